"""Bamba: Mamba-2 layers, and a few of full attention. Its state differs from Qwen's and has the same interface: `spec`
lists the tensors of its layers, and cache and engine do the rest.
"""

from typing import Any

import torch
from torch import nn

from hybrid.models.attention import PlainAttention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, ResidualLayer, RMSNorm
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec, TokenTensor


class BambaLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        self.is_linear: bool = layer_type == "linear_attention"
        if self.is_linear:
            mixer: nn.Module = Mamba2(Mamba2Sizes.of(config), index_of_type)
            self.mamba = mixer
        else:
            mixer = PlainAttention(config, index_of_type)
            self.self_attn = mixer
        self.feed_forward = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            mixer,
            self.pre_ff_layernorm,
            self.feed_forward,
        )


class BambaForCausalLM(CausalLM):
    """Bamba with its head.

    Args:
        config: a `BambaConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    rotates_partly: bool = True
    waits_for_device: bool = True  # the state space rule reads the slots on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layers_block_type
        layers = (BambaLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, config.hidden_size // config.num_attention_heads, layers, norm)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds = config.layers_block_type
        head_dim = config.hidden_size // config.num_attention_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), config.num_key_value_heads, head_dim, dtype),),
            state=Mamba2Sizes.of(config).states(kinds.count("linear_attention"), dtype),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        return ((Source("model.final_layernorm.weight" if parameter == "model.norm.weight" else parameter),),)
