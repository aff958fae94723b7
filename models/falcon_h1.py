"""Falcon-H1: each layer has full attention and Mamba-2 side by side, of the same rows. Everything has factors of its
own: embeddings, logits, the parts of the projections, and what the two mixers and the feed-forward parts give.
"""

from typing import Any

from torch import Tensor

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM, Factors
from hybrid.models.layers import MLP, scaled
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.mixers import Block, Context


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


class ScaledMamba2(Mamba2):
    """Mamba-2; what it gives has a factor."""

    def __init__(self, config: Any) -> None:
        super().__init__(sizes_of(config))
        self.scale: float = config.ssm_out_multiplier

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        return scaled(super().forward(x, context), self.scale)


class ScaledAttention(PlainAttention):
    """Full attention; its rows, its keys and what it gives have factors. Keys are kept without theirs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, head_dim_of(config) ** -0.5 * config.key_multiplier)
        self.scales: tuple[float, float] = (config.attention_in_multiplier, config.attention_out_multiplier)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; writes its keys and values to the slots of the batch."""
        before, after = self.scales
        return scaled(super().forward(scaled(x, before), context), after)


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
    """Falcon-H1 with its head: of a `FalconH1Config`."""

    layer_kinds = ()
    names_on_disk = ({"model.norm.": "model.final_layernorm."},)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        mixers = Block("input_layernorm", mamba=ScaledMamba2(config), self_attn=ScaledAttention(config))
        return mixers, Block("pre_ff_layernorm", feed_forward=ScaledMLP(config))

    @classmethod
    def factors_of(cls, config: Any) -> Factors:
        """Return the factors of a model."""
        return Factors(embeddings=config.embedding_multiplier, logits=config.lm_head_multiplier)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.mamba_rms_norm and config.mamba_norm_before_gate:
            return "mamba_norm_before_gate=True is not supported, only false"
        if config.mamba_proj_bias and config.ssm_in_multiplier != 1:
            return "mamba_proj_bias=True is not supported with an ssm_in_multiplier other than 1"
        return super().unsupported(config)
