"""The interface of eviction policies.

A policy ranks the candidates that it is shown and never sees the tree: the candidate with the lowest `rank(facts)` is
evicted first. A policy that learns overrides the hooks too, which report uses, evictions and misses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np

from hybrid.checks import MAX_INT
from hybrid.tree.node import Kind, Node, NodeUsage
from hybrid.units import Prices

Order = Literal["rising", "any"]
"""The change of a candidate's rank by a use: "rising" never lowers it, "any" may."""


Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

MAX_STEPS = 1000
"""Powers of two of a priority's weight, as far as a float has them."""


class PolicyWarning(UserWarning):
    """An eviction policy raised or returned something that is not a number, and LRU took over."""


class Facts:
    """A candidate, or a checkpoint that was evicted, as a policy may know it.

    Attributes:
        kind: why the checkpoint was put there: "branch", "turn_end", "prompt_end", "anchor", "interval", "user";
            "pages" for a node that never had a checkpoint.
        now: number of requests so far.
        age: requests since its last use, or since it was stored.
        hits: number of requests that resumed from it.
        turn: number of turn ends before it on its path: the number of its turn in a conversation.
        priority: the highest that a request of its tenant gave it, 0 by default. Where it is compared with checkpoints
            of other tenants, `CacheConfig.priority_cap` at most.
        priority_weight: how many times as much it is worth for its priority: twice as much for each step.
        created, last_used: ticks of a clock that advances with every insert and use; `last_used` is 0 for a spare
            checkpoint that no request has used yet.
        num_tokens: number of tokens from the start of the prompt to the checkpoint.
        tokens_saved: tokens that would be computed again without it: those since the nearest checkpoint above it.
        bytes_freed: bytes that its eviction would free: its state, and the pages that nothing else needs. Where states
            and pages have memories of their own, of the memory that is short alone.
        has_below: other nodes or running requests continue from it.
        is_live: the checkpoint is in the cache. Only policies with an `order` rank pages without a checkpoint; for
            other policies such pages are evicted first, because they save no computation.
        expected_in: requests from its last use to the next one, as its client has said (`Tree.expect`); 0: it has not.
        path: of the request that left it, where times are known (`hybrid.tree.paths.Path`), or None.
        notes: the policy's own data, None at first. It is kept with the checkpoint, and after its eviction as long as
            the checkpoint is remembered.
    """

    __slots__ = (
        "_bytes_freed",
        "_has_below",
        "_node",
        "_prices",
        "_priority_cap",
        "_tokens_saved",
        "_usage",
        "now",
        "num_tokens",
    )

    _tokens_saved: int
    _bytes_freed: int
    _has_below: bool

    def __init__(self, node: Node, now: int, prices: Prices) -> None:
        self._node: Node | None = node
        self._usage = node.usage
        self._prices = prices
        self._priority_cap = MAX_INT
        self.now: int = now
        self.num_tokens: int = node.end

    @classmethod
    def without_node(
        cls,
        usage: NodeUsage,
        now: int,
        num_tokens: int,
        tokens_saved: int = 0,
        bytes_freed: int = 1,
        has_below: bool = False,
    ) -> Facts:
        """Facts of a checkpoint that is not in the tree: one that was evicted, or is not stored yet."""
        facts = cls.__new__(cls)
        facts._node = None
        facts._usage = usage
        facts._priority_cap = MAX_INT
        facts.now = now
        facts.num_tokens = num_tokens
        facts._tokens_saved, facts._bytes_freed, facts._has_below = tokens_saved, bytes_freed, has_below
        return facts

    def cap_priority(self, priority_cap: int) -> Facts:
        """Have the priority be that in comparison with checkpoints of other tenants. Returns the same object."""
        self._priority_cap = priority_cap
        return self

    @property
    def kind(self) -> Kind:
        return self._usage.kind

    @property
    def age(self) -> int:
        return self.now - self._usage.used_at

    @property
    def hits(self) -> int:
        return self._usage.hits

    @property
    def turn(self) -> int:
        return self._usage.turn

    @property
    def priority(self) -> int:
        return min(self._usage.priority, self._priority_cap)

    @property
    def priority_weight(self) -> float:
        steps = self.priority
        return 2.0 ** max(-MAX_STEPS, min(MAX_STEPS, steps)) if steps else 1.0

    @property
    def created(self) -> int:
        return self._usage.created

    @property
    def last_used(self) -> int:
        return self._usage.last_used

    @property
    def expected_in(self) -> int:
        expected_at = self._usage.expected_at
        return max(1, expected_at - self._usage.used_at) if expected_at else 0

    @property
    def path(self) -> Any:
        return self._usage.path

    @property
    def notes(self) -> Any:
        return self._usage.notes

    @notes.setter
    def notes(self, notes: Any) -> None:
        self._usage.notes = notes

    @property
    def is_live(self) -> bool:
        return self._node is not None and self._node.slot is not None

    @property
    def tokens_saved(self) -> int:
        node = self._node
        if node is None:
            return self._tokens_saved
        if node.slot is None:
            return 0
        above = node.checkpoint_above()
        return node.end - (above.end if above is not None else 0)

    @property
    def bytes_freed(self) -> int:
        node, total = self._node, 0
        if node is None:
            return self._bytes_freed
        if node.slot is not None:
            total = self._prices.checkpoint
        top, page = node.parent, self._prices.page
        if page and top is not None and not node.children and not node.page_locks:
            while top.parent is not None and top.slot is None and len(top.children) == 1 and not top.page_locks:
                top = top.parent  # a tombstone that nothing else needs is evicted with it
            total += (node.end - top.end) // node.run.page_size * page
        return total

    @property
    def has_below(self) -> bool:
        if self._node is None:
            return self._has_below
        return bool(self._node.children or self._node.page_locks)

    def __repr__(self) -> str:
        return (
            f"Facts(kind={self.kind.value!r}, age={self.age}, hits={self.hits}, num_tokens={self.num_tokens}, "
            f"tokens_saved={self.tokens_saved}, bytes_freed={self.bytes_freed})"
        )


