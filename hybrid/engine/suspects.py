"""Which request makes steps fail.

A step that fails is undone, and computed again: most failures do not repeat. When it fails again with the same
requests, they are computed in halves, and the half that fails in halves again, until one request is left. That one is
the culprit.
"""

from __future__ import annotations

from collections import deque

from hybrid.engine.request import Request, Status


class Suspects:
    """The groups of requests in which the culprit is looked for."""

    def __init__(self) -> None:
        self._failed: frozenset[str] = frozenset()  # the requests of the latest failure; empty: it did not repeat
        self._groups: deque[list[Request]] = deque()

    @property
    def group(self) -> frozenset[Request] | None:
        """The requests that the next step may compute; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def failed(self, requests: list[Request]) -> Request | None:
        """A step with these requests failed. Returns the culprit, once it is found."""
        ids = frozenset(request.request_id for request in requests)
        repeated, self._failed = ids == self._failed, ids
        if self._groups:
            self._groups.popleft()
        elif not repeated:
            return None
        if len(requests) > 1:
            half = len(requests) // 2
            self._groups.extendleft([requests[half:], requests[:half]])
            return None
        if not repeated:
            self._groups.appendleft(requests)
            return None
        return requests[0]

    def passed(self) -> None:
        """A step was computed, or there was nothing to compute: the first group is not the one."""
        self._failed = frozenset()
        if self._groups:
            self._groups.popleft()
        while self._groups and all(request.status is Status.FINISHED for request in self._groups[0]):
            self._groups.popleft()
