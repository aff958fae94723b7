"""Threads that run programs of compiled operations together.

A program is a list of operations (`TASK` numbers each). Every thread takes shares of the first one until none is left,
and turns to the next one when all are computed, or at once where the next one does not need it: a thread waits for a
share that another one computes, and never for a thread, so that one that the system lets wait holds up nothing, and
catches up.

To wake a thread takes the system longer than most operations take (up to two milliseconds, where it puts the thread
behind the one that woke it). So those that help keep looking for the next program for `PATIENCE` seconds, while they
let all others run, and only then sleep. Neither they nor who leads them need the interpreter for that.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from array import array
from functools import lru_cache
from itertools import product
from queue import SimpleQueue
from typing import Any

from numba import typeof, types
from numba.extending import intrinsic

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.vectors import INDEX, INT, KINDS, LONG, at, numbers

PATIENCE = 0.005
"""Seconds that a thread looks for the next program before it sleeps."""

SHARES = 4
"""Shares of an operation for each thread, where it is worth that many: the others compute more where one is slower."""

SPINS = 4096
"""Looks at what another thread changes before a thread lets others run."""

TASK = 7
"""Numbers of a task in a program: address of its code, its signature, `elements`, `multiple`, `most`, the address of
its arguments, and whether the next one `joins` it (`hybrid.kernels.cpu.tasks.Task`)."""

SIGNATURES: tuple[Any, ...] = tuple(map(typeof, (*KINDS.values(), *product(KINDS.values(), repeat=2))))
"""Numba's types of the kinds that operations are compiled for: of one type of numbers, or of a weight and an output."""

LINE = 8
"""Numbers in a cache line."""

STOPPED, TASKS = 0, LINE
"""Places in the progress of a program: whether a thread has failed, and where its tasks begin, a line each."""

TAKEN, DONE = 0, 1
"""Places in the progress of a task: shares that a thread has taken, and that are computed."""

BUSY, POSTED, GATE, ENDED, JOB, HELPERS = (LINE * place for place in range(6))
"""Places in what a team shares: whether it has a caller; the number of its programs so far; how many threads are at
work on the present one, and CLOSED more if none may begin; whether the threads are to end; address and length of the
program, address of its progress and its number of threads; and a line for each of those that help."""

ASLEEP, SECONDS = 0, 1
"""Places in the line of a thread that helps: whether it sleeps, and where it reads the clock."""

CLOSED = 1 << 32

_NO_MEMORY = "a compiled operation found no memory for what it keeps meanwhile"

_BILLION = 1_000_000_000
_LIMIT, _CLOCK = int(PATIENCE * _BILLION), int(time.CLOCK_MONOTONIC)

