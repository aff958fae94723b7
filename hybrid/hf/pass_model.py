"""A model of transformers as a prefix cache uses it: single forward passes, its version, and what it remembers.

Vision models store `rope_deltas` outside of their cache: the offset of text positions after the images of the last
prompt. The next prompt that is resumed from a cached prefix would be shifted as well, so they are reset.

Rotary embeddings of the types "dynamic" and "longrope" change the frequencies of all positions once a sequence is
longer than the original context. Tokens cached before that no longer match, so longer prompts are refused, and the part
of an answer beyond the limit is not cached.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from hybrid.checks import shown
from hybrid.errors import ArgumentError, PromptError, UnsupportedModelError
from hybrid.hf.installed import as_argument, refuse_unexpected
from hybrid.hf.layers import Layout, fork_layer, layout_of, refuse_unsupported
from hybrid.hf.model_version import ModelVersions
from hybrid.models.transformers_types import NEEDED
from hybrid.prompts.images import Media


class RopeDeltas:
    """The `rope_deltas` of a model's modules.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners: list[Any] = [module for module in model.modules() if "rope_deltas" in vars(module)]
        self._lock = threading.RLock()

    @contextmanager
    def reset(self) -> Iterator[None]:
        """Have none in this context. The former ones are restored after it. Since a model remembers those of
        one call, other threads wait until then."""
        if not self._owners:
            yield
            return
        with self._lock, self._kept():
            yield

    def set(self, deltas: Sequence[int] | None, device: torch.device) -> None:
        """Set what is to be added to the positions of tokens after the prompts of a call. None: nothing."""
        for owner in self._owners:
            owner.rope_deltas = None if deltas is None else torch.tensor(deltas, device=device).unsqueeze(1)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        before = [vars(owner)["rope_deltas"] for owner in self._owners]
        for owner in self._owners:
            owner.rope_deltas = None
        try:
            yield
        finally:
            for owner, deltas in zip(self._owners, before, strict=True):
                owner.rope_deltas = deltas


def rope_limit(model: nn.Module) -> int | None:
    """The number of tokens up to which the rotary frequencies of a model do not change; None: they never do."""
    limits = [limit for module in model.modules() if "rope_type" in vars(module) for limit in _limits(module)]
    return min(limits, default=None)


def _limits(rotary: Any) -> Iterator[int]:
    """Limits of one rotary embedding of transformers, whose types may differ by layer."""
    types, parameters = rotary.rope_type, rotary.config.rope_parameters
    if isinstance(types, str):
        types, parameters = {"": types}, {"": parameters}
    for layer_type, rope_type in types.items():
        if rope_type == "longrope":
            yield parameters[layer_type]["original_max_position_embeddings"]
        elif "dynamic" in rope_type:
            yield rotary.original_max_seq_len - 1


def inner_model(model: Any) -> Any:
    """The model of transformers inside a wrapper (of PEFT, or `torch.compile`); without one, the model itself."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, GenerationMixin)), model)


class PassModel:
    """Computes forward passes with a model of transformers.

    Args:
        model: a causal language model, or a wrapper of one.

    Attributes:
        outer: the model as it was given.
        generate: its method `generate`, as it was when this object was made.
        inner: the model of transformers inside it, which computes single passes.
        versions: reports whether the model has changed.
        rope_deltas: positions that the model remembers outside of its cache.
        max_tokens: tokens up to which its rotary frequencies do not change.

    Raises:
        ArgumentError: it is not a model of transformers.
        VersionError: something in transformers is not as expected.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(inner_model(model), GenerationMixin):
            raise ArgumentError(
                "PrefixCache: model must be a loaded model of transformers that has generate, as from "
                f"AutoModelForCausalLM.from_pretrained(...); got {type(model).__name__} {shown(model)}"
            )
        refuse_unexpected(inner_model(model))
        self.outer = model
        self.generate: Callable[..., Any] = model.generate
        self.inner: Any = inner_model(model)
        self.versions = ModelVersions(model)
        self.rope_deltas = RopeDeltas(self.inner)
        self.max_tokens: int = rope_limit(self.inner) or sys.maxsize
        self._parameters = inspect.signature(self.inner.forward).parameters

    @property
    def device(self) -> torch.device:
        """Device of the model's input."""
        device: torch.device = self.inner.get_input_embeddings().weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        size: int = self.inner.config.get_text_config(decoder=True).vocab_size
        return size

    def check_ids(self, ids: Sequence[int]) -> None:
        """Check token ids before the model sees them: one that it does not have ends a process on a GPU.

        Raises:
            PromptError: one is outside the vocabulary.
        """
        embeddings = self.inner.get_input_embeddings()
        count = embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else self.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < count:
            wrong = next(token for token in ids if not 0 <= token < count)
            raise PromptError(f"token id {shown(wrong)} is outside the vocabulary: ids go from 0 to {count - 1}")

    def check_prompts(self, rows: Sequence[Sequence[int]]) -> None:
        """Check prompts.

        Raises:
            PromptError: a token id is outside the vocabulary, or a prompt is too long.
        """
        for row in rows:
            self.check_ids(row)
            if len(row) > self.max_tokens:
                raise PromptError(
                    f"the prompt has {len(row)} tokens; beyond {self.max_tokens} the rotary embedding of this model "
                    "changes the frequencies of all tokens, so no prefix can be reused: call model.generate instead"
                )

    def empty_cache(self) -> DynamicCache:
        """A cache of transformers for this model, without tokens."""
        return DynamicCache(config=self.inner.config)

    def forward(self, tokens: Sequence[int], past: Any, start: int, media: Media | None = None) -> Tensor:
        """One forward pass over tokens of one sequence.

        Args:
            tokens: the token ids to compute.
            past: the cache that holds the tokens before; it is extended.
            start: number of tokens that `past` holds.
            media: the images of the sequence; None: it has none.

        Returns:
            The logits of the last token, `[vocabulary]`.
        """
        device = self.device
        options: dict[str, Any] = {}
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = 1
        if "position_ids" in self._parameters:
            options["position_ids"] = torch.arange(start, start + len(tokens), device=device).unsqueeze(0)
        ids = torch.tensor([tokens], device=device)
        if media is None:
            options["input_ids"] = ids
        else:
            end = start + len(tokens)
            embeddings = self.inner.get_input_embeddings()(ids)
            for offset, rows in media.embeddings(start, end):
                embeddings[0, offset : offset + len(rows)] = rows
            options["inputs_embeds"] = embeddings
            rotary = media.rotary_positions(start, end).to(device).unsqueeze(1)
            options["position_ids"] = torch.cat([options["position_ids"].unsqueeze(0), rotary])  # text, then its three
        output = self.inner(**as_argument(past), use_cache=True, return_dict=True, **options)
        logits: Tensor = output.logits[0, -1]
        return logits


