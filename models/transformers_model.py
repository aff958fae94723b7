"""A model of transformers in the engine, for the types that have no family of their own here: its layers compute, and
two things are replaced. Attention reads keys and values from pages, and layers with states read and write state slots.

* All tokens of a batch are one row of transformers' input. What computes each token by itself (norms, products,
  experts, rotary positions) does not see that they belong to several sequences.
* transformers asks a cache to keep keys and values, and then calls a function for attention. The cache of a pass
  (`PassCache`) writes them to pages, and `attend` is the function: it sees the pages of each sequence alone.
* A module that asks the cache for states is a *mixer*. It is called for each prompt by itself, cut where a checkpoint
  is to be kept, and once for all decoded tokens, with the states of their slots in the layers of the cache.
* Attention that makes its keys from what it kept (latent attention) is a mixer too, for one sequence at a time: the
  cache gives it what is in the pages of this sequence.

When a model is loaded a few tokens go through it twice, as transformers computes them and as the engine does: in two
prompts that are resumed, side by side. A model whose logits differ is refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybrid.batch import Batch, Group
from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference.attention import gathered
from hybrid.kernels.reference.scored_attention import Scores, paged_scored_attention, scored_attention
from hybrid.models.engine_model import EngineModel
from hybrid.models.torch_functions import use_torch_functions_on_cpu, without_kernels
from hybrid.models.transformers_types import STATES_ARE_READ
from hybrid.spec import HybridSpec, StateTensor, TokenTensor

log: logging.Logger = logging.getLogger(__name__)

ATTENTION = "hybrid_pages"
"""Name of `attend` among transformers' functions for attention."""

STATE_KINDS = ("conv_states", "recurrent_states")
"""Attributes of a linear layer of transformers' cache that hold its states, by index."""

LAYERS = frozenset({
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
})  # fmt: skip
"""Classes of layers of transformers' cache that are known here."""

IGNORED_ARGUMENTS = frozenset({
    "cache_position",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "return_dict",
    "use_cache",
})  # fmt: skip
"""Arguments of a function for attention that change nothing here."""

CLOSE = {torch.float32: 2e-5, torch.float64: 1e-9}
"""Largest difference of logits from transformers' own, relative to their range; of shorter types `CLOSE_SHORT`."""

CLOSE_SHORT = 8e-2

TRIED = ((11, 7, 5, 19, 23, 2, 31, 13, 17), (3, 41, 37, 9, 6, 12, 43, 8, 29))
"""Token ids of two sequences that are tried when a model is loaded."""

CUT = 5
"""Tokens of each after which its state is kept."""

RUN_ERRORS = (ValueError, TypeError, NotImplementedError, AttributeError, LookupError, RuntimeError)
"""Errors of models that need a cache of another kind."""

TRIED_PAGE = 16
"""Tokens per page of this trial."""


@dataclass(frozen=True, slots=True)
class AttentionPlace:
    """The keys and values of one layer in pages.

    Attributes:
        row: of the layer in a page.
        heads, key_dim, value_dim: of a token.
        window: tokens that are seen, the token itself included; None: all.
    """

    row: int
    heads: int
    key_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True, slots=True)
class StatePlace:
    """A state of one layer in state slots.

    Attributes:
        kind: one of `STATE_KINDS`.
        index: its key in the layer's dictionary of this kind.
        kept: its tensor in a slot.
    """

    kind: str
    index: int
    kept: StateTensor


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """A module that is called for each sequence by itself.

    Attributes:
        layer: the layer of the cache that it uses.
        states: that it reads and writes.
        makes_keys: it makes the keys of attention from what it kept of all tokens of a sequence.
    """

    layer: int
    states: tuple[StatePlace, ...]
    makes_keys: bool


