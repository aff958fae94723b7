"""transformers' own model, as the judge of ours."""

import importlib
from typing import Any

TORCH_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


def use_torch_functions(model: Any) -> None:
    """Make a transformers model run its plain torch functions, whatever kernels are installed.

    Where flash-linear-attention is installed, transformers picks its kernels when the modeling module is imported, for
    every device, and the model then fails on a CPU. The torch functions stay reachable behind `__wrapped__`.
    """
    module = importlib.import_module(type(model).__module__)
    for name in TORCH_FUNCTIONS:
        function = getattr(module, name)
        while hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        setattr(module, name, function)
