"""LFM2: short convolutions in most layers, full attention in the rest; the feed-forward parts are dense, or mixtures of
experts (as in 8B-A1B).

A convolution's input and output are gated, and its window of a few tokens is all the state that there is: a checkpoint
weighs as much as the keys and values of one or two tokens.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import convolution
from hybrid.models.attention import NormedAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, DepthwiseWeight, Linear, ResidualLayer, RMSNorm, mix_tokens
from hybrid.models.moe import Experts, SigmoidRouter, expert_layouts
from hybrid.models.weights import Layouts, renamed
from hybrid.spec import HybridSpec, StateTensor, TokenTensor

NAMES = {
    "model.norm.": "model.embedding_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.q_norm.": ".self_attn.q_layernorm.",
    ".self_attn.k_norm.": ".self_attn.k_layernorm.",
    ".feed_forward.gate_proj.": ".feed_forward.w1.",
    ".feed_forward.up_proj.": ".feed_forward.w3.",
    ".feed_forward.down_proj.": ".feed_forward.w2.",
    ".feed_forward.gate.choice_bias": ".feed_forward.expert_bias",
}
"""Parts of names, and what they are on disk."""


def _computes(x: Tensor) -> Any:
    """The module whose functions compute what follows from a tensor."""
    return kernels.compiled_for("convolution", x) or convolution


class ShortConvolution(nn.Module):
    """A layer whose state is the window of a causal convolution."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        size, bias = config.hidden_size, bool(config.conv_bias)
        self.in_proj = Linear(size, 3 * size, bias)
        self.conv = DepthwiseWeight(size, config.conv_L_cache, bias)
        self.out_proj = Linear(size, size, bias)

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        before, after, x = self.in_proj(x, batch).chunk(3, dim=-1)
        y = mix_tokens(self, (before * x,), batch, state, chunk_size)
        return self.out_proj(after * y.to(after.dtype), batch)

    def prefill(self, inputs: tuple[Tensor, ...], batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """The convolution for prompts: `inputs` are their gated rows."""
        (gated,), windows = inputs, state["conv"][:, self.layer]
        y: Tensor = _computes(gated).causal_sums(gated, self._taps(), windows, *batch.prompt_slots, self.conv.bias)
        return y

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        (gated,), slots = inputs, (steps.read, steps.write)
        windows = state["conv"][:, self.layer]
        y: Tensor = _computes(gated).causal_sums_update(gated, self._taps(), windows, *slots, self.conv.bias)
        return y

    def _taps(self) -> Tensor:
        return self.conv.weight.squeeze(1)


class Lfm2Experts(nn.Module):
    """A mixture of experts without a shared one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = SigmoidRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            config.routed_scaling_factor,
            has_bias=config.use_expert_bias,
            least=1e-6,
        )
        self.experts = Experts(config.hidden_size, config.moe_intermediate_size, config.num_experts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.experts(x, *self.gate.choose(x, batch), batch)


class Lfm2Layer(ResidualLayer):
    """One layer."""

    def __init__(self, config: Any, layer_type: str, index_of_type: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.is_linear: bool = layer_type == "conv"
        if self.is_linear:
            mixer: nn.Module = ShortConvolution(config, index_of_type)
            self.conv = mixer
        else:
            mixer = NormedAttention(config, index_of_type)
            self.self_attn = mixer
        self.feed_forward = feed_forward
        self.operator_norm = RMSNorm(config.hidden_size, config.norm_eps, offset=0.0)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.operator_norm,
            mixer,
            self.ffn_norm,
            self.feed_forward,
        )


class Lfm2ForCausalLM(CausalLM):
    """LFM2 with its head.

    Args:
        config: a `Lfm2Config` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the convolution reads the slots on the host
    layer_kinds: tuple[str, ...] = ("conv", "full_attention")

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layer_types
        layers = (
            Lfm2Layer(config, kind, kinds[:index].count(kind), self.feed_forward(config, index))
            for index, kind in enumerate(kinds)
        )
        norm = RMSNorm(config.hidden_size, config.norm_eps, offset=0.0)
        super().__init__(config, chunk_size, head_dim_of(config), layers, norm)

    @classmethod
    def feed_forward(cls, config: Any, layer: int) -> nn.Module:
        """The feed-forward part of a layer."""
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = int(2 * size / 3)
            if config.block_ffn_dim_multiplier is not None:
                size = int(config.block_ffn_dim_multiplier * size)
                size = -(-size // config.block_multiple_of) * config.block_multiple_of
        return MLP(config.hidden_size, size)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds = config.layer_types
        heads = config.num_key_value_heads
        windows = (kinds.count("conv"), config.conv_L_cache - 1, config.hidden_size)
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), heads, head_dim_of(config), dtype),),
            state=(StateTensor("conv", windows, dtype),),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        return renamed(parameter, NAMES)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts, and its head.

    Args:
        config: a `Lfm2MoeConfig` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    @classmethod
    def feed_forward(cls, config: Any, layer: int) -> nn.Module:
        """The feed-forward part of a layer: dense in the first ones."""
        if layer < config.num_dense_layers:
            return MLP(config.hidden_size, config.intermediate_size)
        return Lfm2Experts(config)

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        sizes = config.num_experts, config.moe_intermediate_size
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        return expert_layouts(parameter, *sizes, names) or Lfm2ForCausalLM.layouts(parameter, config)
