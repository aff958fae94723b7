"""Falcon-H1: each layer has full attention and Mamba-2 side by side, of the same rows. Everything has factors of its
own: embeddings, logits, the parts of the projections, and what the two mixers and the feed-forward parts give.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, ResidualLayer, RMSNorm, Rotary, scaled
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.weights import Layouts, renamed
from hybrid.spec import HybridSpec, TokenTensor


class ScaledMLP(MLP):
    """A gated feed-forward part; its gate and its result have factors."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.scales: tuple[float, float] = (config.mlp_multipliers[0], config.mlp_multipliers[1])

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        gate, up = self.inputs(x, batch)
        y = self.down_proj(kernels.silu_and_mul(scaled(gate, self.scales[0]), up), batch)
        return scaled(y, self.scales[1])


class FalconLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    is_linear: bool = True

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.mamba = Mamba2(sizes_of(config), layer)
        scale = head_dim_of(config) ** -0.5 * config.key_multiplier  # keys are kept without their factor
        self.self_attn = PlainAttention(config, layer, scale)
        self.feed_forward = ScaledMLP(config)
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.pre_ff_layernorm = RMSNorm(size, eps, offset=0.0)
        self.attention_scales: tuple[float, float] = (config.attention_in_multiplier, config.attention_out_multiplier)
        self.linear_scale: float = config.ssm_out_multiplier
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            self.mamba,
            self.pre_ff_layernorm,
            self.feed_forward,
        )

    @property
    def attention(self) -> PlainAttention:
        """The mixer whose keys and values are in pages."""
        return self.self_attn

    def mix(
        self, y: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, state: dict[str, Tensor], chunk_size: int
    ) -> Tensor:
        """The sum of what both mixers give for normalised rows."""
        before, after = self.attention_scales
        seen = self.self_attn(scaled(y, before), batch, rotary, kv, chunk_size)
        return scaled(self.mamba(y, batch, state, chunk_size), self.linear_scale) + scaled(seen, after)


def sizes_of(config: Any) -> Mamba2Sizes:
    """The sizes of the linear layers. The factor of their input is part of those of its projection."""
    scales = tuple(config.ssm_in_multiplier * scale for scale in config.ssm_multipliers)
    return Mamba2Sizes.of(
        config,
        out_bias=config.projectors_bias,
        has_norm=config.mamba_rms_norm,
        scales=None if all(scale == 1 for scale in scales) else scales,
    )


class FalconH1ForCausalLM(CausalLM):
    """Falcon-H1 with its head.

    Args:
        config: a `FalconH1Config` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the state space rule reads the slots on the host
    layer_kinds: tuple[str, ...] = ()

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        layers = (FalconLayer(config, index) for index in range(config.num_hidden_layers))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, head_dim_of(config), layers, norm)
        self.embedding_scale: float = config.embedding_multiplier
        self.logits_scale: float = config.lm_head_multiplier

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.mamba_rms_norm and config.mamba_norm_before_gate:
            return "mamba_norm_before_gate=True is not supported, only false"
        if config.mamba_proj_bias and config.ssm_in_multiplier != 1:
            return "mamba_proj_bias=True is not supported with an ssm_in_multiplier other than 1"
        return super().unsupported(config)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(layers, heads, head_dim_of(config), dtype),),
            state=sizes_of(config).states(layers, dtype),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        return renamed(parameter, {"model.norm.": "model.final_layernorm."})
