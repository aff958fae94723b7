"""Mixture of experts: a feed-forward part with routed experts, and a shared expert that all tokens use.

Routing is in fp32, its product included. In deterministic mode a token's result does not depend on the other tokens of
its experts: `hybrid.kernels.ops.linear` describes how.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import is_compiled, linear
from hybrid.models.layers import MLP, Linear
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
        logits = linear(x.float(), self._matrix(), batch.decode_start)
        return kernels.route_experts(logits, self.top_k, self.normalise)

    def _matrix(self) -> Tensor:
        """The weight as it is where compiled code multiplies it with fp32 rows; else in fp32, computed once."""
        if is_compiled(self.weight.device):
            return self.weight
        if self.exact is None:
            self.exact = self.weight.detach().float()  # a parameter would be one of the model's
        return self.exact


class Experts(nn.Module):
    """All routed experts. Gate and up projection of an expert are stored as one matrix."""

    def __init__(self, size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.gate_up_proj: nn.Parameter = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, size), requires_grad=False
        )
        self.down_proj: nn.Parameter = nn.Parameter(
            torch.empty(num_experts, size, intermediate_size), requires_grad=False
        )

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of each token's experts: `x` is `[T, size]`, the rest is the router's."""
        top_k, decode_start = experts.shape[1], 0
        if batch.prefills is not None and kernels.uses_triton(x.device):  # the twin would read each weight twice
            decode_start = batch.prefills.rows.stop
        order, places, ends = kernels.sort_by_expert(experts, self.gate_up_proj.shape[0], decode_start)
        num_prompt = decode_start * top_k
        y = kernels.expert_linear(x, self.gate_up_proj, order, ends, top_k, num_prompt)
        y = kernels.silu_and_mul(*y.chunk(2, dim=-1))
        y = kernels.expert_linear(y, self.down_proj, order, ends, 0, num_prompt)
        return kernels.combine_experts(y, places, weights)


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
        shared, gate = self.shared_expert(x, batch), self.shared_expert_gate(x, batch)
        return kernels.add_shared(routed, shared, gate)


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
