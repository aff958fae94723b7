"""Models with full attention in every layer: Llama, and Qwen3, whose queries and keys have norms. There is no state:
pages are all that a hit needs.
"""

from typing import Any

import torch
from torch import nn

from hybrid.models.attention import Attention, NormedAttention, PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, ResidualLayer, RMSNorm
from hybrid.spec import HybridSpec, TokenTensor


class LlamaLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    is_linear: bool = False

    def __init__(self, config: Any, attention: Attention) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn: Attention = attention
        self.mlp = MLP(size, config.intermediate_size, bool(getattr(config, "mlp_bias", False)))
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.mlp,
        )


class LlamaForCausalLM(CausalLM):
    """Llama with its head.

    Args:
        config: a `LlamaConfig` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    layer_kinds: tuple[str, ...] = ()

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        layers = (LlamaLayer(config, self.attention(config, index)) for index in range(config.num_hidden_layers))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, head_dim_of(config), layers, norm)

    @classmethod
    def attention(cls, config: Any, layer: int) -> Attention:
        """The attention of a layer."""
        return PlainAttention(config, layer)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token of a model of this configuration. There is none per sequence."""
        heads = config.num_key_value_heads
        return HybridSpec((TokenTensor.kv(config.num_hidden_layers, heads, head_dim_of(config), dtype),), ())


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its head.

    Args:
        config: a `Qwen3Config` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    @classmethod
    def attention(cls, config: Any, layer: int) -> Attention:
        """The attention of a layer."""
        return NormedAttention(config, layer)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if "sliding_attention" in (config.layer_types or ()):
            return "sliding_attention in layer_types is not supported; set use_sliding_window to false"
        return super().unsupported(config)
