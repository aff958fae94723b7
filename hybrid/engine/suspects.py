"""Which request makes steps fail.

A step that fails is undone, and computed again: most failures do not repeat. When it fails again with the same
requests, they are computed in halves, and the half that fails in halves again, until one request is left. That one is
the culprit.
"""

from __future__ import annotations

from collections import deque

from hybrid.engine.request import Request, Status
from hybrid.engine.step import Part


class Suspects:
    """The requests among which the culprit is looked for.

    A request is suspected until it has been computed beyond where it failed: what a step undid is computed again first,
    token by token in deterministic mode, and such steps prove nothing.
    """

    def __init__(self) -> None:
        self._failed: dict[Request, int] = {}  # with the number of tokens that the failed step would have computed
        self._groups: deque[list[Request]] = deque()

    @property
    def group(self) -> frozenset[Request] | None:
        """The only requests that the next step may compute; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def failed(self, parts: list[Part]) -> Request | None:
        """A step with these parts failed, and was undone. Returns the culprit, once it is found."""
        ends = {part.request: part.end for part in parts if part.request.status is not Status.FINISHED}
        # one that failed earlier than before, while what was undone is computed again, has failed by chance
        common = [request for request, end in ends.items() if end >= self._failed.get(request, end + 1)]
        if self._groups:
            self._groups.popleft()
        if not common:
            self._failed |= {request: max(end, self._failed.get(request, 0)) for request, end in ends.items()}
            return None
        self._failed = {request: ends[request] for request in common}
        if len(ends) == 1:
            return common[0]
        half = len(common) // 2
        self._groups.extendleft(group for group in (common[half:], common[:half]) if group)
        return None

    def passed(self, parts: list[Part]) -> None:
        """A step with these parts was computed. None: those of the group cannot be computed now."""
        for part in parts:
            if part.end >= self._failed.get(part.request, part.end + 1):
                del self._failed[part.request]
        if self._failed:
            self._failed = {
                request: end for request, end in self._failed.items() if request.status is not Status.FINISHED
            }
        if not parts and self._groups:
            self._groups.popleft()
        while self._groups and not any(request in self._failed for request in self._groups[0]):
            self._groups.popleft()
