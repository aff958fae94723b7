"""The properties that decide bits in variants of a kernel that must give the same ones: where the numbers of a sum are
among threads, and which instructions compute. Compiled for a GPU that need not be there, at the sizes of Qwen3.5-9B;
prints JSON.

Run in a process of its own: in one in which kernels are interpreted there is nothing to compile.
"""

import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
VALUE_HEADS, KEY_HEADS, DIM = 32, 16, 128
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def projected(tokens: int, offset: int = 0) -> tuple[Tensor, ...]:
    """Return the inputs of the convolution, a and b: parts of one projection, from some row on."""
    widths = (CHANNELS, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS)
    mixed, _, a, b = blank(tokens + offset, sum(widths))[offset:].split(widths, dim=-1)
    return mixed, a, b


def decode_step(step: Any, tokens: int, requests: int, offset: int = 0) -> None:
    states, windows = blank(8, 24, VALUE_HEADS, DIM, DIM, dtype=torch.float32)[:, 3], blank(8, 24, 3, CHANNELS)[:, 3]
    weights = blank(CHANNELS, 4), blank(VALUE_HEADS, dtype=torch.float32), blank(VALUE_HEADS)
    step(*projected(tokens, offset), *weights, windows, states, ints(requests + 1), ints(tokens), ints(tokens))


def chunks(rule: Any, requests: int, captures: int) -> None:
    tokens = 64 * requests
    widths = (KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM)
    parts = (part.unflatten(-1, (-1, DIM)) for part in blank(tokens, CHANNELS).split(widths, dim=-1))
    gates = (*projected(tokens)[1:], blank(VALUE_HEADS, dtype=torch.float32), blank(VALUE_HEADS))
    states = blank(8, 24, VALUE_HEADS, DIM, DIM, dtype=torch.float32)[:, 3]
    rule(*parts, *gates, states, ints(requests + 1), ints(requests), ints(requests), ints(captures, 3), 64)


def attention(attend: Any, counts: list[int], splits: int) -> None:
    tokens, requests = sum(counts), len(counts)
    query, pages = blank(tokens, 16, 512)[..., :256], blank(10, 8, 2, 64, 4, 256)[:, 1]
    attend(query, pages, ints(requests, 100), ints(requests + 1), ints(requests), 0.1, 64, splits)


def decisive(kernel: Any) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """Return the axis of each sum of floats and the layout of its numbers; and the instructions on floats by name."""
    code = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE))
    reduces = re.findall(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+)[^}]*\}>.*?\}\) : \(([^)]*)\)', code, re.DOTALL)
    sums = [(axis, kind) for axis, kind in reduces if "xf32" in kind]
    named = [(axis, re.sub(r"#\w+", lambda found: layouts.get(found[0], found[0]), kind)) for axis, kind in sums]
    found = re.findall(r"\b((?:fma|mul|add|sub|div|ex2|lg2|rsqrt|max|wgmma|mma)[\w.]*)\b", kernel.asm["ptx"])
    return named, dict(Counter(name for name in found if "f32" in name))


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(ROOT / "bench"), str(ROOT)]
    import hybrid  # noqa: F401 (that of this checkout)

    sys.path.remove(str(ROOT))
    import triton
    from gpu.resources import AbsentGpu
    from triton.runtime.jit import JITFunction

    from hybrid.kernels.ops import OPS

    step, rule, attend = (
        OPS[name].kernel for name in ("gated_delta_step", "chunk_gated_delta_rule", "paged_attention")
    )
    cases: dict[str, dict[str, tuple[Any, ...]]] = {
        "decode steps": {
            "a token each": (decode_step, step, 4, 4),
            "chains": (decode_step, step, 8, 2),
            "after one row": (decode_step, step, 4, 4, 1),
        },
        "chunks": {"one prompt": (chunks, rule, 1, 0), "33 prompts, 40 checkpoints": (chunks, rule, 33, 40)},
        "attention of prompts": {
            "a token each": (attention, attend, [1, 1], 1),
            "more": (attention, attend, [64] * 33, 1),
        },
    }
    triton.runtime.driver.set_active(AbsentGpu())
    compiled: dict[str, dict[str, dict[str, Any]]] = {}
    launch: Any = JITFunction.run
    for group, own in cases.items():
        for case, (run, *args) in own.items():

            def compile_only(function: Any, *args: Any, group: str = group, case: str = case, **options: Any) -> None:
                kernel = launch(function, *args, **{**options, "warmup": True})
                compiled.setdefault(f"{group}: {function.__name__}", {})[case] = decisive(kernel)

            with patch.object(JITFunction, "run", compile_only):
                run(*args)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
