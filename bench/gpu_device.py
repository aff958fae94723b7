"""The machine that `bench/gpu.py` measures: a GPU, or in a rehearsal a CPU in its place. Everything that only a GPU can
do is in `Gpu`; `Cpu` gives the same answers in the plainest way."""

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

GRAPH_SECONDS = 2e-3
"""A recorded graph repeats short calls until it lasts about so long, so that launching it costs nothing beside them."""

MOST_ROUNDS = 50
LEAST_REPEATS, MOST_REPEATS = 7, 60
QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
"""What nvidia-smi is asked. Nothing is ever set."""


@dataclass(frozen=True)
class Timing:
    """How long one call takes.

    Attributes:
        seconds: median over the repeats.
        low, high: quartiles. Differences smaller than what lies between them are noise.
        repeats: of how many measurements.
        how: "graph": recorded and replayed; "events": launched one by one; "clock": by the host's clock.
    """

    seconds: float
    low: float
    high: float
    repeats: int
    how: str

    @classmethod
    def of(cls, times: Sequence[float], how: str) -> "Timing":
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        return cls(statistics.median(times), low, high, len(times), how)


class Gpu:
    """The first CUDA device."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        torch.cuda.set_device(self.device)
        self._properties = torch.cuda.get_device_properties(self.device)
        self.cache_bytes = int(self._properties.L2_cache_size)
        self.memory = int(self._properties.total_memory)

    def time(self, calls: Sequence[Call], seconds: float = 0.1) -> Timing:
        """Seconds per call, from replays of a graph of all calls. Give as many calls, each on buffers of its own, as
        exceed the L2 together.

        Args:
            seconds: to spend on measuring, about.
        """
        for _ in range(2):  # the first round compiles
            for call in calls:
                call()
        once = min(self._elapsed(lambda: [call() for call in calls], 2))
        rounds = max(1, min(MOST_ROUNDS, int(GRAPH_SECONDS / once)))

        def run() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        replay, how = self._recorded(run)
        repeats = max(LEAST_REPEATS, min(MOST_REPEATS, int(seconds / self._elapsed(replay, 2)[1])))
        times = self._elapsed(replay, repeats)
        return Timing.of([spent / rounds / len(calls) for spent in times], how)

    def time_launched(self, call: Call, repeats: int = 20) -> Timing:
        """Seconds of a call that is launched as it is: one that a graph cannot hold, as it is one itself."""
        call()
        return Timing.of(self._elapsed(call, repeats), "events")

    def _elapsed(self, run: Call, repeats: int) -> list[float]:
        """Seconds of each of several runs, on the device's clock."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda.synchronize()
        for start, end in events:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in events]

    def _recorded(self, run: Call) -> tuple[Call, str]:
        """What replays a graph of the run; the run itself where it cannot be recorded."""
        current = torch.cuda.current_stream()
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                run()
            current.wait_stream(aside)
            with torch.cuda.graph(graph):
                run()
        except Exception as error:  # whatever the run does that a graph cannot hold
            torch.cuda.set_stream(current)  # a recording that fails leaves its own stream behind
            torch.cuda.synchronize()
            return run, f"events ({type(error).__name__} while recording)"
        return graph.replay, "graph"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        """Give back the memory that nobody uses."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        found = self._properties
        return {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory": self.memory,
            "l2": self.cache_bytes,
            "cuda": torch.version.cuda,
            "state": self.state(),
        }

    def state(self) -> dict[str, str]:
        """Driver, clocks, power and temperature, as nvidia-smi tells them now."""
        command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader", "--id=0"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            return {"nvidia-smi": f"{type(error).__name__}: {error}"}
        return dict(zip(QUERY.split(","), (value.strip() for value in told.split(",")), strict=False))


class Cpu:
    """A CPU in the place of a GPU, for rehearsals: its times mean nothing."""

    device = torch.device("cpu")
    cache_bytes = 0
    memory = 1 << 30

    def time(self, calls: Sequence[Call], seconds: float = 0.0) -> Timing:
        times = []
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return Timing.of(times, "clock")

    def time_launched(self, call: Call, repeats: int = 2) -> Timing:
        return self.time([call] * repeats)

    def synchronize(self) -> None:
        return None

    def release(self) -> None:
        gc.collect()

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu", "state": self.state()}

    def state(self) -> dict[str, str]:
        return {}


Device = Gpu | Cpu


@dataclass(frozen=True)
class Roofline:
    """What the device can do at best, as measured.

    Attributes:
        bandwidth: bytes per second of a large copy in the fastest of several ways, read and written bytes counted both.
        matmul: operations per second of a large matrix product on random data.
    """

    bandwidth: float
    matmul: float

    @classmethod
    def measured(cls, device: Device, dtype: torch.dtype, copied: int, size: int) -> "Roofline":
        """
        Args:
            copied: bytes of the copy's source.
            size: rows and columns of the matrices.
        """

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device.device, dtype=dtype)

        source = normal(copied // dtype.itemsize)
        target = torch.empty_like(source)
        # the copy itself, recorded or launched, may be given to another engine than kernels have
        ways = [
            device.time([lambda: target.copy_(source)], 0.2),
            device.time_launched(lambda: target.copy_(source)),
            device.time([lambda: torch.neg(source, out=target)], 0.2),
        ]
        copy = min(way.seconds for way in ways)
        x, y, product = normal(size, size), normal(size, size), normal(size, size)
        matmul = device.time([lambda: torch.mm(x, y, out=product)], 0.3)
        return cls(2 * source.numel() * dtype.itemsize / copy, 2 * size**3 / matmul.seconds)


def machine(device: Device, root: Path) -> dict[str, Any]:
    """What the figures were taken on."""
    from importlib.metadata import PackageNotFoundError, version

    packages = {}
    for name in ("torch", "triton", "transformers", "flash-linear-attention", "causal-conv1d", "flashinfer-python"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    commit = ""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **device.describe(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": packages,
        "commit": commit or "unknown",
        "kernels": os.environ.get("HYBRID_KERNELS", "auto"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
