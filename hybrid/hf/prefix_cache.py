"""A prefix cache inside transformers: `AutoModelForCausalLM` and `generate` as they are, and what was computed is kept.

    model = AutoModelForCausalLM.from_pretrained(...)
    cache = hybrid.hf.PrefixCache(model, memory="1GiB")
    out = cache.generate(input_ids, max_new_tokens=64)
    with cache.session(input_ids) as past:
        out = model.generate(input_ids, past_key_values=past, max_new_tokens=64)

How prompts are computed, and what must stay true of it, is in `hybrid.hf_compute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.config import PLACEMENTS, CacheConfig
from hybrid.cache.explain import Explanation, explain
from hybrid.cache.pins import Pin
from hybrid.cache.stats import CacheStats
from hybrid.errors import ArgumentError
from hybrid.hf.memory import PageMemory
from hybrid.hf.options import Prompts, answers_of, option, prompts_of, refuse_options, tokens_of
from hybrid.hf.past import Mark, Past
from hybrid.hf.prefill import Computer
from hybrid.hf.probe import probe, use_functions_of_the_device
from hybrid.key import Key
from hybrid.memory.device import free_memory
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policy import Policy


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
        keep_answers: keep answers, not only prompts. In deterministic mode each is computed once more as whole chunks
            after it was given, since what decoding leaves is not bitwise what a prefill does.

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
        layout = probe(model, self._device)
        where = torch.device(device) if device is not None else self._device
        num_bytes = config.memory_bytes(free_memory(where))
        page_bytes = layout.page_bytes(page_size)
        self.memory = PageMemory(layout, page_size, num_bytes, where)
        self.cache = HybridCache(
            CacheMemory.of_bytes(num_bytes, page_bytes, layout.state_bytes, mover=self.memory), config
        )
        self.keep_answers = keep_answers
        self.explanations: tuple[Explanation, ...] = ()
        self._computer = Computer(model, self._device, layout, self.memory, self.cache)

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
        repeats = max(num_beams, num_returned)
        if repeats > 1:
            past.batch_repeat_interleave(repeats)
        keeps = self.keep_answers and num_returned == 1
        with self._followed(past) if keeps else nullcontext():
            output = self._model.generate(input_ids, past_key_values=past, **options)
        if keeps:
            sequences = output if isinstance(output, Tensor) else output.sequences
            answers = answers_of(prompts, sequences, end_tokens, pad_tokens)
            for at, (row, ids) in enumerate(zip(prompts.rows, answers, strict=True)):
                rows = range(at * repeats, (at + 1) * repeats)
                self._computer.keep_turn(ids, len(row) - 1, namespace, past, rows)
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
        with self._followed(past):
            yield past
        for member in past.family if self.keep_answers else ():
            for at, row in enumerate(member.known_rows() or ()):
                num_before = min(len(row), member.explanations[at].asked - 1)
                self._computer.keep_turn(row, num_before, namespace, member, [at])

    def keep(self, token_ids: Sequence[int], namespace: str = "") -> None:
        """Compute what is not known of these tokens, as whole chunks, and keep it. For instance while nobody waits."""
        self._computer.keep(token_ids, namespace)

    # What it holds

    def explain(self, input_ids: Tensor, namespace: str = "") -> Explanation:
        """What a prompt of one sequence would hit now, and why not more. Changes nothing."""
        ids = prompts_of(input_ids, None, None, frozenset()).rows[0]
        with self._computer.lock:
            key, limit, tree = Key.of(ids, namespace), len(ids) - 1, self.cache.tree
            return explain(tree, key, limit, tree.peek(key, limit))

    def pin(self, input_ids: Tensor, ttl: float = float("inf"), namespace: str = "") -> Pin | None:
        """Keep what is usable of a sequence from eviction; see `HybridCache.pin`."""
        ids = prompts_of(input_ids, None, None, frozenset()).rows[0]
        with self._computer.lock:
            self.cache.adopt()
            return self.cache.pin(Key.of(ids, namespace), ttl)

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin."""
        with self._computer.lock:
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
        with self._computer.lock:
            self.cache.audit()

    def clear(self) -> None:
        """Forget everything that is not pinned: for instance because the weights have changed."""
        with self._computer.lock:
            self.cache.adopt()
            self.cache.clear()

    def _refuse_training(self) -> None:
        if self._model.training:
            raise ArgumentError("the model is in training mode, where dropout changes what it computes: model.eval()")

    def _begin(self, prompts: Prompts, namespace: str) -> Past:
        """A past that lacks of one prompt what follows its last boundary, and of several their last token."""
        explanations = []
        ends = [len(row) - 1 for row in prompts.rows]
        is_alone = len(prompts.rows) == 1 and not prompts.is_padded
        if is_alone:
            ends = [placement.prompt_end(len(prompts.rows[0]), self._computer.grid)]
        done = []
        for row, end in zip(prompts.rows, ends, strict=True):
            layers, explanation = self._computer.prefill(row, end, namespace)
            done.append(layers)
            explanations.append(explanation)
        layers = done[0] if is_alone else self._computer.stack(done, prompts.width - 1)
        self.explanations = tuple(explanations)
        rows = [row[:end] for row, end in zip(prompts.rows, ends, strict=True)]
        marks = [Mark(ends[0])] if is_alone else [None] * len(rows)
        return Past(self._computer, layers, rows, prompts.pads, namespace, explanations, marks)

    @contextmanager
    def _followed(self, past: Past) -> Iterator[None]:
        """Meanwhile the past, and what is forked from it, knows what the model computes with it."""

        def of_ours(kwargs: dict[str, Any]) -> Past | None:
            seen = kwargs.get("past_key_values")
            return seen if isinstance(seen, Past) and any(seen is member for member in past.family) else None

        def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen = of_ours(kwargs)
            if seen is not None:
                seen.refuse_another_place(kwargs.get("position_ids"))

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            seen = of_ours(kwargs)
            if seen is not None:
                seen.note(kwargs.get("input_ids", args[0] if args else None))

        hooks = [
            self._model.register_forward_pre_hook(look, with_kwargs=True),
            self._model.register_forward_hook(note, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
