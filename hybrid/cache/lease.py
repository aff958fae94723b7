"""The pages and slots that one running request holds of the cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid.cache.explain import Explanation
from hybrid.cache.restoring import Restoring
from hybrid.key import Key
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Checkpoint, Lock, Node, NodeUsage, PageLock, StateLock
from hybrid.tree.paths import Path


@dataclass(slots=True, eq=False)
class Lease:
    """The pages, slots and locks that one running request holds of the cache.

    Attributes:
        key: the key that it was opened with, or the longer one of its last commit.
        num_known: tokens of the key that do not change any more: those of the prompt, and those committed.
        front: its state slot, valid after `front_tokens` tokens; `EMPTY_STATE` once it has been donated.
        read_slot: where its next pass reads the state: the matched checkpoint at first (copy-on-write), then the front.
        num_hit_tokens: tokens that did not have to be computed when it was opened.
        branching_len: where a checkpoint would have served this request; None: nowhere.
        explanation: why the hit was what it was.
        block_table: its page ids in order; the tree owns `[0, num_shared)` of them, the rest are private.
        page_lock: protects the pages that the tree owns.
        state_lock: protects the matched checkpoint until the first pass has read it.
        priority: how much its checkpoints matter among those of its tenant, for policies that ask.
        tenant: name of who sent its request; None: its namespace.
        turn: number of turn ends before it on its path.
        path: what a policy knows it by that learns when paths are continued; None: times are not known.
        num_input: tokens of its prompt.
        lost: usage of checkpoints on its path that were evicted, or not admitted, by their number of tokens. The next
            commit enters it in the tree.
        back: the second slot of the ping-pong pair, if it has one: the state after `back_tokens` tokens.
        captured: checkpoints that the pass in flight writes, or that wait to be committed.
        restoring: what is being restored for it; until that ends it can only be closed. None: nothing is.
        num_written: tokens up to the deepest of its checkpoints that the tree has taken.
        is_void: a pass failed (`HybridCache.discard`): the lease can only be closed.
    """

    key: Key
    num_known: int
    front: int
    read_slot: int
    front_tokens: int
    num_hit_tokens: int
    branching_len: int | None
    explanation: Explanation
    block_table: array[int]
    num_shared: int
    page_lock: PageLock | None
    state_lock: StateLock | None
    priority: int = 0
    tenant: str | None = None
    turn: int = 0
    path: Path | None = None
    num_input: int = 0
    lost: dict[int, NodeUsage] = field(default_factory=dict)
    back: int | None = None
    back_tokens: int = 0
    captured: list[Checkpoint] = field(default_factory=list)
    restoring: Restoring | None = None
    num_written: int = 0
    is_void: bool = False

    @property
    def num_expected(self) -> int:
        """Tokens that do not have to be computed, if what is being restored for it can be."""
        return self.num_hit_tokens if self.restoring is None else self.restoring.num_tokens

    @property
    def private_pages(self) -> Sequence[int]:
        """The pages that belong to this lease alone."""
        return self.block_table[self.num_shared :]

    def cut(self, num_pages: int) -> Sequence[int]:
        """Remove the private pages after the first `num_pages` from the block table; returns them."""
        first = max(num_pages, self.num_shared)
        unused, self.block_table = self.block_table[first:], self.block_table[:first]
        return unused

    @property
    def shared_node(self) -> Node | None:
        """The node where the pages end that it shares with the tree; None: it shares none."""
        return self.page_lock.node if self.page_lock is not None else None

    def captures(self, num_tokens: int) -> bool:
        """Tell whether a checkpoint after `num_tokens` tokens is captured, and not committed."""
        return any(checkpoint.num_tokens == num_tokens for checkpoint in self.captured)

    @property
    def locks(self) -> list[Lock]:
        """The locks that it holds."""
        return [lock for lock in (self.page_lock, self.state_lock) if lock is not None]

    def private_slots(self) -> list[int]:
        """List the state slots that belong to this lease alone."""
        slots = [checkpoint.slot for checkpoint in self.captured]
        if self.front != EMPTY_STATE:
            slots.append(self.front)
        if self.back is not None:
            slots.append(self.back)
        return slots
