"""Requests and what they need from disk: read while they wait, and given to them when they have their memory."""

from __future__ import annotations

from collections.abc import Callable

from hybrid.cache.cache import HybridCache
from hybrid.engine.request import Request


class RestoringRequests:
    """Requests of which something may have to be read from disk.

    What a request that is queued will need is read ahead, in the order in which requests came, while there are buffers
    for it. A request that has its memory, and of which not all was read, computes nothing until it is (`proceed`); it
    waits for that as long as computing would take at most.

    Args:
        cache: where requests get their memory.
    """

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._queued: dict[Request, int] = {}  # of which nothing was read ahead yet, with what may be cached
        self._running: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request: object) -> bool:
        return request in self._running

    def queue(self, request: Request, limit: int) -> None:
        """A request waits from now on.

        Args:
            limit: the number of its tokens that may be cached.
        """
        if self._cache.restores is not None:
            self._queued[request] = limit
            self.read_ahead()

    def read_ahead(self) -> None:
        """Begin to read for requests that wait, while there are buffers."""
        restores = self._cache.restores
        while self._queued and restores is not None and restores.reads_ahead:
            request, limit = next(iter(self._queued.items()))
            del self._queued[request]
            request.ahead = restores.read_ahead(request.key(), limit)

    def start(self, request: Request) -> bool:
        """A request has its memory: what was read ahead is its lease's, or not needed. Returns whether it can compute
        at once."""
        self._end_queue(request)
        if request.lease is None or request.lease.restoring is None:
            return True
        self._running[request] = None
        return False

    def forget(self, request: Request) -> None:
        """A request gives its memory back, or waits no more."""
        self._running.pop(request, None)
        self._end_queue(request)

    def _end_queue(self, request: Request) -> None:
        self._queued.pop(request, None)
        if request.ahead is not None:
            request.ahead.drop()
            request.ahead = None

    def proceed(self, only_one: bool, failed: Callable[[Request, Exception], None]) -> list[Request]:
        """Give requests what was read for them meanwhile. Returns those that can compute now.

        Args:
            only_one: others compute, and are delayed by it.
            failed: called for a request for which that raises.
        """
        self.read_ahead()
        ready: list[Request] = []
        for request in list(self._running):
            assert request.lease is not None
            try:
                if not self._cache.proceed(request.lease):
                    continue
            except Exception as error:
                failed(request, error)
                continue
            del self._running[request]
            ready.append(request)
            if only_one:
                break
        return ready

    def wait(self, seconds: float) -> None:
        """Wait until all is read for the first request that needs it, up to `seconds`."""
        for request in self._running:
            if request.lease is not None and request.lease.restoring is not None:
                request.lease.restoring.wait(seconds)
            return