_yield = types.ExternalFunction("sched_yield", types.int32())
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@intrinsic
def _call(context, address, signature, args, first, last):  # type: ignore[no-untyped-def]
    """Call a compiled operation by the address of its code; returns whether it failed."""

    def generate(context, builder, _, values):  # type: ignore[no-untyped-def]
        address, number, args, first, last = values
        convention, entry = context.call_conv, builder.basic_block
        end = builder.append_basic_block("end")
        found = [(INT(1), entry)]
        blocks = []
        for kind in SIGNATURES:
            block = builder.append_basic_block("call")
            builder.position_at_end(block)
            of_call = (types.int64, kind, types.int64, types.int64)
            code = builder.inttoptr(address, convention.get_function_type(types.none, of_call).as_pointer())
            given = (args, context.get_constant_undef(kind), first, last)
            status, _result = convention.call_function(builder, code, types.none, of_call, given)
            found.append((builder.zext(status.is_error, INT), builder.basic_block))
            builder.branch(end)
            blocks.append(block)
        builder.position_at_end(entry)
        switch = builder.switch(number, end)
        for index, block in enumerate(blocks):
            switch.add_case(LONG(index), block)
        builder.position_at_end(end)
        failed = builder.phi(INT)
        for value, block in found:
            failed.add_incoming(value, block)
        return failed

    return types.int32(types.int64, types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def _load(context, pointer, index):  # type: ignore[no-untyped-def]
    """A number that other threads write."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.load_atomic(builder.gep(values[0], [values[1]]), "acquire", 8)

    return types.int64(pointer, types.int64), generate


def _changing(operation: str) -> Any:
    @intrinsic
    def change(context, pointer, index, value):  # type: ignore[no-untyped-def]
        """Change a number that other threads change; returns what it was before."""

        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            return builder.atomic_rmw(operation, builder.gep(values[0], [values[1]]), values[2], "seq_cst")

        return types.int64(pointer, types.int64, types.int64), generate

    return change


_add, _swap = _changing("add"), _changing("xchg")


@compiled_inline
def _cut(blocks, share, shares):  # type: ignore[no-untyped-def]
    """The block that a share begins with. Shares grow from the first one, a block or two in most operations, to the
    last: as the small ones are taken last, threads end an operation at nearly the same time."""
    if blocks < 2 * shares:
        return blocks * share // shares
    return blocks * share * (share + 1) // (shares * (shares + 1))


@compiled_inline
def _shares(program, index, threads):  # type: ignore[no-untyped-def]
    """The number of shares of a task, and of blocks that they consist of."""
    task = at(program, index * TASK)
    blocks = (task[2] + task[3] - 1) // task[3]
    return min(threads * SHARES, blocks, max(task[4], 1)), blocks


@compiled_inline
def _run(program, count, progress, threads):  # type: ignore[no-untyped-def]
    """Run `count` tasks together with other threads that do the same; returns whether one failed.

    Shares are taken from the last one on: the largest first, and of attention to a prompt the last tokens, which take
    longest.
    """
    program, progress, begun = numbers(program, INDEX), numbers(progress, INDEX), 0
    for index in range(count):
        task = at(program, index * TASK)
        elements, multiple = task[2], task[3]
        if threads == 1:
            if _call(task[0], task[1], task[5], 0, elements):
                return True
            continue
        shares, blocks = _shares(program, index, threads)
        own = TASKS + index * LINE
        share = shares - 1 - _add(progress, own + TAKEN, 1)
        while share >= 0:
            first = min(elements, _cut(blocks, share, shares) * multiple)
            last = min(elements, _cut(blocks, share + 1, shares) * multiple)
            if first < last and _call(task[0], task[1], task[5], first, last):
                _swap(progress, STOPPED, 1)  # the others would wait for ever
            _add(progress, own + DONE, 1)
            share = shares - 1 - _add(progress, own + TAKEN, 1)
        if task[6]:
            continue
        spins = 0
        for each in range(begun, index + 1):
            while _load(progress, TASKS + each * LINE + DONE) < _shares(program, each, threads)[0]:
                spins += 1
                if spins > SPINS:
                    _yield()
        begun = index + 1
        if _load(progress, STOPPED):
            return True
    return False


@compiled
def _lead(shared, program, count, progress, threads):  # type: ignore[no-untyped-def]
    """Run a program with the threads of a team that are awake, or alone where it has another caller. No thread is at
    work on it when this returns, or raises because a task failed."""
    shared = numbers(shared, INDEX)
    if threads == 1 or _swap(shared, BUSY, 1):
        if _run(program, count, progress, 1):
            raise MemoryError
        return
    job = at(shared, JOB)
    job[0], job[1], job[2], job[3] = program, count, progress, threads
    _add(shared, GATE, -CLOSED)
    _add(shared, POSTED, 1)
    failed = _run(program, count, progress, threads)
    _add(shared, GATE, CLOSED)
    spins = 0
    while _load(shared, GATE) != CLOSED:
        spins += 1
        if spins > SPINS:
            _yield()
    _swap(shared, BUSY, 0)
    if failed:
        raise MemoryError


@compiled
def _compute(code, signature, args, elements):  # type: ignore[no-untyped-def]
    """Run one task in this thread."""
    if _call(code, signature, args, 0, elements):
        raise MemoryError


def compute(code: int, signature: int, args: int, elements: int) -> None:
    """Run a task in this thread; the arguments are the first numbers of `TASK` and the address of its own.

    Raises:
        MemoryError: it found no memory for what it keeps meanwhile.
    """
    if _compute(code, signature, args, elements):
        raise MemoryError(_NO_MEMORY)


@compiled_inline
def _nanoseconds(place):  # type: ignore[no-untyped-def]
    """A clock that only goes forward, read by way of two numbers in memory."""
    _clock(_CLOCK, place)
    read = numbers(place, INDEX)
    return read[0] * _BILLION + read[1]


@compiled
def _help(address, number):  # type: ignore[no-untyped-def]
    """Take part in every program that has a thread of this number, until there was none for a while."""
    shared, clock = numbers(address, INDEX), address + 8 * (HELPERS + number * LINE + SECONDS)
    own, spins, seen, since = HELPERS + number * LINE, 0, 0, _nanoseconds(clock)
    _swap(shared, own + ASLEEP, 0)
    while not _load(shared, ENDED):
        posted = _load(shared, POSTED)
        if posted != seen:
            seen = posted
            if _add(shared, GATE, 1) < CLOSED and number < shared[JOB + 3] - 1:
                _run(shared[JOB], shared[JOB + 1], shared[JOB + 2], shared[JOB + 3])
                spins, since = 0, _nanoseconds(clock)
            _add(shared, GATE, -1)
        spins += 1
        if spins > SPINS:
            _yield()
            if _nanoseconds(clock) - since > _LIMIT:
                _swap(shared, own + ASLEEP, 1)
                return


class Team:
    """Threads that help where a program is run. It helps one caller at a time; another one computes alone meanwhile.

    Args:
        size: how many there are at most; they are started when they are needed.
    """

    def __init__(self, size: int) -> None:
        self._shared = array("q", bytes(8 * (HELPERS + size * LINE)))
        self._shared[GATE] = CLOSED
        self._address = self._shared.buffer_info()[0]
        self._size = size
        self._helpers: list[tuple[threading.Thread, SimpleQueue[None]]] = []
        self._starting = threading.RLock()  # a signal handler may run a program, too

    def run(self, program: int, count: int, threads: int) -> None:
        """Run a program.

        Args:
            program: address of its tasks.
            count: of them.
            threads: that may compute it. Those that cannot be started, or begin late, are not waited for.

        Raises:
            MemoryError: an operation found no memory for what it keeps meanwhile.
        """
        threads = min(threads, self._size + 1)
        if threads == 1:
            if _lead(self._address, program, count, 0, 1):
                raise MemoryError(_NO_MEMORY)
            return
        for number in range(threads - 1):
            if number == len(self._helpers) and not self._start():
                break
            asleep = HELPERS + number * LINE + ASLEEP
            if self._shared[asleep]:
                self._shared[asleep] = 0
                self._helpers[number][1].put(None)
        progress = array("q", bytes(8 * (TASKS + count * LINE)))
        if _lead(self._address, program, count, progress.buffer_info()[0], threads):
            raise MemoryError(_NO_MEMORY)

    def close(self) -> None:
        """End the threads. Programs that are run later are computed by their callers alone."""
        with self._starting:
            self._size, self._shared[ENDED] = 0, 1
            for thread, wake in self._helpers:
                wake.put(None)
                if thread.ident is not None:  # it was started
                    thread.join()

    def _start(self) -> bool:
        """Start one more thread; returns whether there is one."""
        with self._starting:
            if len(self._helpers) >= self._size:
                return False
            wake: SimpleQueue[None] = SimpleQueue()
            arguments = len(self._helpers), wake
            thread = threading.Thread(target=self._serve, args=arguments, name="hybrid-cpu", daemon=True)
            self._helpers.append((thread, wake))
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left: the others compute its shares
                self._helpers.pop()
                return False
            return True

    def _serve(self, number: int, wake: SimpleQueue[None]) -> None:
        while not self._shared[ENDED]:
            _help(self._shared.buffer_info()[0], number)
            wake.get()


@lru_cache
def team() -> Team:
    """Those of the process, one for each other core."""
    found = Team((os.cpu_count() or 1) - 1)
    atexit.register(found.close)  # its threads read memory that the interpreter frees when it ends
    return found


os.register_at_fork(after_in_child=team.cache_clear)  # a fork has none of the threads
