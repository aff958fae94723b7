"""Compiled operations as tasks: run by as many threads as torch uses, one at a time or a recorded program at once.

A compiled operation is a function `(args, kind, first, last)`. `args` is the address of its numbers (addresses, sizes,
strides) as int64; `kind` says what types its memory holds (`hybrid.kernels.cpu.vectors.KINDS`). It computes the
elements `[first, last)` of its result, and what it does with an element does not depend on the range: threads change no
bit.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from hybrid.kernels.cpu.threads import num_threads

SHARES = 2
"""Shares of an operation for each thread, where it is worth that many: the others compute more where one is slower."""


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
    threads = min(num_threads(), -(-count // multiple), most)
    if threads <= 1:
        function(address, kind, 0, count)
        return
    blocks = -(-count // multiple)
    shares = min(threads * SHARES, blocks, most)
    bounds = [min(count, blocks * at // shares * multiple) for at in range(shares + 1)]
    left = deque(pairwise(bounds))

    def work() -> None:
        try:
            while True:
                first, last = left.popleft()
                function(address, kind, first, last)
        except IndexError:
            return
        except BaseException:
            left.clear()
            raise

    together(work, threads)


def together(work: Callable[[], None], threads: int) -> None:
    """Call `work` in this thread and in others. It takes shares of something until none is left; threads that have not
    begun when this one finds none are not waited for.

    Raises:
        BaseException: that of a call.
    """
    others: list[Future[None]] = []
    try:
        for _ in range(threads - 1):
            others.append(_others().submit(work))
        work()
    finally:  # a signal handler may raise; the memory must not be freed before all threads are done
        wait([other for other in others if not other.cancel()])
    for other in others:
        if not other.cancelled():
            other.result()


@lru_cache
def _others() -> ThreadPoolExecutor:
    """The threads besides the callers', started when they are needed."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="hybrid-cpu")


@lru_cache
def bits(value: float) -> int:
    """An fp32 number as an argument."""
    found: int = struct.unpack("i", struct.pack("f", value))[0]
    return found
