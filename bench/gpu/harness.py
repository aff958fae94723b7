"""What the programs in `bench/gpu` share: the device and its clock, inputs, cases and how they are judged."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from common import Line, Medians, check, ratio, timed
from gpu.sizes import Sizes
from torch import Tensor

from hybrid.kernels import ops
from hybrid.kernels.ops import OPS

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Largest norm of the error over norm of the truth, by the type of inputs and output.

float32: sums of thousands of terms in another order. float16 and bfloat16: a rounded result is wrong by 1.4e-4 and
1.1e-3 of itself in the mean square, and so is what is rounded on the way. Something wrong in one tile, head or page
shows as 1e-2 and more."""

STATE_TOLERANCE = 1e-3
"""The same for states, which are fp32: what may differ is whether a few q, k, v fall on the other side when rounded."""

MOVED = {("causal_conv1d", "state"), ("copy_states", "rows"), ("gated_delta_step", "conv")}
MOVED |= {("fill_in_tokens", "numbers"), ("shift_rows", "state")}
"""Arguments that get values of others as they are: the twin's bits."""

OTHER_RESULT = 0.1
"""A peer whose result is further from ours computes something else: its time is reported, and not compared with."""

GRAPH_SECONDS = 2e-3
"""A recorded graph repeats short calls until it lasts about this long: launching it then costs little in comparison."""

MAX_ROUNDS = 50
MIN_REPEATS, MAX_REPEATS = 7, 60

Call = Callable[[], object]
Peers = dict[str, Callable[[], Sequence[Call]]]
"""For each peer by name, what makes its calls."""


