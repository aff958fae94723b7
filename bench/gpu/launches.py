#!/usr/bin/env python
"""What the host does in a pass of the model on a GPU that need not be there: launches, and the time they take.

    python bench/gpu/launches.py [--json]

A model with the layers of Qwen3.5-9B, and everything in them small, runs on CPU tensors. Launches of Triton do nothing;
operations of torch, which would be a launch each, compute next to nothing. Views and new memory are not launches.
"""

import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":  # not this folder: what is found as `kernels` is taken for another package
    ROOT = Path(__file__).resolve().parents[2]
    sys.path[0] = str(ROOT)
    __import__("hybrid")  # that of this checkout
    sys.path[0] = str(ROOT / "bench")

import os
import time
from types import SimpleNamespace

import torch
from common import Line, arguments, finish, machine, timed
from gpu.resources import SHARED_MEMORY_OF_PROGRAM
from gpu.sizes import FULL, TOY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams
from hybrid.batch import Batch, Group
from hybrid.kernels.batch_invariant import RowBlocks
from hybrid.kernels.ops import OPS
from hybrid.memory.tensors import CacheTensors
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM

PAGE, PRODUCTS, MEMORY = 64, ("linear", "mm", "addmm"), ("empty", "new_empty", "empty_like", "empty_strided")
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


def batch(tokens: int, is_prefill: bool, deterministic: bool) -> Batch:
    """A step of one request: the tokens of a prompt, or one decoded token."""
    count, splits = tokens if is_prefill else 1, (1 if is_prefill else 16) if deterministic else None
    numbers = torch.arange(tokens + 1)
    group = Group(
        slice(0, count),
        cu_seqlens=torch.tensor([0, count]),
        seq_lens=numbers[tokens:],
        block_table=numbers[: -(-tokens // PAGE)].view(1, -1),
        state_read=numbers[:1],
        state_write=numbers[1:2],
        num_splits=splits,
    )
    starts = [(0, count)] if is_prefill else []
    return Batch(
        token_ids=numbers[:count],
        positions=numbers[:count],
        slot_mapping=numbers[:count],
        checkpoints=torch.zeros(0, 3, dtype=torch.int64),
        sample_rows=numbers[count - 1 : count],
        prefills=group if is_prefill else None,
        decodes=None if is_prefill else group,
        blocks=RowBlocks(starts, count if is_prefill else 0, count, PAGE) if deterministic else None,
    )


def measured(name: str, run: Callable[[], Tensor]) -> list[Line]:
    """Launches of a pass by kind, and its time on the host."""
    from triton.runtime.jit import JITFunction

    launched: list[str] = []
    with (
        patch.object(JITFunction, "run", lambda kernel, *_, **__: launched.append(kernel.__name__)),
        patch("hybrid.kernels.triton.attention._shared_memory", lambda device: SHARED_MEMORY_OF_PROGRAM),
    ):
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
    from triton.runtime.jit import JITFunction

    limits = EngineConfig(max_num_seqs=requests, overlap=True, enforce_eager=True)
    engine = Engine.from_pretrained("tiny", cache=CacheConfig(memory="256MiB", deterministic=False), config=limits)
    runner: Any = engine.runner
    logits, launch = torch.randn(requests, engine.model.config.vocab_size), runner.launch
    arrived, under_way, idle = [0.0], [0], list[float]()

    def timed_launch(plan: Any) -> SimpleNamespace:
        pending = launch(plan)
        idle.append(0.0 if under_way[0] else time.process_time() - arrived[0])
        under_way[0] += 1

        def wait() -> Any:
            under_way[0] -= 1
            arrived[0] = time.process_time()
            return pending.wait()

        return SimpleNamespace(wait=wait, choose=pending.choose, sources=pending.sources)

    with (
        patch.object(JITFunction, "run", lambda kernel, *_, **__: None),
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
    from transformers import Qwen3_5TextConfig

    layers = FULL.config["layer_types"]
    config = Qwen3_5TextConfig(**{**TOY.config, "layer_types": layers, "num_hidden_layers": len(layers)})
    model = Qwen3_5ForCausalLM(config, PAGE)
    for parameter in model.parameters():
        parameter.data.zero_()
    fuse = vars(Qwen3_5ForCausalLM.__mro__[1]).get("fuse_projections")  # missing in versions to compare with
    if fuse is not None:
        fuse(model)
    tensors = CacheTensors.fixed(model.spec(config, torch.float32), PAGE, 64, 4, torch.device("cpu"))
    lines: list[Line] = []
    with torch.inference_mode():
        for mode, deterministic in (("fast", False), ("deterministic", True)):
            for what, tokens, is_prefill in (("decode step", 2048, False), ("prefill of 64", 64, True)):
                step = batch(tokens, is_prefill, deterministic)
                lines += measured(f"{what}, {mode}", lambda step=step: model(step, tensors.kv, tensors.state))
    for requests in (1, 32):
        lines += engine_steps(requests)
    return finish(lines, machine(), args.json)


if __name__ == "__main__":
    sys.exit(main())