@dataclass(frozen=True, slots=True)
class KeptTensors:
    """What the layers of a model keep, by their numbers.

    Attributes:
        attention: of layers with keys and values.
        mixers: by module.
    """

    attention: dict[int, AttentionPlace]
    mixers: dict[nn.Module, Mixer]

    @property
    def kv_heads(self) -> int:
        """The most heads of a layer's keys."""
        return max(place.heads for place in self.attention.values())

    @property
    def head_dim(self) -> int:
        """The largest size of a head; others are padded."""
        return max(max(place.key_dim, place.value_dim) for place in self.attention.values())

    def spec(self, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence."""
        pages = TokenTensor.kv(len(self.attention), self.kv_heads, self.head_dim, dtype)
        return HybridSpec((pages,), tuple(state.kept for mixer in self.mixers.values() for state in mixer.states))


class Sequence(NamedTuple):
    """One sequence of a batch.

    Attributes:
        read: the slot of the state before its tokens.
        pieces: its rows `[start, stop)`, and the slots of the state after them.
        pages: `[num_pages]` of it.
        length: its tokens, with those of the batch.
    """

    read: int
    pieces: list[tuple[int, int, list[int]]]
    pages: Tensor
    length: int


@dataclass(slots=True)
class Alone:
    """A sequence that a mixer which makes keys is called for.

    Attributes:
        sequence: it.
        start, stop: its rows.
        window: of its layer, once its keys are kept.
    """

    sequence: Sequence
    start: int
    stop: int
    window: int | None = None


class Pass:
    """One pass of a batch: where its tokens are kept.

    Args:
        layout: of the model.
        cache: of transformers, empty. It holds the states of the sequences that a mixer is called for.
        batch: the plan of the step.
        kv: the pages.
        state: the tensors of state slots by name.
        chunk_size: of the engine, in tokens.
    """

    def __init__(
        self, layout: KeptTensors, cache: Any, batch: Batch, kv: Tensor, state: dict[str, Tensor], chunk_size: int
    ) -> None:
        self.layout = layout
        self._cache = cache
        cache.update = self.keep  # transformers calls it with the keys and values of each layer
        self._batch, self._kv, self._state, self._chunk_size = batch, kv, state, chunk_size
        self._prompts = _sequences(batch.prefills, batch)
        self._decodes: list[Sequence] | None = None
        self._rows: dict[int, tuple[Tensor, AttentionPlace]] = {}
        self._alone: Alone | None = None

    def keep(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values `[1, heads, T, dim]` of a layer to the slots of the batch. Returns them, or those of
        all tokens of the sequence that a mixer is called for."""
        place, alone = self.layout.attention[layer_idx], self._alone
        pages, slots = self._pages(place), self._batch.slot_mapping
        if alone is not None:
            slots = slots[alone.start : alone.stop]
        kernels.store_kv(self._padded(key_states), self._padded(value_states), pages, slots)
        if alone is None:
            self._rows[id(key_states)] = key_states, place  # the tensor is held, so that its id stays its own
            return key_states, value_states
        alone.window = place.window
        length = alone.sequence.length - (alone.sequence.pieces[-1][1] - alone.stop)
        table, size, dtype = alone.sequence.pages, self.layout.head_dim, key_states.dtype
        keys, values = (
            gathered(pages[:, part], table, size, dtype)[:length, :, :dim].transpose(0, 1)[None]
            for part, dim in enumerate((place.key_dim, place.value_dim))
        )
        return keys, values

    def _pages(self, place: AttentionPlace) -> Tensor:
        """The pages of a layer, `[num_pages, 2, page_size, heads, head_dim]`."""
        return self._kv[:, place.row, :, :, : place.heads]

    def _padded(self, part: Tensor) -> Tensor:
        """Keys, values or queries `[1, heads, T, dim]` as `[T, heads, head_dim]`."""
        rows = part[0].transpose(0, 1)
        return F.pad(rows, (0, self.layout.head_dim - rows.shape[-1])).contiguous()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attention of queries `[1, heads, T, dim]` over what was kept with `key`; `[1, T, heads, value_dim]`."""
        if self._alone is not None:
            new, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
            return scored_attention(new, keys, values, 0, scores, self._alone.window)[None]
        _, place = self._rows[id(key)]
        rows, pages, parts = self._padded(query), self._pages(place), []
        for group in self._batch.groups:
            where = group.block_table, group.cu_seqlens, group.seq_lens
            if place.window is None and scores.softcap is None and scores.sinks is None:
                own = (*where, scores.scale, self._chunk_size, group.num_splits)
                parts.append(kernels.paged_attention(rows[group.rows], pages, *own))
            else:
                how = scores, self._chunk_size, place.window
                parts.append(paged_scored_attention(rows[group.rows], pages, *where, *how))
        return torch.cat(parts)[None, ..., : place.value_dim].contiguous()

    def mix(
        self,
        mixer: Mixer,
        call: Callable[..., Any],
        hidden: Tensor,
        args: Iterable[Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Call a mixer for each sequence with its state.

        Args:
            call: the module's own `forward`.
            hidden: `[1, T, size]`, its first argument.
            args, options: the others.

        Returns:
            As it returns, for all tokens.
        """
        count, outputs = hidden.shape[1], []

        def run(start: int, stop: int, is_batch: bool = False) -> None:
            def cut(value: Any) -> Any:
                if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, count):
                    value = value[:, start:stop]
                    return value.transpose(0, 1) if is_batch else value
                return tuple(map(cut, value)) if type(value) is tuple else value

            output = call(cut(hidden), *map(cut, args), **{name: cut(value) for name, value in options.items()})
            parts = output if isinstance(output, tuple) else [output]
            outputs.append(
                type(parts)(part.transpose(0, 1) if is_batch and part is not None else part for part in parts)
            )

        decodes = self._batch.decodes
        if mixer.makes_keys and self._decodes is None:
            self._decodes = _sequences(decodes, self._batch)
        for sequence in [*self._prompts, *(self._decodes or ())] if mixer.makes_keys else self._prompts:
            self._load(mixer, [sequence.read])
            for start, stop, slots in sequence.pieces:
                self._alone = Alone(sequence, start, stop) if mixer.makes_keys else None
                run(start, stop)
                for slot in slots:
                    self._save(mixer, torch.tensor([slot], device=hidden.device))
        self._alone = None
        if decodes is not None and not mixer.makes_keys:
            self._load(mixer, decodes.state_read)
            run(decodes.rows.start, decodes.rows.stop, is_batch=True)
            self._save(mixer, decodes.state_write)
        merged = [None if parts[0] is None else torch.cat(parts, 1) for parts in zip(*outputs, strict=True)]
        return tuple(merged) if isinstance(outputs[0], tuple) else merged[0]

    def _load(self, mixer: Mixer, slots: Any) -> None:
        """Have the cache hold the states of some slots."""
        holder = self._cache.layers[mixer.layer]
        for place in mixer.states:
            states = self._state[place.kept.name][slots]
            holder.lazy_initialization(**{place.kind: states, "state_idx": place.index})
            getattr(holder, place.kind)[place.index].copy_(states)
            holder.has_previous_state[place.index] = True

    def _save(self, mixer: Mixer, slots: Tensor) -> None:
        """Write what the cache holds to some slots; negative ones are left out."""
        kept = (slots >= 0).nonzero().squeeze(1)
        for place in mixer.states:
            states = getattr(self._cache.layers[mixer.layer], place.kind)[place.index]
            self._state[place.kept.name][slots[kept]] = states[kept].to(place.kept.dtype)


