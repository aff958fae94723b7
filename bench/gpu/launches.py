#!/usr/bin/env python
"""What the host does in a pass of the model on a GPU that need not be there: launches, and the time they take.

    python bench/gpu/launches.py [--json]

A model with the layers of Qwen3.5-9B, and everything in them small, runs on CPU tensors. Launches of Triton do nothing;
operations of torch, which would be a launch each, compute next to nothing. Views and new memory are not launches.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # not this folder: what is found as `kernels` is taken for another package
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    __import__("hybrid")  # that of this checkout
    sys.path[0] += "/bench"

import os
import time

import torch
from common import Line, arguments, finish, timed
from gpu.engine import make_engine
from gpu.harness import Bench, Cpu, Roofline
from gpu.resources import SHARED_MEMORY_OF_PROGRAM
from gpu.sizes import FULL, TOY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams
from hybrid.kernels.ops import OPS

PRODUCTS, MEMORY = ("linear", "mm", "addmm"), ("empty", "new_empty", "empty_like", "empty_strided")
RUNS, STEPS = 15, 60


class Operations(TorchDispatchMode):
    """Counts the operations of torch that a GPU would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        views = any(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns)
        if not views and name not in MEMORY:
            self.found[name] += 1
        return result


@contextmanager
def nothing_launched(launched: list[str]) -> Iterator[None]:
    """Launches of Triton are noted by name, and do nothing."""
    from triton.runtime.jit import JITFunction

    with (
        patch.object(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__)),
        patch("hybrid.kernels.triton.attention._shared_memory", lambda device: SHARED_MEMORY_OF_PROGRAM),
    ):
        yield


def pass_of(engine: Engine, prompt: int, is_decode: bool) -> Callable[[], Tensor]:
    """The pass of a step of one request: the tokens of its prompt, or one decoded token."""
    runner: Any = engine.runner
    engine.add_request([1] * prompt, SamplingParams(max_new_tokens=8, ignore_eos=True))
    if is_decode:
        logits = torch.zeros(1, engine.model.config.vocab_size)
        with patch.object(runner, "model", lambda *_: logits):
            engine.step()
    batch = runner.plan(engine.scheduler.schedule(), None).on(torch.device("cpu"))[0]
    return lambda: engine.model(batch, engine.cache.kv, engine.cache.state_tensors)


def measured(name: str, run: Callable[[], Tensor], launched: list[str]) -> list[Line]:
    """Launches of a pass by kind, and its time on the host."""
    run()
    launched.clear()
    with Operations() as operations:
        run()
    kernels, found = Counter(launched), operations.found
    seconds = statistics.median(timed(run) for _ in range(RUNS))
    products = sum(found[kind] for kind in PRODUCTS)
    small = found.total() - products
    details = {"kernels": dict(kernels), "torch": dict(found)}
    counts = {"kernels of ours": kernels.total(), "products": products, "small operations": small}
    launches = Line(f"{name}, launches", sum(counts.values()), medians={**counts}, unit="", details=details)
    return [launches, Line(f"{name}, ms of the host", 1000 * seconds)]


def engine_steps(requests: int) -> list[Line]:
    """The host's time for a step of an engine whose model takes none, and of it what passes while nothing is under way:
    a device that has computed a step waits for the next launch."""
    limits = EngineConfig(max_num_seqs=requests, overlap=True, enforce_eager=True)
    engine = Engine.from_pretrained("tiny", cache=CacheConfig(memory="256MiB", deterministic=False), config=limits)
    runner: Any = engine.runner
    logits, launch = torch.randn(requests, engine.model.config.vocab_size), runner.launch
    arrived, under_way, idle = [0.0], [0], list[float]()

    def timed_launch(plan: Any) -> Any:
        forward = launch(plan)
        take_results = forward.results
        idle.append(0.0 if under_way[0] else time.process_time() - arrived[0])
        under_way[0] += 1

        def results() -> Any:
            under_way[0] -= 1
            arrived[0] = time.process_time()
            return take_results()

        forward.results = results
        return forward

    with (
        patch.object(runner, "model", lambda batch, *_: logits[: len(batch.sample_rows)]),
        patch.object(runner, "launch", timed_launch),
    ):
        for number in range(requests):
            engine.add_request([1 + number, *range(3, 40)], SamplingParams(max_new_tokens=STEPS + 8, ignore_eos=True))
        for _ in range(4):
            engine.step()
        idle.clear()
        began = time.process_time()
        for _ in range(STEPS):
            engine.step()
        spent = (time.process_time() - began) / STEPS
    engine.close()
    name = f"engine step of {requests}"
    return [
        Line(f"{name}, ms of the host", 1000 * spent),
        Line(f"{name}, ms with nothing under way", 1000 * statistics.median(idle)),
    ]


def main() -> int:
    args = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    os.environ.pop("TRITON_INTERPRET", None)
    for op in OPS.values():
        _ = op.kernel  # imported as what is compiled, not as what is interpreted
    os.environ.update(HYBRID_KERNELS="triton", TRITON_INTERPRET="1")  # so that tensors may be on a CPU; nothing runs
    sizes = replace(TOY, model=(*TOY.model[:3], FULL.model[3]), page_size=64, memory="64MiB", batched_tokens=4096)
    bench, lines, launched = Bench(Cpu(), sizes, Roofline(), 0, True), list[Line](), list[str]()
    with torch.inference_mode(), nothing_launched(launched):
        for mode in ("fast", "deterministic"):
            for what, prompt in (("decode step", 2048), ("prefill of 64", 64)):
                engine = make_engine(bench, deterministic=mode == "deterministic")
                lines += measured(f"{what}, {mode}", pass_of(engine, prompt, what == "decode step"), launched)
        for requests in (1, 32):
            lines += engine_steps(requests)
    return finish(lines, args)


if __name__ == "__main__":
    sys.exit(main())
