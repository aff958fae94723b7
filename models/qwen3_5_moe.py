"""Qwen3.5 MoE (as 35B-A3B): the layers of the dense model, each with a mixture of experts as its feed-forward part."""

from typing import Any

from torch import nn

from hybrid.models.moe import SparseMoE, expert_layouts
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
from hybrid.models.weights import Layouts


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801 (the checkpoint's name)
    """Qwen3.5 MoE text with its head.

    Args:
        config: a `Qwen3_5MoeTextConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: it has the layer for multi-token prediction.
    """

    @classmethod
    def feed_forward(cls, config: Any, layer: int) -> nn.Module:
        """The feed-forward part of a layer."""
        return SparseMoE(config, normalise=True)

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        return expert_layouts(parameter, config) or Qwen3_5ForCausalLM.layouts(parameter, config)
