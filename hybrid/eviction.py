"""Which page or checkpoint goes first.

A policy ranks what it is shown and sees no tree: `rank(usage)`, the lowest goes first.
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
        """The rank of a node. May depend on `usage` only, and may only rise as it is used."""
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

    A use raises a rank, and costs nothing here: an entry is looked at when it comes up, and goes back if its rank has
    risen since. A candidate has at most one entry. Finding a victim costs O(log n), whatever the number of candidates.

    Args:
        rank: the present rank of a candidate; it may only rise.
        is_candidate: whether it may be evicted at present.
    """

    def __init__(self, rank: Callable[[Candidate], float], is_candidate: Callable[[Candidate], bool]) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._heap: list[tuple[float, int, Candidate]] = []
        self._entered: set[int] = set()
        self._order = count()  # equal ranks go in the order in which they came: the same run evicts the same victims
        self._compact_at = 1024

    def push(self, candidate: Candidate) -> None:
        """Enter a candidate that has become evictable. One that is entered already stays where it is."""
        if id(candidate) in self._entered:
            return
        self._entered.add(id(candidate))
        heapq.heappush(self._heap, (self._rank(candidate), next(self._order), candidate))
        if len(self._heap) > self._compact_at:
            self._compact()

    def pop(self) -> Candidate | None:
        """Take out the candidate of the lowest rank; None when there is none left."""
        heap = self._heap
        while heap:
            rank, _, candidate = heap[0]
            if self._is_candidate(candidate):
                present = self._rank(candidate)
                if present > rank:
                    heapq.heapreplace(heap, (present, next(self._order), candidate))
                    continue
                found: Candidate | None = candidate
            else:
                found = None
            heapq.heappop(heap)
            self._entered.discard(id(candidate))
            if found is not None:
                return found
        return None

    def _compact(self) -> None:
        """Drop what is no candidate any more; it is entered again when it becomes one."""
        self._heap = [entry for entry in self._heap if self._is_candidate(entry[2])]
        self._entered = {id(entry[2]) for entry in self._heap}
        heapq.heapify(self._heap)
        self._compact_at = max(1024, 2 * len(self._heap))
