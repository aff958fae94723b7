"""The requests that wait, and whose turn it is.

First come requests that were retracted, in their old order. Then come new requests, by turns between namespaces: the
next one is the oldest of the namespace that was served the fewest tokens (fair queueing), so that many requests of one
client do not delay another's. A request that many others have overtaken comes first, whatever its namespace was served.
Within a namespace those with a lower `scheduling_priority` come earlier, of equals the oldest: a client cannot delay
others by its priorities.
Replays come last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set

from hybrid.engine.request import Request

MAX_OVERTAKING = 256
"""A request starts after those that waited when it came, and at most this many others."""

MAX_SERVED = 4096
"""Namespaces of which nothing waits, and of which what they were served is known: at least this many, at most twice."""


class WaitingQueue:
    """Requests in the order in which they may start."""

    def __init__(self) -> None:
        self._retracted: deque[Request] = deque()
        self._by_namespace: dict[str, dict[Request, None]] = {}
        self._replays: dict[Request, None] = {}
        self._served: dict[str, int] = {}
        self._virtual_time = 0  # what the namespace that started last had been served
        self._num_started = 0

    def __bool__(self) -> bool:
        return bool(self._retracted or self._by_namespace or self._replays)

    @property
    def num_replays(self) -> int:
        """Replays that wait."""
        return len(self._replays)

    @property
    def num_requests(self) -> int:
        """Requests that wait, replays aside."""
        return len(self._retracted) + sum(map(len, self._by_namespace.values()))

    def add(self, request: Request) -> None:
        """Queue a request that has not run yet."""
        if request.is_replay:
            self._replays[request] = None
            return
        request.latest_turn = self._num_started + self.num_requests + MAX_OVERTAKING
        name = request.namespace
        if name not in self._by_namespace:
            self._by_namespace[name] = {}
            self._served[name] = max(self._served.get(name, 0), self._virtual_time)
        self._by_namespace[name][request] = None

    def return_first(self, request: Request) -> None:
        """Queue a request that has run, before all others."""
        self._retracted.appendleft(request)

    def remove(self, request: Request) -> None:
        """Remove a request, if it waits."""
        if request in self._replays:
            del self._replays[request]
            return
        if request in self._retracted:
            self._retracted.remove(request)
            return
        name = request.namespace
        own = self._by_namespace.get(name, {})
        if request not in own:
            return
        del own[request]
        if not own:
            del self._by_namespace[name]
            if self._served[name] <= self._virtual_time:
                del self._served[name]

    def started(self, request: Request, num_tokens: int) -> None:
        """A request starts: remove it, and count its prompt as service of its namespace.

        Args:
            num_tokens: tokens of the prompt that have to be computed.
        """
        name = request.namespace
        if not request.is_replay and request not in self._retracted:
            self._num_started += 1
            self._virtual_time = max(self._virtual_time, self._served[name])
            self.serve(name, num_tokens)
        self.remove(request)

    def serve(self, namespace: str, num_tokens: int) -> None:
        """Count tokens as service of a namespace."""
        self._served[namespace] = self._served.get(namespace, self._virtual_time) + num_tokens
        if len(self._served) > 2 * MAX_SERVED + len(self._by_namespace):
            self._forget_least()

    def _forget_least(self) -> None:
        """Forget what namespaces of which nothing waits were served, but for those that were served the most: the
        others come again as new ones do."""
        idle = sorted(self._served.keys() - self._by_namespace.keys(), key=lambda name: self._served[name])
        for name in idle[:-MAX_SERVED]:
            del self._served[name]

    def num_served(self, namespace: str) -> int:
        """Tokens that a namespace was served, counted from where the others were when it came."""
        return self._served.get(namespace, self._virtual_time)

    def in_turn(self, skipped: Set[str]) -> Iterator[Request]:
        """Requests in the order in which they may start, while the caller starts some of them.

        Args:
            skipped: namespaces of which no new request may start. The caller may add to it.
        """
        yield from tuple(self._retracted)
        queues = {name: iter(self._in_order(requests)) for name, requests in self._by_namespace.items()}
        heads = {name: next(queue) for name, queue in queues.items()}
        while heads:
            name = min(heads, key=lambda name: (heads[name].latest_turn > self._num_started, self._served[name]))
            if name not in skipped:
                request, following = heads[name], next(queues[name], None)
                if following is None:
                    del heads[name]
                else:
                    heads[name] = following
                yield request
            else:
                del heads[name]
        yield from tuple(self._replays)

    def _in_order(self, requests: Iterable[Request]) -> Sequence[Request]:
        """The requests of a namespace as they may start, in view of their priorities."""
        waiting = tuple(requests)
        if not any(request.params.scheduling_priority for request in waiting):
            return waiting
        return sorted(waiting, key=lambda r: (r.latest_turn > self._num_started, r.params.scheduling_priority))
