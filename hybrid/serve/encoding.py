"""Encoding prompts beside the thread that runs the engine.

A prompt may be long, its template slow, its grammar large, its image of many pixels. Threads of their own make requests
of prompts, by turns between tenants; the engine's thread only enters what is ready.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from hybrid.engine.forms import aside
from hybrid.engine.request import Request
from hybrid.engine.sampling_params import SamplingParams, tenant_of
from hybrid.prompts.encode import Prompt


@dataclass(frozen=True, eq=False)
class PendingPrompt:
    """One prompt, as it was asked.

    Attributes:
        prompt, params, namespace, request_id: as for `Engine.add_request`.
        num_bytes: that the prompt takes about.
        arrived: when it was asked, as `time.perf_counter`: what it waits to be encoded is a part of the time to its
            first token.
    """

    prompt: Prompt
    params: SamplingParams | None
    namespace: str
    request_id: str | None
    num_bytes: int = 0
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def tenant(self) -> str:
        """Who sends it."""
        return tenant_of(self.params, self.namespace)


class EncodingPool:
    """Threads that make requests of prompts.

    Prompts of one tenant have all threads but one, where there are several: another tenant's are encoded beside
    the slowest. A prompt that is cancelled while it is encoded occupies its thread until that has ended. A thread that
    waits for a form that is compiled elsewhere is not counted: another one encodes meanwhile.

    Args:
        encode: makes a request of a prompt, in any thread.
        num_threads: that encode at once, besides those that wait. They are started with the first prompt.
    """

    def __init__(self, encode: Callable[[PendingPrompt], Request], num_threads: int) -> None:
        self._encode = encode
        self._num_threads = num_threads
        self._changed = threading.Condition()
        # by tenant, the one whose turn it is first
        self._queued: OrderedDict[str, OrderedDict[Future[Request], PendingPrompt]] = OrderedDict()
        self._running: Counter[str] = Counter()  # prompts that are being encoded, by tenant
        self._num_threads_now = 0  # without those that wait for a form
        self._num_started = 0
        self._is_closed = False

    def submit(self, asked: PendingPrompt) -> Future[Request]:
        """Encode a prompt. What is called when that is done is called in a thread of the pool. A prompt that is
        cancelled before its turn is forgotten at once."""
        encoded: Future[Request] = Future()
        encoded.add_done_callback(partial(self._forget, asked.tenant))
        with self._changed:
            self._start_threads()
            self._queued.setdefault(asked.tenant, OrderedDict())[encoded] = asked
            self._changed.notify()
        return encoded

    def close(self) -> None:
        """Forget all prompts, and end the threads, each with the prompt that it encodes."""
        with self._changed:
            self._is_closed = True
            self._queued.clear()
            self._changed.notify_all()

    def _forget(self, tenant: str, encoded: Future[Request]) -> None:
        with self._changed:
            if encoded in self._queued.get(tenant, ()):
                self._remove(tenant, encoded)

    def _remove(self, tenant: str, encoded: Future[Request]) -> PendingPrompt:
        queued = self._queued[tenant]
        asked = queued.pop(encoded)
        if not queued:
            del self._queued[tenant]
        return asked

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
        while (following := self._take_next()) is not None:
            encoded, asked = following
            if encoded.set_running_or_notify_cancel():
                self._encode_one(encoded, asked)
            with self._changed:
                self._running[asked.tenant] -= 1
                self._running += Counter()  # without those that are zero
                self._changed.notify_all()
            del following, encoded, asked  # nothing is kept alive by a thread that waits

    def _take_next(self) -> tuple[Future[Request], PendingPrompt] | None:
        """Wait for a prompt whose turn it is, and take it.

        Returns:
            None if the pool was closed, or has threads enough without this one.
        """
        most = max(1, self._num_threads - 1)
        with self._changed:
            while not self._is_closed:
                if self._num_threads_now > self._num_threads:
                    self._num_threads_now -= 1
                    return None
                tenant = next((name for name in self._queued if self._running[name] < most), None)
                if tenant is not None:
                    self._queued.move_to_end(tenant)  # the others' turns come before its next one
                    self._running[tenant] += 1
                    encoded = next(iter(self._queued[tenant]))
                    return encoded, self._remove(tenant, encoded)
                self._changed.wait()
        return None

    def _encode_one(self, encoded: Future[Request], asked: PendingPrompt) -> None:
        try:
            request = self._encode(asked)
        except BaseException as error:
            encoded.set_exception(error)
        else:
            encoded.set_result(request)
