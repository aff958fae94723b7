"""A prefix cache inside transformers: `AutoModelForCausalLM` and `generate` stay as they are.

    model = AutoModelForCausalLM.from_pretrained(...)
    cache = hybrid.hf.PrefixCache(model, memory="1GiB")
    out = cache.generate(input_ids, max_new_tokens=64)
    with cache.session(input_ids) as past:
        out = model.generate(input_ids, past_key_values=past, max_new_tokens=64)

How prompts are computed, and the invariants of that, are in `hybrid.hf.prefill`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.config import PLACEMENTS, CacheConfig
from hybrid.cache.explain import Explanation, explain
from hybrid.cache.pins import Pin
from hybrid.cache.stats import CacheStats
from hybrid.errors import ArgumentError, NonFiniteError
from hybrid.hf.follow import following
from hybrid.hf.memory import PageMemory
from hybrid.hf.options import Prompts, option, parse_prompts, refuse_options, token_option, turns_of
from hybrid.hf.past import Boundary, Past
from hybrid.hf.prefill import Prefill, Prefiller
from hybrid.hf.probe import probe
from hybrid.hf.torch_functions import use_torch_functions_on_cpu
from hybrid.key import Key
from hybrid.memory.device import free_memory
from hybrid.memory.memory import CacheMemory
from hybrid.tree.policy import Policy

DEFAULT_CHUNK_SIZE, DETERMINISTIC_CHUNK_SIZE = 64, 256
"""Tokens of a chunk. In deterministic mode every chunk is a pass of its own, so chunks are longer."""


class PrefixCache:
    """Caches the prompts and answers that a model of transformers computes, for later prompts with the same prefix.

    It may be called from any thread; calls wait for each other while they compute a prompt.

    Args:
        model: an `AutoModelForCausalLM`, in evaluation mode. If its weights change, call `clear`.
        memory: memory for pages and states: bytes, a text such as "512MiB", or a fraction of the free memory.
        device: device of that memory. None: the model's device.
        deterministic: cut every prefill at every multiple of `chunk_size`, so that a hit is bitwise equal to a cold
            run. Otherwise a prefill is cut only where a checkpoint is captured, and results agree within rounding.
            None: on for CPU, off for GPU.
        chunk_size: prefills are cut, and checkpoints captured, at multiples of this many tokens. The tokens after the
            last multiple are computed again. Smaller passes are slower. None: 256 in deterministic mode, 64 otherwise.
        page_size: tokens per page.
        eviction: as in `hybrid.CacheConfig`.
        placement: as in `hybrid.CacheConfig`. Without "turn_end" the answers of `generate` and of sessions are not
            cached. In deterministic mode each answer is computed again in whole chunks when it is cached, since
            decoding is not bitwise equal to a prefill.

    Attributes:
        cache: the bookkeeping: the tree, the pools, pins and statistics.
        memory: the tensors of pages and state slots.
        explanations: of the last call of `generate` or `session`, per prompt why its hit was as long as it was.

    Raises:
        UnsupportedModelError: the model's cache cannot be saved; the message says why.
        MemoryBudgetError: the memory does not suffice, or is not free.
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
    ) -> None:
        self._model = model
        self._device: torch.device = model.get_input_embeddings().weight.device
        self._refuse_training()
        if deterministic is None:
            deterministic = self._device.type == "cpu"
        config = CacheConfig(
            memory=memory,
            page_size=page_size,
            chunk_size=chunk_size or (DETERMINISTIC_CHUNK_SIZE if deterministic else DEFAULT_CHUNK_SIZE),
            eviction=eviction,
            placement=placement,
            deterministic=deterministic,
        )
        if self._device.type == "cpu":
            use_torch_functions_on_cpu(model)
        layout = probe(model, self._device)
        memory_device = torch.device(device) if device is not None else self._device
        num_bytes = config.memory_bytes(free_memory(memory_device))
        self.memory: PageMemory = PageMemory(layout, page_size, num_bytes, memory_device)
        pools = CacheMemory.of_bytes(num_bytes, layout.page_bytes(page_size), layout.state_bytes, mover=self.memory)
        self.cache: HybridCache = HybridCache(pools, config)
        self.explanations: tuple[Explanation, ...] = ()
        self._prefiller = Prefiller(model, self._device, layout, self.memory, self.cache)
        self._keeps_turns = "turn_end" in config.placement

    # Generating

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *, namespace: str = "", **options: Any) -> Any:
        """`model.generate`, resumed from cached prefixes; prompts and answers are cached.

        Args:
            inputs: the prompts, `[batch, tokens]`, padded on the left. The name `input_ids` works as well.
            namespace: prompts in different namespaces share nothing: an adapter, a tenant.
            options: the options of `model.generate`, except those that cannot work with a prefix cache.

        Returns:
            The return value of `model.generate`.

        Raises:
            ArgumentError: an option cannot work with a prefix cache; the message says why.
            PromptError: there is no prompt, or it is padded on the right.
            NonFiniteError: the model computed NaN or infinity; nothing of that pass is cached.
        """
        self._refuse_training()
        input_ids = options.pop("input_ids", None)
        if inputs is not None and input_ids is not None:
            raise ArgumentError("generate: the prompts are given twice, as first argument and as input_ids")
        input_ids = inputs if input_ids is None else input_ids
        refuse_options(self._model, options)
        pad_tokens, end_tokens = (token_option(self._model, options, name) for name in ("pad_token_id", "eos_token_id"))
        prompts = parse_prompts(input_ids, options.get("attention_mask"), next(iter(pad_tokens), None), end_tokens)
        past = self._begin(prompts, namespace)
        num_beams, num_returned = (
            option(self._model, options, name) or 1 for name in ("num_beams", "num_return_sequences")
        )
        repeats = max(num_beams, num_returned)
        if repeats > 1:
            past.batch_repeat_interleave(repeats)
        is_kept = self._keeps_turns and num_returned == 1
        with following(self._model, past):
            output = self._model.generate(input_ids, past_key_values=past, **options)
        if is_kept:
            sequences = output if isinstance(output, Tensor) else output.sequences
            turns = turns_of(prompts, sequences, end_tokens, pad_tokens)
            for at, (row, ids) in enumerate(zip(prompts.rows, turns, strict=True)):
                self._keep_turn(ids, len(row) - 1, past, range(at * repeats, (at + 1) * repeats))
        return output

    @contextmanager
    def session(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, namespace: str = ""
    ) -> Iterator[Past]:
        """A past to be given, together with all of `input_ids`, to `model.generate` or to the model.

        When the session ends, what the model computed with the past and its forks is cached; after an exception nothing
        of it is. The past can still be used afterwards, as any cache of transformers.

        Args:
            input_ids: the prompts, `[batch, tokens]`, padded on the left.
            attention_mask: `[batch, tokens]`, 0 for padding.
            namespace: prompts in different namespaces share nothing.

        Raises:
            PromptError: there is no prompt, or it is padded on the right.
        """
        self._refuse_training()
        pad_tokens, end_tokens = (token_option(self._model, {}, name) for name in ("pad_token_id", "eos_token_id"))
        prompts = parse_prompts(input_ids, attention_mask, next(iter(pad_tokens), None), end_tokens)
        past = self._begin(prompts, namespace)
        with following(self._model, past):
            yield past
        for member in past.family if self._keeps_turns else ():
            for at, row in enumerate(member.known_rows() or ()):
                num_prompt = min(len(row), member.explanations[at].asked - 1)
                self._keep_turn(row, num_prompt, member, [at])

    def keep(self, token_ids: Sequence[int], namespace: str = "") -> None:
        """Compute the whole chunks of these tokens that are not cached, and cache them: for instance between requests.

        Args:
            token_ids: the tokens of one sequence.
            namespace: prompts in different namespaces share nothing.
        """
        self._prefiller.keep(token_ids, namespace)

    # Bookkeeping

    def explain(self, input_ids: Tensor, namespace: str = "") -> Explanation:
        """The hit that a prompt, `[1, tokens]`, would have now, and why it would not be longer. Changes nothing."""
        ids = parse_prompts(input_ids, None, None, frozenset()).rows[0]
        with self._prefiller.lock:
            key, limit, tree = Key.of(ids, namespace), len(ids) - 1, self.cache.tree
            return explain(tree, key, limit, tree.peek(key, limit))

    def pin(self, input_ids: Tensor, ttl: float = float("inf"), namespace: str = "") -> Pin | None:
        """Protect the usable prefix of a prompt, `[1, tokens]`, from eviction; see `HybridCache.pin`."""
        ids = parse_prompts(input_ids, None, None, frozenset()).rows[0]
        with self._prefiller.lock:
            self.cache.adopt()
            return self.cache.pin(Key.of(ids, namespace), ttl)

    def unpin(self, pin: Pin) -> None:
        """Release a pin."""
        with self._prefiller.lock:
            self.cache.adopt()
            self.cache.unpin(pin)

    def stats(self) -> CacheStats:
        """Counts since the cache was made, and its contents."""
        return self.cache.stats()

    def audit(self) -> None:
        """Verify that every page and every state slot has exactly one owner.

        Raises:
            AuditError: a page or a slot has none or several; the message names it.
        """
        with self._prefiller.lock:
            self.cache.audit()

    def clear(self) -> None:
        """Evict everything that is not pinned: for instance because the weights have changed."""
        with self._prefiller.lock:
            self.cache.adopt()
            self.cache.clear()

    def _refuse_training(self) -> None:
        if self._model.training:
            raise ArgumentError(
                "the model is in training mode, where dropout changes its results: call model.eval() first"
            )

    def _keep_turn(self, token_ids: Sequence[int], num_prompt: int, past: Past, rows: Iterable[int]) -> None:
        """Cache a turn whose answer has been computed: no failure of it takes the answer away."""
        try:
            self._prefiller.keep_turn(token_ids, num_prompt, past, rows)
        except NonFiniteError as error:
            warnings.warn(f"an answer is not cached: {error}", RuntimeWarning, stacklevel=4)

    def _begin(self, prompts: Prompts, namespace: str) -> Past:
        """A past after the prompts: of a single one up to its last boundary, of several up to their last tokens."""
        explanations = []
        ends = [len(row) - 1 for row in prompts.rows]
        is_alone = len(prompts.rows) == 1 and not prompts.is_padded
        if is_alone:
            ends = [placement.prompt_end(len(prompts.rows[0]), self._prefiller.grid)]
        done = []
        for row, end in zip(prompts.rows, ends, strict=True):
            layers, explanation = self._prefiller.prefill(Prefill(row, end, namespace))
            done.append(layers)
            explanations.append(explanation)
        layers = done[0] if is_alone else self._prefiller.stack(done, prompts.width - 1)
        self.explanations = tuple(explanations)
        rows = [row[:end] for row, end in zip(prompts.rows, ends, strict=True)]
        boundaries = [Boundary(ends[0])] if is_alone else [None] * len(rows)
        return Past(self._prefiller, layers, rows, prompts.pads, namespace, explanations, boundaries)
