"""Granite 4: Mamba-2 layers, and a few of full attention, mostly without rotary positions (`-h-`), or full attention
alone. Embeddings, logits, attention and what is added to the residual have factors of their own. The feed-forward parts
are dense, or a dense one that all tokens use beside a mixture of experts.
"""

from typing import Any

from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM, Factors
from hybrid.models.layers import Linear
from hybrid.models.mamba2 import Mamba2, Mamba2Sizes
from hybrid.models.mixers import Block
from hybrid.models.moe import ExpertRouter, Experts, MoE

PUBLISHED = {
    ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
    ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
}
"""Parts of names, and what they are in published checkpoints; transformers also writes them as they are."""


class SharedMLP(nn.Module):
    """A gated feed-forward part, gate and up projection in one matrix."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.input_linear = Linear(size, 2 * intermediate_size)
        self.output_linear = Linear(intermediate_size, size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.output_linear(kernels.silu_and_mul(*self.input_linear(x, batch).chunk(2, dim=-1)), batch)


class GraniteMoeHybridForCausalLM(CausalLM):
    """Granite 4 with its head: of a `GraniteMoeHybridConfig`."""

    layer_kinds = ("full_attention",)
    names_on_disk = (PUBLISHED, {})

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        size, count = config.hidden_size, config.num_local_experts
        if kind == "linear_attention":
            mixer = Block("input_layernorm", mamba=Mamba2(Mamba2Sizes.of(config)))
        else:
            mixer = Block("input_layernorm", self_attn=PlainAttention(config, config.attention_multiplier))
        shared = SharedMLP(size, config.shared_intermediate_size)
        experts = None
        if count:
            router = ExpertRouter(size, count, config.num_experts_per_tok, normalise=True)
            experts = MoE(router, Experts(size, config.intermediate_size, count), router_name="router")
        return mixer, Block("post_attention_layernorm", shared_mlp=shared, block_sparse_moe=experts)

    @classmethod
    def factors_of(cls, config: Any) -> Factors:
        """Return the factors of a model."""
        return Factors(config.embedding_multiplier, config.residual_multiplier, 1 / config.logits_scaling)

    @classmethod
    def rotated_dim(cls, config: Any) -> int:
        """Return the size of a head that is rotated; 0: none is."""
        return head_dim_of(config) if config.position_embedding_type == "rope" else 0
