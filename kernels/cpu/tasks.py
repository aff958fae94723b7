"""Compiled operations as tasks: run by as many threads as torch uses, one at a time or a recorded program at once.

A compiled operation is a function `(args, kind, first, last)`. `args` is the address of its numbers (addresses, sizes,
strides) as int64; `kind` says what types its memory holds (`hybrid.kernels.cpu.kinds`). It computes the
elements `[first, last)` of its result, and what it does with an element does not depend on the range: threads change no
bit.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.cpu.kinds import BYTE, FLOAT, FP8, HALF, INT8, INTEGER, SIGNATURES, Kind
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.team import Posted, compute, repeat, team
from hybrid.kernels.cpu.threads import num_threads

NUMBERS = (torch.float32, torch.bfloat16)
"""Types that are computed with."""

KINDS: dict[torch.dtype, str] = {torch.float32: FLOAT, torch.bfloat16: HALF, torch.int8: BYTE}
"""The kind of numbers in memory of a type."""

KEPT: dict[torch.dtype, int] = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
"""Kinds of rows of keys and values in pages of these types; in others they are unpacked."""


class Task(NamedTuple):
    """One operation.

    Attributes:
        function: compiled.
        kind: the types in memory.
        numbers: its arguments.
        elements: their number; how they are shared among threads is up to who runs it.
        multiple: ranges begin at multiples of it.
        most: ranges that the work is worth.
        joins: it may be computed while the task before it is: neither reads what the other one writes.
    """

    function: Compiled
    kind: Kind
    numbers: tuple[int, ...]
    elements: int
    multiple: int
    most: int
    joins: bool = False

    @property
    def worth(self) -> int:
        """Threads that the task is worth, at least one."""
        return max(min(-(-self.elements // self.multiple), self.most), 1)


recorder: ContextVar[Callable[[Task], None] | None] = ContextVar("recorder", default=None)
"""Is called with every task that is run in its context."""


def run(function: Compiled, kind: Kind, numbers: Sequence[int], elements: int, multiple: int, most: int) -> None:
    """Run a task; the arguments are those of `Task`."""
    task = Task(function, kind, tuple(numbers), elements, multiple, most)
    tell = recorder.get()
    if tell is not None:
        tell(task)
    if min(num_threads(), task.worth) > 1:
        Tasks([task])()
        return
    args = array("q", task.numbers)
    compute(*_code(function, kind), args.buffer_info()[0], elements)


def side_by_side(calls: Iterable[Callable[[], Tensor]]) -> list[Tensor]:
    """The results of calls of which none reads what another one writes: where they are recorded, threads begin with one
    before another one is computed."""
    results: list[Tensor] = []
    for call in calls:
        record = recorder.get()
        if record is None or not results:
            results.append(call())
            continue
        before = recorder.set(_joining(record))
        try:
            results.append(call())
        finally:
            recorder.reset(before)
    return results


def _joining(record: Callable[[Task], None]) -> Callable[[Task], None]:
    """Records tasks, of which the first one joins the task before."""
    first = [True]

    def joining(task: Task) -> None:
        record(task._replace(joins=bool(first)))
        first.clear()

    return joining


class Tasks:
    """Tasks, one after another, as a program.

    Args:
        tasks: at least one.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._program, self._args = _program(tasks)
        self._address = self._program.buffer_info()[0]
        self._worth = max(task.worth for task in tasks)

    def __call__(self) -> None:
        """Run them, on as many threads as torch uses."""
        team().run(self._address, len(self._args), min(num_threads(), self._worth))

    def post(self, before: Task, after: Task, keep: object) -> Posted | None:
        """Have them computed by other threads, after what was posted before; None: by no other one.

        Args:
            before, after: what is computed before and after them.
            keep: what all of these read and write.
        """
        threads = min(num_threads(), self._worth)
        if threads == 1:
            return None
        first, last = _program([before]), _program([after])
        return team().post(first[0] + self._program + last[0], threads, (self, first[1], last[1], keep))

    def repeat(self, times: int, stop: Tensor) -> None:
        """Run them up to `times` times, until they write another number than 0 to `stop`, `[1]` int64: in one thread
        without the interpreter in between, which would have to find all of itself in the caches again."""
        if min(num_threads(), self._worth) == 1:
            repeat(self._address, len(self._args), times, stop.data_ptr())
            return
        for _ in range(times):
            self()
            if stop.item():
                return


def _program(tasks: Sequence[Task]) -> tuple[array[int], list[array[int]]]:
    """The program of tasks, and their arguments, of which it has the addresses."""
    args = [array("q", task.numbers) for task in tasks]
    rows: list[int] = []
    is_joined = [task.joins for task in tasks[1:]] + [False]
    for task, own, followed in zip(tasks, args, is_joined, strict=True):
        rows += _code(task.function, task.kind)
        rows += task.elements, task.multiple, task.most, own.buffer_info()[0], followed
    return array("q", rows), args


@cache
def _code(function: Compiled, kind: Kind) -> tuple[int, int]:
    """The address of the machine code of an operation for memory of a kind, and its signature."""
    return function.address(INTEGER, kind, INTEGER, INTEGER), SIGNATURES.index(kind)


@lru_cache
def bits(value: float) -> int:
    """An fp32 number as an argument."""
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found


def kind_of(operation: str, x: Tensor, *others: Tensor, exact: Sequence[Tensor] = (), lies_right: bool = True) -> Kind:
    """The kind of numbers that an operation computes with.

    Args:
        operation: its name, for the error.
        x, others: tensors of one type, float32 or bfloat16.
        exact: tensors of float32.
        lies_right: the shapes and strides are those that it is compiled for.

    Raises:
        TypeError: they are not, or the types are others.
    """
    has_type = x.dtype in NUMBERS and all(other.dtype == x.dtype for other in others)
    if not (lies_right and has_type and all(other.dtype == torch.float32 for other in exact)):
        found = "; ".join(f"{list(own.shape)} {own.dtype}, strides {own.stride()}" for own in (x, *others, *exact))
        raise TypeError(
            f"{operation} is compiled for float32 and bfloat16 tensors as our models have them; got {found}. "
            "HYBRID_KERNELS=reference computes others in plain torch"
        )
    return KINDS[x.dtype]


def by_rows(x: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