def _sequences(group: Group | None, batch: Batch) -> list[Sequence]:
    """The sequences of a group that have tokens. Those of prompts are cut where a checkpoint is kept."""
    if group is None:
        return []
    parts = (group.cu_seqlens, group.state_read, group.state_write, group.seq_lens)
    starts, reads, writes, lengths = (part.tolist() for part in parts)
    checkpoints: list[list[int]] = batch.checkpoints.tolist() if group is batch.prefills else []
    sequences = []
    for request, (read, write) in enumerate(zip(reads, writes, strict=True)):
        start, end = (group.rows.start + at for at in starts[request : request + 2])
        kept: dict[int, list[int]] = {end: [write]}
        for owner, count, slot in checkpoints:
            if owner == request:
                kept.setdefault(start + count, []).append(slot)
        pieces = []
        for stop in sorted(kept):
            if stop > start:
                pieces.append((start, stop, [slot for slot in kept[stop] if slot >= 0]))
                start = stop
        if pieces:
            sequences.append(Sequence(read, pieces, group.block_table[request], lengths[request]))
    return sequences


_current = threading.local()
"""`run`: the `Pass` that this thread computes, or the `Probe`."""


@contextmanager
def _running(run: Any) -> Iterator[None]:
    before = getattr(_current, "run", None)
    _current.run = run
    try:
        yield
    finally:
        _current.run = before


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention, as transformers calls it: `query` `[1, heads, T, dim]`. Windows are those of the cache's layers."""
    others = sorted(name for name, found in options.items() if found is not None and name not in IGNORED_ARGUMENTS)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    run = _current.run
    if isinstance(run, Probe):
        run.look(module, query, key, attention_mask, sliding_window, others)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
    return run.attend(query, key, value, scores), None


