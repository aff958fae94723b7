"""Passes that are captured once and run again: on a CPU, what CUDA graphs are on a GPU.

A step that decodes a few tokens consists of a hundred small operations, and to call each of them from Python takes as
long as many of them. A capture runs the pass once and keeps its compiled operations as a program; one compiled loop
then runs them on all threads, each of which takes the next share of an operation. They are the same machine code with
the same arguments, so the bits are those of a pass that is not captured.

Like a CUDA graph a program reads and writes memory at fixed addresses. What the pass allocates is taken from one piece
of memory, which all programs of a capture share: one of them runs at a time. The few operations of torch in a pass
(the embedding, rotary angles, the rows to sample) are called again between compiled ones; an operation that is not on
the list might depend on values that the host has read, and is refused.
"""

from __future__ import annotations

import statistics
import time
import timeit
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from numba import njit, typeof, types
from numba.extending import intrinsic
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.kernels.cpu.tasks import SHARES, Task, recorder, together
from hybrid.kernels.cpu.threads import num_threads, torch_on_one_thread
from hybrid.kernels.cpu.vectors import INDEX, at, numbers

BLOCK = 4 << 20
"""Bytes of memory that are allocated together for the tensors of passes."""

ALIGNMENT = 64
"""Bytes; tensors of a pass begin at multiples of it."""

WIDTH = 6
"""Numbers of a task in a program: address of its code, whether it is a product, `count`, `multiple`, `most`, address of
its arguments."""

SPINS = 4096
"""Looks at a task that others compute before a thread lets others run."""

aten = torch.ops.aten

EMPTY = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default)

CALLED_AGAIN = (
    aten._to_copy.default,
    aten.add.Tensor,
    aten.cat.default,
    aten.cos.default,
    aten.embedding.default,
    aten.fill_.Scalar,
    aten.index.Tensor,
    aten.mul.Scalar,
    aten.mul.Tensor,
    aten.sin.default,
    aten.to.dtype,
)
"""Operations of torch that a program may hold: each is a function of its arguments' contents alone."""


class NotCapturedError(RuntimeError):
    """A pass that cannot be run again as a program."""


@intrinsic
def _call(context, address, args, kind, first, last):  # type: ignore[no-untyped-def]
    """Call a compiled operation by the address of its code."""
    kinds = (types.int64, kind, types.int64, types.int64)

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        convention = context.call_conv
        code = builder.inttoptr(values[0], convention.get_function_type(types.none, kinds).as_pointer())
        status, _ = convention.call_function(builder, code, types.none, kinds, values[1:])
        with builder.if_then(status.is_error, likely=False):  # as where memory is short
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, *kinds), generate


@intrinsic
def _load(context, pointer, index):  # type: ignore[no-untyped-def]
    """A number that other threads write."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "acquire", 8)

    return types.int64(pointer, types.int64), generate


@intrinsic
def _add(context, pointer, index, value):  # type: ignore[no-untyped-def]
    """Add to a number that other threads add to; returns what it was before."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", builder.gep(values[0], [values[1]]), values[2], "acq_rel")

    return types.int64(pointer, types.int64, types.int64), generate


_yield = types.ExternalFunction("sched_yield", types.int32())

STOPPED, TASKS = 0, 8
"""Places in the memory that the threads of a run share: whether one of them has failed, and where the tasks begin."""

TAKEN, DONE, PROGRESS = 0, 1, 8
"""Places in the memory of a task: shares that a thread has taken, and that are computed; numbers from a task to the
next: they are in cache lines of their own."""


