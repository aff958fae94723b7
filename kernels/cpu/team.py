"""Threads that run programs of compiled operations together.

A program is a list of operations (`TASK` numbers each). Every thread takes shares of the first one until none is left,
and turns to the next one when all are computed, or at once where the next one does not need it: a thread waits for a
share that another one computes, and never for a thread, so that one that the system lets wait holds up nothing, and
catches up.

To wake a thread takes the system longer than most operations take (up to two milliseconds, where it puts the thread
behind the one that woke it). So those that help keep looking for the next program for `PATIENCE` seconds, while they
let all others run, and only then sleep. Neither they nor who leads them need the interpreter for that
(`hybrid.kernels.cpu.compiled.team`).
"""

from __future__ import annotations

import atexit
import os
import threading
from array import array
from collections.abc import Callable
from functools import lru_cache, partial
from queue import SimpleQueue

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled

PATIENCE = 0.005
"""Seconds that a thread looks for the next program before it sleeps."""

SHARES = 4
"""Shares of an operation for each thread, where it is worth that many: the others compute more where one is slower."""

TASK = 7
"""Numbers of a task in a program: address of its code, its signature, `elements`, `multiple`, `most`, the address of
its arguments, and whether the next one `joins` it (`hybrid.kernels.cpu.tasks.Task`)."""

LINE = 8
"""Numbers in a cache line."""

STOPPED, TASKS = 0, LINE
"""Places in the progress of a program: whether a thread has failed, and where its tasks begin, a line each."""

TAKEN, DONE = 0, 1
"""Places in the progress of a task: shares that a thread has taken, and that are computed."""

BUSY, POSTED, CLOSING, JOBS, HELPERS = 0, LINE, 2 * LINE, 3 * LINE, 9 * LINE
"""Places in what a team shares: whether it has a caller; the number of its programs so far; whether the threads are to
end; the two latest programs; and a line for each thread that helps."""

JOB, GATE, ENDED, NUMBER, PROGRAM = 3 * LINE, 0, LINE, 2 * LINE, 2 * LINE + 1
"""Numbers of each of the two programs, and places in them: how many threads are at work on it, and CLOSED more if none
may begin; its number once it has ended; its number; and its address and length, the address of its progress and its
number of threads. Programs are counted from 1, and alternate between the two places."""

ASLEEP, SECONDS = 0, 1
"""Places in the line of a thread that helps: whether it sleeps, and where it reads the clock."""

CLOSED = 1 << 32

_NO_MEMORY = "a compiled operation found no memory for what it keeps meanwhile"

_lead = Compiled(f"{COMPILED}.team", "lead")
_repeat = Compiled(f"{COMPILED}.team", "repeat")
_compute = Compiled(f"{COMPILED}.team", "compute")
_help = Compiled(f"{COMPILED}.team", "help")
_post = Compiled(f"{COMPILED}.team", "post")
_end = Compiled(f"{COMPILED}.team", "end")


def compute(code: int, signature: int, args: int, elements: int) -> None:
    """Run a task in this thread; the arguments are the first numbers of `TASK` and the address of its own.

    Raises:
        MemoryError: it found no memory for what it keeps meanwhile.
    """
    if _compute(code, signature, args, elements):
        raise MemoryError(_NO_MEMORY)


def repeat(program: int, count: int, times: int, stop: int) -> None:
    """Run a program in this thread up to `times` times.

    Args:
        program, count: as `Team.run` has them.
        times: at most.
        stop: address of an int64 number: it is not run again once that is not 0.

    Raises:
        MemoryError: an operation found no memory for what it keeps meanwhile.
    """
    if _repeat(program, count, times, stop):
        raise MemoryError(_NO_MEMORY)


class Posted:
    """A program that was given to a team, and computed by its threads while the caller does something else.

    Args:
        program: its tasks, which it keeps.
        end: computes what is left of a program of this number.
        keep: what its tasks read and write.
    """

    def __init__(self, program: array[int], end: Callable[[int], object], keep: object) -> None:
        self._program = program
        self._progress = array("q", bytes(8 * (TASKS + len(program) // TASK * LINE)))
        self._number = array("q", [0])
        self._end: Callable[[int], object] | None = end
        self._keep: object = keep
        self._process = os.getpid()

    def post(self, shared: int, threads: int) -> bool:
        """Give it to the team that shares these numbers; returns whether that had no other caller."""
        program, progress, number = (own.buffer_info()[0] for own in (self._program, self._progress, self._number))
        _post(shared, program, len(self._program) // TASK, progress, threads, number)
        return self._number[0] > 0

    def end(self) -> None:
        """Compute what is left of it. No thread is at work on it afterwards."""
        end = self._end
        if end is not None:
            if self._number[0] and self._process == os.getpid():  # it had ended before a fork
                end(self._number[0])
            self._end = self._keep = None

    __del__ = end

    def wait(self) -> None:
        """`end`.

        Raises:
            MemoryError: an operation found no memory for what it keeps meanwhile.
        """
        self.end()
        if self._progress[STOPPED]:
            raise MemoryError(_NO_MEMORY)


class Team:
    """Threads that help where a program is run. It helps one caller at a time; another one computes alone meanwhile.
    Programs that were posted come one after another, and before one that is run.

    Args:
        size: how many there are at most; they are started when they are needed.
    """

    def __init__(self, size: int) -> None:
        self._shared = array("q", bytes(8 * (HELPERS + size * LINE)))
        for place in range(2):
            self._shared[JOBS + place * JOB + GATE] = CLOSED
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
        self._wake(threads - 1)
        progress = array("q", bytes(8 * (TASKS + count * LINE)))
        if _lead(self._address, program, count, progress.buffer_info()[0], threads):
            raise MemoryError(_NO_MEMORY)

    def post(self, program: array[int], threads: int, keep: object) -> Posted | None:
        """Have a program computed after those that were posted before, of which one may be left. None: it was not
        given to any thread, since there is no other one, or another caller.

        Args:
            program: its tasks.
            threads: that may compute it, with the one that waits for it.
            keep: what the tasks read and write.
        """
        threads = min(threads, self._size + 1)
        if threads == 1:
            return None
        posted = Posted(program, partial(_end, self._address), keep)
        if not posted.post(self._address, threads):
            return None
        self._wake(threads - 1)  # those that fall asleep from now on see it before
        return posted

    def settle(self) -> None:
        """Compute what is left of all that was posted."""
        if self._shared[POSTED]:
            _end(self._address, self._shared[POSTED])

    def _wake(self, count: int) -> None:
        """Have this number of threads look for programs, as far as they can be started."""
        for number in range(count):
            if number == len(self._helpers) and not self._start():
                break
            asleep = HELPERS + number * LINE + ASLEEP
            if self._shared[asleep]:
                self._shared[asleep] = 0
                self._helpers[number][1].put(None)

    def close(self) -> None:
        """End the threads. Programs that are run later are computed by their callers alone."""
        with self._starting:
            self._size = 0
            self.settle()
            self._shared[CLOSING] = 1
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
        while not self._shared[CLOSING]:
            _help(self._shared.buffer_info()[0], number)
            wake.get()


@lru_cache
def team() -> Team:
    """Those of the process, one for each other core."""
    found = Team((os.cpu_count() or 1) - 1)
    atexit.register(found.close)  # its threads read memory that the interpreter frees when it ends
    return found


def _before_fork() -> None:
    if team.cache_info().currsize:
        team().settle()


def _in_child() -> None:
    """A fork has none of the threads."""
    if team.cache_info().currsize:
        atexit.unregister(team().close)
        team.cache_clear()


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
