"""Getting to know a model of transformers: what its cache keeps, and that nothing else remembers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hybrid.errors import UnsupportedModelError
from hybrid.hf_layers import Layout, copy_of, layout_of, refuse_unsupported

FALLBACKS = "transformers.integrations.hub_kernels"
"""The module whose wrappers choose between a package's kernel and the torch function, when a model is imported."""

FIRST, REST, OTHER = range(1, 9), range(9, 12), range(20, 28)
"""Tokens of the probe: a prefix, what follows it, and something else of the prefix's length."""

CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9}
"""How far logits of two equal passes may differ on a device whose sums have no fixed order, as part of their range."""


def forward(model: Any, input_ids: Tensor, past: Any) -> Tensor:
    """One pass on top of a past; the logits of the last token, `[batch, vocabulary]`."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    output = model(input_ids=input_ids, past_key_values=past, use_cache=True, return_dict=True, **options)
    return output.logits[:, -1]


@torch.no_grad()
def probe(model: Any, device: torch.device) -> Layout:
    """Run a few tokens, to see what is kept of them; and take one past up twice, to see that nothing else is.

    Raises:
        UnsupportedModelError: the cache has layers of another class, or the model remembers elsewhere.
    """
    name = type(model).__name__
    past = DynamicCache(config=model.config)
    refuse_unsupported(past, name)
    size = model.config.get_text_config(decoder=True).vocab_size

    def run(tokens: range, past: Any) -> Tensor:
        return forward(model, torch.tensor([[token % size for token in tokens]], device=device), past)

    run(FIRST, past)
    refuse_unsupported(past, name)
    again = DynamicCache(config=model.config)
    again.layers = [copy_of(layer) for layer in past.layers]
    layout = layout_of(past.layers, name)
    expected = run(REST, past)
    run(OTHER, DynamicCache(config=model.config))
    found = run(REST, again)
    tolerance = 0.0 if device.type == "cpu" else CLOSE.get(found.dtype, 2e-2) * float(expected.float().abs().max())
    if not float((found.float() - expected.float()).abs().max()) <= tolerance:
        raise UnsupportedModelError(
            f"{name} remembers something outside of its cache: the same past, taken up twice, gives other logits"
        )
    return layout


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
