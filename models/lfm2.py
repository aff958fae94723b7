"""LFM2: short convolutions in most layers, full attention in the rest; the feed-forward parts are dense, or mixtures of
experts (as in 8B-A1B).

A convolution's input and output are gated, and its window of a few tokens is all the state that there is: a checkpoint
weighs as much as the keys and values of one or two tokens.
"""

from typing import Any

from torch import Tensor, nn

from hybrid.models.attention import NormedAttention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, DepthwiseWeight, Linear
from hybrid.models.mixers import Block, Context, ConvolvedMixer
from hybrid.models.moe import NUMBERED, Experts, ExpertsOnDisk, MoE, SigmoidRouter

ON_DISK = {
    "model.norm.": "model.embedding_norm.",
    ".conv.conv1d.": ".conv.conv.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".feed_forward.gate_proj.": ".feed_forward.w1.",
    ".feed_forward.up_proj.": ".feed_forward.w3.",
    ".feed_forward.down_proj.": ".feed_forward.w2.",
    ".feed_forward.gate.choice_bias": ".feed_forward.expert_bias",
}
"""Parts of names, and what they are on disk."""


class ShortConvolution(ConvolvedMixer):
    """A layer whose state is the window of a causal convolution."""

    has_silu = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, bias = config.hidden_size, bool(config.conv_bias)
        self.in_proj = Linear(size, 3 * size, bias)
        self.conv1d = DepthwiseWeight(size, config.conv_L_cache, bias)
        self.out_proj = Linear(size, size, bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        before, after, x = self.in_proj(x, context.batch).chunk(3, dim=-1)
        return self.out_proj(after * self.mix((before * x,), context), context.batch)


class Lfm2ForCausalLM(CausalLM):
    """LFM2 with its head: of a `Lfm2Config`."""

    layer_kinds = ("conv", "full_attention")
    names_on_disk = (ON_DISK,)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        if kind == "conv":
            mixer = Block("operator_norm", conv=ShortConvolution(config))
        else:
            mixer = Block("operator_norm", self_attn=NormedAttention(config))
        return mixer, Block("ffn_norm", feed_forward=cls.feed_forward(config, index))

    @classmethod
    def feed_forward(cls, config: Any, index: int) -> nn.Module:
        """Make the feed-forward part of a layer."""
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if config.block_ffn_dim_multiplier is not None:
                size = int(config.block_ffn_dim_multiplier * size)
                size = -(-size // config.block_multiple_of) * config.block_multiple_of
        return MLP(config.hidden_size, size)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, and its head: of a `Lfm2MoeConfig`."""

    parts_on_disk = (ExpertsOnDisk("num_experts", "moe_intermediate_size", NUMBERED),)

    @classmethod
    def feed_forward(cls, config: Any, index: int) -> nn.Module:
        """Make the feed-forward part of a layer: dense in the first ones."""
        if index < config.num_dense_layers:
            return MLP(config.hidden_size, config.intermediate_size)
        router = SigmoidRouter(config, config.num_experts, least=1e-6, has_bias=config.use_expert_bias)
        return MoE(router, Experts(config.hidden_size, config.moe_intermediate_size, config.num_experts))
