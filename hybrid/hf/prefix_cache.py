"""A prefix cache inside transformers: `AutoModelForCausalLM` and `generate` stay as they are.

    model = AutoModelForCausalLM.from_pretrained(...)
    cache = hybrid.hf.PrefixCache(model, memory="1GiB")
    out = cache.generate(input_ids, max_new_tokens=64)
    with cache.session(input_ids) as past:
        out = model.generate(input_ids, **past.as_argument, max_new_tokens=64)

How prompts are computed, and the invariants of that, are in `hybrid.hf.prefill`.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from transformers import GenerationMixin

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import DEFAULT_PLACEMENT, CacheConfig
from hybrid.cache.explain import Explanation, explain_now
from hybrid.cache.fingerprints import fingerprint_of
from hybrid.cache.pins import Pin
from hybrid.cache.stats import CacheStats
from hybrid.checks import refuse_unknown
from hybrid.errors import ArgumentError, NonFiniteError, RequestError
from hybrid.hf.drafting import DraftProvider
from hybrid.hf.images import ImageInputs, Images
from hybrid.hf.keys import KeySpace, Segments
from hybrid.hf.layers import Layout, PageMemory
from hybrid.hf.model_version import digest_of
from hybrid.hf.options import GenerateCall, Prompts, device_named, ids_of, parse_prompts, token_option
from hybrid.hf.pass_model import PassModel, layout_of_model, probe
from hybrid.hf.past import Past, PastOrigin, following
from hybrid.hf.prefill import PastFactory, Prefiller
from hybrid.hf.second_run import SecondRun
from hybrid.key import MAX_NAMESPACE_CHARACTERS, Key, check_namespace
from hybrid.memory.device import free_memory
from hybrid.memory.memory import CacheMemory
from hybrid.models.torch_functions import use_torch_functions_on_cpu
from hybrid.prompts.images import Media
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.speculator import DrafterStats
from hybrid.tiers.archive import Archive, read_archive
from hybrid.tiers.fingerprint import Fingerprint
from hybrid.tiers.transfer import Transfer
from hybrid.tree.policy import Policy

DETERMINISTIC_CHUNK_SIZE = 128
"""Tokens of a chunk in deterministic mode, where each is a pass of its own."""

CPU_CHUNK_SIZE, GPU_CHUNK_SIZE = 1, 16
"""Tokens of a chunk otherwise: the last of them are computed again. On a CPU that takes longer than the bookkeeping of
smaller pages, on a GPU not."""


class TierOptions(TypedDict, total=False):
    """The places for copies of what is evicted: fields of `hybrid.CacheConfig`."""

    host: int | str | None
    disk: int | str | None
    directory: str | Path | None


class PrefixCache:
    """Caches the prompts and answers that a model of transformers computes, for later prompts with the same prefix.

    It may be called from any thread; calls wait for each other while they compute a prompt.

    Args:
        model: an `AutoModelForCausalLM`, in evaluation mode, or a wrapper of one (of PEFT, or `torch.compile`). When
            its weights, adapters or settings change, prefixes computed before are not used for prompts after that.
        memory: memory for pages and states: bytes, a text such as "512MiB", or a fraction of the free memory.
        device: device of that memory. None: the model's device.
        deterministic: cut every prefill where a turn ends (after an end-of-sequence token of the model's generation
            config), and every `chunk_size` tokens after that, so that a hit is bitwise equal to a cold run. Otherwise a
            prefill is cut only where a checkpoint is captured, and results agree within rounding. None: on for CPU,
            off for GPU.
        chunk_size: in deterministic mode the tokens of a pass at most, from 8 on; None: 128. Otherwise prefills are
            cut, and checkpoints captured, at multiples of this many tokens; None: 1 on a CPU, and 16 on a GPU. The
            tokens after the last cut are computed again. Smaller passes are slower.
        eviction: as in `hybrid.CacheConfig`.
        placement: as in `hybrid.CacheConfig`. Without "turn_end" the answers of `generate` and of sessions are not
            cached. In deterministic mode each answer is computed again when it is cached, since decoding is not bitwise
            equal to a prefill.
        tiers: `host`, `disk` and `directory`: copies of what is evicted, as in `hybrid.CacheConfig`. With `disk` all
            weights are read, since copies are of the model as it is: its weights, configuration and settings. Call
            `close` at the end.

    Attributes:
        cache: the bookkeeping: the tree, the pools, pins and statistics.
        memory: the tensors of pages and state slots.
        explanations: of the last call of `generate` or `session`, per prompt why its hit was as long as it was.

    Raises:
        UnsupportedModelError: the model's cache cannot be saved; the message says why.
        MemoryBudgetError: the memory does not suffice, or is not free, on the device or the host.
    """

    def __init__(
        self,
        model: Any,
        memory: int | float | str = "1GiB",
        *,
        device: str | torch.device | None = None,
        deterministic: bool | None = None,
        chunk_size: int | None = None,
        eviction: str | Mapping[str, Any] | Policy = "lhd",
        placement: Sequence[str] = DEFAULT_PLACEMENT,
        **tiers: Unpack[TierOptions],
    ) -> None:
        options = [*(PrefixCache.__init__.__kwdefaults__ or ()), *TierOptions.__annotations__]
        refuse_unknown("PrefixCache() got an unexpected keyword argument", tiers, options)
        self._model = PassModel(model)
        self._refuse_training()
        on_cpu = self._model.device.type == "cpu"
        if deterministic is None:
            deterministic = on_cpu
        if chunk_size is None:
            chunk_size = DETERMINISTIC_CHUNK_SIZE if deterministic else CPU_CHUNK_SIZE if on_cpu else GPU_CHUNK_SIZE
        self._turn_ends = token_option(model, {}, "eos_token_id")
        self._segments = Segments(chunk_size, self._turn_ends) if deterministic else None
        self._chunk_size = chunk_size
        grid = chunk_size if self._segments is None else 1  # segments end anywhere
        self._config = CacheConfig(
            memory=memory,
            **tiers,
            page_size=grid,
            chunk_size=grid,
            eviction=eviction,
            placement=placement,
            deterministic=deterministic,
        )
        if on_cpu:
            use_torch_functions_on_cpu(self._model.inner)
        layout = probe(self._model)
        self._memory_device: torch.device = device_named(device) if device is not None else self._model.device
        self._num_bytes = self._config.memory_bytes(free_memory(self._memory_device))
        self._lock = threading.RLock()
        self._version = self._model.versions.current()
        self._images = Images(self._model)
        self.explanations: tuple[Explanation, ...] = ()
        self._installed: MethodType | None = None
        self._reasons: set[str] = set()  # why calls were left to the model, as far as it was said
        self._allocate(layout)

    def _replace_memory(self, layout: Layout) -> None:
        """Make memory and bookkeeping anew. Copies on disk stay, for a model as this one was."""
        if self.cache.tiers is not None and self.cache.tiers.disk is not None:
            self.cache.tiers.disk.close()
        del self.memory, self._prefiller, self._past_factory
        self._missing: Layout | None = layout  # until there is memory for it
        self._allocate(layout)

    def _allocate(self, layout: Layout) -> None:
        """Make memory and bookkeeping for a layout."""
        page_size, spec = self._config.page_size, layout.spec
        with torch.inference_mode(False):  # tensors of inference mode could not be written outside of it
            self.memory = PageMemory(layout, page_size, self._num_bytes, self._memory_device)
        pools = CacheMemory.of_bytes(
            self._num_bytes, spec.page_bytes(page_size), spec.state_bytes, mover=weakref.proxy(self.memory.tensors)
        )
        made_with = self._fingerprint(pools) if self._config.disk is not None else None
        self.cache = HybridCache(pools, self._config, model=made_with)
        self.cache.use_clock(time.monotonic)
        self.cache.adopt()
        self._prefiller = Prefiller(self._model, self.memory, self.cache, self._lock, self._turn_ends)
        self._past_factory = PastFactory(self._model, self._prefiller, self._config)
        self._drafting = DraftProvider(self._model, self.cache, self._lock)
        self._missing = None

    # Generating

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        *,
        namespace: str = "",
        speculation: SpeculationConfig | str | None = None,
        **options: Any,
    ) -> Any:
        """`model.generate`, resumed from cached prefixes; prompts and answers are cached.

        Args:
            inputs: the prompts, `[batch, tokens]`, padded on the left. The name `input_ids` works as well.
            generation_config: a `GenerationConfig` of transformers.
            namespace: prompts in different namespaces share nothing: an adapter, a tenant.
            speculation: draft tokens, so that a pass may yield several; the answers are the same. "cache" (what comes
                next in the cache), or a `hybrid.SpeculationConfig`. Only for one sequence, without `deterministic`.
            options: the options of `model.generate`, except those that cannot work with a prefix cache. Prompt lookup
                and assistant models work, on every model: their drafts are what is computed instead of `speculation`'s.

        Returns:
            The return value of `model.generate`.

        Raises:
            ArgumentError: an option cannot work with a prefix cache; the message says why.
            PromptError: there is no prompt, it is padded on the right, or it is longer than the original context of a
                model whose rotary frequencies change there.
            NonFiniteError: the model computed NaN or infinity, also without what was cached; nothing of that pass is
                cached. After a hit the call is run once more without it first.
        """
        start = time.monotonic()
        if generation_config is not None:
            options["generation_config"] = generation_config
        config = self._drafting.config(speculation)
        return self._run(self._read(inputs, options), namespace, config, start)

    def _read(self, inputs: Any, options: dict[str, Any]) -> GenerateCall:
        """Check a call of `generate`. Raises ArgumentError when it cannot work with a prefix cache."""
        self._refuse_training()
        call = GenerateCall.of(self._model.outer, inputs, options)
        self._model.check_prompts(call.prompts.rows)
        return call

    @torch.no_grad()
    def _run(self, call: GenerateCall, namespace: str, speculation: SpeculationConfig | None, start: float) -> Any:
        """Run a call of `generate` that began at `start`, by `time.monotonic`."""
        with self._model.rope_deltas.reset():
            keys, past = self._keys(call.prompts, call.images, namespace), call.past
            if past is not None:
                self._past_factory.resume(past, call.prompts, keys)
                return self._answer(call, past, speculation, start)
            past = self._past_factory.make(call.prompts, keys, call.max_new_tokens)
            hits = _hits(past.origins, call.prompts, keys)
            if not hits:
                return self._answer(call, past, speculation, start)
            again = SecondRun(call.options, self._model.device)
            try:
                return self._answer(call, past, speculation, start)
            except NonFiniteError:
                self._prefiller.drop(hits)
            again.begin()
            past = self._past_factory.make(call.prompts, keys, call.max_new_tokens, is_cold=True)
            return self._answer(call, past, speculation, start)

    def _answer(self, call: GenerateCall, past: Past, speculation: SpeculationConfig | None, start: float) -> Any:
        """Run a call from a past on."""
        self.explanations = past.explanations
        num_committed = [origin.num_committed for origin in past.origins]
        try:
            if call.repeats > 1:
                past.batch_repeat_interleave(call.repeats)
            if call.max_seconds is not None:
                call.options["max_time"] = max(0.0, call.max_seconds - (time.monotonic() - start))
            with following(self._model, past):
                output = self._drafting.generate(call, past, speculation, call.options)
            if call.num_returned == 1:
                turns = call.turns(output if isinstance(output, Tensor) else output.sequences)
                for at, ids in enumerate(turns):
                    self._keep_turn(ids, num_committed[at], past, range(at * call.repeats, (at + 1) * call.repeats))
        finally:
            past.end_session()
        return output

    def install(self, speculation: SpeculationConfig | str | None = None) -> None:
        """Make the model's own `generate` use this cache, until `uninstall`: pipelines and chat loops then need no
        change. Calls with options that cannot work with a prefix cache run without it: a warning says why, once for
        each reason, and `explanations` have it.

        The model refers to this cache meanwhile. A copy of the model does not use it.

        Args:
            speculation: as in `generate`.

        Raises:
            ArgumentError: `speculation` cannot be used.
            RequestError: the model's `generate` is replaced already, by this cache or another.
        """
        model, config = self._generate_owner, self._drafting.config(speculation)
        if "generate" in vars(model):
            raise RequestError("install: the generate of this model has been replaced already; uninstall that first")

        def generate(called: Any, inputs: Any = None, generation_config: Any = None, **options: Any) -> Any:
            start = time.monotonic()
            if generation_config is not None:
                options["generation_config"] = generation_config
            if called is not model:
                return type(called).generate(called, inputs, **options)
            try:
                call = self._read(inputs, options)
            except ArgumentError as error:
                self._leave_alone(inputs, options, str(error))
                return self._model.generate(inputs, **options)
            return self._run(call, "", config, start)

        model.generate = MethodType(generate, model)
        self._installed = model.generate

    def _leave_alone(self, inputs: Any, options: Mapping[str, Any], reason: str) -> None:
        """Say that a call runs without the cache, and why: each reason is warned of once."""
        prompts = inputs if inputs is not None else options.get("input_ids")
        count, asked = prompts.shape if isinstance(prompts, Tensor) and prompts.ndim == 2 else (1, 0)
        self.explanations = (Explanation(asked, 0, 0, f"left to the model's own generate: {reason}"),) * count
        if reason not in self._reasons:
            self._reasons.add(reason)
            warnings.warn(f"install: this call runs without the cache: {reason}", RuntimeWarning, stacklevel=3)

    def uninstall(self) -> None:
        """Give the model its own `generate` back. Without `install` before, nothing happens."""
        if self._installed is not None and vars(self._generate_owner).get("generate") is self._installed:
            del self._generate_owner.generate
        self._installed = None

    @contextmanager
    def session(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, namespace: str = "", **images: Tensor
    ) -> Iterator[Past]:
        """A past to be given, together with all of `input_ids`, to `model.generate` or to the model.

        When the session ends, what the model computed with the past and its forks is cached; after an exception nothing
        of it is. The past can still be used afterwards, as any cache of transformers.

        Args:
            input_ids: the prompts, `[batch, tokens]`, padded on the left.
            attention_mask: `[batch, tokens]`, 0 for padding.
            namespace: prompts in different namespaces share nothing.
            images: `pixel_values`, `image_grid_thw` and `mm_token_type_ids` of prompts with images. The past holds
                them: `model.generate` gets the token ids alone.

        Raises:
            PromptError: there is no prompt, or it is padded on the right.
            NonFiniteError: by a pass that gave NaN or infinity. What holds such of the hit that it began with is
                dropped.
        """
        self._refuse_training()
        image_inputs = ImageInputs.taken(images)
        if images:
            raise ArgumentError(f"session: {next(iter(images))!r} is not an argument; see its documentation")
        model = self._model.outer
        pad_tokens, end_tokens = (token_option(model, {}, name) for name in ("pad_token_id", "eos_token_id"))
        prompts = parse_prompts(input_ids, attention_mask, next(iter(pad_tokens), None), end_tokens)
        self._model.check_prompts(prompts.rows)
        with self._model.rope_deltas.reset():
            past = self._past_factory.make(prompts, self._keys(prompts, image_inputs, namespace))
            self.explanations = past.explanations
            try:
                with following(self._model, past):
                    yield past
                for member in past.family:
                    for at, row in enumerate(member.known_rows() or ()):
                        self._keep_turn(row, min(len(row), member.origins[at].num_committed), member, [at])
            except NonFiniteError:
                self._prefiller.drop(_hits(past.origins, prompts, past.keys))
                raise
            finally:
                past.end_session()

    def keep(self, token_ids: Sequence[int], namespace: str = "") -> None:
        """Compute these tokens up to the last place where a prefill may be cut, if they are not cached, and cache them:
        for instance between requests.

        Args:
            token_ids: the tokens of one sequence.
            namespace: prompts in different namespaces share nothing.

        Raises:
            PromptError: these are not token ids, or one is outside the vocabulary.
        """
        ids = ids_of(token_ids)
        self._model.check_ids(ids)
        with self._bookkeeping():
            key_space = self._key_space(namespace)
        self._prefiller.keep(ids, KeySpace(key_space, (None,), self._segments))

    # Files

    def save(self, path: str | Path, input_ids: Tensor | None = None, *, namespace: str = "") -> Transfer:
        """Write what is cached of a prompt, `[1, tokens]`, to a file; None: everything of the namespace. See
        `hybrid.Engine.save`. It reads all weights.

        Raises:
            PromptError: nothing of the prompt is cached.
            CacheFileError: the file cannot be written.
        """
        archive = self._archive(input_ids, namespace)
        archive.write(path)
        return archive.transfer

    def dump(self, input_ids: Tensor | None = None, *, namespace: str = "") -> bytes:
        """Save in memory."""
        return self._archive(input_ids, namespace).to_bytes()

    def load(self, source: str | Path | bytes) -> Transfer:
        """Bring what `save` or `dump` of a `PrefixCache` has written into the cache, each checkpoint with all before it
        or not at all. It reads all weights.

        Raises:
            CacheFileError: it is damaged, or of another model, other settings or another version. Nothing was changed.
        """
        archive = read_archive(source)
        with self._bookkeeping():
            self._key_space("")
            return self.cache.load(
                archive.renamed(self._version.key_space),
                model=self._fingerprint(self.cache.memory),
                vocab_size=self._model.vocab_size,
            )

    def _archive(self, input_ids: Tensor | None, namespace: str) -> Archive:
        with self._bookkeeping():
            key_space = self._key_space(namespace)
            keys = None if input_ids is None else [self._key(input_ids, key_space)[1]]
            made = self.cache.archive(keys, namespace=key_space, model=self._fingerprint(self.cache.memory))
            return made.renamed(self._version.namespace)

    def _fingerprint(self, memory: CacheMemory) -> Fingerprint:
        """Make the fingerprint of what is cached now: of the model as it is."""
        model = digest_of(self._model.outer, self._model.inner.config.to_dict())
        made = fingerprint_of(memory, self._config, model, self._segments is not None)
        return replace(made, chunk_size=self._chunk_size)

    # Bookkeeping

    def explain(self, input_ids: Tensor, namespace: str = "") -> Explanation:
        """The hit that a prompt, `[1, tokens]`, would have now, and why it would not be longer. Changes nothing."""
        with self._bookkeeping():
            ids, key = self._key(input_ids, self._key_space(namespace))
            limit = len(ids) - 1 if self._segments is None else self._segments.prompt_end(ids, key)
            return explain_now(self.cache.tree, key, limit)

    def pin(self, input_ids: Tensor, ttl: float = float("inf"), namespace: str = "") -> Pin | None:
        """Protect the usable prefix of a prompt, `[1, tokens]`, from eviction; see `HybridCache.pin`."""
        with self._bookkeeping():
            return self.cache.pin(self._key(input_ids, self._key_space(namespace))[1], ttl)

    def unpin(self, pin: Pin) -> None:
        """Release a pin."""
        with self._bookkeeping():
            self.cache.unpin(pin)

    def stats(self) -> CacheStats:
        """Counts since the cache was made, and its contents."""
        return self.cache.stats()

    def speculation_stats(self) -> dict[str, DrafterStats]:
        """Return the counts of each drafter since the cache was made, by its name."""
        return self._drafting.stats

    def verify_contents(self) -> None:
        """Begin to take a digest of each page and checkpoint that is cached, for `audit(contents=True)`. What was
        cached before is dropped, pins end, and `cache` and `memory` are new objects."""
        with self._bookkeeping():
            self._config = replace(self._config, verify_contents=True)
            self._replace_memory(self.memory.layout)

    def audit(self, contents: bool = False) -> None:
        """Verify that every page and every state slot has exactly one owner; `contents` as in `HybridCache.audit`.

        Raises:
            AuditError: it is not so; the message names what is wrong.
        """
        with self._bookkeeping():
            self.cache.audit(contents)

    def clear(self) -> None:
        """Evict everything that is not pinned."""
        with self._bookkeeping():
            self.cache.clear()

    def close(self) -> None:
        """Write to disk what is worth it, for a later process, and leave the directory. The cache is empty then, and
        works on without the disk."""
        with self._bookkeeping():
            self.cache.shutdown()

    @property
    def _generate_owner(self) -> Any:
        """The module whose `generate` a call of the model's `generate` runs: a wrapper without one passes calls on."""
        has_generate = isinstance(self._model.outer, GenerationMixin) or "generate" in vars(type(self._model.outer))
        return self._model.outer if has_generate else self._model.inner

    def _refuse_training(self) -> None:
        if self._model.outer.training:
            raise ArgumentError("the model is in training mode, where dropout changes results: call model.eval() first")

    def _keep_turn(self, token_ids: Sequence[int], num_prompt: int, past: Past, rows: Iterable[int]) -> None:
        """Cache a turn whose answer has been computed: no failure of it takes the answer away."""
        if "turn_end" not in self._config.placement or not self._model.versions.current().owns(past.keys.namespace):
            return  # or the model has changed meanwhile
        try:
            self._prefiller.keep_turn(token_ids, num_prompt, past, rows)
        except NonFiniteError as error:
            warnings.warn(f"an answer is not cached: {error}", RuntimeWarning, stacklevel=4)

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """The bookkeeping of the cache, which the calling thread owns."""
        with self._lock:
            if self._missing is not None:
                self._allocate(self._missing)
            self.cache.adopt()
            with self.cache.bookkeeping():
                yield

    def _key_space(self, namespace: str) -> str:
        """The namespace of the tree for the version that the model is now. What former weights computed is evicted."""
        check_namespace(namespace, MAX_NAMESPACE_CHARACTERS)
        version = self._model.versions.current()
        if version.weights != self._version.weights:
            layout = layout_of_model(self._model)
            if layout == self.memory.layout and self._config.disk is None:
                self.cache.clear()
            else:  # of another dtype, on another device, or with another fingerprint
                self._replace_memory(layout)
        self._version = version
        return version.key_space(namespace)

    def _keys(self, prompts: Prompts, images: ImageInputs | None, namespace: str) -> KeySpace:
        """Make the keys of prompts, for the model as it is now."""
        check_namespace(namespace, MAX_NAMESPACE_CHARACTERS)
        media: tuple[Media | None, ...] = (None,) * len(prompts.rows)
        if images is not None:
            media = self._images.read(images, prompts.rows, prompts.pads, self._config.page_size, namespace)
        with self._bookkeeping():
            return KeySpace(self._key_space(namespace), media, self._segments)

    def _key(self, input_ids: Tensor, key_space: str) -> tuple[list[int], Key]:
        """A prompt, `[1, tokens]`, and its key."""
        ids = parse_prompts(input_ids, None, None, frozenset()).rows[0]
        self._model.check_ids(ids)
        return ids, KeySpace(key_space, (None,), self._segments).key(0, ids)


def _hits(origins: Sequence[PastOrigin], prompts: Prompts, keys: KeySpace) -> list[tuple[Key, int]]:
    """The key of each prompt that had a hit, and its tokens."""
    found = zip(prompts.rows, origins, strict=True)
    return [
        (keys.key(at, row), origin.explanation.usable_hit)
        for at, (row, origin) in enumerate(found)
        if origin.explanation.usable_hit
    ]
