"""Mixture of experts: a feed-forward part with routed experts, and a shared expert that all tokens use.

Routing is in fp32, its product included. In deterministic mode a token's result does not depend on the other tokens of
its experts: `hybrid.kernels.batch_invariant` describes how.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.batch_invariant import (
    ALIGNMENT,
    COMPILED,
    ONE_BY_ONE,
    Products,
    can_compile,
    choose_for_experts,
    linear,
)
from hybrid.kernels.reference import sigmoid
from hybrid.models.layers import MLP, Chosen, Linear
from hybrid.models.weights import Layouts, Source


class Router(Linear):
    """Chooses the experts of a token, and their weights.

    Args:
        size: of a row.
        num_experts: experts to choose from.
        top_k: experts per token.
        normalise: whether a token's weights sum to one.
    """

    def __init__(self, size: int, num_experts: int, top_k: int, normalise: bool) -> None:
        super().__init__(size, num_experts)
        self.top_k: int = top_k
        self.normalise: bool = normalise
        self.exact: Tensor | None = None

    def choose(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The `[T, top_k]` fp32 weights, and the `[T, top_k]` experts, of rows `[T, size]`."""
        logits = linear(x.float(), self.matrix(), batch.blocks, self.products)
        return kernels.route_experts(logits, self.top_k, self.normalise)

    def matrix(self) -> Tensor:
        """The weight in fp32, computed once, or as it is where compiled code multiplies it with fp32 rows."""
        if self.exact is None:
            self.exact = self.weight.detach().float()  # a parameter would be one of the model's
        return self.exact

    def compile_products(self, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        """Multiply by compiled code where that is possible, rows in fp32 whatever `dtype` they have before."""
        if can_compile(self.weight, torch.float32):
            self.exact = self.weight.detach()
        super().compile_products(torch.float32, scale)


class Experts(nn.Module):
    """All routed experts. Gate and up projection of an expert are stored as one matrix.

    Attributes:
        products: how an expert's rows are multiplied in deterministic mode, and out of it where they are compiled.
    """

    def __init__(self, size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, size), requires_grad=False
        )
        self.down_proj: nn.Parameter = nn.Parameter(
            torch.empty(num_experts, size, intermediate_size), requires_grad=False
        )
        self.products: Products = ONE_BY_ONE

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of each token's experts: `x` is `[T, size]`, the rest is the router's."""
        top_k, decode_start = experts.shape[1], 0
        if batch.prefills is not None and kernels.uses_triton(x.device):  # the twin would read each weight twice
            decode_start = batch.prefills.rows.stop
        order, places, ends = kernels.sort_by_expert(experts, self.gate_up_proj.shape[0], decode_start)
        num_prompt = decode_start * top_k
        sizes = self.products.sizes if batch.is_batch_invariant else ()
        y = kernels.expert_linear(x, self.gate_up_proj, order, ends, top_k, num_prompt, sizes)
        y = kernels.silu_and_mul(*y.chunk(2, dim=-1))
        y = kernels.expert_linear(y, self.down_proj, order, ends, 0, num_prompt, sizes)
        return kernels.combine_experts(y, places, weights)

    def compile_products(self, dtype: torch.dtype) -> None:
        """Multiply rows of a type by compiled code where that is possible, in deterministic mode and out of it."""
        if can_compile(self.gate_up_proj, dtype) and can_compile(self.down_proj, dtype):
            self.products = COMPILED

    def make_batch_invariant(self, chunk_size: int, chosen: Chosen) -> None:
        """Choose blocks of an expert's rows whose rows have the same bits in every batch.

        Args:
            chunk_size: rows of a chunk.
            chosen: products of other weights; each kind is tried once.
        """
        if self.products.is_compiled:
            return
        found = []
        for weight in (self.gate_up_proj, self.down_proj):
            kind = ("experts", weight.dtype, tuple(weight.shape), weight.stride(), weight.data_ptr() % ALIGNMENT)
            if kind not in chosen:
                chosen[kind] = choose_for_experts(weight)
            found.append(chosen[kind])
        gate_up, down = found
        both = tuple(size for size in gate_up.sizes if size in down.sizes) or (1,)
        self.products = COMPILED if gate_up.is_compiled and down.is_compiled else Products(sizes=both)


class SparseMoE(nn.Module):
    """Routed experts, plus a shared one with a gate."""

    def __init__(self, config: Any, normalise: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.gate: Router = Router(size, config.num_experts, config.num_experts_per_tok, normalise)
        self.experts: Experts = Experts(size, config.moe_intermediate_size, config.num_experts)
        self.shared_expert: MLP = MLP(size, config.shared_expert_intermediate_size)
        self.shared_expert_gate: Linear = Linear(size, 1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        routed = self.experts(x, *self.gate.choose(x, batch), batch)
        return routed + self.shared_expert(x, batch) * sigmoid(self.shared_expert_gate(x, batch))


def expert_layouts(parameter: str, config: Any) -> Layouts | None:
    """The layouts of experts: fused, like the parameter, or one by one; None: the parameter is not one of experts."""
    size, experts = config.moe_intermediate_size, range(config.num_experts)
    prefix, _, kind = parameter.rpartition(".experts.")
    parts: dict[str, Callable[[int], tuple[Source, ...]]] = {
        "gate_up_proj": lambda expert: (
            Source(f"{prefix}.experts.{expert}.gate_proj.weight", at=(expert, slice(0, size))),
            Source(f"{prefix}.experts.{expert}.up_proj.weight", at=(expert, slice(size, 2 * size))),
        ),
        "down_proj": lambda expert: (Source(f"{prefix}.experts.{expert}.down_proj.weight", at=(expert,)),),
    }
    if not prefix or kind not in parts:
        return None
    return (Source(parameter),), tuple(source for expert in experts for source in parts[kind](expert))
