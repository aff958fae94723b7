"""Computing prompts with a model of transformers: from what is known, and so that it is known the next time.

What must stay true:

* A prefill is cut only at multiples of the grid, in deterministic mode at every one of them, whether it starts at a hit
  or not. Then a hit is bitwise the run that computed everything.
* What others computed (a pass of `generate`, in a session) is kept as it is where that changes no result: in
  deterministic mode whole chunks alone, otherwise whatever ends on the grid. All else is computed again, as chunks.
* A lease is held while a prefill runs, and never while others run: transformers' cache holds copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.explain import Explanation
from hybrid.cache.lease import Lease
from hybrid.hf.layers import Layout, fill, stacked, states_of
from hybrid.hf.memory import PageMemory
from hybrid.hf.past import Mark, Past
from hybrid.hf.probe import forward
from hybrid.interrupts import deferred_interrupts
from hybrid.key import Key
from hybrid.tree.node import Kind


class Computer:
    """What a model computes, between transformers' caches and the memory of a `PrefixCache`.

    Attributes:
        lock: held while a prompt is computed, and while the cache is looked at.
    """

    def __init__(
        self, model: Any, device: torch.device, layout: Layout, memory: PageMemory, cache: HybridCache
    ) -> None:
        self.lock = threading.RLock()
        self._model = model
        self._device = device
        self._layout = layout
        self._memory = memory
        self._cache = cache
        config = cache.config
        self._longest_pass = config.grid if config.deterministic else layout.longest_pass(config.grid)

    @property
    def grid(self) -> int:
        """Prefills are cut at its multiples."""
        return self._cache.config.grid

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of a prefix is a part of the cache: the model has full attention alone."""
        return self._layout.can_be_cut

    @property
    def has_states(self) -> bool:
        """Whether the model has linear-attention layers."""
        return bool(self._layout.states)

    # A prompt, from what is known of it

    @torch.no_grad()
    def prefill(
        self, ids: Sequence[int], end: int, namespace: str, is_replay: bool = False
    ) -> tuple[list[Any], Explanation]:
        """The layers of one sequence after `ids[:end]`, cut on the grid; whole chunks are kept.

        Where memory for a chunk cannot be had, it and what follows is computed all the same.

        Args:
            is_replay: it is no prompt, but something that was computed before.
        """
        key = Key.of(ids, namespace)
        with self.lock:
            self._cache.adopt()
            past = DynamicCache(config=self._model.config)
            with deferred_interrupts():
                lease = self._cache.open(key, end if is_replay else len(ids) - 1, 0)
            position = 0
            if lease is None:
                explanation = Explanation(len(ids), 0, 0, "no memory can be had for this prompt now")
            else:
                explanation = lease.explanation
                try:
                    position = self._prefill_chunks(past, lease, key, ids, end, is_replay)
                finally:
                    with deferred_interrupts():
                        self._cache.close(lease)
            if not is_replay:
                self._cache.record(explanation)
            while position < end:
                start, position = position, min(end, (position + self._longest_pass) // self.grid * self.grid)
                forward(self._model, ids[start:position], past, start, self._device)
            return past.layers, explanation

    def compute(self, rows: Sequence[Sequence[int]], pads: Sequence[int], namespace: str) -> list[Any]:
        """The layers after these tokens, padded on the left, each row resumed at its nearest checkpoint."""
        done = [self.prefill(row, len(row), namespace, is_replay=True)[0] for row in rows]
        return done[0] if len(rows) == 1 and not pads[0] else self.stack(done, len(rows[0]) + pads[0])

    def stack(self, done: Sequence[Sequence[Any]], length: int) -> list[Any]:
        """The layers of several sequences as those of one batch of `length` positions, padded on the left."""
        layers = DynamicCache(config=self._model.config).layers
        if length:
            fill(layers, self._layout, *stacked(done, self._layout, length), length)
        return layers

    # What was computed by others

    def mark(self, before: Mark | None, layers: Sequence[Any], row: int, num_tokens: int, num_new: int) -> Mark | None:
        """The last boundary of a sequence whose state can be kept as it was computed, after one more pass.

        Args:
            before: the one before the pass.
            row: index of the sequence in the batch.
            num_tokens, num_new: what the layers have seen of it, and how many tokens of that in this pass.
        """
        if num_tokens % self.grid or self._layout.has_windows:
            return before
        is_chunk = before is not None and before.num_tokens == num_tokens - num_new and num_new == self.grid
        if self._cache.config.deterministic and not is_chunk:
            return before
        return Mark(num_tokens, tuple(state.clone() for state in states_of(layers, self._layout, row)))

    def keep(self, token_ids: Sequence[int], namespace: str) -> None:
        """Compute what is not known of these tokens, as whole chunks, and keep it."""
        end = len(token_ids) // self.grid * self.grid
        with self.lock:
            self._cache.adopt()
            if end and self._cache.tree.peek(Key.of(token_ids[:end], namespace), end).num_tokens < end:
                self.prefill(token_ids[:end], end, namespace, is_replay=True)

    def keep_turn(
        self, token_ids: Sequence[int], num_before: int, namespace: str, past: Past, rows: Iterable[int]
    ) -> None:
        """Keep a turn, unless what was before it could not be kept: then all of it would be computed for nothing.

        Args:
            token_ids: all of the sequence, with its answer.
            num_before: tokens of it that were looked up.
            past: where it was computed, as one of `rows` of the batch.
        """
        num_before -= num_before % self.grid
        key = Key.of(token_ids[:num_before], namespace)
        if Kind.TURN_END not in self._cache.config.placement:
            return
        with self.lock:
            if self._cache.tree.peek(key, num_before).num_page_tokens < num_before:
                return
            for row in rows:
                mark = past.mark_of(row, token_ids)
                if mark is not None:
                    self._keep_computed(past, row, mark, namespace)
                    if not self._cache.config.deterministic:  # the last token is not worth a chunk
                        token_ids = token_ids[: past.num_seen(row)]
                    break
            self.keep(token_ids, namespace)

    @torch.no_grad()
    def _keep_computed(self, past: Past, row: int, mark: Mark, namespace: str) -> None:
        """Keep what a past holds of one of its sequences up to a mark, as it is."""
        assert past.rows is not None
        cache, end = self._cache, mark.num_tokens
        key = Key.of(past.rows[row][:end], namespace)
        cache.adopt()
        with deferred_interrupts():
            lease = cache.open(key, end, 0)
            if lease is None:
                return
            try:
                if lease.num_hit_tokens == end or not cache.reserve(lease, end):
                    return
                pages = lease.block_table[lease.num_shared :]
                self._memory.write_pages(past.layers, pages, end, row=row, num_seen=past.num_seen(row))
                checkpoint = cache.capture(lease, end, Kind.TURN_END)
                if checkpoint is not None:
                    self._memory.write_state(mark.states, checkpoint.slot)
                cache.commit(lease, key, end)
            finally:
                cache.close(lease)

    # How a prefill goes

    def _prefill_chunks(
        self, past: DynamicCache, lease: Lease, key: Key, ids: Sequence[int], end: int, is_replay: bool
    ) -> int:
        """Resume at the hit, and compute and keep every whole chunk before `end`. Returns how far it came."""
        position, last = lease.num_hit_tokens, end // self.grid * self.grid
        wanted = self._wanted(lease, len(ids), last, is_replay)
        if position:
            pages = lease.block_table[: position // self._cache.config.page_size]
            self._memory.restore(past.layers, pages, lease.read_slot, position)
        self._cache.advance(lease, position)
        is_kept = True
        while position < last:
            start = position
            position = min([*(cut for cut in wanted if cut > start), start + self._longest_pass, last])
            forward(self._model, ids[start:position], past, start, self._device)
            with deferred_interrupts():
                is_kept = is_kept and self._keep_chunk(past, lease, key, start, position, wanted)
                if is_kept and position == last and lease.num_shared * self._cache.config.page_size < last:
                    self._cache.commit(lease, key, last)
        return position

    def _wanted(self, lease: Lease, num_tokens: int, last: int, is_replay: bool) -> dict[int, str]:
        """Where checkpoints are put on the way, and why."""
        cache = self._cache
        names, start = cache.config.placement, lease.num_hit_tokens
        spare: Iterable[int] = ()
        if not self.has_states:
            spare = range(start, last + 1, self._longest_pass)  # they weigh nothing
        elif "geometric" in names:
            if self._longest_pass == self.grid:
                spare = placement.spare(start, last, self.grid, cache.spare_share)
            else:
                spare = placement.sparse(start, last, self.grid)
        wanted = dict.fromkeys(spare, Kind.INTERVAL)
        wanted |= placement.of_prompt(
            names,
            num_tokens,
            self.grid,
            branching_len=lease.branching_len,
            shared=(),
            declared=(),
            is_replay=is_replay,
        )
        return wanted

    def _keep_chunk(
        self, past: DynamicCache, lease: Lease, key: Key, start: int, end: int, wanted: dict[int, str]
    ) -> bool:
        """Copy what has just been computed into pages, and the state into a slot. False when there is no page."""
        cache, page_size = self._cache, self._cache.config.page_size
        if not cache.reserve(lease, end):
            return False
        first = max(start // page_size, lease.num_shared)  # what the tree has is not written
        self._memory.write_pages(past.layers, lease.block_table[first : end // page_size], end, row=0, num_seen=end)
        if end in wanted:
            is_spare = wanted[end] == Kind.INTERVAL and self.has_states
            checkpoint = cache.capture_spare(lease, end) if is_spare else cache.capture(lease, end, wanted[end])
            if checkpoint is not None:
                self._memory.write_state(states_of(past.layers, self._layout, 0), checkpoint.slot)
                cache.commit(lease, key, end)
        return True
