"""The kinds of queue of candidates for eviction, one for each kind of policy.

`OrderedQueue` is for ranks that change only with use (a heap), `SampledQueue` for ranks that change by themselves, with
age or with what was learned (the lowest of a random sample), and so is `AgingQueue`, for policies that rank a whole
sample at once. All find a victim without looking at all candidates.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Container, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from random import Random
from typing import Protocol

import numpy as np

from hybrid.tree.node import Node
from hybrid.tree.policy import Floats, Ints

SAMPLE = 48
"""Number of candidates in a sample: the lowest of 48 is among the lowest 6 % in 19 of 20 cases."""

LARGE_SAMPLE = 256
"""The same where a sample is ranked at once: the lowest is among the lowest 1.2 % in 19 of 20 cases."""

NOT_WEIGHED = -1, 0.0, 0
"""What is kept of a candidate that has not been weighed yet: no group has this number."""


class Queue(Protocol):
    """Candidates of one kind."""

    @property
    def settled(self) -> Container[int]:
        """Identities of nodes that need no push, unless `renewed`."""
        ...

    def push(self, node: Node, renewed: bool) -> None:
        """Add a candidate. One that is in the queue already stays as it is, unless `renewed`: its rank may have
        fallen."""
        ...

    def used(self, node: Node) -> None:
        """A candidate's use was counted."""
        ...

    def changed(self, node: Node) -> None:
        """Something about a node has changed, without a use."""
        ...

    def __contains__(self, node: Node) -> bool:
        """Whether the node is in the queue."""
        ...

    def __len__(self) -> int:
        """Number of entries, those of nodes that are not candidates any more included."""
        ...

    def peek(self) -> tuple[float, Node] | None:
        """The candidate to evict first and its rank; None when the queue is empty."""
        ...

    def pop(self, node: Node) -> None:
        """Remove the candidate that `peek` has just returned."""
        ...

    def is_whole(self) -> bool:
        """Whether each candidate is where the queue looks for it, for the audit."""
        ...


class OrderedQueue:
    """Candidates in order.

    A candidate always has an entry whose rank is at most its present one. An entry that reaches the top of the heap is
    put back if its rank has risen since; a use that lowers a rank adds a second entry. Finding a victim takes O(log n).

    Args:
        rank: returns the present rank of a candidate.
        is_candidate: returns whether a node may be evicted at present.
        falls: whether a use may lower a rank.
    """

    def __init__(self, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool], falls: bool) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._falls = falls
        self._heap: list[tuple[float, int, Node]] = []
        self.settled: set[int] = set()
        self._order = count()  # candidates of equal rank are evicted in the order of their arrival, so that runs repeat
        self._compact_at = 1024

    def push(self, node: Node, renewed: bool) -> None:
        key = id(node)
        if renewed or key not in self.settled:
            heap = self._heap
            heappush(heap, (self._rank(node), next(self._order), node))
            self.settled.add(key)
            if len(heap) > self._compact_at:
                self._compact()

    def __contains__(self, node: Node) -> bool:
        return id(node) in self.settled

    def __len__(self) -> int:
        return len(self._heap)

    def used(self, node: Node) -> None:
        if self._falls and id(node) in self.settled:
            self.push(node, renewed=True)

    def changed(self, node: Node) -> None:
        pass  # its rank follows from its uses

    def peek(self) -> tuple[float, Node] | None:
        heap, is_candidate = self._heap, self._is_candidate
        while heap:
            rank, _, node = heap[0]
            if not is_candidate(node):
                heappop(heap)
                self.settled.discard(id(node))
                continue
            present = self._rank(node)
            if present <= rank:
                return rank, node
            heapreplace(heap, (present, next(self._order), node))
        return None

    def pop(self, node: Node) -> None:
        assert self._heap[0][2] is node
        heappop(self._heap)
        self.settled.discard(id(node))

    def is_whole(self) -> bool:
        return self.settled <= {id(node) for _, _, node in self._heap}

    def _compact(self) -> None:
        """Drop entries of nodes that are not candidates any more; `push` adds them again when they are."""
        alive = {id(entry[2]): entry for entry in sorted(self._heap, reverse=True) if self._is_candidate(entry[2])}
        self._heap = list(alive.values())
        self.settled = set(alive)
        heapify(self._heap)
        self._compact_at = max(1024, 2 * len(self._heap))