@njit(nogil=True, error_model="numpy", cache=True)
def _run(program, count, kind, kinds, progress, threads):  # type: ignore[no-untyped-def]
    """Run `count` tasks together with other threads that do the same; those of the second type are products: `kinds`
    are of weight and output.

    A thread takes shares of a task until none is left, and turns to the next task when all are computed. It waits for
    a share that another one computes, and never for a thread: one that the system lets wait holds up nothing, and
    catches up.
    """
    program, progress = numbers(program, INDEX), numbers(progress, INDEX)
    for index in range(count):
        task = at(program, index * WIDTH)
        code, is_product, elements, multiple = task[0], task[1], task[2], task[3]
        blocks = (elements + multiple - 1) // multiple
        shares = min(threads * SHARES, blocks, max(task[4], 1)) if threads > 1 else 1
        own = TASKS + index * PROGRESS
        share = _add(progress, own + TAKEN, 1) if threads > 1 else 0
        while share < shares:
            first = min(elements, blocks * share // shares * multiple)
            last = min(elements, blocks * (share + 1) // shares * multiple)
            if is_product:
                _call(code, task[5], kinds, first, last)
            else:
                _call(code, task[5], kind, first, last)
            if threads == 1:
                break
            _add(progress, own + DONE, 1)
            share = _add(progress, own + TAKEN, 1)
        spins = 0
        while threads > 1 and _load(progress, own + DONE) < shares:
            if _load(progress, STOPPED):
                return
            spins += 1
            if spins > SPINS:
                _yield()


class Tasks:
    """Tasks of equal types, one after another, as a program.

    Args:
        tasks: at least one.
        kind: their types, and `kinds` those of the products among them.
    """

    def __init__(self, tasks: list[Task], kind: Any, kinds: Any) -> None:
        self._args = [array("q", task.numbers) for task in tasks]  # the program has their addresses
        rows: list[int] = []
        for task, args in zip(tasks, self._args, strict=True):
            code, is_product = _code(task.function, _types(task.kind)), isinstance(task.kind, tuple)
            rows += [code, is_product, task.elements, task.multiple, task.most, args.buffer_info()[0]]
        self._program = array("q", rows)
        self._arguments = self._program.buffer_info()[0], len(tasks), kind, kinds
        self._most = max(min(-(-task.elements // task.multiple), task.most) for task in tasks)

    def __call__(self) -> None:
        """Run them, on as many threads as torch uses."""
        threads = min(num_threads(), self._most)
        if threads <= 1:
            _run(*self._arguments, 0, 1)
            return
        progress = array("q", bytes(8 * (TASKS + PROGRESS * self._arguments[1])))
        arguments = *self._arguments, progress.buffer_info()[0], threads

        def work() -> None:
            try:
                _run(*arguments)
            except BaseException:
                progress[STOPPED] = 1  # the others would wait for ever
                raise

        together(work, threads)


_known_types: dict[Any, Any] = {}


def _types(kind: Any) -> Any:
    """The Numba type of a kind, which follows from its classes: numbers of two classes may be equal. To find it takes
    longer than most operations."""
    classes = tuple(map(type, kind)) if isinstance(kind, tuple) else type(kind)
    if classes not in _known_types:
        _known_types[classes] = typeof(kind)
    return _known_types[classes]


@lru_cache
def _code(function: Any, kind: Any) -> int:
    """The address of the machine code of an operation for memory of a Numba type."""
    types_of_arguments = (types.int64, kind, types.int64, types.int64)
    if types_of_arguments not in function.overloads:
        function.compile(types_of_arguments)
    compiled = function.overloads[types_of_arguments]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def _is_view(result: Any, args: Any) -> bool:
    """Whether a result lies in the memory of the arguments. What an operation is called does not say that: `to` and
    `reshape` copy or do not."""
    memory = {arg.untyped_storage().data_ptr() for arg in tree_leaves(args) if isinstance(arg, Tensor)}
    return all(isinstance(part, Tensor) and part.untyped_storage().data_ptr() in memory for part in tree_leaves(result))


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
        result = func(*args, **kwargs)
        if func in EMPTY:
            return self._allocate(result)
        if _is_view(result, args) and not func._schema.is_mutable:
            return result
        if func not in CALLED_AGAIN:
            raise NotCapturedError(f"{func} cannot be a part of a captured pass")

        def again() -> None:
            result.copy_(func(*args, **kwargs))

        self.steps.append(again)
        return result

    def _allocate(self, like: Tensor) -> Tensor:
        size = like.numel() * like.element_size()
        while self._block < len(self._memory) and self._end + size > len(self._memory[self._block]):
            self._block, self._end = self._block + 1, 0
        if self._block == len(self._memory):
            self._memory.append(torch.empty(max(BLOCK, size), dtype=torch.uint8))
        start, self._end = self._end, self._end + -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[self._block][start : start + size].view(like.dtype).view(like.shape)


class Program:
    """What a pass did, to be done again.

    Args:
        steps: the pass's tasks and calls of torch, in their order.
    """

    def __init__(self, steps: Sequence[Task | Callable[[], None]]) -> None:
        self._steps = steps
        self._parts: list[Callable[[], None]] = []
        tasks: list[Task] = []
        kinds: dict[bool, Any] = {}
        for step in steps:
            if not isinstance(step, Task):
                self._close(tasks, kinds)
                self._parts.append(step)
                continue
            is_product = isinstance(step.kind, tuple)
            if _types(kinds.get(is_product, step.kind)) != _types(step.kind):
                self._close(tasks, kinds)
            kinds[is_product] = step.kind
            tasks.append(step)
        self._close(tasks, kinds)

    def _close(self, tasks: list[Task], kinds: dict[bool, Any]) -> None:
        if tasks:
            plain = kinds.get(False, INDEX)
            self._parts.append(Tasks(tasks.copy(), plain, kinds.get(True, (plain, plain))))
        tasks.clear()
        kinds.clear()

    @torch.inference_mode()
    def __call__(self) -> None:
        """Run the pass again."""
        with torch_on_one_thread():
            for part in self._parts:
                part()

    @torch.inference_mode()
    def seconds(self, runs: int = 20) -> dict[str, float]:
        """CPU time of each operation of the pass, the median of several passes; those of equal names together. The pass
        has to be idle: states are computed several times."""
        works: list[tuple[str, Callable[[], None]]] = []
        for step in self._steps:
            if isinstance(step, Task):
                works.append((step.function.__name__.strip("_"), Tasks([step], step.kind, step.kind)))
            else:
                works.append(("torch", step))
        times = [[timeit.timeit(work, number=1, timer=time.process_time) for _, work in works] for _ in range(runs)]
        found: dict[str, float] = {}
        for (name, _), own in zip(works, zip(*times, strict=True), strict=True):
            found[name] = found.get(name, 0.0) + statistics.median(own)
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
