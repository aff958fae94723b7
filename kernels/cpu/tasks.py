"""Compiled operations as tasks: run by as many threads as torch uses, one at a time or a recorded program at once.

A compiled operation is a function `(args, kind, first, last)`. `args` is the address of its numbers (addresses, sizes,
strides) as int64; `kind` says what types its memory holds (`hybrid.kernels.cpu.vectors.KINDS`). It computes the
elements `[first, last)` of its result, and what it does with an element does not depend on the range: threads change no
bit.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class Task(NamedTuple):
    """One operation.

    Attributes:
        function: compiled.
        kind: the types in memory.
        numbers: its arguments.
        elements: their number; how they are shared among threads is up to who runs it.
        multiple: ranges begin at multiples of it.
        most: ranges that the work is worth.
    """

    function: Any
    kind: Any
    numbers: tuple[int, ...]
    elements: int
    multiple: int
    most: int


recorder: ContextVar[Callable[[Task], None] | None] = ContextVar("recorder", default=None)
"""Is called with every task that is run in its context."""


def run(function: Any, kind: Any, numbers: Sequence[int], count: int, multiple: int, most: int) -> None:
    """Run a task; the arguments are those of `Task`."""
    tell = recorder.get()
    if tell is not None:
        tell(Task(function, kind, tuple(numbers), count, multiple, most))
    args = array("q", numbers)
    address = args.buffer_info()[0]
    threads = min(torch.get_num_threads(), -(-count // multiple), most)
    if threads <= 1:
        function(address, kind, 0, count)
        return
    bounds = ranges(count, multiple, threads)
    pool, waiting = threads_besides(torch.get_num_threads() - 1), []
    try:
        for first, last in pairwise(bounds[1:]):
            waiting.append(pool.submit(function, address, kind, first, last))
        function(address, kind, bounds[0], bounds[1])
    finally:  # a signal handler may raise; the memory must not be freed before all threads are done
        wait(waiting)
    for future in waiting:
        future.result()


def ranges(count: int, multiple: int, threads: int) -> list[int]:
    """Where the ranges of `threads` threads begin, and the end of the last one."""
    blocks = -(-count // multiple)
    return [min(count, blocks * at // threads * multiple) for at in range(threads + 1)]


@lru_cache(maxsize=1)
def threads_besides(size: int) -> ThreadPoolExecutor:
    """The threads besides the caller's."""
    return ThreadPoolExecutor(size, thread_name_prefix="hybrid-cpu")


@lru_cache
def bits(value: float) -> int:
    """An fp32 number as an argument."""
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found
