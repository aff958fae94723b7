"""The candidates for eviction of a tree, in the order of its policy.

A policy is the user's code and may fail: `Candidates` calls it, and replaces it with LRU when it breaks its contract.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter
from random import Random
from types import MethodType

import numpy as np

from hybrid.tree.node import Node, NodeUsage
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import AgingPolicy, Facts, Floats, Ints, Order, Policy, PolicyWarning
from hybrid.tree.pools import INTEGERS, Pools
from hybrid.tree.queues import AgingQueue, OrderedQueue, Queue, SampledQueue
from hybrid.units import Prices

MAX_NOTIFIED = 32
"""Nodes below a change that are looked at for checkpoints to weigh again; the others are when a sample has them."""

Hook = Callable[[Facts], None]

recency: Callable[[Node], float] = attrgetter("usage.last_used")
"""The rank of a node for LRU, without the facts about it."""


def page_recency(node: Node) -> float:
    """The same for pages that are evicted as a whole edge: what was below them counts too, though it has gone."""
    usage = node.usage
    return max(usage.last_used, usage.pages_used, usage.cut_at)


class Candidates:
    """What a tree can evict, in the order of a policy.

    There are three kinds of candidates: checkpoints; leaves with a checkpoint, for their pages; tails, which are leaves
    without a checkpoint. Tails save no computation: a policy without an `order` does not rank them, they are evicted
    first, oldest first. A policy that raises, or whose rank is not a number, is dismissed: a `PolicyWarning` says why,
    and LRU takes over.

    Args:
        policy: ranks the candidates.
        prices: bytes of a page and of a checkpoint.
        seed: of the random samples.
        pools: whether pages and checkpoints are in memories of their own: then what is evicted of one is ranked by what
            it would free of that one; and whether edges are evicted as a whole.

    Attributes:
        failure: why the policy was dismissed; None while it is in use.
        now: number of requests so far.
        follows_changes: `changed` does something.
        reports_entries: `entered` does something.
        reports_evictions: `evicting` does something.
    """

    def __init__(self, policy: Policy, prices: Prices, seed: int, pools: Pools = INTEGERS) -> None:
        self.failure: str | None = None
        self.now: int = 0
        self._moment = np.zeros((), np.int64)  # as an operand faster than a number
        self._prices = prices
        self._checkpoint_prices = replace(prices, page=0) if pools.apart else prices
        self._leaf_prices = replace(prices, checkpoint=0) if pools.apart else prices
        self._rng = Random(seed)
        self._recency_of_pages = page_recency if pools.whole_edges else recency
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
        order = policy.order
        self._checkpoints = self._queue(order, is_evictable_checkpoint, self._checkpoint_prices)
        self._leaves = self._queue(order, is_evictable_leaf, self._leaf_prices)
        self._samples = order is None
        self._rises = order == "rising"
        self._weighs = isinstance(policy, AgingPolicy)
        self._reorders = not self._weighs and not self._rises  # a use may change an order that was found before it
        self.follows_changes: bool = self._weighs or self._changed is not None
        self.reports_entries: bool = self._weighs or self._entered is not None
        rank = recency if self._samples else self._rank_of(policy, is_evictable_tail)
        self._tails = OrderedQueue(rank, is_evictable_tail, falls=order == "any")

    def _queue(self, order: Order | None, is_candidate: Callable[[Node], bool], prices: Prices) -> Queue:
        policy = self._policy
        if isinstance(policy, AgingPolicy):
            return AgingQueue(self._weigher(policy, prices), partial(self._ranks, policy), is_candidate, self._rng)
        if order is None:
            return SampledQueue(partial(self._rank, prices), is_candidate, self._rng)
        return OrderedQueue(self._rank_of(policy, is_candidate), is_candidate, falls=order == "any")

    def _rank_of(self, policy: Policy, is_candidate: Callable[[Node], bool]) -> Callable[[Node], float]:
        if type(policy) is not LeastRecentlyUsed:
            return partial(self._rank, self._prices)
        return recency if is_candidate is is_evictable_checkpoint else self._recency_of_pages

    @property
    def num_entries(self) -> tuple[int, int, int]:
        """Number of entries in the queues of tails, leaves and checkpoints."""
        return len(self._tails), len(self._leaves), len(self._checkpoints)

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
        if node.slot is None:
            if not node.children and not node.page_locks and (renewed or key not in self._tails.settled):
                self._tails.push(node, renewed)
        elif not node.state_locks:
            if renewed or key not in self._checkpoints.settled:
                self._checkpoints.push(node, renewed)
            if not node.children and not node.page_locks and (renewed or key not in self._leaves.settled):
                self._leaves.push(node, renewed)

    def overlooks(self, node: Node) -> bool:
        """Whether something of the node may be evicted and it is not a candidate for that: it would stay forever."""
        return (
            (is_evictable_tail(node) and node not in self._tails)
            or (is_evictable_leaf(node) and node not in self._leaves)
            or (is_evictable_checkpoint(node) and node not in self._checkpoints)
        )

    def are_whole(self) -> bool:
        """Whether each candidate is where its queue looks for it, for the audit."""
        return all(queue.is_whole() for queue in (self._tails, self._leaves, self._checkpoints))

    def next_checkpoint(self) -> Node | None:
        """Remove and return the checkpoint to evict first."""
        found = self._checkpoints.peek()
        if found is None:
            return None
        self._checkpoints.pop(found[1])
        return found[1]

    def next_leaf(self) -> Node | None:
        """Remove and return the leaf to evict first."""
        return self._next(self._leaves)

    def next_of_all(self) -> Node | None:
        """Remove and return the checkpoint or tail to evict first."""
        return self._next(self._checkpoints)

    def _next(self, others: Queue) -> Node | None:
        """Remove and return the first of the tails and of others: a tail, if a policy without an order finds one."""
        queue: Queue = self._tails
        best = queue.peek() if self._tails.settled else None
        if best is None or not self._samples:
            found = others.peek()
            if found is not None and (best is None or found[0] < best[0]):
                best, queue = found, others
        if best is None:
            return None
        node = best[1]
        queue.pop(node)
        return node

    # Calls of the policy

    def requested(self, node: Node | None, ticks: Iterator[int]) -> None:
        """Count a request, and that it resumes from a node's checkpoint. The policy's hook is called before that."""
        self.now += 1
        if node is None:
            return
        if self._hit is not None:
            self._report("hit", self._hit, Facts(node, self.now, self._prices))
        usage = node.usage
        usage.last_used = next(ticks)
        usage.used_at = self.now
        usage.hits += 1
        if self.follows_changes:
            self.changed(node)  # its request has locked it and continues from it
        if self._reorders:
            self.renewed(node)

    def renewed(self, node: Node) -> None:
        """The tick of a node's last use has changed, without a use."""
        if not self._rises:
            self._checkpoints.used(node)
            self._leaves.used(node)

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
        """What the checkpoints next below a node save or would free has changed: rank up to `MAX_NOTIFIED` again."""
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
                self._checkpoints.changed(node)
                self._leaves.changed(node)

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
            self._checkpoints.changed(node)
            self._leaves.changed(node)
        elif len(node.children) == 1:
            self.reweigh_below(node)

    def worth(self, usage: NodeUsage, num_tokens: int, tokens_saved: int, num_bytes: int) -> float:
        """The rank at present of a checkpoint that is kept elsewhere, where `num_bytes` are free without it."""
        return self._value(Facts.without_node(usage, self.now, num_tokens, tokens_saved, num_bytes))

    def admits(self, usage: NodeUsage, num_tokens: int, tokens_saved: int, num_pages: int, tails_help: bool) -> bool:
        """Whether a checkpoint that is not stored yet is worth more than the one that would be evicted for it.

        Args:
            num_pages: pages that only it would need; 0 if something continues from it.
            tails_help: pages without a checkpoint can be evicted instead.
        """
        if not self._samples or (tails_help and self._tails.peek() is not None):
            return True
        least = self._checkpoints.peek()
        if least is None:
            return True
        freed = self._checkpoint_prices.checkpoint + num_pages * self._checkpoint_prices.page
        facts = Facts.without_node(usage, self.now, num_tokens, tokens_saved, freed, has_below=num_pages == 0)
        if self._changed is not None:
            usage.reported_below = facts.has_below
            self._report("changed", self._changed, facts)
        return self._value(facts) >= least[0]

    def _rank(self, prices: Prices, node: Node) -> float:
        return self._value(Facts(node, self.now, prices))

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

    def _weigher(self, policy: AgingPolicy, prices: Prices) -> Callable[[Node], tuple[int, float]]:
        """A function for the group and the weight of a candidate."""
        weigh = policy.weigh

        def weighed(node: Node) -> tuple[int, float]:
            if self.failure is None:
                try:
                    group, weight = weigh(Facts(node, self.now, prices))
                    if not math.isnan(weight):
                        return group, weight
                    reason = "a weight is NaN"
                except Exception as error:
                    reason = f"weigh raised {error!r}"
                self._dismiss(reason)
            return 0, 0.0

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

    def settle(self, nodes: Iterable[tuple[str, Node]]) -> None:
        """Install LRU if the policy was dismissed since the last call."""
        if self.failure is not None and type(self._policy) is not LeastRecentlyUsed:
            self._install(LeastRecentlyUsed())
            for _, node in nodes:
                self.enter(node)


def is_evictable_leaf(node: Node) -> bool:
    """A leaf with a checkpoint, whose pages may be evicted with it."""
    return node.parent is not None and node.slot is not None and not node.children and not node.page_locks


def is_evictable_tail(node: Node) -> bool:
    """A leaf without a checkpoint."""
    return node.parent is not None and node.slot is None and not node.children and not node.page_locks


def is_evictable_checkpoint(node: Node) -> bool:
    """A node whose checkpoint may be evicted."""
    return node.parent is not None and node.slot is not None and not node.state_locks
