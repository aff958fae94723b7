"""Who may go, and who of them goes first.

Two kinds of queue, one for each kind of policy: `OrderedQueue` for ranks that change only with use (a heap), and
`SampledQueue` for ranks that change by themselves, with age or with what was learned (the lowest of a random sample).
Both find a victim without looking at all candidates.
"""

from __future__ import annotations

import heapq
import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, Protocol

from hybrid.tree.node import Node
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import Facts, Policy, Usage
from hybrid.units import Prices

SAMPLE = 48
"""A sampled policy looks at so many candidates at a time: the best of 48 is among the best 6 % in 19 of 20 cases."""


class PolicyWarning(UserWarning):
    """A policy broke its word, and LRU took over."""


class Queue(Protocol):
    """Candidates of one kind."""

    def push(self, node: Node, renewed: bool) -> None:
        """Enter a candidate. One that is entered already stays, unless its rank may have fallen: it was `renewed`."""
        ...

    def used(self, node: Node) -> None:
        """A candidate's use was counted."""
        ...

    def __contains__(self, node: Node) -> bool:
        """Whether it is entered."""
        ...

    def peek(self) -> tuple[float, Node] | None:
        """The candidate that goes first, with its rank; None when there is none."""
        ...

    def pop(self, node: Node) -> None:
        """Take out what `peek` has just found."""
        ...


class OrderedQueue:
    """Candidates in order.

    A candidate always has an entry whose rank is at most its present one: an entry is looked at when it comes up, and
    goes back if its rank has risen since; a use that lowers a rank enters the candidate once more. Finding a victim
    costs O(log n), whatever the number of candidates.

    Args:
        rank: the present rank of a candidate.
        is_candidate: whether it may be evicted at present.
        falls: a use may lower a rank.
    """

    def __init__(self, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool], falls: bool) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._falls = falls
        self._heap: list[tuple[float, int, Node]] = []
        self._entered: set[int] = set()
        self._order = count()  # equal ranks go in the order in which they came: the same run evicts the same victims
        self._compact_at = 1024

    def push(self, node: Node, renewed: bool) -> None:
        if renewed or id(node) not in self._entered:
            self._enter(node)

    def __contains__(self, node: Node) -> bool:
        return id(node) in self._entered

    def used(self, node: Node) -> None:
        if self._falls and id(node) in self._entered:
            self._enter(node)

    def peek(self) -> tuple[float, Node] | None:
        heap = self._heap
        while heap:
            rank, _, node = heap[0]
            if not self._is_candidate(node):
                heapq.heappop(heap)
                self._entered.discard(id(node))
                continue
            present = self._rank(node)
            if present <= rank:
                return rank, node
            heapq.heapreplace(heap, (present, next(self._order), node))
        return None

    def pop(self, node: Node) -> None:
        assert self._heap[0][2] is node
        heapq.heappop(self._heap)
        self._entered.discard(id(node))

    def _enter(self, node: Node) -> None:
        self._entered.add(id(node))
        heapq.heappush(self._heap, (self._rank(node), next(self._order), node))
        if len(self._heap) > self._compact_at:
            self._compact()

    def _compact(self) -> None:
        """Drop what is no candidate any more; it is entered again when it becomes one."""
        alive = {id(entry[2]): entry for entry in sorted(self._heap, reverse=True) if self._is_candidate(entry[2])}
        self._heap = list(alive.values())
        self._entered = set(alive)
        heapq.heapify(self._heap)
        self._compact_at = max(1024, 2 * len(self._heap))


