"""The candidates for eviction of a tree, in the order of its policy.

A policy is the user's code and may fail: `Candidates` calls it, and replaces it with LRU when it breaks its contract.
There is a kind of queue for each kind of policy: `OrderedQueue` for ranks that change only with use (a heap),
`SampledQueue` for ranks that change by themselves, with age or with what was learned (the lowest of a random sample),
and `AgingQueue` for policies that rank a whole sample at once. All find a victim without looking at all candidates.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count, islice
from operator import attrgetter, itemgetter
from random import Random
from types import MethodType
from typing import NamedTuple, TypeAlias

import numpy as np

from hybrid.tree.node import Node, NodeUsage, Tenant, end_of
from hybrid.tree.paths import PathRhythm
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import AgingPolicy, Facts, Floats, Ints, Order, Policy, PolicyWarning
from hybrid.tree.shares import Shares
from hybrid.units import Prices

SAMPLE = 48
"""Number of candidates in a sample: the lowest of 48 is among the lowest 6 % in 19 of 20 cases."""

LARGE_SAMPLE = 256
"""The same where a sample is ranked at once: the lowest is among the lowest 1.2 % in 19 of 20 cases."""

NOT_WEIGHED = -1, 0.0, 0.0, 0, 0
"""The entry of a candidate that has not been weighed yet: no group has this number."""

MIN_COMPACTED = 1024
"""Size that a queue has to have before what is no candidate any more is looked for and dropped."""

MAX_NOTIFIED = 32
"""Nodes below a change that are looked at for checkpoints to weigh again; the others are when a sample has them."""

Hook = Callable[[Facts], None]

recency: Callable[[Node], float] = attrgetter("usage.last_used")
"""The rank of a node for LRU, without the facts about it."""


class Candidates:
    """The nodes of a tree that can be evicted, in the order of a policy.

    There are three kinds of candidates: checkpoints; leaves with a checkpoint, for their pages; tails, which are leaves
    without a checkpoint. Tails save no computation: a policy without an `order` does not rank them, they are evicted
    first, oldest first. A policy that raises, or whose rank is not a number, is dismissed: a `PolicyWarning` says why,
    and LRU takes over. Each tenant with a share of the memory has queues of its own: while it has more than that, they
    are looked at first.

    Args:
        policy: ranks the candidates.
        prices: bytes of a page and of a checkpoint.
        seed: of the random samples.
        priority_cap: steps of priority that count between tenants.

    Attributes:
        failure: why the policy was dismissed; None while it is in use.
        now: number of requests so far.
        shares: of tenants.
        clock: seconds; None: times are not known.
        rhythm: learns when paths are continued, for a policy that has one.
        follows_changes: `changed` does something.
        reports_entries: `entered` does something.
        reports_evictions: `evicting` does something.
    """

    def __init__(self, policy: Policy, prices: Prices, seed: int, priority_cap: int = 0) -> None:
        self.failure: str | None = None
        self.now: int = 0
        self._moment = np.zeros((), np.int64)  # as an operand faster than a number
        self._prices = prices
        self._checkpoint_prices = replace(prices, page=0) if prices.are_apart else prices
        self._leaf_prices = replace(prices, checkpoint=0) if prices.are_apart else prices
        self._rng = Random(seed)
        self._priority_cap = priority_cap
        self._by_lru = False
        self._spacing = prices.anchor_spacing
        self.shares: Shares = Shares({})
        self.clock: Callable[[], float] | None = None
        self.rhythm: PathRhythm | None = getattr(policy, "rhythm", None)
        self._install(policy)

    def _install(self, policy: Policy) -> None:
        self._policy = policy

        def overridden(hook: Hook, of_base: Callable[[Policy, Facts], None]) -> Hook | None:
            return None if hook == MethodType(of_base, policy) else hook  # what does nothing is not called

        self._hit = overridden(policy.hit, Policy.hit)
        self._evicted = overridden(policy.evicted, Policy.evicted)
        self.reports_evictions: bool = self._evicted is not None
        self._missed = overridden(policy.missed, Policy.missed)
        self._entered = overridden(policy.entered, Policy.entered)
        self._changed = overridden(policy.changed, Policy.changed)
        self._ranking = LeastRecentlyUsed() if self._by_lru else policy
        self._samples = self._ranking.order is None
        self._rises = self._ranking.order == "rising"
        self._weighs = isinstance(self._ranking, AgingPolicy)
        self._others = self._queues(None)
        self._own = {tenant: self._queues(tenant) for tenant in self.shares.of}
        self._reorders = not self._weighs and not self._rises  # a use may change an order that was found before it
        self.follows_changes: bool = self._weighs or self._changed is not None
        self.reports_entries: bool = self._weighs or self._entered is not None

    def _queues(self, tenant: Tenant | None) -> Queues:
        """The queues of a tenant with a share, or of all others."""
        policy, shares = self._ranking, self.shares.of

        def own(is_evictable: Callable[[Node], bool]) -> Callable[[Node], bool]:
            if not shares:
                return is_evictable
            if tenant is None:
                return lambda node: is_evictable(node) and node.owner not in shares
            return lambda node: node.owner is tenant and is_evictable(node)

        order = policy.order
        rank = recency if type(policy) is LeastRecentlyUsed else partial(self._rank, self._prices)
        checkpoints = self._queue(order, rank, own(is_evictable_checkpoint), self._checkpoint_prices)
        leaves = self._queue(order, rank, own(is_evictable_leaf), self._leaf_prices)
        tail_rank = recency if self._samples else rank
        tails = OrderedQueue(tail_rank, own(is_evictable_tail), falls=order == "any")
        return Queues(tails, leaves, checkpoints, self._samples, self._spacing, {})

    def _queue(
        self, order: Order | None, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool], prices: Prices
    ) -> Queue:
        policy = self._ranking
        if isinstance(policy, AgingPolicy):
            return AgingQueue(self._weigher(policy, prices), partial(self._ranks, policy), is_candidate, self._rng)
        if order is None:
            across, own = partial(self._rank_across, prices), partial(self._rank, prices)
            return SampledQueue(across, own, is_candidate, self._rng)
        return OrderedQueue(rank, is_candidate, falls=order == "any")

    def rank_by_lru(self, by_lru: bool, nodes: Iterable[tuple[str, Node]]) -> None:
        """Rank by LRU instead of by the policy, which learns all the same; or by the policy again."""
        self._by_lru = by_lru
        self._install(self._policy)
        for _, node in nodes:
            self.enter(node)

    def limit(self, shares: Shares, nodes: Iterable[tuple[str, Node]]) -> None:
        """Give tenants shares of the memory, in place of those that they had."""
        self.shares = shares
        self._install(self._policy)
        for _, node in nodes:
            self.enter(node)

    def _of(self, node: Node) -> Queues:
        """The queues that a node belongs to."""
        return self._own.get(node.owner, self._others) if self._own else self._others

    @property
    def _all(self) -> list[Queues]:
        return [self._others, *self._own.values()]

    @property
    def num_entries(self) -> tuple[int, int, int]:
        """Number of entries in the queues of tails, leaves and checkpoints."""
        many = self._all
        return sum(len(q.tails) for q in many), sum(len(q.leaves) for q in many), sum(len(q.checkpoints) for q in many)

    def facts(self, node: Node) -> Facts:
        """The facts about a node at present."""
        return Facts(node, self.now, self._prices)

    def value(self, node: Node) -> float | None:
        """The rank of a node's checkpoint at present, for pictures; None if there is none or it is not finite."""
        rank = math.nan
        if node.slot is not None:
            with suppress(Exception):
                rank = float(self._policy.rank(self.facts(node)))
        return rank if math.isfinite(rank) else None

    def enter(self, node: Node, renewed: bool = False) -> None:
        """Make a node a candidate for everything that may be evicted of it at present.

        Args:
            renewed: its usage was replaced, or it is a candidate of another kind: rank it again.
        """
        if node.parent is None:
            return
        key = id(node)
        queues = self._own.get(node.owner, self._others) if self._own else self._others  # `_of`: this is called often
        if node.slot is None:
            if not node.children and not node.page_locks and (renewed or key not in queues.tails.settled):
                queues.tails.push(node, renewed)
        elif not node.state_locks:
            if node in queues.kept:
                del queues.kept[node]
            if renewed or key not in queues.checkpoints.settled:
                queues.checkpoints.push(node, renewed)
            if not node.children and not node.page_locks and (renewed or key not in queues.leaves.settled):
                queues.leaves.push(node, renewed)

    def is_missing(self, node: Node) -> bool:
        """Return whether the node is no candidate for something of it that may be evicted: it would stay forever."""
        queues = self._of(node)
        return (
            (is_evictable_tail(node) and node not in queues.tails)
            or (is_evictable_leaf(node) and node not in queues.leaves)
            or (is_evictable_checkpoint(node) and node not in queues.checkpoints and node not in queues.kept)
        )

    def are_whole(self) -> bool:
        """Return whether each candidate is where its queue looks for it: for `Tree.check`."""
        queues = [queue for own in self._all for queue in (own.tails, own.leaves, own.checkpoints)]
        return all(queue.is_whole() for queue in queues)

    def next_checkpoint(self) -> Node | None:
        """Remove and return the checkpoint to evict first."""
        return self._next(CHECKPOINTS, pages=False)

    def next_leaf(self) -> Node | None:
        """Remove and return the leaf to evict first."""
        return self._next(LEAVES, checkpoints=False)

    def next_of_all(self) -> Node | None:
        """Remove and return the checkpoint or tail to evict first."""
        return self._next(CHECKPOINTS)

    def _next(self, kind: int, pages: bool = True, checkpoints: bool = True) -> Node | None:
        """Remove and return the candidate to evict first.

        Args:
            kind: which queue there is beside that of tails.
            pages, checkpoints: which kinds memory is needed of; tails are candidates where it is pages.
        """
        victim = self._first(kind, pages, checkpoints) if self._own else self._others.first(kind, pages)
        if victim is None:
            return None
        _, _, node, queue = victim
        if queue is None:
            del self._of(node).kept[node]
        else:
            queue.pop(node)
        return node

    def not_kept(self, node: Node) -> None:
        """Look at an anchor again, if it is one: something next to it may have ended what it is kept for."""
        queues = self._of(node)
        if node in queues.kept:
            self.enter(node)

    def came_between(self, node: Node) -> None:
        """Look at the anchors above and below a checkpoint again that has come."""
        if not any(queues.kept for queues in self._all):
            return
        if (above := node.checkpoint_above()) is not None:
            self.not_kept(above)
        stored = node.run.stored
        if (place := bisect_right(stored, node.end, key=end_of)) < len(stored):
            self.not_kept(stored[place])

    def _first(self, kind: int, pages: bool = True, checkpoints: bool = True) -> Victim | None:
        """The candidate to evict first: of the tenant that is furthest above its share, if one is and has any."""
        excesses = {tenant: self.shares.excess(tenant, pages, checkpoints) for tenant in self._own}
        for tenant in sorted((one for one in excesses if excesses[one] > 1), key=excesses.__getitem__, reverse=True):
            if (victim := self._own[tenant].first(kind, pages)) is not None:
                return victim
        victims = (victim for own in self._all if (victim := own.first(kind, pages)) is not None)
        return min(victims, key=itemgetter(0, 1), default=None)

    # Calls of the policy

    def requested(self, node: Node | None, ticks: Iterator[int]) -> None:
        """Count a request, and that it resumes from a node's checkpoint. The policy's hook is called before that."""
        self.now += 1
        if self.clock is not None and self.rhythm is not None:
            self.rhythm.requested(self.now, self.clock())
        if node is None:
            return
        if self._hit is not None:
            self._report("hit", self._hit, Facts(node, self.now, self._prices))
        usage = node.usage
        usage.last_used = next(ticks)
        usage.used_at = self.now
        usage.hits += 1
        usage.expected_at = 0
        if self.follows_changes:
            self.changed(node)  # its request has locked it and continues from it
        if self._reorders:
            self.renewed(node)

    def renewed(self, node: Node) -> None:
        """The tick of a node's last use has changed, without a use."""
        if not self._rises:
            queues = self._of(node)
            queues.checkpoints.used(node)
            queues.leaves.used(node)

    def lowered(self, node: Node) -> None:
        """A node's rank is another one, and may have fallen, without a use; it may be locked at present."""
        queues = self._of(node)
        for queue in (queues.tails, queues.leaves, queues.checkpoints):
            if node in queue:
                queue.push(node, renewed=True)
        self.enter(node)

    def evicting(self, node: Node) -> None:
        """Report that the node's checkpoint is about to be evicted."""
        if self._evicted is not None:
            self._report("evicted", self._evicted, Facts(node, self.now, self._prices))

    def missed(self, usage: NodeUsage, num_tokens: int) -> None:
        """Report, and count, that a request would have resumed from a checkpoint that was evicted."""
        if self._missed is not None:
            self._report("missed", self._missed, Facts.without_node(usage, self.now, num_tokens))
        usage.hits += 1
        usage.used_at = self.now

    def entered(self, node: Node) -> None:
        """Report that the node got a checkpoint, or the usage of one that was not admitted."""
        if self._entered is not None:
            facts = Facts(node, self.now, self._prices)
            node.usage.reported_below = facts.has_below
            self._report("entered", self._entered, facts)
        if self._weighs and node.children:
            self.reweigh_below(node)

    def reweigh_below(self, node: Node) -> None:
        """Rank up to `MAX_NOTIFIED` checkpoints next below a node again: what they save or would free has changed."""
        if not self._weighs:
            return
        below = [*islice(node.children.values(), MAX_NOTIFIED)]
        for _ in range(MAX_NOTIFIED):
            if not below:
                break
            node = below.pop()
            if node.slot is None:
                below.extend(islice(node.children.values(), MAX_NOTIFIED))
            else:
                self._has_changed(node)

    def relabeled(self, node: Node) -> None:
        """Report that the kind of a node's checkpoint has changed."""
        node.usage.reported_below = None
        self.changed(node)

    def changed(self, node: Node) -> None:
        """Report that the node got its first child or request, or lost its last one, if it has."""
        if self._changed is not None and (node.slot is not None or node.lost_checkpoint):
            usage, has_below = node.usage, bool(node.children or node.page_locks)
            if usage.reported_below is not has_below:
                usage.reported_below = has_below
                self._report("changed", self._changed, Facts(node, self.now, self._prices))
        if not self._weighs:
            return
        if node.slot is not None:
            self._has_changed(node)
        elif len(node.children) == 1:
            self.reweigh_below(node)

    def _has_changed(self, node: Node) -> None:
        queues = self._own.get(node.owner, self._others) if self._own else self._others  # `_of`, likewise
        queues.checkpoints.changed(node)
        queues.leaves.changed(node)

    def admits(self, usage: NodeUsage, num_tokens: int, tokens_saved: int, num_pages: int, tails_help: bool) -> bool:
        """Return whether a checkpoint that is not stored yet is worth more than the one that would be evicted for it.

        Args:
            num_pages: pages that only it would need; 0 if something continues from it.
            tails_help: pages without a checkpoint can be evicted instead.
        """
        if not self._samples:
            return True
        least = self._first(CHECKPOINTS, pages=tails_help)
        if least is None or least[2].slot is None:
            return True
        _, rank, first, _ = least
        if first.owner is not usage.tenant and self.shares.excess(first.owner, pages=tails_help) > 1:
            return True  # it gives way to others, whatever it is worth
        freed = self._checkpoint_prices.checkpoint + num_pages * self._checkpoint_prices.page
        facts = Facts.without_node(usage, self.now, num_tokens, tokens_saved, freed, has_below=num_pages == 0)
        if self._changed is not None:
            usage.reported_below = facts.has_below
            self._report("changed", self._changed, facts)
        tenant = usage.tenant
        if tenant is not None and tenant.has_priorities:
            if first.usage.tenant is tenant:
                rank = self._rank(self._checkpoint_prices, first)
            else:
                facts.cap_priority(self._priority_cap)
        return self._value(facts) >= rank

    def _rank(self, prices: Prices, node: Node) -> float:
        """The rank of a candidate among those of its tenant."""
        return self._value(Facts(node, self.now, prices))

    def _rank_across(self, prices: Prices, node: Node) -> float:
        """The rank of a candidate among those of all tenants."""
        return self._value(Facts(node, self.now, prices).cap_priority(self._priority_cap))

    def _value(self, facts: Facts) -> float:
        if self.failure is not None:
            return facts.last_used  # dismissed during a search: the queues are rebuilt after it
        try:
            rank = 0.0 + self._policy.rank(facts)
            if not math.isnan(rank):
                return rank
            reason = "its rank is NaN"
        except Exception as error:
            reason = f"rank raised {error!r}"
        self._dismiss(reason)
        return facts.last_used

    def _weigher(self, policy: AgingPolicy, prices: Prices) -> Callable[[Node], tuple[int, float, float]]:
        """A function for the group of a candidate, and its weights: among all, and among those of its tenant."""
        weigh = policy.weigh

        def weighed(node: Node) -> tuple[int, float, float]:
            if self.failure is None:
                try:
                    facts = Facts(node, self.now, prices)
                    group, weight = own = weigh(facts)
                    if node.usage.priority:
                        group, weight = weigh(facts.cap_priority(self._priority_cap))
                    if not math.isnan(weight + own[1]):
                        return group, weight, own[1]
                    reason = "a weight is NaN"
                except Exception as error:
                    reason = f"weigh raised {error!r}"
                self._dismiss(reason)
            return 0, 0.0, 0.0

        return weighed

    def _ranks(self, policy: AgingPolicy, groups: Ints, weights: Floats, used: Ints) -> tuple[Floats, int]:
        """The ranks of candidates, and the place of the lowest."""
        if self.failure is None:
            try:
                self._moment[()] = self.now
                ranks = policy.ranks(groups, weights, np.subtract(self._moment, used))
                if ranks.shape == used.shape:
                    lowest = int(ranks.argmin())  # that of NaN, if there is one
                    if not math.isnan(ranks.item(lowest)):
                        return ranks, lowest
                reason = "a rank is NaN, or there are not as many as candidates"
            except Exception as error:
                reason = f"ranks raised {error!r}"
            self._dismiss(reason)
        return used.astype(np.float64), int(used.argmin())  # dismissed meanwhile: the queues are rebuilt after it

    def _report(self, name: str, hook: Hook, facts: Facts) -> None:
        if self.failure is not None:
            return
        try:
            hook(facts)
        except Exception as error:
            self._dismiss(f"{name} raised {error!r}")

    def _dismiss(self, reason: str) -> None:
        if self.failure is None:
            self.failure = f"eviction policy {type(self._policy).__name__}: {reason}; LRU takes over"
            with suppress(PolicyWarning):  # warnings may be errors, and must not interrupt the bookkeeping
                warnings.warn(self.failure, PolicyWarning, stacklevel=2)

    def install_fallback(self, nodes: Iterable[tuple[str, Node]]) -> None:
        """Install LRU if the policy was dismissed since the last call."""
        if self.failure is not None and type(self._policy) is not LeastRecentlyUsed:
            self._install(LeastRecentlyUsed())
            for _, node in nodes:
                self.enter(node)


