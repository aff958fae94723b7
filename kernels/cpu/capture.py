"""Passes that are captured once and run again: on a CPU, what CUDA graphs are on a GPU.

A step that decodes a few tokens consists of a hundred small operations, and to call each of them from Python takes as
long as many of them. A capture runs the pass once and keeps its compiled operations as a program
(`hybrid.kernels.cpu.team`). They are the same machine code with the same arguments, so the bits are those of a pass
that is not captured.

Like a CUDA graph a program reads and writes memory at fixed addresses. What the pass allocates is taken from one piece
of memory, which all programs of a capture share: one of them runs at a time. Operations of torch in a pass are called
again between compiled ones, but those that copy (the embedding, the rows to sample, bfloat16 to fp32) or add and
multiply rows (biases, factors) are compiled ones with the same bits: a pass of any model is one program. An operation
that is not on the list might depend on values that the host has read, and is refused.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.kernels.cpu.elementwise import add, can_combine, can_scale, mul, scale
from hybrid.kernels.cpu.memory import can_join, can_take_rows, fill, join, narrow, take_rows, widen
from hybrid.kernels.cpu.tasks import Task, Tasks, recorder
from hybrid.kernels.cpu.team import Posted
from hybrid.kernels.cpu.threads import torch_on_one_thread

BLOCK = 4 << 20
"""Bytes of memory that are allocated together for the tensors of passes."""

ALIGNMENT = 64
"""Bytes; tensors of a pass begin at multiples of it."""

aten = torch.ops.aten

EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)


def _copied(x: Tensor, *of_type: Any, out: Tensor, **options: Any) -> None:
    """Write a copy of another type: that of `out`."""
    out.copy_(x)


CALLED_AGAIN: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _copied,
    aten.add.Tensor: aten.add.out,
    aten.cat.default: aten.cat.out,
    aten.clone.default: _copied,
    aten.contiguous.default: _copied,
    aten.cos.default: aten.cos.out,
    aten.embedding.default: aten.embedding.out,
    aten.fill_.Scalar: lambda x, value, out: out.fill_(value),
    aten.index.Tensor: aten.index.Tensor_out,
    aten.mul.Scalar: lambda x, value, out: torch.mul(x, value, out=out),
    aten.mul.Tensor: aten.mul.out,
    aten.sin.default: aten.sin.out,
    aten.to.dtype: _copied,
}
"""Operations of torch that a program may hold, each with what writes its result again: functions of their arguments'
contents alone."""


class NotCapturedError(RuntimeError):
    """A pass that cannot be run again as a program."""


def _is_view(result: Any, args: Any) -> bool:
    """Tell whether a result lies in the memory of the arguments. The name of an operation does not reveal that: `to`
    and `reshape` copy or do not."""
    memory = {arg.untyped_storage().data_ptr() for arg in tree_leaves(args) if isinstance(arg, Tensor)}
    return all(isinstance(part, Tensor) and part.untyped_storage().data_ptr() in memory for part in tree_leaves(result))


def _converted(func: Any, args: Any, kwargs: Any) -> tuple[torch.dtype, torch.dtype] | None:
    """The type of rows, and that which an operation makes of them; None: it is another one."""
    if func is aten.to.dtype and len(args) == 2:
        after = args[1]
    elif func is aten._to_copy.default and [*kwargs] == ["dtype"]:
        after = kwargs["dtype"]
    else:
        return None
    return (args[0].dtype, after) if args[0].dim() == 2 and args[0].stride(1) == 1 else None


class _Pass(TorchDispatchMode):
    """Keeps what a pass does.

    Args:
        memory: blocks of bytes that its tensors are made of; more are added where they do not suffice.
    """

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Task | Callable[[], None]] = []
        self._memory = memory
        self._block, self._end = 0, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: it would import torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and func not in CALLED_AGAIN:
            raise NotCapturedError(f"{func} cannot be a part of a captured pass: it writes its arguments")
        compiled = self._compiled(func, args, kwargs)
        if compiled is not None:
            return compiled
        result = func(*args, **kwargs)
        if func in EMPTY:
            return self._allocate(result)
        if _is_view(result, args) and not func._schema.is_mutable:
            return result
        if func not in CALLED_AGAIN:
            raise NotCapturedError(f"{func} cannot be a part of a captured pass")
        self.steps.append(partial(CALLED_AGAIN[func], *args, **kwargs, out=result))
        return result

    def _compiled(self, func: Any, args: Any, kwargs: Any) -> Tensor | None:
        """The result of an operation of torch that copies, adds or multiplies rows, by a compiled one; None: it is
        another one."""
        if func is aten.embedding.default and len(args) == 2 and can_take_rows(*args):
            x, rows = args
        elif func is aten.index.Tensor and len(args[1]) == 1 and can_take_rows(args[0], *args[1]):
            x, (rows,) = args
        elif func is aten.cat.default and len(args[0]) == 1:
            return args[0][0]
        elif func is aten.cat.default and args[1:] in ((-1,), (1,)) and can_join(args[0]):
            parts, sizes = args[0], [part.shape[1] for part in args[0]]
            return join(parts, self._allocate(parts[0].new_empty(len(parts[0]), sum(sizes))))
        elif (kinds := _converted(func, args, kwargs)) == (torch.bfloat16, torch.float32):
            return widen(args[0], self._allocate(torch.empty(args[0].shape, dtype=torch.float32)))
        elif kinds == (torch.float32, torch.bfloat16):
            return narrow(args[0], self._allocate(torch.empty(args[0].shape, dtype=torch.bfloat16)))
        elif func in (aten.add.Tensor, aten.mul.Tensor) and not kwargs:
            return self._combined(func, *args)
        else:
            return None
        return take_rows(x, rows, self._allocate(x.new_empty(len(rows), x.shape[1])))

    def _combined(self, func: Any, x: Tensor, other: Any) -> Tensor | None:
        """The sum or product of rows, as torch rounds it; None: they are others."""
        if isinstance(other, Tensor):
            if other.dim() > x.dim():
                x, other = other, x
            if can_combine(x, other):
                combine = add if func is aten.add.Tensor else mul
                return combine(x, other, self._allocate(x.new_empty(x.shape)))
        elif func is aten.mul.Tensor and can_scale(x):
            return scale(x, float(other), self._allocate(x.new_empty(x.shape)))
        return None

    def _allocate(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        while self._block < len(self._memory) and self._end + size > len(self._memory[self._block]):
            self._block, self._end = self._block + 1, 0
        if self._block == len(self._memory):
            self._memory.append(torch.empty(max(BLOCK, size), dtype=torch.uint8))
        start, self._end = self._end, self._end + -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[self._block][start : start + size].view(like.dtype).view(like.shape)


class Program:
    """The work of a pass, to be done again.

    Args:
        steps: the pass's tasks and calls of torch, in their order.
    """

    def __init__(self, steps: Sequence[Task | Callable[[], None]]) -> None:
        self._steps = steps
        self._parts: list[Callable[[], None]] = []
        for is_task, group in groupby(steps, lambda step: isinstance(step, Task)):
            found: list[Any] = list(group)
            self._parts += [Tasks(found)] if is_task else found
        self._is_compiled = len(self._parts) == 1 and isinstance(steps[0], Task)

    def __call__(self) -> None:
        """Run the pass again."""
        if self._is_compiled:
            self._parts[0]()
            return
        with torch.inference_mode(), torch_on_one_thread():
            for part in self._parts:
                part()

    def post(self, before: Sequence[Tensor], after: Sequence[Tensor], keep: object) -> Posted | None:
        """Have the pass run again by other threads, after what was posted before. None: by no other one, since torch
        has one thread, or operations in the pass.

        Args:
            before, after: what is copied before and after it: arguments of `fill`.
            keep: what the pass reads and writes.
        """
        first = self._parts[0]
        if not self._is_compiled or not isinstance(first, Tasks):
            return None
        return first.post(fill(*before), fill(*after), (before, after, keep))

    def repeat(self, times: int, stop: Tensor) -> None:
        """Run the pass up to `times` times, until it writes another number than 0 to `stop`, `[1]` int64."""
        first = self._parts[0]
        if self._is_compiled and isinstance(first, Tasks):
            first.repeat(times, stop)
            return
        for _ in range(times):
            self()
            if stop.item():
                return

    @torch.inference_mode()
    def seconds(self, runs: int = 20) -> dict[str, float]:
        """CPU time of each operation of the pass, the median of several passes; those of equal names together. The pass
        has to be idle: states are computed several times."""
        works: list[tuple[str, Callable[[], None]]] = []
        for step in self._steps:
            if isinstance(step, Task):
                works.append((step.function.__name__.strip("_"), Tasks([step])))
            else:
                works.append(("torch", step))
        times = [[timeit.timeit(work, number=1, timer=time.process_time) for _, work in works] for _ in range(runs)]
        found: dict[str, float] = {}
        for (name, _), own in zip(works, zip(*times, strict=True), strict=True):
            found[name] = found.get(name, 0.0) + sorted(own)[runs // 2]
        return found


class CpuCapture:
    """Captures passes on a CPU; all of them share the memory of their tensors."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Program, Tensor]:
        """Run a pass, and return what runs it again and the tensor that it writes each time.

        Raises:
            NotCapturedError: it does something that cannot be run again.
        """
        captured = _Pass(self._memory)
        token = recorder.set(captured.steps.append)
        try:
            with captured:
                result = run()
        finally:
            recorder.reset(token)
        return Program(captured.steps), result
