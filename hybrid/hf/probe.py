"""Probing a model of transformers: what its cache stores, and that it remembers nothing outside of its cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybrid.errors import UnsupportedModelError
from hybrid.hf.installed import NEEDED
from hybrid.hf.layers import Layout, fork_layer, layout_of, refuse_unsupported
from hybrid.hf.pass_model import PassModel

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
        """What the cache stores, and the cache after the first tokens."""
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
    """What the cache of a model stores, found out by one pass.

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
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        tensor.copy_(noise * (8 * tensor.abs().max() + 8))
    return bool(states)


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the range of `b`."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())
