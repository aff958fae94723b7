"""Jamba: Mamba-1 in most layers, full attention without rotary positions in the rest; the feed-forward parts are dense,
or mixtures of experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, ResidualLayer, RMSNorm
from hybrid.models.mamba1 import Mamba1, mamba1_states
from hybrid.models.moe import ExpertRouter, Experts, expert_layouts
from hybrid.models.weights import Layouts, renamed
from hybrid.spec import HybridSpec, TokenTensor

ON_DISK = {"model.norm.": "model.final_layernorm.", ".mamba.dt_bias": ".mamba.dt_proj.bias"}
"""Parts of names, and what they are on disk."""


class JambaExperts(nn.Module):
    """A mixture of experts whose weights are probabilities."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, experts = config.hidden_size, config.num_experts
        self.router = ExpertRouter(size, experts, config.num_experts_per_tok, normalise=False)
        self.experts = Experts(size, config.intermediate_size, experts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.experts(x, *self.router.choose(x, batch), batch)


class JambaLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    def __init__(self, config: Any, layer_type: str, index_of_type: int, has_experts: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear: bool = layer_type == "linear_attention"
        if self.is_linear:
            mixer: nn.Module = Mamba1(config, index_of_type)
            self.mamba = mixer
        else:
            mixer = PlainAttention(config, index_of_type)
            self.self_attn = mixer
        self.feed_forward: nn.Module = JambaExperts(config) if has_experts else MLP(size, config.intermediate_size)
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.pre_ff_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            mixer,
            self.pre_ff_layernorm,
            self.feed_forward,
        )


class JambaForCausalLM(CausalLM):
    """Jamba with its head.

    Args:
        config: a `JambaConfig` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the scan reads the slots on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds, experts = config.layer_types, config.layers_num_experts
        layers = (
            JambaLayer(config, kind, kinds[:index].count(kind), experts[index] > 1) for index, kind in enumerate(kinds)
        )
        super().__init__(config, chunk_size, 0, layers, RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0))

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds, heads = config.layer_types, config.num_key_value_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), heads, head_dim_of(config), dtype),),
            state=mamba1_states(config, kinds.count("linear_attention"), dtype),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        experts = expert_layouts(parameter, config.num_experts, config.intermediate_size)
        return experts or renamed(parameter, ON_DISK)
