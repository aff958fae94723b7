"""The requests that wait, and whose turn it is.

First come requests that were retracted, in their old order. Then come new requests, by turns between tenants: the
next one is the oldest of the tenant that was served the fewest tokens (fair queueing), so that many requests of one
client do not delay another's. Within a tenant those with a lower `scheduling_priority` come earlier, of equals the
oldest: a tenant cannot delay others by its priorities. Replays come last.

No tenant is starved by others that come later. They count as served as much as the *virtual time*, which grows as what
one tenant is served if all that wait are served equally: it passes every tenant that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Set
from heapq import heappop, heappush

from hybrid.engine.request import Request
from hybrid.lazy_heap import LazyHeap

MAX_SERVED = 4096
"""Tenants of which nothing waits, and of which what they were served is known: at least this many, at most twice."""


class WaitingQueue:
    """Requests in the order in which they may start. What a step costs does not depend on how many wait.

    Args:
        weight_of: how much a tenant is to be served in comparison with others; None: all alike.
    """

    def __init__(self, weight_of: Callable[[str], float] | None = None) -> None:
        self._weight_of = weight_of
        self._retracted: deque[Request] = deque()
        self._by_tenant: dict[str, LazyHeap[Request]] = {}  # by `scheduling_priority`
        self._tenants: LazyHeap[str] = LazyHeap()  # those of which requests wait, by what they were served
        self._replays: LazyHeap[Request] = LazyHeap()
        self._served: dict[str, float] = {}  # tokens, divided by the tenant's weight
        self._moved: dict[str, None] = {}  # tenants that were served since they were put into the queue
        self._virtual_time: float = 0
        self._new: set[Request] = set()  # those that have not run

    def __bool__(self) -> bool:
        return bool(self._retracted or self._by_tenant or self._replays)

    @property
    def num_replays(self) -> int:
        """Replays that wait."""
        return len(self._replays)

    @property
    def oldest_replay(self) -> Request:
        """The replay that came first, of those that wait. At least one must."""
        return next(self._replays.walk())[1]

    @property
    def num_requests(self) -> int:
        """Requests that wait, replays aside."""
        return len(self._retracted) + len(self._new)

    def add(self, request: Request) -> None:
        """Queue a request that has not run yet."""
        if request.is_replay:
            self._replays.put(request, 0)
            return
        name = request.tenant
        self._new.add(request)
        if name not in self._by_tenant:
            self._served[name] = max(self._served.get(name, 0), self._virtual_time)
            self._tenants.put(name, self._served[name])
            self._by_tenant[name] = LazyHeap()
        self._by_tenant[name].put(request, request.params.scheduling_priority)

    def return_first(self, request: Request) -> None:
        """Queue a request that has run, before all others."""
        self._retracted.appendleft(request)

    def remove(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request in self._replays:
            self._replays.remove(request)
            return
        if request in self._retracted:
            self._retracted.remove(request)
        if request in self._new:
            self._remove_of(request.tenant, request)
            self._new.remove(request)

    def _remove_of(self, name: str, request: Request) -> None:
        own = self._by_tenant.get(name)
        if own is not None and request in own:
            own.remove(request)
        if not own:  # also where an exception has come while it was added, or removed
            self._by_tenant.pop(name, None)
            if name in self._tenants:
                self._tenants.remove(name)
            if name in self._served and self._served[name] <= self._virtual_time:
                del self._served[name]

    def started(self, request: Request, num_tokens: int) -> None:
        """Record that a request starts: remove it, and count its prompt as service of its tenant.

        Args:
            num_tokens: tokens of the prompt that have to be computed.
        """
        name = request.tenant
        if not request.is_replay and request not in self._retracted:
            self._virtual_time = max(self._virtual_time, self._served[name])
            self.serve(name, num_tokens)
        self.remove(request)

    def serve(self, tenant: str, num_tokens: int) -> None:
        """Count tokens as service of a tenant."""
        counted = num_tokens if self._weight_of is None else num_tokens / self._weight_of(tenant)
        self._served[tenant] = self._served.get(tenant, self._virtual_time) + counted
        if self._by_tenant:
            self._virtual_time += counted / len(self._by_tenant)
        if tenant in self._by_tenant:
            self._moved[tenant] = None
        if len(self._served) > 2 * MAX_SERVED + len(self._by_tenant):
            self._forget_least()

    def _forget_least(self) -> None:
        """Forget what tenants of which nothing waits were served, but for those that were served the most: the
        others come again as new ones do."""
        idle = sorted(self._served.keys() - self._by_tenant.keys(), key=lambda name: self._served[name])
        for name in idle[:-MAX_SERVED]:
            del self._served[name]

    def num_served(self, tenant: str) -> float:
        """Tokens that a tenant was served, divided by its weight and counted from where the others were when it
        came."""
        return self._served.get(tenant, self._virtual_time)

    def in_turn(self, skipped: Set[str]) -> Iterator[Request]:
        """Requests in the order in which they may start, while the caller starts some of them.

        Args:
            skipped: tenants of which no new request may start. The caller may add to it.
        """
        for name in self._moved:
            if name in self._by_tenant:
                self._tenants.put(name, self._served[name])
        self._moved.clear()
        yield from tuple(self._retracted)
        yield from self._by_turns(skipped)
        yield from (replay for _, replay in self._replays.walk())

    def _by_turns(self, skipped: Set[str]) -> Iterator[Request]:
        """The requests of all tenants, each time the next one of the tenant that was served the fewest tokens."""
        others = self._tenants.walk()
        following = next(others, None)
        begun: list[tuple[float, str]] = []
        queues: dict[str, Iterator[tuple[float, Request]]] = {}
        while begun or following is not None:
            if following is not None and (not begun or following[0] < begun[0][0]):
                name, following = following[1], next(others, None)
                queues[name] = self._by_tenant[name].walk() if name in self._by_tenant else iter(())
            else:
                name = heappop(begun)[1]
            _, request = next(queues[name], (0, None))
            if request is not None and name not in skipped:
                yield request
                heappush(begun, (self.num_served(name), name))
