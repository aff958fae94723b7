"""What one running request holds of the cache, and what the cache counts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hybrid.cache.explain import Explanation
from hybrid.memory.pool import EMPTY_STATE
from hybrid.tree.node import Checkpoint, NodeUsage, PageLock, StateLock


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds of the cache.

    Attributes:
        block_table: its page ids in order; the tree owns `[0, num_shared)` of them, the rest are private.
        front: its state slot, valid after `front_tokens` tokens; `EMPTY_STATE` once it has been donated.
        read_slot: where its next pass reads the state: the matched checkpoint at first (copy-on-write), then the front.
        back: the other slot of the ping-pong pair, when it has one: the state after `back_tokens` tokens.
        turn: turn ends before its own on its way.
        marks: the use of checkpoints that are not there, by their tokens: they were evicted, or not worth their room.
            The next commit notes them in the tree.
        captured: checkpoints that are written by the pass under way, or wait to be committed.
        explanation: why the hit was what it was.
    """

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
    turn: int = 0
    marks: dict[int, NodeUsage] = field(default_factory=dict)
    back: int | None = None
    back_tokens: int = 0
    captured: list[Checkpoint] = field(default_factory=list)

    def private_slots(self) -> list[int]:
        """The state slots that belong to this lease alone."""
        slots = [checkpoint.slot for checkpoint in self.captured]
        if self.front != EMPTY_STATE:
            slots.append(self.front)
        if self.back is not None:
            slots.append(self.back)
        return slots


@dataclass(slots=True, eq=False)
class Pin:
    """A prefix that somebody wants kept.

    Attributes:
        num_tokens: what is kept: so many tokens, and the checkpoint at their end.
        expires: when it is let go by itself, by `time.monotonic`.
    """

    num_tokens: int
    expires: float
    page_lock: PageLock
    state_lock: StateLock


@dataclass(slots=True)
class CacheStats:
    """Counts since the cache was made, and what it holds now.

    Attributes:
        requests, prompt_tokens, usable_tokens, page_tokens: requests recorded, and their tokens asked, usable, with
            pages.
        evicted_pages, evicted_checkpoints: given up to make room.
        pages_free, pages_cached, pages_private: the pages by owner; they add up to `pages_total` where they do not
            share their memory with states. Where they do, free memory counts as free for both kinds.
        states_free, checkpoints, states_private: the state slots by owner; they add up to `states_total` where they do
            not share their memory with pages.
        moved_pages: pages (and states) that were moved together so that memory could go from one kind to the other.
        page_bytes, checkpoint_bytes: the size of one, 0 where the cache does not know it.
        pins: prefixes that are pinned.
        policy_failure: why the eviction policy was dismissed; None while it holds.
    """

    requests: int = 0
    prompt_tokens: int = 0
    usable_tokens: int = 0
    page_tokens: int = 0
    evicted_pages: int = 0
    evicted_checkpoints: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_private: int = 0
    states_total: int = 0
    states_free: int = 0
    checkpoints: int = 0
    states_private: int = 0
    page_bytes: int = 0
    checkpoint_bytes: int = 0
    moved_pages: int = 0
    pins: int = 0
    policy_failure: str | None = None

    @property
    def hit_rate(self) -> float:
        """Part of the prompt tokens that were not computed."""
        usable = self.usable_tokens  # read first: in another thread than the owner's both may grow meanwhile
        return min(1.0, usable / self.prompt_tokens) if self.prompt_tokens else 0.0
