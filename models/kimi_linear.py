"""Kimi Linear: Kimi delta attention in most layers, latent attention without rotary positions in the rest; the first
feed-forward parts are dense, the others mixtures of experts beside a shared one.
"""

from typing import Any

import torch
from torch import nn

from hybrid.models.causal_lm import CausalLM
from hybrid.models.kda import KimiDeltaAttention, kda_layouts, kda_states
from hybrid.models.latent_attention import LatentAttention, latent_layouts, latent_rows
from hybrid.models.layers import MLP, Linear, ResidualLayer, RMSNorm
from hybrid.models.moe import SharedMoE, expert_layouts
from hybrid.models.weights import Layouts, renamed, with_names
from hybrid.spec import HybridSpec

EXPERTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""Matrices of experts, and those of one expert on disk."""


class KimiLayer(ResidualLayer):
    """One layer.

    Args:
        mixer: of the layer.
        is_linear: its state is in state slots.
        is_dense: the feed-forward part has no experts.
    """

    def __init__(self, config: Any, mixer: nn.Module, is_linear: bool, is_dense: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear: bool = is_linear
        self.self_attn: nn.Module = mixer
        self.mlp: nn.Module = MLP(size, config.intermediate_size) if is_dense else SharedMoE(config)
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            mixer,
            self.post_attention_layernorm,
            self.mlp,
        )


class KimiLinearForCausalLM(CausalLM):
    """Kimi Linear with its head.

    Args:
        config: a `KimiLinearConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the rule reads the slots on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layer_types
        layers: list[nn.Module] = []
        for index, (kind, part) in enumerate(zip(kinds, config.mlp_layer_types, strict=True)):
            is_linear, place = kind == "linear_attention", kinds[:index].count(kind)
            mixer = self.linear(config, place) if is_linear else self.attention(config, place)
            layers.append(KimiLayer(config, mixer, is_linear, part == "dense"))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, self.rotated(config), layers, norm)

    @classmethod
    def linear(cls, config: Any, layer: int) -> KimiDeltaAttention:
        """A linear-attention layer."""
        size, heads, short = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        decay, gate = (
            {f"{name}_a_proj": Linear(size, short), f"{name}_b_proj": Linear(short, heads * short)} for name in "fg"
        )
        return KimiDeltaAttention(config, layer, decay, gate, (1, 1, heads, 1), None)

    @classmethod
    def attention(cls, config: Any, layer: int) -> LatentAttention:
        """A full-attention layer."""
        return LatentAttention(config, layer)

    @classmethod
    def rotated(cls, config: Any) -> int:
        """The size of what is rotated."""
        return 0

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds = config.layer_types
        return HybridSpec(
            tokens=(latent_rows(config, kinds.count("full_attention"), dtype),),
            state=kda_states(config, kinds.count("linear_attention"), dtype),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        found = expert_layouts(parameter, config.num_local_experts, config.moe_intermediate_size, EXPERTS)
        found = found or kda_layouts(parameter, config) or latent_layouts(parameter, config)
        found = found or renamed(parameter, {".gate.choice_bias": ".gate.e_score_correction_bias"})
        return (*found, *with_names(found, {".mlp.": ".block_sparse_moe."}))
