"""Triton's interpreter with what tests ask of it beyond what it does by itself."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


def multiply_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `tl.dot` multiply the numbers of bfloat16, not their bits read as whole numbers. What the interpreter rounds
    to bfloat16 is still rounded towards zero."""
    multiply = interpreter.InterpreterBuilder.create_dot

    def numbers(x: Any) -> Any:
        if x.dtype != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(builder, numbers(a), numbers(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def interpret_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flash-linear-attention's chunk rule run: without its autotuner, which asks for a GPU, and with tensors to
    count the rounds of its loops, whose methods it calls."""

    def run_first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        return tuner.fn.run(*args, **tuner.configs[0].kwargs, **kwargs)

    def tensors(*bounds: Any) -> Iterator[Any]:
        for index in range(*map(int, bounds)):
            yield interpreter._implicit_cvt(index)

    for tuner in (Autotuner, import_module("fla.ops.utils.cache").CachedAutotuner):
        monkeypatch.setattr(tuner, "run", run_first)
    monkeypatch.setattr(import_module("fla.ops.common.chunk_delta_h"), "range", tensors, raising=False)