def is_anchor(node: Node, spacing: int) -> bool:
    """Return whether one path alone continues from a checkpoint, and those before and after it would be more than
    `spacing` pages apart without it: it is what is left of the path when that is trimmed from its end."""
    if len(node.children) > 1 or not (node.children or node.page_locks):
        return False
    run = node.run
    after = bisect_right(run.stored, node.end, key=end_of)
    if run.nodes[-1] is node:
        for child in node.children.values():
            run, after = child.run, 0
    below = run.stored[after].end if after < len(run.stored) else run.nodes[-1].end
    above = node.checkpoint_above()
    return below - (above.end if above is not None else 0) > spacing * run.page_size


def is_evictable_leaf(node: Node) -> bool:
    """A leaf with a checkpoint, whose pages may be evicted with it."""
    return node.parent is not None and node.slot is not None and not node.children and not node.page_locks


def is_evictable_tail(node: Node) -> bool:
    """A leaf without a checkpoint."""
    return node.parent is not None and node.slot is None and not node.children and not node.page_locks


def is_evictable_checkpoint(node: Node) -> bool:
    """A node whose checkpoint may be evicted."""
    return node.parent is not None and node.slot is not None and not node.state_locks


class Queue(ABC):
    """Candidates of one kind.

    Args:
        is_candidate: returns whether a node may be evicted at present.

    Attributes:
        settled: identities of the nodes that are in the queue: they need no push, unless `renewed`.
    """

    settled: set[int] | dict[int, int]

    def __init__(self, is_candidate: Callable[[Node], bool]) -> None:
        self._is_candidate = is_candidate
        self._compact_at = MIN_COMPACTED

    @abstractmethod
    def push(self, node: Node, renewed: bool) -> None:
        """Add a candidate. One that is in the queue already stays as it is, unless `renewed`: its rank may have
        fallen."""

    def used(self, node: Node) -> None:  # noqa: B027 - a queue may have nothing to do
        """Note that a candidate's use was counted."""

    def changed(self, node: Node) -> None:  # noqa: B027
        """Note that something about a node has changed, without a use."""

    def __contains__(self, node: Node) -> bool:
        """Return whether the node is in the queue."""
        return id(node) in self.settled

    @abstractmethod
    def __len__(self) -> int:
        """Number of entries, those of nodes that are not candidates any more included."""

    @abstractmethod
    def peek(self) -> tuple[float, Node] | None:
        """The candidate to evict first and its rank; None when the queue is empty."""

    @abstractmethod
    def pop(self, node: Node) -> None:
        """Remove the candidate that `peek` has just returned."""

    @abstractmethod
    def is_whole(self) -> bool:
        """Return whether each candidate is where the queue looks for it."""


