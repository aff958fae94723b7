"""Encoding prompts beside the thread that runs the engine.

A prompt may be long, its template slow, its grammar large, its image of many pixels. Threads of their own make requests
of prompts, by turns between tenants; the engine's thread only enters what is ready. All methods but those that a
thread of the pool calls are for the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybrid.engine.forms import aside
from hybrid.engine.request import Request
from hybrid.serve.admission import AdmissionQueue, Inbox, PendingPrompt

Encoded = Request | BaseException
"""A request that can run, or why the prompt cannot."""


class EncodingPool:
    """Threads that make requests of prompts.

    Prompts of one tenant have all threads but one, where there are several: another tenant's are encoded beside
    the slowest. A prompt that is removed while it is encoded occupies its thread until that has ended. A thread that
    waits for a form that is compiled elsewhere is not counted: another one encodes meanwhile.

    Args:
        encode: makes a request of a prompt, in any thread.
        deliver: takes what has become of a prompt, in a thread of the pool.
        num_threads: that encode at once, besides those that wait. They are started with the first prompt.
        max_seconds: from `add` until a prompt is encoded, at most; None: no limit.

    Attributes:
        asked: all prompts that were added, until they are taken.
    """

    def __init__(
        self,
        encode: Callable[[PendingPrompt], Request],
        deliver: Callable[[Inbox, Encoded], None],
        num_threads: int,
        max_seconds: float | None,
    ) -> None:
        self._encode = encode
        self._deliver = deliver
        self._num_threads = num_threads
        self._max_seconds = max_seconds
        self.asked: AdmissionQueue = AdmissionQueue()
        self._changed = threading.Condition()
        self._queue = AdmissionQueue()
        self._deadlines: dict[Inbox, float] = {}  # of those that are not encoded, the first one first
        self._running: Counter[str] = Counter()  # prompts that are being encoded, by tenant
        self._num_threads_now = 0  # without those that wait for a form
        self._num_started = 0
        self._is_closed = False

    def add(self, inbox: Inbox, asked: PendingPrompt) -> None:
        """Encode a prompt."""
        with self._changed:
            self._start_threads()
            self._changed.notify()
            self._queue.add(inbox, asked)
            if self._max_seconds is not None:
                self._deadlines[inbox] = time.monotonic() + self._max_seconds
            self.asked.add(inbox, asked)  # at last: where this raises before, nothing waits for it

    def remove(self, inbox: Inbox) -> PendingPrompt | None:
        """Forget a prompt, wherever it is. None: it is not there."""
        with self._changed:
            asked = self.asked.remove(inbox)
            self._deadlines.pop(inbox, None)
            self._queue.remove(inbox)
            return asked

    def mend(self) -> None:
        """Make it consistent after an exception in one of the calls."""
        with self._changed:
            self._queue.mend()
            self.asked.mend()
            self._deadlines = {inbox: end for inbox, end in self._deadlines.items() if inbox in self.asked}

    @property
    def seconds_left(self) -> float | None:
        """Seconds until a prompt has taken too long; None: none can."""
        with self._changed:
            first = next(iter(self._deadlines.values()), None)
        return None if first is None else max(0.0, first - time.monotonic())

    def next_overdue(self) -> Inbox | None:
        """A prompt that has taken too long; None: there is none."""
        with self._changed:
            inbox, deadline = next(iter(self._deadlines.items()), (None, 0.0))
        return inbox if deadline <= time.monotonic() else None

    def close(self) -> None:
        """Forget all prompts, and end the threads, each with the prompt that it encodes."""
        with self._changed:
            self._is_closed = True
            self._queue, self.asked, self._deadlines = AdmissionQueue(), AdmissionQueue(), {}
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while self._num_threads_now < self._num_threads:
            name = f"hybrid-encoding-{self._num_started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
            self._num_started += 1
            self._num_threads_now += 1

    # In the threads of the pool

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """While this thread waits for a form."""
        with self._changed:
            self._num_threads_now -= 1
            if not self._is_closed:
                self._start_threads()
        try:
            yield
        finally:
            with self._changed:
                self._num_threads_now += 1

    def _work(self) -> None:
        aside.set(self._aside)
        while (following := self._next()) is not None:
            self._encode_one(*following)
            del following  # nothing is kept alive by a thread that waits

    def _next(self) -> tuple[Inbox, PendingPrompt] | None:
        """Wait for a prompt whose turn it is; None: the pool was closed, or has threads enough without this one."""
        most = max(1, self._num_threads - 1)
        with self._changed:
            while not self._is_closed:
                if self._num_threads_now > self._num_threads:
                    self._num_threads_now -= 1
                    return None
                full = {tenant for tenant, count in self._running.items() if count >= most}
                following = self._queue.next(full)
                if following is not None:
                    self._running[following[1].tenant] += 1
                    return following
                self._changed.wait()
        return None

    def _encode_one(self, inbox: Inbox, asked: PendingPrompt) -> None:
        encoded: Any
        try:
            encoded = self._encode(asked)
        except BaseException as error:
            encoded = error
        with self._changed:
            self._running[asked.tenant] -= 1
            self._running += Counter()  # without those that are zero
            self._deadlines.pop(inbox, None)
            self._changed.notify_all()
            is_wanted = inbox in self.asked
        if is_wanted:
            self._deliver(inbox, encoded)
