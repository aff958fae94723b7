"""Which request makes steps fail.

A step that fails is undone, and computed again: most failures do not repeat. When it fails again with the same
requests, they are computed in halves, and the half that fails in halves again, until one request is left. That one is
the culprit.
"""

from __future__ import annotations

from collections import deque

from hybrid.engine.request import Request, Status


class Suspects:
    """The requests among which the culprit is looked for."""

    def __init__(self) -> None:
        self._failed: frozenset[Request] = frozenset()  # requests of failed steps that have not passed since
        self._groups: deque[list[Request]] = deque()

    @property
    def group(self) -> frozenset[Request] | None:
        """The only requests that the next step may compute; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def failed(self, requests: list[Request]) -> Request | None:
        """A step with these requests failed, and was undone. Returns the culprit, once it is found."""
        requests = [request for request in requests if request.status is not Status.FINISHED]
        common = [request for request in requests if request in self._failed]
        is_group = bool(self._groups)
        if is_group:
            self._groups.popleft()
        if not common:
            self._failed = frozenset(requests)
            return None
        self._failed = frozenset(common)
        if len(requests) == 1:
            return requests[0]
        half = len(common) // 2
        self._groups.extendleft(group for group in (common[half:], common[:half]) if group)
        return None

    def passed(self, requests: list[Request]) -> None:
        """A step with these requests was computed. None: those of the group cannot be computed now."""
        self._failed -= set(requests)
        if self._groups:
            self._groups.popleft()
        while self._groups and all(request.status is Status.FINISHED for request in self._groups[0]):
            self._groups.popleft()
