"""Triton's interpreter, watched: every launch is checked for what only a GPU would show (`support.races`), its programs
run in an order of choice (`support.program_order`), and memory that nobody wrote holds NaN.

The interpreter runs programs one after another and tiles as a whole, and gives zeros where a load is masked and nothing
else was asked for; `torch.empty` often finds zeros too. None of that holds on a GPU.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import signature
from math import prod
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.utils._device import _device_constructors
from triton.runtime import interpreter

from support.program_order import WOVEN, Loom, sequence
from support.races import ATOMIC, LOAD, STORE, Finding, Launch, Program, Site

Builder = interpreter.InterpreterBuilder
POISON = 0x5A
"""Every byte of integers that nobody wrote: no index, and no size, of anything here."""
MAKERS = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


class Watch:
    """The subject of a watch, and the order in which programs run.

    Attributes:
        order: one of `support.program_order.ORDERS`.
        findings: of all launches since they were last taken.
    """

    def __init__(self, order: str, seed: int) -> None:
        self.order = order
        self.findings: list[Finding] = []
        self.draw = random.Random(seed)
        self.launch: Launch | None = None
        self.program = Program(0, (0, 0, 0))
        self.loom: Loom | None = None

    @contextmanager
    def ordered(self, order: str) -> Iterator[None]:
        """Run programs in another order for a while."""
        before, self.order = self.order, order
        try:
            yield
        finally:
            self.order = before

    def take(self) -> list[Finding]:
        """The findings so far, which are then forgotten."""
        found, self.findings = self.findings, []
        return found

    def access(self, kind: int, ptrs: Any, mask: Any, values: Any = None) -> Any:
        """Note an access before it is made; returns the mask without lanes that are out of bounds."""
        if self.loom is not None:
            self.loom.turn()
        assert self.launch is not None
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        allowed = self.launch.access(self.program, kind, _site(), ptrs.data, mask, size, values)
        return np.ones(ptrs.data.shape, bool) if allowed is None else allowed


class Programs:
    """Stands in for a kernel's function: collects the calls of the interpreter, one per program, and with the last one
    runs them all in the watch's order."""

    def __init__(self, function: Any, watch: Watch, builder: Any) -> None:
        self.__name__ = function.__name__
        self.__globals__ = function.__globals__
        self.__annotations__ = function.__annotations__
        self.__signature__ = signature(function)
        self._function = function
        self._watch = watch
        self._builder = builder
        self._places: list[tuple[int, int, int]] = []

    def __call__(self, **arguments: Any) -> None:
        self._places.append(self._builder.grid_idx)
        if len(self._places) < prod(self._builder.grid_dim):
            return
        watch = self._watch
        programs = [Program(index, place) for index, place in enumerate(self._places)]

        def resume(index: int) -> None:
            watch.program = programs[index]
            self._builder.grid_idx = programs[index].grid

        order = sequence(watch.order, len(programs), watch.draw)
        if watch.order == WOVEN:
            watch.loom = Loom(watch.draw, resume)
            watch.loom.run(order, lambda index: self._function(**arguments))
            return
        for index in order:
            resume(index)
            self._function(**arguments)


@contextmanager
def watched(watch: Watch) -> Iterator[Watch]:
    """Watch every interpreted launch."""
    builder, executor = Builder, interpreter.GridExecutor
    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        changed.append((owner, name, original))
        setattr(owner, name, make(original))

    change(builder, "create_masked_load", lambda load: _load(load, watch))
    change(builder, "create_masked_store", lambda store: _store(store, watch))
    change(builder, "create_atomic_rmw", lambda update: _update(update, watch, 3))
    change(builder, "create_atomic_cas", lambda update: _update(update, watch, None))
    change(builder, "create_barrier", lambda barrier: _barrier(barrier, watch))
    ready: set[int] = set()
    change(interpreter, "_patch_lang", lambda prepare: _prepare(prepare, ready))
    change(interpreter, "_get_np_dtype", _remembered)
    change(executor, "__call__", lambda launch: _launch(launch, watch, ready))
    _device_constructors()  # torch remembers its own functions, which `with torch.device("meta")` replaces
    for owner, name in MAKERS:
        change(owner, name, _poisoned)
    try:
        yield watch
    finally:
        for owner, name, original in reversed(changed):
            setattr(owner, name, original)


