"""transformers' own model, as the judge of ours."""

import importlib
from typing import Any

TORCH_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
)
"""Those of all families; a model's module has some of them."""


def use_torch_functions(model: Any) -> None:
    """Make a transformers model run its plain torch functions, whatever kernels are installed.

    Where flash-linear-attention is installed, transformers picks its kernels when the modeling module is imported, for
    every device, and the model then fails on a CPU. The torch functions stay reachable behind `__wrapped__`.
    """
    module = importlib.import_module(type(model).__module__)
    for name in vars(module).keys() & set(TORCH_FUNCTIONS):
        function = getattr(module, name)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        setattr(module, name, function)
