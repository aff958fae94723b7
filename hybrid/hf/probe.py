"""Getting to know a model of transformers: what its cache keeps, and that nothing else remembers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybrid.errors import UnsupportedModelError
from hybrid.hf.layers import Layout, copy_of, layout_of, refuse_unsupported

FALLBACKS = "transformers.integrations.hub_kernels"
"""The module whose wrappers choose between a package's kernel and the torch function, when a model is imported."""

FIRST, REST, OTHER = range(1, 9), range(9, 11), range(20, 28)
"""Tokens of the probe: a prefix, what follows it, and something else of the prefix's length."""

SAME = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far logits of two equal passes may differ on a device whose sums have no fixed order, as part of their range."""

CLOSE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""How far those of a pass in two parts may differ from those of one."""


def forward(model: Any, tokens: Sequence[int], past: Any, start: int, device: torch.device) -> Tensor:
    """One pass over the tokens of one sequence on top of a past; the logits of the last one, `[vocabulary]`.

    Args:
        start: tokens that the past has seen.
    """
    options: dict[str, Any] = {}
    parameters = inspect.signature(model.forward).parameters
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    if "position_ids" in parameters:
        options["position_ids"] = torch.arange(start, start + len(tokens), device=device).unsqueeze(0)
    ids = torch.tensor([tokens], device=device)
    return model(input_ids=ids, past_key_values=past, use_cache=True, return_dict=True, **options).logits[0, -1]


@torch.no_grad()
def probe(model: Any, device: torch.device) -> Layout:
    """Run a few tokens, to see what the cache keeps of them, that nothing else remembers, and that the model goes on
    from it.

    Raises:
        UnsupportedModelError: it is not so; the message says what.
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
        other.layers = [copy_of(layer) for layer in past.layers]
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
        otherwise = run(REST, shifted, len(FIRST))
    except UnsupportedModelError:
        raise
    except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, RuntimeError) as error:
        raise UnsupportedModelError(f"{name} does not run on transformers' DynamicCache: {error}") from error
    exact = 0.0 if device.type == "cpu" else SAME.get(found.dtype, 2e-2)
    if not _apart(found, expected) <= exact:
        raise UnsupportedModelError(
            f"{name} remembers something outside of its cache: the same past, taken up twice, gives other logits"
        )
    if recurrent and torch.equal(otherwise, expected):
        raise UnsupportedModelError(
            f"{name} drops its recurrent states when it goes on with several tokens, so no prefix of it can be taken up"
        )
    if not _apart(at_once, expected) <= CLOSE.get(found.dtype, 5e-2):
        raise UnsupportedModelError(f"{name} gives other logits when a prompt is computed in two parts")
    return layout


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, as part of the range."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def use_functions_of_the_device(model: Any) -> None:
    """Have a model on a CPU run its plain torch functions there, whatever kernels are installed.

    transformers picks kernels when the modeling module is imported, for every device: with flash-linear-attention
    installed, linear-attention models fail on a CPU. Each such function is replaced by one that looks at its first
    tensor: on a CPU the torch function behind the kernel runs, elsewhere what was picked.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(name)
        if module is None or not name.startswith("transformers.models."):
            continue
        for key, function in list(vars(module).items()):
            if getattr(function, "__globals__", {}).get("__name__") == FALLBACKS and hasattr(function, "__wrapped__"):
                setattr(module, key, _by_device(function))


def _by_device(picked: Callable[..., Any]) -> Callable[..., Any]:
    plain = inspect.unwrap(picked)
    parameters = inspect.signature(plain).parameters

    @wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if first is None or first.device.type != "cpu":
            return picked(*args, **kwargs)
        return plain(*args, **{name: value for name, value in kwargs.items() if name in parameters})

    return function
