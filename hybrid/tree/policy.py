"""What a policy is, and what it may know.

A policy ranks what it is shown and sees no tree: `rank(facts)`, the lowest goes first. A policy that learns is also
told what was used, what went, and what was asked for after it had gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hybrid.units import Prices

if TYPE_CHECKING:
    from hybrid.tree.node import Node

BRANCH = "branch"
TURN_END = "turn_end"
PROMPT_END = "prompt_end"
INTERVAL = "interval"
USER = "user"
PAGES = "pages"
"""Kinds of what may go: checkpoints by the reason for which they were put there, and pages without a checkpoint."""


@dataclass(slots=True)
class Usage:
    """What is remembered of a node's use.

    Attributes:
        created: tick at which it was inserted.
        last_used: tick of its last use; 0 for a spare checkpoint that nobody has used yet.
        hits: number of requests that resumed from its checkpoint.
        kind: why its checkpoint was put there.
        used_at: number of requests that had come when it was last used.
        priority: the highest that a request gave it.
        turn: turn ends before it on its way.
        notes: a policy's own.
    """

    created: int
    last_used: int
    hits: int = 0
    kind: str = BRANCH
    used_at: int = 0
    priority: int = 0
    turn: int = 0
    notes: Any = None


class Facts:
    """What a policy may know of a candidate, or of a checkpoint that has gone.

    Attributes:
        kind: why it was put there: "branch", "turn_end", "prompt_end", "interval", "user"; "pages": there never was a
            checkpoint.
        now: requests that have come so far.
        age: requests since its last use, or since it was put there.
        hits: requests that resumed from it.
        turn: turn ends before it on its way: the number of its turn in a conversation.
        priority: the highest that a request gave it (0 unless somebody said otherwise).
        created, last_used: ticks of a clock that moves with every insert and use; `last_used` is 0 for a spare
            checkpoint that nobody has used yet.
        num_tokens: tokens from the start of the prompt to its end.
        tokens_saved: tokens that would be computed again without it: those since the next checkpoint above it.
        bytes_freed: what would come free with it: its state, and the pages that nothing else needs.
        has_below: something goes on from it, or is just being computed from it.
        is_live: the checkpoint is in the cache. Only policies with an `order` are asked about pages without one: for
            others those go first, for they spare nobody anything.
        notes: whatever the policy puts there; kept with the checkpoint, and after it has gone as long as it is
            remembered. None at first.
    """

    __slots__ = ("_bytes_freed", "_has_below", "_node", "_prices", "_tokens_saved", "_usage", "now", "num_tokens")

    _tokens_saved: int
    _bytes_freed: int
    _has_below: bool

    def __init__(self, node: Node, now: int, prices: Prices) -> None:
        self._node: Node | None = node
        self._usage = node.usage
        self._prices = prices
        self.now = now
        self.num_tokens = node.end

    @classmethod
    def without_node(
        cls,
        usage: Usage,
        now: int,
        num_tokens: int,
        tokens_saved: int = 0,
        bytes_freed: int = 1,
        has_below: bool = False,
    ) -> Facts:
        """Facts of a checkpoint that is not in the tree: it has gone, or is to be."""
        facts = cls.__new__(cls)
        facts._node = None
        facts._usage = usage
        facts.now = now
        facts.num_tokens = num_tokens
        facts._tokens_saved, facts._bytes_freed, facts._has_below = tokens_saved, bytes_freed, has_below
        return facts

    @property
    def kind(self) -> str:
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
        return self._usage.priority

    @property
    def created(self) -> int:
        return self._usage.created

    @property
    def last_used(self) -> int:
        return self._usage.last_used

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
        above = node.parent
        while above is not None and above.slot is None:
            above = above.parent
        return node.end - (above.end if above is not None else 0)

    @property
    def bytes_freed(self) -> int:
        node, total = self._node, 0
        if node is None:
            return self._bytes_freed
        if node.slot is not None:
            total = self._prices.checkpoint
        top = node.parent
        if top is not None and not node.children and not node.page_locks:
            page_tokens = (node.end - top.end) // len(node.pages)
            while (
                top.parent is not None and top.slot is None and len(top.children) == 1 and not top.page_locks
            ):  # a tombstone that nothing else needs goes along
                top = top.parent
            total += (node.end - top.end) // page_tokens * self._prices.page
        return total

    @property
    def has_below(self) -> bool:
        if self._node is None:
            return self._has_below
        return bool(self._node.children or self._node.page_locks)

    def __repr__(self) -> str:
        return (
            f"Facts(kind={self.kind!r}, age={self.age}, hits={self.hits}, num_tokens={self.num_tokens}, "
            f"tokens_saved={self.tokens_saved}, bytes_freed={self.bytes_freed})"
        )


@runtime_checkable
class Policy(Protocol):
    """Ranks candidates for eviction. The lowest rank goes first.

    That is all a policy must do: it is asked about a sample of the candidates each time something must go. One whose
    ranks change only when a candidate is used may say so with an attribute `order`: "rising" if a use never lowers the
    rank, "any" if it may; its candidates are then kept in order, and the lowest of all goes.

    A policy that learns may have any of these too, each with the facts before the event is counted:

        entered(facts)   a checkpoint was put there; or (`not facts.is_live`) it was not worth its room
        hit(facts)       a request resumes from it
        missed(facts)    a request would have resumed from it, had it not been evicted
        changed(facts)   `facts.has_below` or `facts.kind` has changed
        evicted(facts)   it is about to go
    """

    def rank(self, facts: Facts) -> float:
        """The rank of a candidate: a number, not NaN."""
        ...