@dataclass(frozen=True)
class Timing:
    """How long one call takes: median and quartiles over the repeats. Smaller differences than between these are noise.
    `how`: by replays of a graph, by events around launches, or by the host's clock."""

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
    activity = torch.profiler.ProfilerActivity.CUDA

    def __init__(self) -> None:
        torch.cuda.set_device(self.device)
        self._properties = torch.cuda.get_device_properties(self.device)
        self.cache_bytes = int(self._properties.L2_cache_size)

    def time(self, calls: Sequence[Call], seconds: float = 0.1) -> Timing:
        """Seconds per call, from replays of a graph of all calls, which work on buffers of their own that together
        exceed the L2. About `seconds` are spent on measuring."""
        for _ in range(2):  # the first round compiles
            for call in calls:
                call()
        once = min(self._elapsed(lambda: [call() for call in calls], 2))
        rounds = max(1, min(MAX_ROUNDS, int(GRAPH_SECONDS / once)))

        def run() -> None:
            for _ in range(rounds):
                for call in calls:
                    call()

        replay, how = self.recorded(run)
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(seconds / self._elapsed(replay, 2)[1])))
        return Timing.of([spent / rounds / len(calls) for spent in self._elapsed(replay, repeats)], how)

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

    def recorded(self, run: Call) -> tuple[Call, str]:
        """A replay of a graph of the run; the run itself where it cannot be recorded."""
        current = torch.cuda.current_stream()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        try:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                run()
            current.wait_stream(side)
            with torch.cuda.graph(graph):
                run()
        except Exception as error:  # anything in the run that a graph cannot hold
            torch.cuda.set_stream(current)  # a recording that fails leaves its own stream set
            torch.cuda.synchronize()
            return run, f"events ({type(error).__name__} while recording)"
        return graph.replay, "graph"

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def release(self) -> None:
        """Return unused memory."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        found = self._properties
        return {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory": int(found.total_memory),
            "l2": self.cache_bytes,
            "cuda": torch.version.cuda,
        }


class Cpu:
    """A CPU in the place of a GPU, for rehearsals: its times mean nothing."""

    device = torch.device("cpu")
    activity = torch.profiler.ProfilerActivity.CPU
    cache_bytes = 0

    def time(self, calls: Sequence[Call], seconds: float = 0.0) -> Timing:
        return Timing.of([timed(call) for call in calls], "clock")

    def recorded(self, run: Call) -> tuple[Call, str]:
        return run, "clock"

    def synchronize(self) -> None:
        return None

    def release(self) -> None:
        gc.collect()

    def describe(self) -> dict[str, Any]:
        return {"device": "cpu"}


Device = Gpu | Cpu


def profile(device: Device, run: Call) -> dict[str, Any]:
    """What a device does in a run: how many kernels (operations of a CPU), for which part of the time, and which take
    longest."""
    device.synchronize()
    with torch.profiler.profile(activities=[device.activity]) as profiler:
        wall = timed(lambda: (run(), device.synchronize()))
    wanted = getattr(torch.autograd.DeviceType, device.activity.name)
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in profiler.events() if e.device_type == wanted]
    busy, end, each = 0.0, 0.0, dict[str, list[float]]()
    for start, stop, name in sorted(spans):
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
        each.setdefault(name[:80], []).append(stop - start)
    longest = sorted(each.items(), key=lambda entry: -sum(entry[1]))[:25]
    top = {name: {"calls": len(times), "us": round(sum(times), 1)} for name, times in longest}
    return {"kernels": len(spans), "busy share": busy / 1e6 / wall, "ms": 1000 * wall, "longest": top}


@dataclass(frozen=True)
class Roofline:
    """What the device can do at best, as measured."""

    bandwidth: float | None = None  # bytes per second of a large copy, of which read and written bytes both count
    matmul: float | None = None  # operations per second of a large matrix product on random data

    def moving(self, num_bytes: float) -> float | None:
        """Seconds that it takes to move this much; None: it was not measured."""
        return num_bytes / self.bandwidth if self.bandwidth else None

    def computing(self, operations: float) -> float | None:
        """Seconds that matrix products of this many operations take; None: it was not measured."""
        return operations / self.matmul if self.matmul else None

    @classmethod
    def measured(cls, device: Device, sizes: Sizes) -> "Roofline":
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device.device, dtype=sizes.dtype)

        source = normal(sizes.copied // sizes.dtype.itemsize)
        target = torch.empty_like(source)
        # the copy itself may run on another engine than kernels do
        ways = (lambda: target.copy_(source)), (lambda: torch.neg(source, out=target))
        copy = min(device.time([way], 0.2).seconds for way in ways)
        x, y, product = (normal(sizes.matmul, sizes.matmul) for _ in range(3))
        matmul = device.time([lambda: torch.mm(x, y, out=product)], 0.3)
        return cls(2 * sizes.copied / copy, 2 * sizes.matmul**3 / matmul.seconds)


@dataclass(frozen=True)
class Case:
    """A kernel on one size, with everything that is measured of it."""

    calls: Sequence[Call] = ()  # of our kernel, each on buffers of its own; empty: there are only checks
    checks: Callable[[], Iterator[Line]] = lambda: iter(())  # results against the truth, before anything is timed
    num_bytes: float = 0  # that must be moved; `target` is the part of the copy bandwidth to reach
    target: float | None = None
    operations: float = 0  # compared with the matmul rate
    tokens: int = 0  # reported per second
    variants: dict[str, Sequence[Call]] = field(default_factory=dict)  # of ours, timed over `calls`
    peers: Peers = field(default_factory=dict)  # at most `peer_target` times the time of the fastest is to be reached
    peer_target: float | None = None
    error: Callable[[Any], float] | None = None  # of the result of a peer's call


@dataclass(frozen=True)
class Planned:
    """A case to come: its inputs are made when it begins, which takes `seconds` left, and dropped when it ends."""

    name: str
    seconds: float
    make: Callable[[], Case]


def plan(name: str, seconds: float, make: Callable[..., Case], *given: Any) -> Planned:
    """A case whose maker takes its name first."""
    return Planned(name, seconds, partial(make, name, *given))


def relative_error(found: Tensor, truth: Tensor) -> float:
    """Norm of the difference over norm of the truth; NaN where anything is."""
    difference, truth = found.double() - truth.double(), truth.double()
    return float(difference.norm() / truth.norm().clamp(min=1e-30))


def compare(name: str, found: Tensor, truth: Tensor, allowed: float | None = None) -> Line:
    """Whether a result is near enough to the truth; NaN is not."""
    error, allowed = relative_error(found, truth), TOLERANCE[found.dtype] if allowed is None else allowed
    return check(name, error <= allowed, f"error {error:.1e}, allowed {allowed:.0e}")


def compare_states(name: str, found: Tensor, truth: Tensor) -> Line:
    return compare(name, found, truth, STATE_TOLERANCE if found.dtype == torch.float32 else None)


def same_bits(name: str, found: Tensor, truth: Tensor) -> Line:
    """Whether two tensors are bitwise equal."""
    same = torch.equal(*(x.contiguous().view(torch.uint8) for x in (found, truth)))
    return check(name, same, "the same bits" if same else "OTHER BITS")


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


def each_with(function: Callable[..., object], sets: Iterable[tuple[Any, ...]]) -> list[Call]:
    """A call for every set of arguments."""
    return [partial(function, *arguments) for arguments in sets]


@dataclass
class Bench:
    """What a section works with."""

    device: Device
    sizes: Sizes
    roofline: Roofline
    deadline: float  # on `time.perf_counter`: what would end after it is skipped
    rehearsal: bool
    ops: Any = ops  # the operations that are measured
    is_blank: bool = False  # inputs hold no numbers: nothing is computed with them
    skip: Callable[..., object] = lambda **_: None  # called with `skipped`: what the time does not hold
    kept: dict[str, Any] = field(default_factory=dict)  # objects that several sections need, made once

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device.device).manual_seed(0)

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.perf_counter()

    def has(self, seconds: float, what: str) -> bool:
        """Whether this much time is left; if not, `what` is reported as skipped."""
        if self.left >= seconds:
            return True
        self.skip(skipped=what)
        return False

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """An object that several sections need, made when it is first asked for."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """New random numbers: zeros would hide what is not written, and run faster."""
        made = torch.empty(shape, device=self.device.device, dtype=dtype or self.sizes.dtype)
        return made if self.is_blank else made.normal_(generator=self._generator)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device.device)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator, device=self.device.device)

    def sets(self, num_bytes: float) -> int:
        """Number of sets of inputs of this size, such that none is found in the L2 when its turn comes again."""
        if self.rehearsal or self.is_blank:
            return 1 if self.is_blank else 2
        return max(1, min(64, math.ceil(3 * self.device.cache_bytes / num_bytes)))

    def poison(self, output: Tensor) -> None:
        """Leave NaN in the memory that an output of this shape gets next: what is not written shows."""
        if output.is_floating_point():
            torch.full_like(output, float("nan"), dtype=self.sizes.dtype)

    def call(self, operation: str) -> Callable[..., Any]:
        """An operation as it is measured: by our own kernel."""
        how = {"batch_invariant": True} if OPS[operation].external else {}
        return partial(getattr(self.ops, operation), **how)

    def case(self, name: str, operation: str, inputs: Sequence[tuple[Any, ...]], **more: Any) -> Case:
        """An operation on sets of inputs, the first of which is compared with its twin. `more`: of the case."""
        checks = partial(self.twins, name, operation, *inputs[0])
        return Case(each_with(self.call(operation), inputs), checks, **more)

    def twins(self, name: str, operation: str, *arguments: Any, fp64: bool = False) -> Iterator[Line]:
        """An operation against its twin, which may compute in fp64: what it returns, and the arguments that it writes,
        of which the twin gets copies; rows of them that the twin leaves as they are keep their bits. Then again."""
        op = OPS[operation]
        names = [*signature(op.twin).parameters]
        written = {names.index(argument): argument for argument in op.writes}
        theirs = [x.clone() if at in written else x for at, x in enumerate(arguments)]
        before = {at: arguments[at].clone() for at in written}
        if fp64:
            theirs = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in theirs]
        truths = _outputs(op.twin(*theirs))
        for truth in truths:
            self.poison(truth)
        run = partial(self.call(operation), *arguments)
        founds = _outputs(run())
        for number, (found, truth) in enumerate(zip(founds, truths, strict=True)):
            judge = compare if found.is_floating_point() else same_bits
            yield judge(f"{name}, output {number}" if number else name, found, truth)
        for at, argument in written.items():
            kept = (theirs[at] == before[at]).all(-1)
            judge = same_bits if (operation, argument) in MOVED else compare_states
            yield judge(f"{name}, {argument}", arguments[at][~kept], theirs[at][~kept])
            yield same_bits(f"{name}, the rest of {argument}", arguments[at][kept], before[at][kept])
        yield from self.again(name, run, founds, {arguments[at]: before[at] for at in written})

    def again(self, name: str, run: Call, founds: Sequence[Tensor], written: dict[Tensor, Tensor]) -> Iterator[Line]:
        """Whether a call gives the same bits from a recorded graph.

        Args:
            founds: what it returned.
            written: the arguments that it wrote, and what they were before.
        """
        after, results = [argument.clone() for argument in written], list[tuple[Tensor, ...]]()
        replay, how = self.device.recorded(lambda: results.append(_outputs(run())))
        for argument, before in written.items():
            argument.copy_(before)
        replay()
        pairs = [*zip(results[-1], founds, strict=True), *zip(written, after, strict=True)]
        same = all(torch.equal(*(x.contiguous().view(torch.uint8) for x in pair)) for pair in pairs)
        yield check(
            f"{name}, again", same and not how.startswith("events"), f"{'the same' if same else 'OTHER'} bits, {how}"
        )

    def measure(self, planned: Planned) -> Iterator[Line]:
        """All figures of a case."""
        name = planned.name
        if not self.has(planned.seconds, name):
            return
        case = planned.make()
        yield from case.checks()
        if case.calls:
            ours = self.device.time(case.calls)
            yield from self._rates(name, case, ours)
            for variant, calls in case.variants.items():
                medians: Medians = {variant: self.device.time(calls).seconds, "ours": ours.seconds}
                yield ratio(f"{name}, {variant} over ours", medians, variant, "ours", at_most=True)
            if case.peers:
                yield self.against_fastest(name, ours, case.peers, case.peer_target, case.error)
        del case
        self.device.release()

    def _rates(self, name: str, case: Case, ours: Timing) -> Iterator[Line]:
        details, medians = asdict(ours), {"ours": ours.seconds}
        if case.num_bytes:
            floor: Medians = {**medians, "floor": self.roofline.moving(case.num_bytes)}
            more = {**details, "bytes": case.num_bytes, "GB/s": case.num_bytes / ours.seconds / 1e9}
            yield ratio(f"{name}, of copy bandwidth", floor, "floor", "ours", self.asked(case.target), details=more)
        if case.operations:
            floor = {**medians, "floor": self.roofline.computing(case.operations)}
            more = {**details, "operations": case.operations, "TFLOP/s": case.operations / ours.seconds / 1e12}
            yield ratio(f"{name}, of the matmul rate", floor, "floor", "ours", details=more)
        if case.tokens:
            yield Line(f"{name}, tokens per second", case.tokens / ours.seconds, medians={**medians})

    def against_fastest(
        self, name: str, ours: Timing, peers: Peers, target: float | None, error: Callable[[Any], float] | None = None
    ) -> Line:
        """A line: our time over that of the fastest peer that runs here. Its details are the times of all of them, why
        some did not run, and the error of their results."""
        timings: dict[str, Timing] = {}
        details: dict[str, Any] = {"ours": asdict(ours)}
        for peer, make in peers.items():
            try:
                calls = make()
                timing = self.device.time(calls)
                details[peer] = asdict(timing)
                if error is not None:
                    details[peer]["error"] = error(calls[0]())
                if details[peer].get("error", 0.0) <= OTHER_RESULT:
                    timings[peer] = timing
            except Exception as failure:  # a peer may fail in any way; that is not a fault of ours
                details[peer] = f"{type(failure).__name__}: {failure}"[:300]
                self.device.release()
        medians: Medians = {"ours": ours.seconds, **{peer: timing.seconds for peer, timing in timings.items()}}
        if not timings:
            if self.asked(target) is not None:
                self.skip(skipped=f"{name} against {', '.join(peers)}")
            return Line(f"{name}: no peer runs here", None, None, True, medians=medians, details=details)
        fastest, how = min(timings, key=lambda peer: timings[peer].seconds), {"at_most": True, "details": details}
        return ratio(f"{name}, over {fastest}", medians, "ours", fastest, self.asked(target), **how)

    def asked(self, target: float | None) -> float | None:
        """The target; none in a rehearsal, whose times mean nothing."""
        return None if self.rehearsal else target
