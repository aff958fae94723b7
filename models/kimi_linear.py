"""Kimi Linear: Kimi delta attention in most layers, latent attention without rotary positions in the rest; the first
feed-forward parts are dense, the others mixtures of experts beside a shared one.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hybrid.models.causal_lm import CausalLM
from hybrid.models.kda import KimiDeltaAttention, kda_layouts
from hybrid.models.latent_attention import LatentAttention, latent_layouts
from hybrid.models.layers import MLP, Linear
from hybrid.models.mixers import Block, Mixer
from hybrid.models.moe import NUMBERED, Experts, ExpertsOnDisk, MoE, SigmoidRouter

BIAS = {".gate.choice_bias": ".gate.e_score_correction_bias"}
"""A part of a name, and what it is on disk."""


class KimiLinearForCausalLM(CausalLM):
    """Kimi Linear with its head: of a `KimiLinearConfig`."""

    is_rotated = False
    names_on_disk: tuple[Mapping[str, str], ...] = (BIAS, {**BIAS, ".mlp.": ".block_sparse_moe."})
    parts_on_disk = (
        ExpertsOnDisk("num_local_experts", "moe_intermediate_size", NUMBERED),
        kda_layouts,
        latent_layouts,
    )

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        mixer = cls.linear(config) if kind == "linear_attention" else cls.attention(config)
        is_dense = config.mlp_layer_types[index] == "dense"
        part = MLP(config.hidden_size, config.intermediate_size) if is_dense else experts(config)
        return Block("input_layernorm", self_attn=mixer), Block("post_attention_layernorm", mlp=part)

    @classmethod
    def linear(cls, config: Any) -> Mixer:
        """Make the mixer of a linear-attention layer."""
        size, heads, short = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        decay, gate = (
            {f"{name}_a_proj": Linear(size, short), f"{name}_b_proj": Linear(short, heads * short)} for name in "fg"
        )
        return KimiDeltaAttention(config, decay, gate, (1, 1, heads, 1), None)

    @classmethod
    def attention(cls, config: Any) -> Mixer:
        """Make the mixer of a full-attention layer."""
        return LatentAttention(config)


def experts(config: Any) -> nn.Module:
    """Make routed experts in groups, and a shared one without a gate, of a configuration with the names of
    DeepSeek's."""
    size, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_local_experts
    shared = MLP(size, config.n_shared_experts * inner)
    return MoE(SigmoidRouter(config, count), Experts(size, inner, count), shared)