class SampledQueue:
    """Candidates in no order; the first to go is the lowest of a random sample.

    Args:
        rank: the present rank of a candidate.
        is_candidate: whether it may be evicted at present.
        dice: the same dice and the same work find the same victims.
    """

    def __init__(self, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool], dice: Random) -> None:
        self._rank = rank
        self._is_candidate = is_candidate
        self._dice = dice
        self._nodes: list[Node] = []
        self._places: dict[int, int] = {}
        self._compact_at = 1024

    def push(self, node: Node, renewed: bool) -> None:
        if id(node) not in self._places:
            self._places[id(node)] = len(self._nodes)
            self._nodes.append(node)
            if len(self._nodes) > self._compact_at:  # nobody may have drawn from it for long
                self._nodes = [node for node in self._nodes if self._is_candidate(node)]
                self._places = {id(node): place for place, node in enumerate(self._nodes)}
                self._compact_at = max(1024, 2 * len(self._nodes))

    def __contains__(self, node: Node) -> bool:
        return id(node) in self._places

    def used(self, node: Node) -> None:
        pass

    def peek(self) -> tuple[float, Node] | None:
        while len(self._nodes) > SAMPLE:
            found = self._lowest([self._nodes[int(self._dice.random() * len(self._nodes))] for _ in range(SAMPLE)])
            if found is not None:
                return found
        return self._lowest(list(self._nodes))

    def pop(self, node: Node) -> None:
        place = self._places.pop(id(node))
        last = self._nodes.pop()
        if last is not node:
            self._nodes[place] = last
            self._places[id(last)] = place

    def _lowest(self, sample: Iterable[Node]) -> tuple[float, Node] | None:
        """The lowest of a sample; what is no candidate any more is taken out, and entered again when it becomes one."""
        best: tuple[float, Node] | None = None
        for node in sample:
            if self._is_candidate(node):
                rank = self._rank(node)
                if best is None or rank < best[0]:
                    best = rank, node
            elif id(node) in self._places:
                self.pop(node)
        return best


