"""Computing prompts with a model of transformers: resuming from cached prefixes, and committing new ones.

Invariants:

* In deterministic mode each segment (`hybrid.hf.keys`) is a pass, whether a prefill starts at a hit or at zero. A
  hit is then bitwise equal to the run that computes everything. Otherwise a prefill is cut at multiples of the grid.
* What the model computed outside of a prefill (a pass of `generate`, a session) is committed as it is only where that
  cannot change results: whole segments in deterministic mode, anything that ends on the grid otherwise. The rest is
  computed again.
* A lease is held only while a prefill runs: transformers' cache holds copies.
* The cache is changed in its `bookkeeping` alone, before and after each pass. Passes run outside of it, so that signal
  handlers may interrupt them.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import LEFT_OUT, Explanation
from hybrid.cache.lease import Lease
from hybrid.errors import ArgumentError, NonFiniteError, RequestError
from hybrid.hf.installed import cache_name
from hybrid.hf.keys import MIN_SEGMENT, KeySpace, last_image_end
from hybrid.hf.layers import PageMemory, fill, stack_left_padded, states_of, token_tensor
from hybrid.hf.options import Prompts
from hybrid.hf.pass_model import PassModel
from hybrid.hf.past import CommitPoint, Past, PastOrigin, finite_logits
from hybrid.interrupts import deferred, handlers_allowed
from hybrid.key import Key
from hybrid.prompts.images import Media
from hybrid.tree.node import Kind


@dataclass(frozen=True)
class Prefill:
    """A sequence to be computed from the cache.

    Attributes:
        ids: its token ids.
        end: tokens to compute; at most `len(ids)`.
        key: its key in the tree.
        limit: tokens that may be taken from the cache, and given to it.
        media: its images; None: it has none.
        max_rest: where a part of it is cached and no more than this many tokens are not, only that part is restored.
        is_replay: it was computed before, and is computed again to be committed or restored; otherwise it is a prompt.
        is_cold: nothing of it is taken from the cache, nor given to it: what was taken gave NaN or infinity.
    """

    ids: Sequence[int]
    end: int
    key: Key
    limit: int
    media: Media | None = None
    max_rest: int = 0
    is_replay: bool = False
    is_cold: bool = False

    def is_left_after(self, num_hit_tokens: int) -> bool:
        """Tell whether only this hit is to be restored."""
        rest = len(self.ids) - num_hit_tokens
        return num_hit_tokens > 0 and rest <= self.max_rest and last_image_end(self.media) <= num_hit_tokens


class ComputedPrefix(NamedTuple):
    """A sequence that was computed from the cache.

    Attributes:
        layers: of transformers' cache.
        num_tokens: tokens that they hold.
        explanation: why the hit was as long as it was.
    """

    layers: list[Any]
    num_tokens: int
    explanation: Explanation


class Prefiller:
    """Computes prompts, between transformers' caches and the memory of a `PrefixCache`.

    Args:
        model: what computes the passes.
        memory: the tensors of pages and state slots.
        cache: the bookkeeping of the same memory.
        lock: held while a prompt is computed, and while the bookkeeping is read or changed.
        turn_ends: ids of the tokens that end a turn.
    """

    def __init__(
        self,
        model: PassModel,
        memory: PageMemory,
        cache: HybridCache,
        lock: threading.RLock,
        turn_ends: frozenset[int],
    ) -> None:
        self._model = model
        self._layout = memory.layout
        self._memory = memory
        self._cache = cache
        self._lock = lock
        self._turn_ends = turn_ends
        self._is_in_segments = cache.config.deterministic is True
        self._num_resumed = 0  # tokens that the latest prefill has restored
        self._max_pass_tokens = self._layout.max_pass_tokens(cache.config.grid)

    @property
    def grid(self) -> int:
        """Prefills are cut at some multiples of this many tokens; 1 in deterministic mode, where segments say where."""
        return self._cache.config.grid

    @property
    def can_be_cut(self) -> bool:
        """Tell whether the cache of a prefix can be cut out of the cache: the model has full attention alone."""
        return self._layout.can_be_cut

    @property
    def has_windows(self) -> bool:
        """Tell whether the model has sliding windows."""
        return self._layout.has_windows

    @property
    def has_states(self) -> bool:
        """Tell whether the model has linear-attention layers."""
        return bool(self._layout.states)

    # Computing a sequence from the cache

    @torch.no_grad()
    def prefill(self, work: Prefill) -> ComputedPrefix:
        """Compute a sequence in passes, and commit those up to its limit. Where a pass after a hit gives NaN or
        infinity, it is computed once more, without the hit, which is dropped.

        If no memory can be allocated for a pass, that one and those after it are computed but not committed.

        Raises:
            NonFiniteError: the model computed NaN or infinity. The pass was not committed; those before it may be.
        """
        with self._lock:
            self._cache.adopt()
            try:
                done = self._prefill(work)
            except NonFiniteError:
                if not self._num_resumed:
                    raise
                self.drop([(work.key, self._num_resumed)])
                done = self._prefill(replace(work, is_cold=True))
            if not work.is_replay and not work.is_cold:
                self._cache.record(done.explanation)
            return done

    @torch.no_grad()
    def _prefill(self, work: Prefill) -> ComputedPrefix:
        past, self._num_resumed = self._model.empty_cache(), 0
        position, explanation = (self._prefill_cold if work.is_cold else self._prefill_committed)(past, work)
        while position < work.end and not work.is_left_after(explanation.usable_hit):
            start, position = position, work.end
            if not self._is_in_segments:
                position = min(position, (start + self._max_pass_tokens) // self.grid * self.grid)
            self._forward(work, position, past, start)
        return ComputedPrefix(past.layers, position, explanation)

    def drop(self, hits: Sequence[tuple[Key, int]]) -> None:
        """Drop hits from which a pass gave NaN or infinity: each a key, and how many of its tokens were cached."""
        with self._lock:
            self._cache.adopt()
            for key, num_tokens in hits:
                self._cache.drop(key, num_tokens)

    def compute(self, rows: Sequence[Sequence[int]], pads: Sequence[int], keys: KeySpace) -> list[Any]:
        """The layers after these tokens, padded on the left. Each row resumes at its nearest checkpoint.

        Raises:
            RequestError: the model has changed since the namespace was found for it.
        """
        if not self._model.versions.current().owns(keys.namespace):
            raise RequestError("the model has changed since this past was made; start a session again")
        done = [
            self.prefill(
                Prefill(row, len(row), keys.key(at, row), len(row), keys.media[at], is_replay=True),
            ).layers
            for at, row in enumerate(rows)
        ]
        return done[0] if len(rows) == 1 and not pads[0] else self.stack(done, len(rows[0]) + pads[0])

    def stack(self, done: Sequence[Sequence[Any]], length: int) -> list[Any]:
        """The layers of several sequences as those of one batch of `length` positions, padded on the left."""
        layers: list[Any] = self._model.empty_cache().layers
        if length:
            tokens, states = stack_left_padded(done, self._layout, length)
            fill(layers, self._layout, tokens, states, length)
        return layers

    # Committing what was computed outside of a prefill

    def next_boundary(
        self,
        before: CommitPoint | None,
        layers: Sequence[Any],
        row: int,
        ids: Sequence[int],
        num_new: int,
        keys: KeySpace,
    ) -> CommitPoint | None:
        """The last boundary of a sequence after one more pass.

        Args:
            before: its last boundary before the pass.
            layers: the layers of the batch after the pass.
            row: index of the sequence in the batch.
            ids: the tokens that the layers hold of it.
            num_new: how many of them were computed by the pass.
            keys: how the sequences of the batch are keyed.
        """
        num_tokens = len(ids)
        if num_tokens % self.grid or self._layout.has_windows or num_tokens > self._model.max_tokens:
            return before
        if self._is_in_segments:
            start = num_tokens - num_new
            is_alone = len(token_tensor(layers, self._layout.tokens[0])) == 1  # bits may depend on the rows of a batch
            if num_new < MIN_SEGMENT or not is_alone or before is None or before.num_tokens != start:
                return before
            if (start, num_tokens) not in keys.key(row, ids).units:
                return before
        elif self.grid == 1:  # every pass ends at one, and the last one's states are those of the layers
            return CommitPoint(num_tokens)
        return CommitPoint(num_tokens, tuple(state.clone() for state in states_of(layers, self._layout, row)))

    def keep(self, token_ids: Sequence[int], keys: KeySpace, row: int = 0) -> None:
        """Compute these tokens up to the last place where prefills may be cut, if they are not cached, and commit them.

        Args:
            token_ids: of one sequence.
            keys: how the sequences of a batch are keyed.
            row: index of the sequence among them.
        """
        whole = keys.key(row, token_ids)
        end = whole.whole(min(len(token_ids), self._model.max_tokens), self.grid)
        key = keys.key(row, token_ids[:end])
        with self._lock:
            self._cache.adopt()
            if end and self._cache.tree.peek(key, end).num_tokens < end:
                work = Prefill(token_ids[:end], end, key, end, keys.media[row], is_replay=True)
                try:
                    self._prefill(work)
                except NonFiniteError:
                    if self._num_resumed:
                        self.drop([(work.key, self._num_resumed)])
                    raise

    def keep_turn(self, token_ids: Sequence[int], num_prompt: int, past: Past, rows: Iterable[int]) -> None:
        """Commit a turn, unless its prompt could not be committed: all of it would be computed again for nothing.

        Args:
            token_ids: the prompt and its answer.
            num_prompt: tokens of the prompt that were committed, if there was memory.
            past: the cache in which the model computed them, as one of the sequences `rows` of the batch.
            rows: indices of sequences in `past`.
        """
        rows = list(rows)
        key = past.keys.key(rows[0], token_ids)
        num_prompt = key.whole(num_prompt, self.grid)
        with self._lock:
            if self._cache.tree.peek(key, num_prompt).num_page_tokens < num_prompt:
                return
            for row in rows:
                boundary = past.boundary_of(row, token_ids)
                if boundary is not None:
                    self._commit_computed(past, row, boundary)
                    if not self._is_in_segments and not (len(past.pads) == 1 and token_ids[-1] in self._turn_ends):
                        token_ids = token_ids[: past.num_seen(row)]  # the last token alone is not worth a pass
                    break
            self.keep(token_ids, past.keys, rows[0])

    @torch.no_grad()
    def _commit_computed(self, past: Past, row: int, boundary: CommitPoint) -> None:
        """Commit one sequence of a past up to a boundary, as it was computed."""
        assert past.rows is not None
        cache, end = self._cache, boundary.num_tokens
        states = states_of(past.layers, self._layout, row) if end == past.num_seen(row) else boundary.states
        if len(states) < len(self._layout.states):
            return  # the tree had them, and has lost them since
        key = past.keys.key(row, past.rows[row][:end])
        if self._end_of_own(key, end) < end:
            return
        cache.adopt()
        with cache.bookkeeping():
            lease = cache.open_whole(key)
            if lease is None:
                return
            try:
                if lease.num_hit_tokens == end or not cache.reserve(lease, end):
                    return
                pages = lease.block_table[lease.num_shared :]
                self._memory.write_pages(past.layers, pages, end, row=row, num_seen=past.num_seen(row))
                checkpoint = cache.capture(lease, end, Kind.TURN_END)
                if checkpoint is not None:
                    self._memory.write_state(states, checkpoint.slot)
                cache.advance(lease, end)
                cache.commit(lease, key, end)
            finally:
                self._close(lease)

    def _close(self, lease: Lease) -> None:
        """Close a lease, unless it has ended since the cache was emptied."""
        with self._cache.bookkeeping():
            if lease in self._cache.leases:
                self._cache.close(lease)

    # The passes of a prefill

    def _prefill_committed(self, past: DynamicCache, work: Prefill) -> tuple[int, Explanation]:
        """Restore the hit, then compute and commit everything up to the limit. Returns the position reached, and why
        the hit was as long as it was."""
        with deferred():  # no handler raises between opening the lease and closing it but in a pass
            with (cache := self._cache).bookkeeping():
                lease = cache.open_whole(work.key) if work.is_replay else cache.open(work.key, work.limit, 0)
            if lease is None:
                return 0, Explanation(len(work.ids), 0, 0, "not enough memory can be allocated for this prompt now")
            try:
                return self._compute_leased(past, work, lease), lease.explanation
            finally:
                self._close(lease)

    def _compute_leased(self, past: DynamicCache, work: Prefill, lease: Lease) -> int:
        """Restore the hit of a lease, and compute and commit what follows. Handlers run while the model computes."""
        cache, key, page_size = self._cache, work.key, self._cache.config.page_size
        with cache.bookkeeping():
            position, last = lease.num_hit_tokens, key.whole(min(work.end, work.limit), self.grid)
            self._num_resumed = position
            if work.is_left_after(position):
                last = position
            wanted = self._checkpoints(lease, work, last)
            if position:
                self._memory.restore(past.layers, lease.block_table[: position // page_size], lease.read_slot, position)
            cache.advance(lease, position)
            keep_end, is_kept = self._end_of_own(key, last), True
        for end in self._cuts(key, position, last, wanted):
            start, position = position, end
            with handlers_allowed():
                self._forward(work, position, past, start)
            is_kept = is_kept and position <= keep_end
            if not is_kept:
                continue
            with cache.bookkeeping():
                is_kept = self._keep_pass(past, lease, start, position, wanted)
                if is_kept:
                    cache.advance(lease, position)
                    if lease.captured or (position == last and lease.num_shared < last // page_size):
                        cache.commit(lease, key, position)
        return position

    def _prefill_cold(self, past: DynamicCache, work: Prefill) -> tuple[int, Explanation]:
        """Compute everything up to the limit, in the passes of `_prefill_committed`."""
        position, last = 0, work.key.whole(min(work.end, work.limit), self.grid)
        for end in self._cuts(work.key, 0, last, {}):
            start, position = position, end
            self._forward(work, position, past, start)
        return position, Explanation(len(work.ids), 0, 0, LEFT_OUT)

    def _cuts(self, key: Key, start: int, last: int, wanted: dict[int, Kind]) -> list[int]:
        """The ends of the passes over the tokens `[start, last)`."""
        if self._is_in_segments:
            return [end for _, end in key.units if start < end <= last]
        cuts: list[int] = []
        while start < last:
            start = min([*(cut for cut in wanted if cut > start), start + self._max_pass_tokens, last])
            cuts.append(start)
        return cuts

    def _end_of_own(self, key: Key, last: int) -> int:
        """Tokens of a key, up to `last`, before a segment that begins with an id of another one in the tree: it has 31
        bits, and what has some of these ids in common shares pages. All ids that stand for a segment are never equal.
        """
        if not self._is_in_segments:
            return last
        found = self._cache.tree.peek(Key(key.ids, key.namespace), last).num_page_tokens
        whole = key.whole(found, self.grid)
        return whole if whole < found < whole + MIN_SEGMENT else last

    def _forward(self, work: Prefill, end: int, past: DynamicCache, start: int) -> None:
        """Run one forward pass over the tokens `[start, end)`."""
        began = time.perf_counter()
        if not finite_logits(self._model.forward(work.ids[start:end], past, start, work.media)):
            raise NonFiniteError(
                f"the model gave logits with NaN or infinity for tokens {start} to {end} of the prompt; nothing of "
                "this pass is cached"
            )
        self._cache.note_pass(end - start, time.perf_counter() - began)

    def _checkpoints(self, lease: Lease, work: Prefill, last: int) -> dict[int, Kind]:
        """The positions up to `last` at which checkpoints are captured, with their kinds."""
        cache = self._cache
        names, start = cache.config.placement, lease.num_hit_tokens
        spare: Iterable[int] = ()
        ends = [end for _, end in work.key.units if end <= last] if self._is_in_segments else []
        if not self.has_states:  # they take no memory
            spare = ends or range(start, last + 1, self._max_pass_tokens)
        elif "geometric" in names and self._is_in_segments:
            free = cache.memory.free_state_share
            spare = (ends[n - 1] for n in placement.spare(bisect_right(ends, start), len(ends), 1, free))
        elif "geometric" in names:
            if self._max_pass_tokens == self.grid:
                spare = placement.spare(start, last, self.grid, cache.memory.free_state_share)
            else:
                spare = placement.sparse(start, last, self.grid)
        wanted = dict.fromkeys(spare, Kind.INTERVAL)
        wanted |= placement.of_prompt(
            {*names, "turn_end"},  # a replay is run to cache its end
            work.limit if work.is_replay else work.limit + 1,
            self.grid,
            branching_len=lease.branching_len,
            shared=(),
            declared=(),
            is_replay=work.is_replay,
            hit=start,
            spacing=cache.tree.anchor_spacing(last) if self.has_states else 0,
            key=lease.key,
        )
        return wanted

    def _keep_pass(self, past: DynamicCache, lease: Lease, start: int, end: int, wanted: dict[int, Kind]) -> bool:
        """Copy the tokens `[start, end)` into pages, and the state into a slot where a checkpoint is wanted. False when
        no page can be allocated."""
        cache, page_size = self._cache, self._cache.config.page_size
        if not cache.reserve(lease, end):
            return False
        first = max(start // page_size, lease.num_shared)  # pages of the tree are not written
        self._memory.write_pages(past.layers, lease.block_table[first : end // page_size], end, row=0, num_seen=end)
        checkpoint = None
        if end in wanted:
            is_spare = wanted[end] == Kind.INTERVAL and self.has_states
            checkpoint = cache.capture_spare(lease, end) if is_spare else cache.capture(lease, end, wanted[end])
            if checkpoint is not None:
                self._memory.write_state(states_of(past.layers, self._layout, 0), checkpoint.slot)
        return True


SHORT_TURN = 128
"""Without determinism, up to this many tokens after a hit are computed by `generate`, in one pass: another one up to
their last boundary would cost as much again. They are committed with the answer."""

MIN_PREFILL = 16
"""Without determinism, fewer tokens are not computed in a pass of their own before `generate` computes the rest: that
would cost more than it saves. They are committed with the answer."""


class PastFactory:
    """Makes the pasts of a `PrefixCache`.

    Args:
        model: computes the passes.
        prefiller: computes prompts from the cache.
        config: of the cache.
    """

    def __init__(self, model: PassModel, prefiller: Prefiller, config: CacheConfig) -> None:
        self._model = model
        self._prefiller = prefiller
        self._config = config

    def make(
        self, prompts: Prompts, keys: KeySpace, max_new_tokens: int | None = None, *, is_cold: bool = False
    ) -> Past:
        """A past after the prompts: of a single one up to its last boundary or the hit, of several up to their last
        tokens.

        Args:
            max_new_tokens: tokens of the answer, at most; None: not known.
            is_cold: without the cache.
        """
        is_alone = len(prompts.rows) == 1 and not prompts.is_padded
        works = [self._alone(prompts.rows[0], keys, max_new_tokens)] if is_alone else self._batch(prompts, keys)
        done = [self._prefiller.prefill(replace(work, is_cold=is_cold)) for work in works]
        layers = done[0].layers if is_alone else self._prefiller.stack([one.layers for one in done], prompts.width - 1)
        rows = [row[: one.num_tokens] for row, one in zip(prompts.rows, done, strict=True)]
        origins = [
            PastOrigin(one.explanation, min(one.num_tokens, work.limit)) for work, one in zip(works, done, strict=True)
        ]
        on_grid = is_alone and works[0].key.whole(done[0].num_tokens, self._prefiller.grid) == done[0].num_tokens
        boundaries = [CommitPoint(done[0].num_tokens)] if on_grid else [None] * len(rows)
        self._model.rope_deltas.set(keys.shifts, self._model.device)
        return Past(self._prefiller, layers, rows, prompts.pads, keys, origins, boundaries)

    def _batch(self, prompts: Prompts, keys: KeySpace) -> list[Prefill]:
        """The prompts of a batch, each computed up to its last token."""
        works = []
        for at, row in enumerate(prompts.rows):
            key, end = keys.key(at, row), len(row) - 1
            limit = end if keys.segments is None else keys.segments.prompt_end(row, key)
            works.append(Prefill(row, end, key, limit, keys.media[at]))
        return works

    def _alone(self, row: Sequence[int], keys: KeySpace, max_new_tokens: int | None) -> Prefill:
        """A single prompt, up to its last boundary; to the end of its last image, since `generate` knows no images."""
        key, media, limit = keys.key(0, row), keys.media[0], len(row) - 1
        if keys.segments is not None:
            limit = keys.segments.prompt_end(row, key)
            return Prefill(row, max(limit, last_image_end(media)), key, limit, media)
        max_rest = self._max_rest(max_new_tokens)
        end = placement.prompt_end(len(row), self._prefiller.grid)
        if max_rest and end < MIN_PREFILL:
            end = 0
        return Prefill(row, max(end, last_image_end(media)), key, limit, media, max_rest)

    def resume(self, past: Past, prompts: Prompts, keys: KeySpace) -> None:
        """Begin again with a past that was given back, for prompts that continue it.

        Raises:
            ArgumentError: they do not, or it is not a past of this cache.
        """
        if not past.belongs_to(self._prefiller) or past.keys.namespace != keys.namespace:
            raise ArgumentError(
                f"generate: {cache_name()}: this past is of another cache or namespace, or the model has changed "
                "since; leave it out"
            )
        past.resume(prompts.rows, prompts.pads, keys)
        self._model.rope_deltas.set(past.keys.shifts, self._model.device)

    def _max_rest(self, max_new_tokens: int | None) -> int:
        """Tokens after a hit that are left to `generate`. Where an answer is too short to reach the next boundary, or
        cannot be committed as it was computed, they would have to be computed again."""
        is_committed = "turn_end" in self._config.placement and not self._config.deterministic
        if not is_committed or self._prefiller.has_windows:
            return 0
        return SHORT_TURN if max_new_tokens is None or max_new_tokens >= self._prefiller.grid else 0