class Queues(NamedTuple):
    """The candidates of one tenant, or of several.

    Attributes:
        tails, leaves, checkpoints: the candidates of each kind.
        tails_first: tails are not compared with others, and are evicted first.
        spacing: of anchors, in pages.
        kept: checkpoints that were found to be anchors, and are evicted after all others: before one is, what
            continues from it goes. They are no candidates among `checkpoints` until something next to them changes.
    """

    tails: OrderedQueue
    leaves: Queue
    checkpoints: Queue
    tails_first: bool
    spacing: int
    kept: dict[Node, None]

    def first(self, kind: int, with_tails: bool) -> Victim | None:
        """The candidate to evict first, of `kind` (`LEAVES` or `CHECKPOINTS`) and of tails."""
        tail = self.tails.peek() if with_tails and self.tails.settled else None
        if tail is None or not self.tails_first:
            others = self.leaves if kind == LEAVES else self.checkpoints
            found = others.peek()
            while found is not None and self.spacing and is_anchor(found[1], self.spacing):
                others.pop(found[1])
                self.kept[found[1]] = None
                found = others.peek()
            if found is not None and (tail is None or found[0] < tail[0]):
                return COMPARED, *found, others
        if tail is not None:
            return FIRST if self.tails_first else COMPARED, *tail, self.tails
        if kind == CHECKPOINTS and self.kept:
            anchors = [node for node in self.kept if is_evictable_checkpoint(node)]
            node = min(anchors, key=recency, default=None)
            if node is not None:
                return LAST, recency(node), node, None
        return None


