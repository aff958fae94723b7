"""Bamba: Mamba-2 layers, and a few of full attention. Its state differs from Qwen's and has the same interface: the
mixers say what they keep, and cache and engine do the rest.
"""

from typing import Any

from hybrid.models.attention import PlainAttention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.mixers import Block


class BambaForCausalLM(CausalLM):
    """Bamba with its head: of a `BambaConfig`."""

    rotates_partly = True
    names_on_disk = ({"model.norm.": "model.final_layernorm."},)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        if kind == "linear_attention":
            mixer = Block("input_layernorm", mamba=Mamba2(Mamba2Sizes.of(config)))
        else:
            mixer = Block("input_layernorm", self_attn=PlainAttention(config))
        mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        return mixer, Block("pre_ff_layernorm", feed_forward=mlp)