class SampledQueue:
    """Candidates in no order: the lowest of a random sample is evicted first.

    Args:
        rank: returns the present rank of a candidate.
        is_candidate: returns whether a node may be evicted at present.
        rng: with an equal seed the same calls find the same victims.
    """

    def __init__(self, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool], rng: Random) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._rng = rng
        self._nodes: list[Node] = []
        self._places: dict[int, int] = {}
        self._compact_at = 1024

    @property
    def settled(self) -> Container[int]:
        return self._places

    def push(self, node: Node, renewed: bool) -> None:
        if id(node) not in self._places:
            self._places[id(node)] = len(self._nodes)
            self._nodes.append(node)
            if len(self._nodes) > self._compact_at:  # `peek` drops such nodes too, but may not be called
                self._nodes = [node for node in self._nodes if self._is_candidate(node)]
                self._places = {id(node): place for place, node in enumerate(self._nodes)}
                self._compact_at = max(1024, 2 * len(self._nodes))

    def __contains__(self, node: Node) -> bool:
        return id(node) in self._places

    def __len__(self) -> int:
        return len(self._nodes)

    def used(self, node: Node) -> None:
        pass  # it is ranked anew whenever it is in a sample

    changed = used

    def peek(self) -> tuple[float, Node] | None:
        while len(self._nodes) > SAMPLE:
            found = self._lowest([self._nodes[int(self._rng.random() * len(self._nodes))] for _ in range(SAMPLE)])
            if found is not None:
                return found
        return self._lowest(list(self._nodes))

    def pop(self, node: Node) -> None:
        place = self._places.pop(id(node))
        last = self._nodes.pop()
        if last is not node:
            self._nodes[place] = last
            self._places[id(last)] = place

    def is_whole(self) -> bool:
        return self._places == {id(node): place for place, node in enumerate(self._nodes)}

    def _lowest(self, sample: Iterable[Node]) -> tuple[float, Node] | None:
        """The lowest of a sample. Nodes that are not candidates any more are removed from the queue."""
        best: tuple[float, Node] | None = None
        for node in sample:
            if self._is_candidate(node):
                rank = self._rank(node)
                if best is None or rank < best[0]:
                    best = rank, node
            elif id(node) in self._places:
                self.pop(node)
        return best


class Columns:
    """What the ranks of candidates need, by place. Written one by one as `array`s, and read all at once through NumPy's
    views of them, each of which is several times as fast as the other would be.

    Args:
        size: number of places.

    Attributes:
        groups, weights, used, stale: the numbers of each place; `stale` is 1 for those to weigh again.
        all_groups, all_weights, all_used, are_stale: the views.
    """

    def __init__(self, size: int) -> None:
        self.groups: array[int] = array("q", bytes(8 * size))
        self.weights: array[float] = array("d", bytes(8 * size))
        self.used: array[int] = array("q", bytes(8 * size))
        self.stale: bytearray = bytearray(size)
        self.all_groups: Ints = np.frombuffer(self.groups, np.int64)
        self.all_weights: Floats = np.frombuffer(self.weights, np.float64)
        self.all_used: Ints = np.frombuffer(self.used, np.int64)
        self.are_stale: np.ndarray = np.frombuffer(self.stale, np.bool_)

    def of(self, places: list[int], size: int) -> Columns:
        """A copy of some places, with room for `size`."""
        columns, count = Columns(size), len(places)
        columns.all_groups[:count] = self.all_groups[places]
        columns.all_weights[:count] = self.all_weights[places]
        columns.all_used[:count] = self.all_used[places]
        columns.are_stale[:count] = self.are_stale[places]
        return columns