LEAVES, CHECKPOINTS = range(2)
"""What may be evicted beside tails."""

FIRST, COMPARED, LAST = range(3)
"""Whether a candidate is compared with others by its rank, or is evicted before or after them."""

Victim: TypeAlias = tuple[int, float, Node, Queue | None]
"""A candidate to evict: one of the three above, its rank, itself, and the queue that it is in; None: it is kept."""


class OrderedQueue(Queue):
    """Candidates in order.

    A candidate always has an entry whose rank is at most its present one. An entry that reaches the top of the heap is
    put back if its rank has risen since; a use that lowers a rank adds a second entry. Finding a victim takes O(log n).

    Args:
        rank: returns the present rank of a candidate.
        is_candidate: returns whether a node may be evicted at present.
        falls: whether a use may lower a rank.
    """

    def __init__(self, rank: Callable[[Node], float], is_candidate: Callable[[Node], bool], falls: bool) -> None:
        super().__init__(is_candidate)
        self._rank = rank
        self._falls = falls
        self._heap: list[tuple[float, int, Node]] = []
        self.settled: set[int] = set()
        self._order = count()  # candidates of equal rank are evicted in the order of their arrival, so that runs repeat

    def push(self, node: Node, renewed: bool) -> None:
        key = id(node)
        if renewed or key not in self.settled:
            heap = self._heap
            heappush(heap, (self._rank(node), next(self._order), node))
            self.settled.add(key)
            if len(heap) > self._compact_at:
                self._compact()

    def __len__(self) -> int:
        return len(self._heap)

    def used(self, node: Node) -> None:
        if self._falls and id(node) in self.settled:
            self.push(node, renewed=True)

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
        self._compact_at = max(MIN_COMPACTED, 2 * len(self._heap))