class Probe:
    """A few tokens through a model, to find out what its layers keep and which modules are mixers.

    Args:
        model: of transformers, which calls `attend`.

    Raises:
        UnsupportedModelError: it keeps what is not known here.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._name = type(model).__name__
        self._layers: list[Any] = []
        self._inside: list[nn.Module] = []
        self._users: dict[tuple[int, str, int], nn.Module] = {}
        self._makers: dict[nn.Module, int] = {}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def layout(self) -> KeptTensors:
        """Run the tokens."""
        cache = empty_cache(self._model)
        self._layers = cache.layers
        unknown = sorted({type(layer).__name__ for layer in cache.layers} - LAYERS)
        types = set(getattr(self._model.config.get_text_config(), "layer_types", None) or ())
        if unknown or "chunked_attention" in types:
            raise self.refused(f"it has cache layers of {', '.join(unknown) or 'chunked attention'}")
        cache.update = self._keep
        if any("LinearAttention" in type(layer).__name__ for layer in cache.layers):
            self._note_states(cache)
        hooks = [
            hook
            for module in self._model.modules()
            for hook in (
                module.register_forward_pre_hook(lambda entered, _: self._inside.append(entered)),
                module.register_forward_hook(lambda *_: self._leave()),
            )
        ]
        try:
            with _running(self):
                compute(self._model, cache, torch.tensor(TRIED[0][:4]), torch.arange(4), None)
        finally:
            for hook in hooks:
                hook.remove()
        return self._found(cache)

    def _note_states(self, cache: Any) -> None:
        """Note who reads and writes the states in a cache."""
        for kind in STATE_KINDS:
            for method in (f"get_{kind.removesuffix('s')}", f"update_{kind.removesuffix('s')}"):
                if not hasattr(cache, method):
                    raise self.refused(
                        f"layers with states are computed with transformers from version {STATES_ARE_READ} on, and "
                        f'installed is {version("transformers")}: pip install -U "transformers>={STATES_ARE_READ}"'
                    )
                setattr(cache, method, self._noting(kind, getattr(cache, method)))

    def _leave(self) -> None:
        self._inside.pop()

    def _keep(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self._kept[layer_idx] = key_states, value_states
        return key_states, value_states

    def _noting(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of the cache for states of a kind, which notes the module that calls it."""
        parameters = inspect.signature(method)

        def noting(*args: Any, **options: Any) -> Any:
            given = parameters.bind(*args, **options).arguments
            layer, index = given["layer_idx"], given.get("state_idx", 0)
            user = next((module for module in reversed(self._inside) if hasattr(module, "layer_idx")), None)
            if user is None or self._users.setdefault((layer, kind, index), user) is not user:
                raise self.refused(f"{kind} of layer {layer} belong to no module of their own")
            return method(*args, **options)

        return noting

    def look(
        self, module: nn.Module, query: Tensor, key: Tensor, mask: Any, window: int | None, others: list[str]
    ) -> None:
        """Look at a call of `attend`.

        Raises:
            UnsupportedModelError: it asks for something that is not known here.
        """
        if all(kept is not key for kept, _ in self._kept.values()):
            layer = getattr(module, "layer_idx", None)
            if layer not in self._kept:
                raise self.refused("its attention changes keys after it has given them to the cache")
            self._makers[module] = layer
        if window is not None and all(getattr(layer, "sliding_window", None) != window for layer in self._layers):
            raise self.refused(f"its attention has a window of {window} tokens that its cache does not have")
        if mask is not None or others:
            raise self.refused(f"its attention is given {', '.join(others) or 'a mask of its own'}")
        if query.shape[1] % key.shape[1]:
            raise self.refused(f"it has {query.shape[1]} heads of queries, and {key.shape[1]} of keys")

    def refused(self, why: str) -> UnsupportedModelError:
        """Say why the model cannot run in the engine."""
        return UnsupportedModelError(
            f"{self._name} runs neither by this package's own layers nor by transformers' in the engine: {why}; try "
            "hybrid.hf.PrefixCache, which caches prefixes inside transformers"
        )

    def _found(self, cache: Any) -> KeptTensors:
        attention: dict[int, AttentionPlace] = {}
        for layer, (keys, values) in self._kept.items():
            window = getattr(cache.layers[layer], "sliding_window", None)
            shape = keys.shape[1], keys.shape[3], values.shape[3]
            attention[layer] = AttentionPlace(len(attention), *shape, window)
        if not attention:
            raise self.refused("none of its layers keeps keys and values")
        states: dict[nn.Module, list[StatePlace]] = {module: [] for module in self._makers}
        layers = dict(self._makers)
        for (layer, kind, index), module in self._users.items():
            tensor = getattr(cache.layers[layer], kind)[index]
            if tensor is not None:
                kept = StateTensor(f"{layer}.{kind}.{index}", tuple(tensor.shape[1:]), tensor.dtype)
                states.setdefault(module, []).append(StatePlace(kind, index, kept))
                layers[module] = layer
        mixers = {
            module: Mixer(layers[module], (*places,), module in self._makers) for module, places in states.items()
        }
        return KeptTensors(attention, mixers)


