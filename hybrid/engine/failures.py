"""Which request is the reason that steps fail.

After a step that fails all requests are computed again: most failures do not repeat. When it fails again with the same
requests, they are computed in halves, and the half that fails in halves again, until one request is left. That one is
the culprit.
"""

from __future__ import annotations

from collections import deque

from hybrid.engine.request import Request
from hybrid.engine.step import Part


class FailureBisector:
    """The requests among which the culprit is looked for.

    A request is suspected until it has been computed beyond where it failed: what it had computed is computed again
    first, token by token in deterministic mode, and such steps prove nothing.
    """

    def __init__(self) -> None:
        self._failed: dict[Request, int] = {}  # with the number of tokens that the failed step would have computed
        self._groups: deque[list[Request]] = deque()

    @property
    def group(self) -> frozenset[Request] | None:
        """The only requests that the next step may compute; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def failed(self, parts: list[Part]) -> Request | None:
        """Record that a pass with these parts failed. Returns the culprit, once it is found."""
        ends = {part.request: part.end for part in parts if not part.request.has_ended}
        # one that failed earlier than before, while it computes again what it had, has failed by chance
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
        """Record that a pass with these parts was computed. No parts: those of the group cannot be computed now."""
        for part in parts:
            if not part.is_dropped and part.end >= self._failed.get(part.request, part.end + 1):
                del self._failed[part.request]
        if self._failed:
            self._failed = {request: end for request, end in self._failed.items() if not request.has_ended}
        if not parts and self._groups:
            self._groups.popleft()
        while self._groups and not any(request in self._failed for request in self._groups[0]):
            self._groups.popleft()
