"""A prefix cache inside transformers: `AutoModelForCausalLM` and `generate` as they are, and what was computed is kept.

    model = AutoModelForCausalLM.from_pretrained(...)
    cache = hybrid.hf.PrefixCache(model, memory="1GiB")
    out = cache.generate(input_ids, max_new_tokens=64)
    with cache.session(input_ids) as past:
        out = model.generate(input_ids, past_key_values=past, max_new_tokens=64)

What must stay true:

* What is restored is bit for bit what was saved, and a prefill is cut only at multiples of `chunk_size`. In
  deterministic mode it is cut at every one of them, whether it starts at a hit or not: so on a CPU a hit is bitwise the
  run that computed everything.
* Only what a prefill computed in whole chunks is kept. An answer is computed once more as whole chunks, after it has
  been given, because what decoding leaves is not bitwise what a prefill does.
* A lease is held while a prefill runs, and never while others run: transformers' cache holds copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybrid import placement
from hybrid.cache import HybridCache
from hybrid.config import PLACEMENTS, CacheConfig
from hybrid.errors import ArgumentError
from hybrid.eviction import INTERVAL, Policy
from hybrid.explain import Explanation, explain
from hybrid.hf_layers import fill, stacked
from hybrid.hf_memory import PageMemory
from hybrid.hf_past import Past
from hybrid.hf_probe import forward, probe, use_functions_of_the_device
from hybrid.hf_prompt import Prompts, answers_of, option, prompts_of, refuse_options, tokens_of
from hybrid.interrupts import deferred_interrupts
from hybrid.key import Key
from hybrid.lease import CacheStats, Lease, Pin
from hybrid.settings import free_memory


class PrefixCache:
    """Keeps what a model of transformers computes of prompts and answers, for later prompts that begin the same.

    May be called from any thread; calls wait for each other while they compute a prompt.

    Args:
        model: an `AutoModelForCausalLM`, in evaluation mode. Its weights must not change; if they do, call `clear`.
        memory: for pages and states: bytes, a text as "512MiB", or a fraction of what is free.
        device: where that memory is; None: the model's device.
        deterministic: cut every prefill at every multiple of `chunk_size`, so that a hit is bitwise a cold run. Without
            it a prefill is cut only where a checkpoint is put, and results agree within rounding. None: on for CPU, off
            for GPU.
        chunk_size: prefills are cut at multiples of this many tokens, and checkpoints lie there; what follows the last
            one is computed again. Smaller passes are slower. None: 256 in deterministic mode, else 64.
        page_size: tokens per page.
        eviction, placement: as in `hybrid.CacheConfig`.
        keep_answers: keep answers, not only prompts: each is computed once more as whole chunks after it was given.

    Raises:
        UnsupportedModelError: the model's cache cannot be saved; the message names what of it.
        MemoryBudgetError: the memory does not suffice, or is not there.
    """

    def __init__(
        self,
        model: Any,
        memory: int | float | str = "1GiB",
        *,
        device: str | torch.device | None = None,
        deterministic: bool | None = None,
        chunk_size: int | None = None,
        page_size: int = 64,
        eviction: str | Policy = "lhd",
        placement: Sequence[str] = PLACEMENTS,
        keep_answers: bool = True,
    ) -> None:
        self._model = model
        self._device = model.get_input_embeddings().weight.device
        self._refuse_training()
        if deterministic is None:
            deterministic = self._device.type == "cpu"
        config = CacheConfig(
            memory=memory,
            page_size=page_size,
            chunk_size=chunk_size or (256 if deterministic else 64),
            eviction=eviction,
            placement=placement,
            deterministic=deterministic,
        )
        if self._device.type == "cpu":
            use_functions_of_the_device(model)
        self._layout = probe(model, self._device)
        where = torch.device(device) if device is not None else self._device
        num_bytes = config.memory_bytes(free_memory(where))
        page_bytes = self._layout.page_bytes(page_size)
        self.memory = PageMemory(self._layout, page_size, num_bytes, where)
        self.cache = HybridCache.of_bytes(num_bytes, page_bytes, self._layout.state_bytes, config, mover=self.memory)
        self.keep_answers = keep_answers
        self._longest_pass = config.grid if deterministic else self._layout.longest_pass(config.grid)
        self.explanations: tuple[Explanation, ...] = ()
        self._lock = threading.RLock()

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of a prefix is a part of the cache: the model has full attention alone."""
        return self._layout.can_be_cut

    @property
    def has_states(self) -> bool:
        """Whether the model has linear-attention layers."""
        return bool(self._layout.states)

    # The two ways to use it

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *, namespace: str = "", **options: Any) -> Any:
        """`model.generate`, from what is known of the prompts; what it computes is kept.

        `explanations` tells afterwards, per prompt, why the hit was what it was.

        Args:
            inputs: the prompts, `[batch, tokens]`, padded on the left; also as `input_ids`.
            namespace: prompts of different namespaces share nothing: an adapter, a tenant.
            options: whatever `model.generate` takes, but for what cannot be right.

        Returns:
            What `model.generate` returns.

        Raises:
            ArgumentError: an option cannot be right with a prefix cache; the message says why.
            PromptError: the prompts are none, or padded on the right.
        """
        self._refuse_training()
        input_ids = options.pop("input_ids", None)
        if inputs is not None and input_ids is not None:
            raise ArgumentError("generate: the prompts are given twice, as first argument and as input_ids")
        input_ids = inputs if input_ids is None else input_ids
        refuse_options(self._model, options)
        pad_tokens, end_tokens = (tokens_of(self._model, options, name) for name in ("pad_token_id", "eos_token_id"))
        prompts = prompts_of(input_ids, options.get("attention_mask"), next(iter(pad_tokens), None), end_tokens)
        past = self._begin(prompts, namespace)
        num_beams, num_returned = (
            option(self._model, options, name) or 1 for name in ("num_beams", "num_return_sequences")
        )
        if max(num_beams, num_returned) > 1:
            past.batch_repeat_interleave(max(num_beams, num_returned))
        output = self._model.generate(input_ids, past_key_values=past, **options)
        if self.keep_answers and num_returned == 1:
            sequences = output if isinstance(output, Tensor) else output.sequences
            for row, ids in zip(prompts.rows, answers_of(prompts, sequences, end_tokens, pad_tokens), strict=True):
                self._keep_turn(ids, len(row) - 1, namespace)
        return output

    @contextmanager
    def session(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, namespace: str = ""
    ) -> Iterator[Past]:
        """A past to be given to `model.generate`, or to the model, together with all of `input_ids`.

        What the model computes with it, or with its forks, is kept when the session ends; after an exception nothing of
        it is. The past stays usable afterwards, as any cache of transformers.

        Raises:
            PromptError: the prompts are none, or padded on the right.
        """
        self._refuse_training()
        pad_tokens, end_tokens = (tokens_of(self._model, {}, name) for name in ("pad_token_id", "eos_token_id"))
        prompts = prompts_of(input_ids, attention_mask, next(iter(pad_tokens), None), end_tokens)
        past = self._begin(prompts, namespace)
        family = past.family

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen = kwargs.get("past_key_values")
            if isinstance(seen, Past) and any(seen is member for member in family):
                seen.note(kwargs.get("input_ids", args[0] if args else None))

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = kwargs.get("past_key_values")
            if isinstance(seen, Past) and any(seen is member for member in family):
                seen.refuse_another_place(kwargs.get("position_ids"))

        hooks = [
            self._model.register_forward_pre_hook(look, with_kwargs=True),
            self._model.register_forward_hook(note, with_kwargs=True),
        ]
        try:
            yield past
        finally:
            for hook in hooks:
                hook.remove()
        for member in family if self.keep_answers else ():
            for row, prompt in zip(member.known_rows() or (), prompts.rows, strict=False):
                self._keep_turn(row, min(len(row), len(prompt) - 1), namespace)

    def keep(self, token_ids: Sequence[int], namespace: str = "") -> None:
        """Compute what is not known of these tokens, as whole chunks, and keep it. For instance while nobody waits."""
        end = len(token_ids) // self._grid * self._grid
        with self._lock:
            self.cache.adopt()
            if end and self.cache.tree.peek(Key.of(token_ids[:end], namespace), end).num_tokens < end:
                self._prefill(token_ids[:end], end, namespace, is_replay=True)

    def _keep_turn(self, token_ids: Sequence[int], num_before: int, namespace: str) -> None:
        """`keep` a turn, unless what was before it could not be kept: then all of it would be computed for nothing."""
        num_before -= num_before % self._grid
        key = Key.of(token_ids[:num_before], namespace)
        with self._lock:
            was_kept = self.cache.tree.peek(key, num_before).num_page_tokens == num_before
        if was_kept:
            self.keep(token_ids, namespace)

    # What it holds

    def explain(self, input_ids: Tensor, namespace: str = "") -> Explanation:
        """What a prompt of one sequence would hit now, and why not more. Changes nothing."""
        ids = prompts_of(input_ids, None, None, frozenset()).rows[0]
        with self._lock:
            key, limit, tree = Key.of(ids, namespace), len(ids) - 1, self.cache.tree
            return explain(tree, key, limit, tree.peek(key, limit))

    def pin(self, input_ids: Tensor, ttl: float = float("inf"), namespace: str = "") -> Pin | None:
        """Keep what is usable of a sequence from eviction; see `HybridCache.pin`."""
        ids = prompts_of(input_ids, None, None, frozenset()).rows[0]
        with self._lock:
            self.cache.adopt()
            return self.cache.pin(Key.of(ids, namespace), ttl)

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin."""
        with self._lock:
            self.cache.adopt()
            self.cache.unpin(pin)

    def stats(self) -> CacheStats:
        """What the cache did and holds."""
        return self.cache.stats()

    def audit(self) -> None:
        """Prove that every page and every slot is in exactly one place.

        Raises:
            AuditError: it is not so.
        """
        with self._lock:
            self.cache.audit()

    def clear(self) -> None:
        """Forget everything that is not pinned: for instance because the weights have changed."""
        with self._lock:
            self.cache.adopt()
            self.cache.clear()

    # How it is computed

    @property
    def _grid(self) -> int:
        return self.cache.config.grid

    def _refuse_training(self) -> None:
        if self._model.training:
            raise ArgumentError("the model is in training mode, where dropout changes what it computes: model.eval()")

    def _begin(self, prompts: Prompts, namespace: str) -> Past:
        """A past that lacks of one prompt what follows its last boundary, and of several their last token."""
        explanations = []
        ends = [len(row) - 1 for row in prompts.rows]
        is_alone = len(prompts.rows) == 1 and not prompts.is_padded
        if is_alone:
            ends = [placement.prompt_end(len(prompts.rows[0]), self._grid)]
        done = []
        for row, end in zip(prompts.rows, ends, strict=True):
            layers, explanation = self._prefill(row, end, namespace, is_replay=False)
            done.append(layers)
            explanations.append(explanation)
        layers = done[0] if is_alone else self._stack(done, prompts.width - 1)
        self.explanations = tuple(explanations)
        rows = [row[:end] for row, end in zip(prompts.rows, ends, strict=True)]
        return Past(self, layers, rows, prompts.pads, namespace, explanations)

    def compute(self, rows: Sequence[Sequence[int]], pads: Sequence[int], namespace: str) -> list[Any]:
        """The layers after these tokens, padded on the left, each row resumed at its nearest checkpoint."""
        done = [self._prefill(row, len(row), namespace, is_replay=True)[0] for row in rows]
        return done[0] if len(rows) == 1 and not pads[0] else self._stack(done, len(rows[0]) + pads[0])

    def _stack(self, done: Sequence[Sequence[Any]], length: int) -> list[Any]:
        layers = self._fresh()
        if length:
            fill(layers, self._layout, *stacked(done, self._layout, length), length)
        return layers

    def _fresh(self) -> list[Any]:
        return DynamicCache(config=self._model.config).layers

    @torch.no_grad()
    def _prefill(self, ids: Sequence[int], end: int, namespace: str, is_replay: bool) -> tuple[list[Any], Explanation]:
        """The layers of one sequence after `ids[:end]`, cut on the grid; whole chunks are kept.

        Where memory for a chunk cannot be had, it and what follows is computed all the same.
        """
        key = Key.of(ids, namespace)
        with self._lock:
            self.cache.adopt()
            past = DynamicCache(config=self._model.config)
            with deferred_interrupts():
                lease = self.cache.open(key, end if is_replay else len(ids) - 1, 0)
            position = 0
            if lease is None:
                explanation = Explanation(len(ids), 0, 0, "no memory can be had for this prompt now")
            else:
                explanation = lease.explanation
                try:
                    position = self._prefill_chunks(past, lease, key, ids, end, is_replay)
                finally:
                    with deferred_interrupts():
                        self.cache.close(lease)
            if not is_replay:
                self.cache.record(explanation)
            while position < end:
                start, position = position, min(end, (position + self._longest_pass) // self._grid * self._grid)
                forward(self._model, ids[start:position], past, start, self._device)
            return past.layers, explanation

    def _prefill_chunks(
        self, past: DynamicCache, lease: Lease, key: Key, ids: Sequence[int], end: int, is_replay: bool
    ) -> int:
        """Resume at the hit, and compute and keep every whole chunk before `end`. Returns how far it came."""
        position, last = lease.num_hit_tokens, end // self._grid * self._grid
        wanted = self._wanted(lease, len(ids), last, is_replay)
        if position:
            pages = lease.block_table[: position // self.cache.config.page_size]
            self.memory.restore(past.layers, pages, lease.read_slot, position)
        self.cache.advance(lease, position)
        is_kept = True
        while position < last:
            start = position
            position = min([*(cut for cut in wanted if cut > start), start + self._longest_pass, last])
            forward(self._model, ids[start:position], past, start, self._device)
            with deferred_interrupts():
                is_kept = is_kept and self._keep_chunk(past, lease, key, start, position, wanted)
                if is_kept and position == last and lease.num_shared * self.cache.config.page_size < last:
                    self.cache.commit(lease, key, last)
        return position

    def _wanted(self, lease: Lease, num_tokens: int, last: int, is_replay: bool) -> dict[int, str]:
        """Where checkpoints are put on the way, and why."""
        cache = self.cache
        names, start = cache.config.placement, lease.num_hit_tokens
        spare: Iterable[int] = ()
        if not self.has_states:
            spare = range(start, last + 1, self._longest_pass)  # they weigh nothing
        elif "geometric" in names:
            is_cut = self._longest_pass == self._grid  # else each costs a cut
            spare = placement.spare(start, last, self._grid, cache.spare_share if is_cut else placement.DENSE_ABOVE)
        wanted = dict.fromkeys(spare, INTERVAL)
        wanted |= placement.of_prompt(
            names,
            num_tokens,
            self._grid,
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
        cache, page_size = self.cache, self.cache.config.page_size
        if not cache.reserve(lease, end):
            return False
        first = max(start // page_size, lease.num_shared)  # what the tree has is not written
        self.memory.write_pages(past.layers, lease.block_table[first : end // page_size], end)
        if end in wanted:
            is_spare = wanted[end] == INTERVAL and self.has_states
            checkpoint = cache.capture_spare(lease, end) if is_spare else cache.capture(lease, end, wanted[end])
            if checkpoint is not None:
                self.memory.write_state(past.layers, checkpoint.slot)
                cache.commit(lease, key, end)
        return True
