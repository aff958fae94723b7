"""MiniMax-Text: lightning attention in most layers, full attention in the rest, and mixtures of experts. What a part
adds to is the norm of its input, and both have factors.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import ResidualLayer, RMSNorm, Rotary, scaled
from hybrid.models.lightning import LightningAttention
from hybrid.models.moe import ExpertRouter, Experts, expert_layouts
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec, StateTensor, TokenTensor


class MiniMaxExperts(nn.Module):
    """A mixture of experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, experts = config.hidden_size, config.num_local_experts
        self.gate = ExpertRouter(size, experts, config.num_experts_per_tok, normalise=True)
        self.experts = Experts(size, config.intermediate_size, experts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.experts(x, *self.gate.choose(x, batch), batch)


class MiniMaxLayer(ResidualLayer):
    """One layer.

    Attributes:
        factors: of the mixer's and the experts' inputs, which are added, and of what they give.
    """

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        kinds, size, eps = config.layer_types, config.hidden_size, config.rms_norm_eps
        self.is_linear: bool = kinds[index] == "linear_attention"
        place = kinds[:index].count(kinds[index])
        if self.is_linear:
            mixer: nn.Module = LightningAttention(config, head_dim_of(config), place, index)
            first = (config.linear_attn_alpha_factor, config.linear_attn_beta_factor)
        else:
            mixer = PlainAttention(config, place)
            first = (config.full_attn_alpha_factor, config.full_attn_beta_factor)
        self.factors: tuple[tuple[float, float], ...] = (first, (config.mlp_alpha_factor, config.mlp_beta_factor))
        self.self_attn: nn.Module = mixer
        self.block_sparse_moe = MiniMaxExperts(config)
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.block_sparse_moe,
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        rotary: Rotary,
        kv: Tensor,
        state: dict[str, Tensor],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on `x + residual`, as `ResidualLayer.forward`."""
        (kept, given), (kept_after, given_after) = self.factors
        _, x = self.input_layernorm.of_terms(x, residual)
        y = self.mix(x, batch, rotary, kv, state, chunk_size)
        _, x = self.post_attention_layernorm.of_sum(scaled(y, given), scaled(x, kept))
        return scaled(self.block_sparse_moe(x, batch), given_after), scaled(x, kept_after)


class MiniMaxForCausalLM(CausalLM):
    """MiniMax-Text with its head.

    Args:
        config: a `MiniMaxConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the rule reads the slots on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        layers = (MiniMaxLayer(config, index) for index in range(config.num_hidden_layers))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, head_dim_of(config), layers, norm)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.sliding_window is not None:
            return f"sliding_window {config.sliding_window!r} is not supported, only null"
        return super().unsupported(config)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds, size = config.layer_types, head_dim_of(config)
        states = (kinds.count("linear_attention"), config.num_attention_heads, size, size)
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), config.num_key_value_heads, size, dtype),),
            state=(StateTensor("recurrent", states, torch.float32),),
        )

    @staticmethod
    def ignores(name: str, config: Any) -> bool:
        """Tell whether a tensor on disk is not used: factors that follow from the number of a layer are computed."""
        return name.endswith((".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay"))

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter: as published, or as transformers has them in memory."""
        names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
        found = expert_layouts(parameter, config.num_local_experts, config.intermediate_size, names)
        found = found or ((Source(parameter),),)
        return (*found, (Source(parameter.replace(".block_sparse_moe.", ".mlp.")),))
