"""transformers' plain torch functions in place of the kernels that it picks when a modeling module is imported.

With flash-linear-attention installed, transformers picks its Triton kernels for every device, and models with linear
attention then fail on a CPU. The torch function that a kernel replaces stays reachable as its `__wrapped__`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType
from typing import Any

from torch import Tensor

TORCH_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba_selective_scan",
    "mamba_selective_state_update",
)
"""The functions with kernels, over all model families; a modeling module has some of them."""

KERNEL_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")
"""Packages in which transformers finds kernels."""

KERNEL_MODULE = "transformers.integrations.hub_kernels"
"""The module of transformers whose wrappers choose between a kernel and its torch function."""


def use_torch_functions(model: Any) -> None:
    """Make a transformers model run its plain torch functions on every device: the reference for comparisons."""
    module = importlib.import_module(type(model).__module__)
    for name in vars(module).keys() & set(TORCH_FUNCTIONS):
        setattr(module, name, inspect.unwrap(getattr(module, name)))


@contextmanager
def without_kernels() -> Iterator[None]:
    """A modeling module of transformers that is imported within has its torch functions alone. It does not import the
    packages of kernels, which takes seconds; those that are loaded already stay."""
    hidden = [package for package in KERNEL_PACKAGES if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: the import fails
    try:
        yield
    finally:
        for package in hidden:
            del sys.modules[package]


def use_torch_functions_on_cpu(model: Any) -> None:
    """Make a transformers model run its plain torch functions on a CPU, and the kernels that were picked elsewhere.

    Each function that was picked is replaced, in the imported modeling module, by one that dispatches on the device of
    its first tensor.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        module = sys.modules.get(name)
        if module is None or not name.startswith("transformers.models."):
            continue
        for key, function in list(vars(module).items()):
            if _is_kernel_wrapper(function):
                setattr(module, key, _by_device(function))


def _is_kernel_wrapper(function: object) -> bool:
    """Tell whether transformers made this function to choose between a kernel and its torch function."""
    if not isinstance(function, FunctionType) or inspect.unwrap(function) is function:
        return False
    return function.__globals__.get("__name__") == KERNEL_MODULE


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
