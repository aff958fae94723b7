"""Probing a model of transformers: what its cache stores, and that it remembers nothing outside of its cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybrid.errors import UnsupportedModelError
from hybrid.hf.layers import Layout, fork_layer, layout_of, refuse_unsupported

FIRST, REST, OTHER = range(1, 9), range(9, 11), range(20, 28)
"""Token ids of the probe: a prefix, its continuation, and an unrelated prompt of the same length as the prefix."""

SAME = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Tolerance for the logits of two equal passes on a device with nondeterministic sums, relative to their range."""

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Tolerance for the logits of a prompt computed in two passes against one."""


def forward(model: Any, tokens: Sequence[int], past: Any, start: int, device: torch.device) -> Tensor:
    """One forward pass over tokens of one sequence.

    Args:
        model: a causal language model.
        tokens: the token ids to compute.
        past: the cache that holds the tokens before; it is extended.
        start: number of tokens that `past` holds.
        device: device of the model's input.

    Returns:
        The logits of the last token, `[vocabulary]`.
    """
    options: dict[str, Any] = {}
    parameters = inspect.signature(model.forward).parameters
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    if "position_ids" in parameters:
        options["position_ids"] = torch.arange(start, start + len(tokens), device=device).unsqueeze(0)
    ids = torch.tensor([tokens], device=device)
    output = model(input_ids=ids, past_key_values=past, use_cache=True, return_dict=True, **options)
    logits: Tensor = output.logits[0, -1]
    return logits


@torch.no_grad()
def probe(model: Any, device: torch.device) -> Layout:
    """Run a few tokens to find out what the cache stores, and check that the model can resume from it.

    Returns:
        The layout of the model's cache.

    Raises:
        UnsupportedModelError: the cache has unsupported layers, the model remembers something outside of its cache, or
            it cannot resume from a copy of it; the message says which.
    """
    name = type(model).__name__
    config = model.config
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder; PrefixCache is for decoders")
    past = DynamicCache(config=config)
    refuse_unsupported(past.layers, name)
    size = config.get_text_config(decoder=True).vocab_size

    def run(tokens: Iterable[int], past: Any, start: int = 0) -> Tensor:
        return forward(model, [token % size for token in tokens], past, start, device)

    def fork(past: Any) -> Any:
        other = DynamicCache(config=config)
        other.layers = [fork_layer(layer) for layer in past.layers]
        return other

    try:
        run(FIRST, past)
        refuse_unsupported(past.layers, name)
        layout = layout_of(past.layers, name)
        at_once = run((*FIRST, *REST), DynamicCache(config=config))
        again, shifted = fork(past), fork(past)
        expected = run(REST, past, len(FIRST))
        run(OTHER, DynamicCache(config=config))
        found = run(REST, again, len(FIRST))
        recurrent = [state for state in layout.states if state.kind == "recurrent_states"]
        for state in recurrent:
            shifted.layers[state.layer].recurrent_states[state.index].add_(1)
        disturbed = run(REST, shifted, len(FIRST))
    except UnsupportedModelError:
        raise
    except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, RuntimeError) as error:
        raise UnsupportedModelError(f"{name} does not run on transformers' DynamicCache: {error}") from error
    exact = 0.0 if device.type == "cpu" else SAME.get(found.dtype, 2e-2)
    if not _difference(found, expected) <= exact:
        raise UnsupportedModelError(
            f"{name} remembers something outside of its cache: resuming twice from the same past gives different logits"
        )
    if recurrent and torch.equal(disturbed, expected):
        raise UnsupportedModelError(
            f"{name} drops its recurrent states when it continues with several tokens, so no prefix can be resumed"
        )
    if not _difference(at_once, expected) <= CLOSE.get(found.dtype, 5e-2):
        raise UnsupportedModelError(f"{name} gives different logits when a prompt is computed in two passes")
    return layout


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the range of `b`."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())
