"""Jamba: Mamba-1 in most layers, full attention without rotary positions in the rest; the feed-forward parts are dense,
or mixtures of experts.
"""

from typing import Any

from torch import nn

from hybrid.models.attention import PlainAttention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP
from hybrid.models.mamba1 import Mamba1
from hybrid.models.mixers import Block
from hybrid.models.moe import ExpertRouter, Experts, ExpertsOnDisk, MoE


class JambaForCausalLM(CausalLM):
    """Jamba with its head: of a `JambaConfig`."""

    is_rotated = False
    names_on_disk = ({"model.norm.": "model.final_layernorm.", ".mamba.dt_bias": ".mamba.dt_proj.bias"},)
    parts_on_disk = (ExpertsOnDisk("num_experts", "intermediate_size"),)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        size, inner, count = config.hidden_size, config.intermediate_size, config.num_experts
        if kind == "linear_attention":
            mixer = Block("input_layernorm", mamba=Mamba1(config))
        else:
            mixer = Block("input_layernorm", self_attn=PlainAttention(config))
        if config.layers_num_experts[index] > 1:
            router = ExpertRouter(size, count, config.num_experts_per_tok, normalise=False)
            part: nn.Module = MoE(router, Experts(size, inner, count), router_name="router")
        else:
            part = MLP(size, inner)
        return mixer, Block("pre_ff_layernorm", feed_forward=part)