class AgingQueue:
    """Candidates in no order, each with what its rank needs beside its age: the lowest of a random sample is evicted
    first.

    What is kept of a candidate may be out of date, where something next to it has changed. The one that is found is
    therefore weighed again, and so are those of a sample that were notified of a change, or else one of all in turn.

    Args:
        weigh: returns the group and the weight of a candidate.
        ranks: returns the ranks of candidates of some groups, weights and requests of their last use, and the place of
            the lowest.
        is_candidate: returns whether a node may be evicted at present.
        rng: with an equal seed the same calls find the same victims.

    Attributes:
        settled: the place of each node, by its identity.
    """

    def __init__(
        self,
        weigh: Callable[[Node], tuple[int, float]],
        ranks: Callable[[Ints, Floats, Ints], tuple[Floats, int]],
        is_candidate: Callable[[Node], bool],
        rng: Random,
    ) -> None:
        self._weigh = weigh
        self._ranks = ranks
        self._is_candidate = is_candidate
        self._dice = np.random.default_rng(rng.getrandbits(64))
        self._rolled, self._num_rolled = np.zeros(0), 0
        self._turn = 0
        self._nodes: list[Node] = []
        self.settled: dict[int, int] = {}
        self._found: tuple[float, Node] | None = None  # until something in the queue changes
        self._compact_at = 1024
        self._weighed: list[tuple[int, float, int]] = []  # group, weight, and request of the last use: as in columns
        self._columns = Columns(self._compact_at + 1)
        self._sampled = Columns(LARGE_SAMPLE)
        self._scaled, self._size = np.zeros(LARGE_SAMPLE), np.zeros(())
        self._sampled_places: Ints = np.zeros(LARGE_SAMPLE, np.int64)

    def push(self, node: Node, renewed: bool) -> None:
        key = id(node)
        place = self.settled.get(key)
        if place is None:
            if len(self._nodes) > self._compact_at:
                self._compact()
            place = self.settled[key] = len(self._nodes)
            self._nodes.append(node)
            self._weighed.append(NOT_WEIGHED)
        self._columns.stale[place] = 1
        self._found = None

    def used(self, node: Node) -> None:
        place = self.settled.get(id(node))
        if place is not None:
            self._columns.stale[place] = 1
            self._found = None

    changed = used

    def __contains__(self, node: Node) -> bool:
        return id(node) in self.settled

    def __len__(self) -> int:
        return len(self._nodes)

    def peek(self) -> tuple[float, Node] | None:
        if self._found is not None and self._is_candidate(self._found[1]):
            return self._found
        self._found = None
        while self._nodes and self._found is None:
            self._found = self._lowest()
        return self._found

    def pop(self, node: Node) -> None:
        self._found = None
        place = self.settled.pop(id(node))
        last, weighed = self._nodes.pop(), self._weighed.pop()
        if last is not node:
            columns = self._columns
            self._nodes[place], self._weighed[place] = last, weighed
            self.settled[id(last)] = place
            columns.stale[place] = columns.stale[len(self._nodes)]
            if weighed is not NOT_WEIGHED:
                columns.groups[place], columns.weights[place], columns.used[place] = weighed

    def is_whole(self) -> bool:
        places = {id(node): place for place, node in enumerate(self._nodes)}
        return self.settled == places and len(self._weighed) == len(self._nodes)

    def _sample(self, size: int) -> Ints:
        """Places of a sample, until the next call."""
        start, self._num_rolled = self._num_rolled, self._num_rolled + LARGE_SAMPLE
        if self._num_rolled > len(self._rolled):
            self._rolled, start, self._num_rolled = self._dice.random(64 * LARGE_SAMPLE), 0, LARGE_SAMPLE
        self._size[()] = size  # an array: as an operand it is faster than a number
        np.multiply(self._rolled[start : self._num_rolled], self._size, self._scaled)
        self._sampled_places[:] = self._scaled  # rounded down
        return self._sampled_places

    def _lowest(self) -> tuple[float, Node] | None:
        """The lowest of a sample, or of all while they are few. Nodes that are not candidates any more are removed from
        the queue."""
        size, columns, sampled = len(self._nodes), self._columns, self._sampled
        if size > LARGE_SAMPLE:
            places = self._sample(size)
            stale = places[columns.are_stale.take(places, None, sampled.are_stale, "clip")]
        else:
            places = None
            stale = columns.are_stale[:size].nonzero()[0]
        self._turn = (self._turn + 1) % size
        weighed = set(stale.tolist() or [self._turn])
        gone: dict[int, Node] = {}
        for place in weighed:
            node = self._nodes[place]
            if self._is_candidate(node):
                self._renew(place, node)
            else:
                gone[place] = node
        groups, weights, used = columns.all_groups, columns.all_weights, columns.all_used
        if places is None:
            ranks, at = self._ranks(groups[:size], weights[:size], used[:size])
        else:
            ranks, at = self._ranks(
                groups.take(places, None, sampled.all_groups, "clip"),
                weights.take(places, None, sampled.all_weights, "clip"),
                used.take(places, None, sampled.all_used, "clip"),
            )
        found: tuple[float, Node] | None = None
        while True:
            rank, place = ranks.item(at), at if places is None else places.item(at)
            if rank == math.inf:
                break
            node = self._nodes[place]
            if place in gone or not self._is_candidate(node):
                gone[place] = node
                rank = math.inf
            elif place not in weighed and self._renew(place, node):
                weighed.add(place)
                one = slice(place, place + 1)
                rank = self._ranks(groups[one], weights[one], used[one])[0].item()
            else:
                found = rank, node
                break
            ranks[at if places is None else places == place] = rank
            at = int(ranks.argmin())
        for node in gone.values():
            self.pop(node)
        return found

    def _renew(self, place: int, node: Node) -> bool:
        """Weigh a candidate again. Returns whether something has changed."""
        group, weight = self._weigh(node)
        weighed, columns = (group, weight, node.usage.used_at), self._columns
        columns.stale[place] = 0
        if weighed == self._weighed[place]:
            return False
        self._weighed[place] = weighed
        columns.groups[place], columns.weights[place], columns.used[place] = weighed
        return True

    def _compact(self) -> None:
        """Drop nodes that are not candidates any more (`peek` does so too, but may not be called), and have room for as
        many again."""
        kept = [place for place, node in enumerate(self._nodes) if self._is_candidate(node)]
        self._nodes = [self._nodes[place] for place in kept]
        self.settled = {id(node): place for place, node in enumerate(self._nodes)}
        self._weighed = [self._weighed[place] for place in kept]
        self._compact_at = max(1024, 2 * len(kept))
        self._columns = self._columns.of(kept, self._compact_at + 1)