FIRST, REST, OTHER = range(1, 9), range(9, 11), range(20, 28)
"""Token ids of the probe: a prefix, its continuation, and an unrelated prompt of the same length as the prefix."""

SAME = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Tolerance for the logits of two equal passes on a device with nondeterministic sums, relative to their range."""

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Tolerance for the logits of a prompt computed in two passes against one."""

RUN_ERRORS = (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, RuntimeError)
"""Errors of models that cannot run on a `DynamicCache`."""


class _Probe:
    """A few passes with a model."""

    def __init__(self, model: PassModel) -> None:
        self._model = model

    def run(self, tokens: Iterable[int], past: DynamicCache, start: int = 0) -> Tensor:
        return self._model.forward([token % self._model.vocab_size for token in tokens], past, start)

    def fork(self, past: DynamicCache) -> DynamicCache:
        other = self._model.empty_cache()
        other.layers = [fork_layer(layer) for layer in past.layers]
        return other

    def layout(self) -> tuple[Layout, DynamicCache]:
        """Find out what the cache stores. Returns the cache after the first tokens, too."""
        name = type(self._model.inner).__name__
        past = self._model.empty_cache()
        refuse_unsupported(past.layers, name)
        self.run(FIRST, past)
        refuse_unsupported(past.layers, name)  # some models make their layers in the first pass
        empty = self._model.empty_cache()
        if len(past.layers) != len(empty.layers):
            raise UnsupportedModelError(
                f"{name} adds layers to its cache when it runs, and an empty one cannot be filled from a saved one"
            )
        beside = [key for key, value in vars(past).items() if isinstance(value, Tensor) and key not in vars(empty)]
        if beside:
            needed = NEEDED.get(self._model.inner.config.get_text_config(decoder=True).model_type, "another version")
            raise UnsupportedModelError(
                f"{name} of transformers {transformers.__version__} keeps {' and '.join(beside)} in its cache outside "
                f"of the layers, which PrefixCache does not save: it needs transformers {needed}"
            )
        return layout_of(past.layers, name), past


@torch.no_grad()
def layout_of_model(model: PassModel) -> Layout:
    """Find out by one pass what the cache of a model stores.

    Raises:
        UnsupportedModelError: the cache has unsupported layers.
    """
    return _Probe(model).layout()[0]


@torch.no_grad()
def probe(model: PassModel) -> Layout:
    """Run a few tokens to find out what the cache stores, and check that the model can resume from it.

    Returns:
        The layout of the model's cache.

    Raises:
        UnsupportedModelError: the cache has unsupported layers, the model remembers something outside of its cache, or
            it cannot resume from a copy of it; the message says which.
    """
    name = type(model.inner).__name__
    if model.inner.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; PrefixCache is for decoders")
    passes = _Probe(model)
    try:
        layout, past = passes.layout()
        at_once = passes.run((*FIRST, *REST), model.empty_cache())
        again, disturbed_past = passes.fork(past), passes.fork(past)
        expected = passes.run(REST, past, len(FIRST))
        passes.run(OTHER, model.empty_cache())
        found = passes.run(REST, again, len(FIRST))
        has_recurrent = _disturb(disturbed_past.layers, layout)
        disturbed = passes.run(REST, disturbed_past, len(FIRST))
    except (UnsupportedModelError, torch.OutOfMemoryError):  # the latter says nothing about the model
        raise
    except RUN_ERRORS as error:
        raise UnsupportedModelError(f"{name} does not run on transformers' DynamicCache: {error}") from error
    exact = 0.0 if model.device.type == "cpu" else SAME.get(found.dtype, 2e-2)
    if not _difference(found, expected) <= exact:
        raise UnsupportedModelError(
            f"{name} remembers something outside of its cache: resuming twice from the same past gives different logits"
        )
    if has_recurrent and torch.equal(disturbed, expected):
        raise UnsupportedModelError(
            f"{name} drops its recurrent states when it continues with several tokens, so no prefix can be resumed"
        )
    if not _difference(at_once, expected) <= CLOSE.get(found.dtype, 5e-2):
        raise UnsupportedModelError(f"{name} gives different logits when a prompt is computed in two passes")
    return layout


def _disturb(layers: Sequence[Any], layout: Layout) -> bool:
    """Replace the recurrent states by others, far larger ones: a small change may be lost in rounding. False when there
    are none."""
    generator = torch.Generator().manual_seed(0)
    states = [state for state in layout.states if state.kind == "recurrent_states"]
    for state in states:
        tensor = layers[state.layer].recurrent_states[state.index]
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        tensor.copy_(noise * (8 * tensor.abs().max() + 8))
    return bool(states)


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the range of `b`."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())
