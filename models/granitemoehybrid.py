"""Granite 4: Mamba-2 layers, and a few of full attention, mostly without rotary positions (`-h-`), or full attention
alone. Embeddings, logits, attention and what is added to the residual have factors of their own. The feed-forward parts
are dense, or a dense one that all tokens use beside a mixture of experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import Linear, ResidualLayer, RMSNorm
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.moe import ExpertRouter, Experts
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec, TokenTensor

ON_DISK = {
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}
"""Ends of names, and what they are in published checkpoints; transformers also writes them as they are."""


class SharedMLP(nn.Module):
    """A gated feed-forward part, gate and up projection in one matrix."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.input_linear = Linear(size, 2 * intermediate_size)
        self.output_linear = Linear(intermediate_size, size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.output_linear(kernels.silu_and_mul(*self.input_linear(x, batch).chunk(2, dim=-1)), batch)


class GraniteExperts(nn.Module):
    """The routed experts of a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, experts = config.hidden_size, config.num_local_experts
        self.router = ExpertRouter(size, experts, config.num_experts_per_tok, normalise=True)
        self.experts = Experts(size, config.intermediate_size, experts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the experts on `[T, size]`."""
        return self.experts(x, *self.router.choose(x, batch), batch)


class FeedForward(nn.Module):
    """The feed-forward part of a layer, whose parts belong to the layer.

    Args:
        shared: all tokens use it.
        experts: of which each token uses some; None: there are none.
    """

    def __init__(self, shared: SharedMLP, experts: GraniteExperts | None) -> None:
        super().__init__()
        self._parts: tuple[SharedMLP, GraniteExperts | None] = (shared, experts)  # a tuple: they are no submodules

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        shared, experts = self._parts
        y = shared(x, batch)
        return y if experts is None else experts(x, batch) + y


class GraniteLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.residual_scale: float = config.residual_multiplier
        self.is_linear: bool = layer_type == "linear_attention"
        if self.is_linear:
            mixer: nn.Module = Mamba2(Mamba2Sizes.of(config), index_of_type)
            self.mamba = mixer
        else:
            mixer = PlainAttention(config, index_of_type, config.attention_multiplier)
            self.self_attn = mixer
        self.shared_mlp = SharedMLP(size, config.shared_intermediate_size)
        self.block_sparse_moe: GraniteExperts | None = GraniteExperts(config) if config.num_local_experts else None
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            mixer,
            self.post_attention_layernorm,
            FeedForward(self.shared_mlp, self.block_sparse_moe),
        )


class GraniteMoeHybridForCausalLM(CausalLM):
    """Granite 4 with its head.

    Args:
        config: a `GraniteMoeHybridConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the state space rule reads the slots on the host
    layer_kinds: tuple[str, ...] = ("full_attention",)

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layers_block_type
        layers = (GraniteLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        rotated = head_dim_of(config) if config.position_embedding_type == "rope" else 0
        super().__init__(config, chunk_size, rotated, layers, norm)
        self.embedding_scale: float = config.embedding_multiplier
        self.logits_scale: float = 1 / config.logits_scaling

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds, heads = config.layers_block_type, config.num_key_value_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), heads, head_dim_of(config), dtype),),
            state=Mamba2Sizes.of(config).states(kinds.count("linear_attention"), dtype),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        for end, stored in ON_DISK.items():
            if parameter.endswith(f".block_sparse_moe{end}"):
                return (Source(parameter.removesuffix(end) + stored),), (Source(parameter),)
        return ((Source(parameter),),)