class Policy(ABC):
    """Ranks candidates for eviction: the candidate with the lowest rank is evicted first.

    Subclasses implement `rank`, and override the hooks that they need. Each hook gets the facts before the event is
    counted. A policy that raises, or whose rank is not a number, is replaced by LRU with a `PolicyWarning`.

    Attributes:
        order: None: ranks change by themselves, for example with age; the lowest of a random sample of the candidates
            is evicted. "rising" or "any": ranks change only when a candidate is used; candidates are kept in order and
            the lowest of all is evicted.
        guarded: while LRU would have had more hits lately, it takes over (`hybrid.tree.guard`).
    """

    order: Order | None = None
    guarded: bool = False

    @abstractmethod
    def rank(self, facts: Facts) -> float:
        """The rank of a candidate: a number, not NaN."""

    def entered(self, facts: Facts) -> None:  # noqa: B027 - a hook that does nothing by default
        """A checkpoint was stored, or (`not facts.is_live`) it was not admitted."""

    def hit(self, facts: Facts) -> None:  # noqa: B027
        """A request resumes from the checkpoint."""

    def missed(self, facts: Facts) -> None:  # noqa: B027
        """A request would have resumed from the checkpoint if it had not been evicted."""

    def changed(self, facts: Facts) -> None:  # noqa: B027
        """`facts.has_below` or `facts.kind` has changed; `facts.age` too where what continued from it was evicted and
        was used later."""

    def evicted(self, facts: Facts) -> None:  # noqa: B027
        """The checkpoint is about to be evicted."""


class AgingPolicy(Policy):
    """A policy whose ranks change with age alone, as long as nothing happens to a candidate or next to it.

    What does not depend on age is asked for once and kept, a group and a weight for each candidate; the ranks of many
    candidates follow from these and their ages in one call.
    """

    @abstractmethod
    def weigh(self, facts: Facts) -> tuple[int, float]:
        """The group of a candidate, 0 or more, and its weight: numbers for `ranks`."""

    @abstractmethod
    def ranks(self, groups: Ints, weights: Floats, ages: Ints) -> Floats:
        """The ranks of candidates of these groups, weights and ages, each `[candidates]`: the lowest is evicted
        first."""

    def rank(self, facts: Facts) -> float:
        group, weight = self.weigh(facts)
        return float(self.ranks(np.array([group]), np.array([weight]), np.array([facts.age]))[0])