class SampledQueue(Queue):
    """Candidates in no order: the lowest of a random sample is evicted first.

    Args:
        rank: returns the present rank of a candidate, which is ranked anew whenever it is in a sample.
        own_rank: returns its rank among the candidates of its tenant.
        is_candidate: returns whether a node may be evicted at present.
        rng: with an equal seed the same calls find the same victims.

    Attributes:
        settled: the place of each node, by its identity.
    """

    def __init__(
        self,
        rank: Callable[[Node], float],
        own_rank: Callable[[Node], float],
        is_candidate: Callable[[Node], bool],
        rng: Random,
    ) -> None:
        super().__init__(is_candidate)
        self._rank = rank
        self._own_rank = own_rank
        self._rng = rng
        self._nodes: list[Node] = []
        self.settled: dict[int, int] = {}

    def push(self, node: Node, renewed: bool) -> None:
        if id(node) not in self.settled:
            self.settled[id(node)] = len(self._nodes)
            self._nodes.append(node)
            if len(self._nodes) > self._compact_at:  # `peek` drops such nodes too, but may not be called
                self._nodes = [node for node in self._nodes if self._is_candidate(node)]
                self.settled = {id(node): place for place, node in enumerate(self._nodes)}
                self._compact_at = max(MIN_COMPACTED, 2 * len(self._nodes))

    def __len__(self) -> int:
        return len(self._nodes)

    def peek(self) -> tuple[float, Node] | None:
        while len(self._nodes) > SAMPLE:
            found = self._lowest([self._nodes[int(self._rng.random() * len(self._nodes))] for _ in range(SAMPLE)])
            if found is not None:
                return found
        return self._lowest(list(self._nodes))

    def pop(self, node: Node) -> None:
        place = self.settled.pop(id(node))
        last = self._nodes.pop()
        if last is not node:
            self._nodes[place] = last
            self.settled[id(last)] = place

    def is_whole(self) -> bool:
        return self.settled == {id(node): place for place, node in enumerate(self._nodes)}

    def _lowest(self, sample: list[Node]) -> tuple[float, Node] | None:
        """The lowest of a sample, by its tenant's own ranks if that has priorities. Nodes that are not candidates any
        more are removed from the queue."""
        best: tuple[float, Node] | None = None
        for node in sample:
            if self._is_candidate(node):
                rank = self._rank(node)
                if best is None or rank < best[0]:
                    best = rank, node
            elif id(node) in self.settled:
                self.pop(node)
        tenant = best[1].usage.tenant if best is not None else None
        if best is not None and tenant is not None and tenant.has_priorities:
            own = (node for node in sample if node.usage.tenant is tenant and self._is_candidate(node))
            best = best[0], min(own, key=self._own_rank)
        return best


