"""Which page or checkpoint goes first.

A policy ranks what it is shown and sees no tree: `rank(usage)`, the lowest goes first. The queue keeps the candidates
in a heap with stale entries: whatever changes a rank pushes a fresh entry, and an entry whose rank is no longer the
present one is dropped when it comes up. Finding a victim costs O(log n), whatever the number of candidates.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from hybrid.errors import ArgumentError

Candidate = TypeVar("Candidate")


@dataclass(slots=True)
class Usage:
    """What a policy knows of a node.

    Attributes:
        created: tick at which it was inserted.
        last_used: tick of its last use; 0 for a spare checkpoint that nobody has used yet.
        hits: number of requests that resumed from its checkpoint.
    """

    created: int
    last_used: int
    hits: int = 0


class Policy(Protocol):
    """Ranks candidates for eviction. The lowest rank goes first."""

    def rank(self, usage: Usage) -> float:
        """The rank of a node. May depend on `usage` only, and may change only when `usage` does."""
        ...


class LeastRecentlyUsed:
    """The least recently used goes first."""

    def rank(self, usage: Usage) -> float:
        return usage.last_used


POLICIES: dict[str, Callable[[], Policy]] = {"lru": LeastRecentlyUsed}


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ArgumentError: there is none.
    """
    if name not in POLICIES:
        raise ArgumentError(f"no eviction policy is named {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


class EvictionQueue(Generic[Candidate]):
    """Candidates in the order in which they go.

    Args:
        rank: the present rank of a candidate.
        is_candidate: whether it may be evicted at present.
    """

    def __init__(self, rank: Callable[[Candidate], float], is_candidate: Callable[[Candidate], bool]) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, Candidate]] = []
        self._order = count()  # equal ranks go in the order in which they came: the same run evicts the same victims
        self._compact_at = 1024

    def push(self, candidate: Candidate) -> None:
        """Enter a candidate, or enter it again after its rank has changed or it has become evictable."""
        heapq.heappush(self._heap, (self._rank(candidate), next(self._order), candidate))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Candidate | None:
        """Take out the candidate of the lowest rank; None when there is none left."""
        while self._heap:
            rank, _, candidate = heapq.heappop(self._heap)
            if self._is_candidate(candidate) and rank == self._rank(candidate):
                return candidate
        return None

    def _compact(self) -> None:
        """Drop stale and repeated entries, so that the heap stays within a small multiple of the candidates."""
        valid = [e for e in self._heap if self._is_candidate(e[2]) and e[0] == self._rank(e[2])]
        self._heap = list({id(e[2]): e for e in sorted(valid, key=lambda e: -e[1])}.values())
        heapq.heapify(self._heap)
        self._compact_at = max(1024, 4 * len(self._heap))