def _site() -> Site:
    """The line of the kernel, or of the function that it calls, that touches memory."""
    frame = sys._getframe(3)
    while "/triton/runtime/" in frame.f_code.co_filename or "/triton/language/" in frame.f_code.co_filename:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _load(load: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def watched_load(builder: Any, ptrs: Any, mask: Any, other: Any, *rest: Any) -> Any:
        if watch.launch is None:
            return load(builder, ptrs, mask, other, *rest)
        allowed = watch.access(LOAD, ptrs, mask.data)
        loaded = load(builder, ptrs, interpreter.TensorHandle(allowed, mask.dtype), other, *rest)
        # of one element the interpreter takes a zero that was asked for as nothing
        if other is None and allowed.size > 1 and not allowed.all():
            loaded.data = np.where(allowed, loaded.data, _poison(loaded.data.dtype))
        return loaded

    return watched_load


def _store(store: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def watched_store(builder: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if watch.launch is None:
            return store(builder, ptrs, value, mask, *rest)
        values = np.broadcast_to(value.data, ptrs.data.shape)
        allowed = watch.access(STORE, ptrs, mask.data, values)
        return store(builder, ptrs, value, interpreter.TensorHandle(allowed, mask.dtype), *rest)

    return watched_store


def _update(update: Callable[..., Any], watch: Watch, mask_at: int | None) -> Callable[..., Any]:
    """Atomics: `(ptr, ..., semantics, scope)`, with a mask at one place or without."""

    def watched_update(builder: Any, *arguments: Any) -> Any:
        if watch.launch is None:
            return update(builder, *arguments)
        ptrs, semantics, scope = arguments[0 if mask_at is None else 1], arguments[-2], arguments[-1]
        mask = None if mask_at is None else arguments[mask_at].data
        allowed = watch.access(ATOMIC, ptrs, mask)
        if mask_at is not None:
            masked = interpreter.TensorHandle(allowed, arguments[mask_at].dtype)
            arguments = (*arguments[:mask_at], masked, *arguments[mask_at + 1 :])
        found = update(builder, *arguments)
        name = str(semantics).upper() if "CTA" not in str(scope).upper() else "RELAXED"
        watch.launch.synchronise(
            watch.program, ptrs.data[allowed], acquires="ACQUIRE" in name, releases="RELEASE" in name
        )
        return found

    return watched_update


def _barrier(barrier: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    def watched_barrier(builder: Any) -> Any:
        watch.program.time += 1
        return barrier(builder)

    return watched_barrier


def _prepare(prepare: Callable[[Any], Any], ready: set[int]) -> Callable[[Any], Any]:
    """Make the language ready for the interpreter once per module and launch, not again whenever a function is called:
    half of the interpreter's time goes into that."""

    def prepare_unless_ready(function: Any) -> Any:
        module = id(function.__globals__)
        if module in ready:
            return None
        ready.add(module)
        return prepare(function)

    return prepare_unless_ready


def _remembered(numpy_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter asks for NumPy's name of a type several times per operation, and makes the whole table each time:
    a sixth of its time goes into that."""
    of_numbers = cache(numpy_type)

    def remembered(dtype: Any) -> Any:
        numbers = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return numpy_type(numbers) if isinstance(numbers, tl.pointer_type) else of_numbers(numbers)

    return remembered


def _launch(launch: Callable[..., Any], watch: Watch, ready: set[int]) -> Callable[..., Any]:
    def watched_call(executor: Any, *arguments: Any, **options: Any) -> Any:
        copy, name = executor._init_args_hst, executor.fn.__name__

        def copy_and_note(args: Any, kwargs: Any) -> Any:
            copies, named = copy(args, kwargs)
            watch.launch = Launch(name, _tensors([*copies, *named.values()]))
            return copies, named

        ready.clear()
        executor._init_args_hst = copy_and_note
        executor.fn = Programs(executor.fn, watch, interpreter.interpreter_builder)
        try:
            return launch(executor, *arguments, **options)
        finally:
            ready.clear()
            noted, watch.launch, watch.loom = watch.launch, None, None
            if noted is not None:
                watch.findings += noted.findings()

    return watched_call


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(getattr(value, "base", None), Tensor):  # a descriptor, or a tensor under another type
            yield value.base


def _poison(dtype: np.dtype[Any]) -> Any:
    """A number that no kernel may use: NaN, also where bfloat16 goes as the integers of its bits."""
    byte = 0xFF if dtype.kind == "f" or dtype == np.uint16 else POISON
    return np.frombuffer(bytes([byte] * dtype.itemsize), dtype)[0] if dtype.kind != "b" else dtype.type(True)


def _poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_poisoned(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        if type(made) is Tensor and made.device.type == "cpu" and made.dtype != torch.bool:
            if made.is_floating_point():
                made.detach().fill_(float("nan"))
            elif not made.is_complex() and not made.is_quantized:
                made.fill_(int.from_bytes(bytes([POISON] * made.element_size()), "little"))
        return made

    return make_poisoned