class Columns:
    """The numbers that ranks of candidates need, by place.

    They are written one by one as `array`s, and read all at once through NumPy's views of them: each is several times
    as fast as the other would be.

    Args:
        size: number of places.

    Attributes:
        groups, weights, own, used, tenants, stale: the numbers of each place: `own` are weights among candidates of the
            same tenant, `stale` is 1 for those to weigh again.
        all_groups, all_weights, all_own, all_used, all_tenants, are_stale: the views.
    """

    def __init__(self, size: int) -> None:
        self.groups: array[int] = array("q", bytes(8 * size))
        self.weights: array[float] = array("d", bytes(8 * size))
        self.own: array[float] = array("d", bytes(8 * size))
        self.tenants: array[int] = array("q", bytes(8 * size))
        self.used: array[int] = array("q", bytes(8 * size))
        self.stale: bytearray = bytearray(size)
        self.all_groups: Ints = np.frombuffer(self.groups, np.int64)
        self.all_weights: Floats = np.frombuffer(self.weights, np.float64)
        self.all_own: Floats = np.frombuffer(self.own, np.float64)
        self.all_tenants: Ints = np.frombuffer(self.tenants, np.int64)
        self.all_used: Ints = np.frombuffer(self.used, np.int64)
        self.are_stale: np.ndarray = np.frombuffer(self.stale, np.bool_)

    def put(self, place: int, weighed: tuple[int, float, float, int, int]) -> None:
        """Write the numbers of a place."""
        self.groups[place], self.weights[place], self.own[place], self.used[place], self.tenants[place] = weighed

    def of(self, places: list[int], size: int) -> Columns:
        """A copy of some places, with room for `size`."""
        columns, count = Columns(size), len(places)
        columns.all_groups[:count] = self.all_groups[places]
        columns.all_weights[:count] = self.all_weights[places]
        columns.all_own[:count] = self.all_own[places]
        columns.all_tenants[:count] = self.all_tenants[places]
        columns.all_used[:count] = self.all_used[places]
        columns.are_stale[:count] = self.are_stale[places]
        return columns


