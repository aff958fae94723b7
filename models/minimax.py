"""MiniMax-Text: lightning attention in most layers, full attention in the rest, and mixtures of experts. What a part
adds to is the norm of its input, and both have factors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import RMSNorm, scaled
from hybrid.models.lightning import LightningAttention
from hybrid.models.mixers import Block, Context, Layer, sum_of
from hybrid.models.moe import NUMBERED, ExpertRouter, Experts, ExpertsOnDisk, MoE


class MiniMaxLayer(Layer):
    """One layer.

    Args:
        factors: of each block's normalised input, which is added, and of what the block gives.
    """

    def __init__(self, norm: Callable[[], RMSNorm], *blocks: Block, factors: tuple[tuple[float, float], ...]) -> None:
        super().__init__(norm, *blocks)
        self.factors = factors

    def forward(self, x: Tensor, residual: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """Run the layer on `x + residual`, as `Layer.forward`."""
        for (norm, parts, _), (kept, given) in zip(self.blocks, self.factors, strict=True):
            assert norm is not None
            _, y = norm.of_terms(x, residual)
            x, residual = scaled(sum_of(parts, y, context), given), scaled(y, kept)
        assert residual is not None
        return x, residual


class MiniMaxForCausalLM(CausalLM):
    """MiniMax-Text with its head: of a `MiniMaxConfig`."""

    names_on_disk = ({}, {".block_sparse_moe.": ".mlp."})  # as published; in memory
    parts_on_disk = (ExpertsOnDisk("num_local_experts", "intermediate_size", NUMBERED),)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        size, count = config.hidden_size, config.num_local_experts
        is_linear = kind == "linear_attention"
        mixer = LightningAttention(config, head_dim_of(config), index) if is_linear else PlainAttention(config)
        router = ExpertRouter(size, count, config.num_experts_per_tok, normalise=True)
        experts = MoE(router, Experts(size, config.intermediate_size, count))
        return (
            Block("input_layernorm", self_attn=mixer),
            Block("post_attention_layernorm", block_sparse_moe=experts),
        )

    @classmethod
    def layer(cls, config: Any, kind: str, index: int) -> Layer:
        """Make a layer."""
        name = "linear" if kind == "linear_attention" else "full"
        mixer, experts = (
            (getattr(config, f"{part}_alpha_factor"), getattr(config, f"{part}_beta_factor"))
            for part in (f"{name}_attn", "mlp")
        )
        return MiniMaxLayer(partial(cls.norm, config), *cls.blocks(config, kind, index), factors=(mixer, experts))

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.sliding_window is not None:
            return f"sliding_window {config.sliding_window!r} is not supported, only null"
        return super().unsupported(config)

    @staticmethod
    def ignores(name: str, config: Any) -> bool:
        """Tell whether a tensor on disk is not used: factors that follow from the number of a layer are computed."""
        return name.endswith((".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"))