def empty_cache(model: Any) -> Any:
    """transformers' cache for a model, without tokens."""
    from transformers.cache_utils import DynamicCache

    return DynamicCache(config=model.config)


@functools.cache
def _arguments(kind: type[Any]) -> tuple[str, bool]:
    """The name of the cache among the arguments of a pass of a class of transformers, and whether it takes the rows
    whose logits are computed."""
    from transformers import GenerationMixin

    known = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    name = next(name for name in ("cache", "past_key_values") if name in known)
    return name, "logits_to_keep" in inspect.signature(kind.forward).parameters


def compute(model: Any, cache: Any, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
    """One pass of a model of transformers over tokens of a row.

    Args:
        tokens, positions: `[T]`.
        rows: whose logits are computed; None: all.

    Returns:
        `[S, vocab]` fp32.
    """
    cache_name, takes_rows = _arguments(model.__class__)
    options, keeps = {cache_name: cache}, takes_rows and rows is not None
    if keeps:
        options["logits_to_keep"] = rows
    device = model.get_input_embeddings().weight.device
    ids, places = tokens.to(device)[None], positions.to(device)[None]
    output = model(input_ids=ids, position_ids=places, use_cache=True, return_dict=True, **options)
    logits: Tensor = output.logits[0].float()
    return logits if keeps or rows is None else logits[rows]


class TransformersModel(EngineModel):
    """A model of transformers, as an engine computes it.

    Args:
        inner: a causal language model that was loaded with `ATTENTION`.
        chunk_size: of the engine, in tokens.

    Raises:
        UnsupportedModelError: it cannot be computed so.
    """

    mtp: None = None
    keeps_bits: bool = False
    takes_drafts: bool = False
    takes_adapters: bool = False
    takes_images: bool = False
    is_warmed_up: bool = False

    def __init__(self, inner: Any, chunk_size: int) -> None:
        super().__init__(inner.config.get_text_config())
        self.inner = inner
        self.chunk_size = chunk_size
        probe = Probe(inner)
        try:
            with torch.inference_mode():
                self.layout: KeptTensors = probe.layout()
                for module, mixer in self.layout.mixers.items():
                    module.forward = _for_each_sequence(mixer, module.forward)
                difference = self._largest_difference()
        except UnsupportedModelError:
            raise
        except RUN_ERRORS as error:
            raise probe.refused(f"it does not run on transformers' DynamicCache: {error}") from error
        if not difference <= CLOSE.get(self.dtype, CLOSE_SHORT):
            raise probe.refused(f"its logits would differ from transformers' by {difference:.2g} of their range")
        limit = min([self._max_position_embeddings(), *_fixed_frequencies(inner)])
        self.config.max_position_embeddings = limit

    def _max_position_embeddings(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", None) or sys.maxsize)

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations."""
        found: torch.dtype = self.inner.dtype
        return found

    def own_spec(self) -> HybridSpec:
        """The tensors per token and per sequence."""
        return self.layout.spec(self.dtype)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Run a step, as `hybrid.models.causal_lm.CausalLM.forward`."""
        if batch.arriving is not None:
            batch.arriving.wait_for_all()
        cache = empty_cache(self.inner)
        with _running(Pass(self.layout, cache, batch, kv, state, self.chunk_size)):
            return compute(self.inner, cache, batch.token_ids, batch.positions, batch.sample_rows)

    def _largest_difference(self) -> float:
        """The difference of logits from those of transformers' own pass, over their range. Two sequences are computed
        side by side; one is resumed from a state that was kept on the way, while a token of the other one is decoded;
        then a token of each is."""
        device = self.inner.get_input_embeddings().weight.device
        spec = self.own_spec()
        kv = torch.zeros(2, *spec.tokens[0].shape(TRIED_PAGE), dtype=self.dtype, device=device)
        state = {part.name: torch.zeros(5, *part.shape, dtype=part.dtype, device=device) for part in spec.state}
        steps: tuple[tuple[list[_Trial], list[_Trial]], ...] = (
            ([_Trial(0, 0, 7, 0, 1, kept=3), _Trial(1, 0, 7, 0, 2, kept=4)], []),
            ([_Trial(1, CUT, 8, 4, 2)], [_Trial(0, 7, 8, 1, 1)]),
            ([], [_Trial(0, 8, 9, 1, 1), _Trial(1, 8, 9, 2, 2)]),
        )
        own = self._transformers_logits()
        worst, scale = 0.0, max(float(logits.abs().max()) for logits in own)
        for prompts, decodes in steps:
            logits = self(_trial_batch(prompts, decodes, device), kv, state)
            expected = torch.cat([own[part.sequence][part.start : part.stop] for part in (*prompts, *decodes)])
            worst = max(worst, float((logits - expected).abs().max()))
        return worst / scale

    def _transformers_logits(self) -> list[Tensor]:
        """The logits of the trial's sequences, as transformers computes them."""
        self.inner.set_attn_implementation("eager")
        try:
            return [
                compute(self.inner, empty_cache(self.inner), tokens, torch.arange(len(tokens)), None)
                for tokens in map(torch.tensor, TRIED)
            ]
        finally:
            self.inner.set_attn_implementation(ATTENTION)


@dataclass(frozen=True)
class _Trial:
    """Tokens `[start, stop)` of a sequence of `TRIED`, and the slots of the states before and after them.

    Attributes:
        kept: the slot of the state after `CUT` tokens; None: it is not kept.
    """

    sequence: int
    start: int
    stop: int
    read: int
    write: int
    kept: int | None = None


def _trial_batch(prompts: list[_Trial], decodes: list[_Trial], device: torch.device) -> Batch:
    """A batch of sequences of which each has one page."""
    parts = [*prompts, *decodes]
    tokens = [TRIED[part.sequence][at] for part in parts for at in range(part.start, part.stop)]
    positions = [at for part in parts for at in range(part.start, part.stop)]
    slots = [part.sequence * TRIED_PAGE + at for part in parts for at in range(part.start, part.stop)]
    checkpoints = [[row, CUT - part.start, part.kept] for row, part in enumerate(prompts) if part.kept is not None]

    def tensor(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def group(members: list[_Trial], start: int) -> Group | None:
        if not members:
            return None
        lengths = [part.stop - part.start for part in members]
        return Group(
            slice(start, start + sum(lengths)),
            tensor([0, *accumulate(lengths)]),
            tensor([part.stop for part in members]),
            tensor([[part.sequence] for part in members]),
            tensor([part.read for part in members]),
            tensor([part.write for part in members]),
            None,
        )

    count = sum(part.stop - part.start for part in prompts)
    return Batch(
        tensor(tokens),
        tensor(positions),
        tensor(slots),
        tensor(checkpoints).reshape(-1, 3),
        tensor([*range(len(tokens))]),
        group(prompts, 0),
        group(decodes, count),
        None,
    )


def _for_each_sequence(mixer: Mixer, call: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a mixer in the engine; elsewhere it is what it was."""

    def forward(*args: Any, **options: Any) -> Any:
        run = getattr(_current, "run", None)
        if not isinstance(run, Pass):
            return call(*args, **options)
        hidden, *rest = args or (options.pop("hidden_states"),)
        return run.mix(mixer, call, hidden, rest, options)

    return forward


def _fixed_frequencies(model: Any) -> Iterator[int]:
    """Tokens up to which the rotary frequencies of a model's modules stay as they are, where they change at all."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for name, kind in (kinds if isinstance(kinds, dict) else {"": kinds}).items():
            parameters = getattr(module.config, "rope_parameters", {}) if kind else {}
            if kind == "longrope":
                yield int((parameters[name] if name else parameters)["original_max_position_embeddings"])
            elif kind and "dynamic" in kind:
                yield int(module.original_max_seq_len) - 1


def load_transformers_model(
    path: Path, dtype: torch.dtype, device: torch.device, chunk_size: int, progress: bool
) -> TransformersModel:
    """Load a checkpoint by transformers.

    Raises:
        CheckpointError: transformers cannot read it.
        UnsupportedModelError: its model cannot be computed by the engine.
    """
    with without_kernels() if device.type == "cpu" else nullcontext():
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        AttentionInterface.register(ATTENTION, attend)
        shown = transformers_logging.is_progress_bar_enabled()
        if not progress:
            transformers_logging.disable_progress_bar()
        try:
            inner, found = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
            )
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise CheckpointError(f"{path} cannot be loaded by transformers: {error!r}") from error
            raise UnsupportedModelError(f"{path}: attention of this model cannot be replaced") from error
        except Exception as error:  # transformers raises many kinds for files that do not fit
            raise CheckpointError(f"{path} cannot be loaded by transformers: {error}") from error
        finally:
            if shown:
                transformers_logging.enable_progress_bar()
    others = {name for name, *_ in found["mismatched_keys"]}
    if wrong := sorted(others | set(found["missing_keys"])):  # transformers would leave them random
        raise CheckpointError(f"{path} lacks weights of its model, or has them in other shapes: {', '.join(wrong[:8])}")
    inner = inner.to(device).eval().requires_grad_(False)
    use_torch_functions_on_cpu(inner)
    model = TransformersModel(inner, chunk_size)
    log.warning(
        "%s (%s) runs by transformers' own layers: slower than a family of this package, batched and cached; hits are "
        "cold runs within rounding, not bit by bit",
        path,
        inner.config.model_type,
    )
    return model