class AgingQueue(Queue):
    """Candidates in no order, each with what its rank needs beside its age: the lowest of a random sample is evicted
    first.

    What is kept of a candidate may be out of date, where something next to it has changed. The one that is found is
    therefore weighed again, and so are those of a sample that were notified of a change, or else one of all in turn.

    Args:
        weigh: returns the group of a candidate, its weight, and its weight among candidates of its tenant.
        ranks: returns the ranks of candidates of some groups, weights and requests of their last use, and the place of
            the lowest.
        is_candidate: returns whether a node may be evicted at present.
        rng: with an equal seed the same calls find the same victims.

    Attributes:
        settled: the place of each node, by its identity.
    """

    def __init__(
        self,
        weigh: Callable[[Node], tuple[int, float, float]],
        ranks: Callable[[Ints, Floats, Ints], tuple[Floats, int]],
        is_candidate: Callable[[Node], bool],
        rng: Random,
    ) -> None:
        super().__init__(is_candidate)
        self._weigh = weigh
        self._ranks = ranks
        self._dice = np.random.default_rng(rng.getrandbits(64))
        self._rolled, self._num_rolled = np.zeros(0), 0
        self._turn = 0
        self._nodes: list[Node] = []
        self.settled: dict[int, int] = {}
        self._found: tuple[float, Node] | None = None  # until something in the queue changes
        self._weighed: list[tuple[int, float, float, int, int]] = []  # group, weights, last use, tenant: as in columns
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
                columns.put(place, weighed)

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
        found = self._first(ranks, at, places, weights, weighed, gone)
        if found is not None and (tenant := found[1].usage.tenant) is not None and tenant.has_priorities:
            among = np.arange(size) if places is None else places
            among = among[columns.all_tenants[among] == tenant.number]
            ranks, at = self._ranks(groups[among], columns.all_own[among], used[among])
            own = self._first(ranks, at, among, columns.all_own, weighed, gone)
            found = found[0], own[1] if own is not None else found[1]
        for node in gone.values():
            self.pop(node)
        return found

    def _first(
        self, ranks: Floats, at: int, places: Ints | None, weights: Floats, weighed: set[int], gone: dict[int, Node]
    ) -> tuple[float, Node] | None:
        """The lowest, at `at` as it seems, of the candidates at some places, None: all, weighed again; with its rank.

        Args:
            weights: of all places, by which they are ranked.
            weighed: places that were weighed again.
            gone: receives nodes that are not candidates any more, by their place.
        """
        groups, used = self._columns.all_groups, self._columns.all_used
        while (rank := ranks.item(at)) != math.inf:
            place = at if places is None else places.item(at)
            node = self._nodes[place]
            if place in gone or not self._is_candidate(node):
                gone[place] = node
                rank = math.inf
            elif place not in weighed and self._renew(place, node):
                weighed.add(place)
                one = slice(place, place + 1)
                rank = self._ranks(groups[one], weights[one], used[one])[0].item()
            else:
                return rank, node
            ranks[at if places is None else places == place] = rank
            at = int(ranks.argmin())
        return None

    def _renew(self, place: int, node: Node) -> bool:
        """Weigh a candidate again. Returns whether something has changed."""
        usage = node.usage
        weighed = (*self._weigh(node), usage.used_at, usage.tenant.number if usage.tenant is not None else 0)
        columns = self._columns
        columns.stale[place] = 0
        if weighed == self._weighed[place]:
            return False
        self._weighed[place] = weighed
        columns.put(place, weighed)
        return True

    def _compact(self) -> None:
        """Drop nodes that are not candidates any more (`peek` does so too, but may not be called), and have room for as
        many again."""
        kept = [place for place, node in enumerate(self._nodes) if self._is_candidate(node)]
        self._nodes = [self._nodes[place] for place in kept]
        self.settled = {id(node): place for place, node in enumerate(self._nodes)}
        self._weighed = [self._weighed[place] for place in kept]
        self._compact_at = max(MIN_COMPACTED, 2 * len(kept))
        self._columns = self._columns.of(kept, self._compact_at + 1)