class Candidates:
    """What a tree could give up, in the order of a policy.

    Three kinds: checkpoints; leaves with a checkpoint, for their pages; tails, which are leaves without one. Tails
    spare nobody anything: a policy that is asked about samples is not asked about them, they go first, oldest first. A
    policy that raises, or whose rank is no number, is dismissed: a `PolicyWarning` says why, and LRU takes over.

    Attributes:
        failure: why the policy was dismissed; None while it holds.
    """

    def __init__(self, policy: Policy, prices: Prices, seed: int) -> None:
        self.failure: str | None = None
        self.now = 0
        self._prices = prices
        self._dice = Random(seed)
        self._install(policy)

    def _install(self, policy: Policy) -> None:
        self._policy = policy
        self._hit, self._evicted, self._missed, self._entered, self._changed = (
            hook if callable(hook := getattr(policy, name, None)) else None
            for name in ("hit", "evicted", "missed", "entered", "changed")
        )
        order = getattr(policy, "order", None)
        self._checkpoints = self._queue(order, is_evictable_checkpoint)
        self._leaves = self._queue(order, is_evictable_leaf)
        self._samples = order is None
        rank = self._recency if self._samples else self._rank
        self._tails = OrderedQueue(rank, is_evictable_tail, falls=order == "any")

    def _queue(self, order: str | None, is_candidate: Callable[[Node], bool]) -> Queue:
        if order is None:
            return SampledQueue(self._rank, is_candidate, self._dice)
        return OrderedQueue(self._rank, is_candidate, falls=order == "any")

    @staticmethod
    def _recency(node: Node) -> float:
        return node.usage.last_used

    def facts(self, node: Node) -> Facts:
        return Facts(node, self.now, self._prices)

    def enter(self, node: Node, renewed: bool = False) -> None:
        """Make a node a candidate for what it may be evicted for at present.

        Args:
            renewed: its usage is another one, or it is a candidate of another kind: it is ranked anew.
        """
        if node.parent is None:
            return
        if node.slot is None:
            if not node.children and not node.page_locks:
                self._tails.push(node, renewed)
        elif not node.state_locks:
            self._checkpoints.push(node, renewed)
            if not node.children and not node.page_locks:
                self._leaves.push(node, renewed)

    def overlooks(self, node: Node) -> bool:
        """Whether the node may be evicted for something, and is no candidate for it: it would stay for ever."""
        return (
            (is_evictable_tail(node) and node not in self._tails)
            or (is_evictable_leaf(node) and node not in self._leaves)
            or (is_evictable_checkpoint(node) and node not in self._checkpoints)
        )

    def next_checkpoint(self) -> Node | None:
        """Take out the checkpoint that goes first."""
        return self._next(self._checkpoints)

    def next_leaf(self) -> Node | None:
        """Take out the leaf that goes first."""
        return self._next(self._tails, self._leaves)

    def next_of_all(self) -> Node | None:
        """Take out what goes first of checkpoints and tails."""
        return self._next(self._tails, self._checkpoints)

    def _next(self, *queues: Queue) -> Node | None:
        best: tuple[float, Node] | None = None
        source: Queue | None = None
        for queue in queues:
            found = queue.peek()
            if found is not None and (best is None or found[0] < best[0]):
                best, source = found, queue
                if self._samples and queue is self._tails:
                    break
        if best is None or source is None:
            return None
        source.pop(best[1])
        return best[1]

    # The policy, and what becomes of one that fails

    def used(self, node: Node) -> None:
        """A request resumed from the node's checkpoint: tell the policy, before the use is counted."""
        if self._hit is not None:
            self._tell(self._hit, self.facts(node))

    def reordered(self, node: Node) -> None:
        """The use has been counted."""
        self._checkpoints.used(node)
        self._leaves.used(node)

    def going(self, node: Node) -> None:
        """The node's checkpoint is about to go."""
        if self._evicted is not None:
            self._tell(self._evicted, self.facts(node))

    def missed(self, usage: Usage, num_tokens: int) -> None:
        """A request would have resumed from a checkpoint that has gone: tell the policy, and count it."""
        if self._missed is not None:
            self._tell(self._missed, Facts.without_node(usage, self.now, num_tokens))
        usage.hits += 1
        usage.used_at = self.now

    def entered(self, node: Node) -> None:
        """The node got a checkpoint, or the memory of one that was not admitted."""
        if self._entered is not None:
            self._tell(self._entered, self.facts(node))

    def changed(self, node: Node) -> None:
        """The node got its first child or request, or lost its last one; or its checkpoint is of another kind."""
        if self._changed is not None and (node.slot is not None or node.lost_checkpoint):
            self._tell(self._changed, self.facts(node))

    def admits(self, usage: Usage, num_tokens: int, tokens_saved: int, num_pages: int, tails_help: bool) -> bool:
        """Whether a checkpoint that is to be is worth more than the one that would go for it.

        Args:
            num_pages: pages that only it would need; 0: something goes on from it.
            tails_help: pages without a checkpoint may go for it instead.
        """
        if not self._samples or (tails_help and self._tails.peek() is not None):
            return True
        least = self._checkpoints.peek()
        if least is None:
            return True
        freed = self._prices.checkpoint + num_pages * self._prices.page
        facts = Facts.without_node(usage, self.now, num_tokens, tokens_saved, freed, has_below=num_pages == 0)
        if self._changed is not None:
            self._tell(self._changed, facts)
        return self._value(facts) >= least[0]

    def _rank(self, node: Node) -> float:
        return self._value(Facts(node, self.now, self._prices))

    def _value(self, facts: Facts) -> float:
        if self.failure is not None:
            return facts.last_used  # dismissed in the middle of a search: the queues are made anew after it
        try:
            rank = 0.0 + self._policy.rank(facts)
            if not math.isnan(rank):
                return rank
            reason = "its rank is NaN"
        except Exception as error:
            reason = f"rank raised {error!r}"
        self._dismiss(reason)
        return facts.last_used

    def _tell(self, hook: Callable[[Facts], Any], facts: Facts) -> None:
        if self.failure is not None:
            return
        try:
            hook(facts)
        except Exception as error:
            self._dismiss(f"{getattr(hook, '__name__', repr(hook))} raised {error!r}")

    def _dismiss(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"eviction policy {type(self._policy).__name__}: {reason}; LRU takes over"
            with suppress(PolicyWarning):  # where warnings are errors: not in the middle of the books
                warnings.warn(self.failure, PolicyWarning, stacklevel=2)

    def settle(self, nodes: Iterable[tuple[str, Node]]) -> None:
        """Install LRU if the policy was dismissed since the last call."""
        if self.failure is not None and type(self._policy) is not LeastRecentlyUsed:
            self._install(LeastRecentlyUsed())
            for _, node in nodes:
                self.enter(node)


def is_evictable_leaf(node: Node) -> bool:
    """A leaf with a checkpoint, whose pages may go with it."""
    return node.parent is not None and node.slot is not None and not node.children and not node.page_locks


def is_evictable_tail(node: Node) -> bool:
    """A leaf without a checkpoint."""
    return node.parent is not None and node.slot is None and not node.children and not node.page_locks


def is_evictable_checkpoint(node: Node) -> bool:
    """A node whose checkpoint may go."""
    return node.parent is not None and node.slot is not None and not node.state_locks
