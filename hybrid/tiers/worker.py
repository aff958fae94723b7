"""Threads for what waits for a disk or a network, and a lock between them that survives a fork."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

Job = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """Runs jobs one after the other in a thread of its own, which ends with this object, and does not keep the process
    alive.

    Args:
        name: of the thread.
        idle: a bound method that is called when there was no job for a while. Its object may be freed meanwhile.
        seconds: how long a while is.
    """

    def __init__(self, name: str, idle: Callable[[], None] | None = None, seconds: float | None = None) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        reference = weakref.WeakMethod(idle) if idle is not None else None
        self._thread = threading.Thread(target=_run, args=(self._jobs, reference, seconds), name=name, daemon=True)
        self._finalizer = weakref.finalize(self, self._jobs.put, None)
        self._thread.start()

    def submit(self, job: Callable[[], ResultT]) -> Future[ResultT]:
        """Have a job run after those before it."""
        future: Future[ResultT] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, seconds: float) -> None:
        """End the thread after its jobs, and wait for that."""
        self._finalizer()
        self._thread.join(seconds)


def ended_within(seconds: float, future: Future[Any]) -> bool:
    """Wait for a job up to `seconds`. Returns whether it has ended; raises what it raised."""
    if not wait([future], seconds).done:
        return False
    future.result()
    return True


def _run(
    jobs: queue.SimpleQueue[Job | None], idle: weakref.WeakMethod[Callable[[], None]] | None, seconds: float | None
) -> None:
    while True:
        try:
            job = jobs.get(timeout=seconds)
        except queue.Empty:
            call = idle() if idle is not None else None
            if call is not None:
                call()
            del call
            continue
        if job is None:
            return
        future, run = job
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)
        del job, future, run


FORKED = "this process was forked from the one that opened the directory"
"""Why threads are not used."""


class ProcessLock:
    """A lock between the threads of the process that makes it.

    In a process that is forked from it those threads do not exist, and one of them may have held the lock: there it is
    not held by anyone, and does nothing. The other methods are those of `threading.Lock`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Tell whether this process was forked from the one that made it."""
        return self._process != os.getpid()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock.acquire`."""
        return blocking if self.is_foreign else self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """See `threading.Lock.release`."""
        if not self.is_foreign:
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()
