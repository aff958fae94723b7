"""A thread for what waits for a disk or a network."""

from __future__ import annotations

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
