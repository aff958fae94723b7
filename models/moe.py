"""Mixture of experts: a feed-forward part with routed experts, and a shared expert that all tokens use.

Routing is in fp32, its product included. In deterministic mode a token's result does not depend on the other tokens of
its experts: `hybrid.kernels.ops.linear` describes how.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import is_compiled, linear
from hybrid.kernels.packed_weights import steps, unpack
from hybrid.kernels.reference import experts
from hybrid.models.layers import MLP, Linear, squared_relu, weight
from hybrid.models.weights import Layouts, Source


class ExpertRouter(Linear):
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


class SigmoidRouter(ExpertRouter):
    """Chooses experts by the logistic function of their logits, each by itself, plus a bias that only the choice sees.

    Args:
        config: says how they are chosen, by the names of DeepSeek's: `routed_scaling_factor` is a factor of the
            weights, and of `n_group` groups of experts of equal sizes, if there are any, the `topk_group` with the
            highest sum of two experts are chosen from.
        num_experts: experts to choose from.
        least: is added to the sum of the weights.
        has_bias: there is a bias of the choice.
    """

    def __init__(self, config: Any, num_experts: int, least: float = 1e-20, has_bias: bool = True) -> None:
        super().__init__(config.hidden_size, num_experts, config.num_experts_per_tok, config.norm_topk_prob)
        self.factor: float = config.routed_scaling_factor
        self.least = least
        self.groups: tuple[int, int] = (getattr(config, "n_group", 1), getattr(config, "topk_group", 1))
        self.choice_bias = weight(num_experts) if has_bias else None

    def choose(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The `[T, top_k]` fp32 weights, and the `[T, top_k]` experts, of rows `[T, size]`."""
        logits = linear(x.float(), self._matrix(), batch.decode_start)
        compiled: Any = kernels.compiled_for("experts", logits)
        how = self.top_k, self.normalise, self.least, self.factor, self.groups
        chosen: tuple[Tensor, Tensor] = (compiled or experts).choose_experts(logits, self.choice_bias, *how)
        return chosen


class Experts(nn.Module):
    """All routed experts. Gate and up projection of an expert are stored as one matrix.

    Attributes:
        first: the name of the matrices that rows are multiplied by first.
        sizes: numbers of a row of the matrices of a name, however they are stored.
        scales: scales and minimums of matrices that have four bits (`hybrid.kernels.packed_weights`), by name.
    """

    first: str = "gate_up_proj"

    def __init__(self, size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {self.first: size, "down_proj": intermediate_size}
        self.scales: dict[str, Tensor] = {}
        self.gate_up_proj = weight(num_experts, 2 * intermediate_size, size)
        self.down_proj = weight(num_experts, size, intermediate_size)

    @property
    def reads_on_host(self) -> bool:
        """Whether a decode step reads on the host which tokens are those of an expert, where operations are compiled
        for a CPU."""
        return bool(kernels.compiled_module("experts").READS_ON_HOST)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of each token's experts: `x` is `[T, size]`, the rest is the router's."""
        top_k, decode_start = experts.shape[1], 0
        if batch.prefills is not None and kernels.uses_triton(x.device):  # the twin would read each weight twice
            decode_start = batch.prefills.rows.stop
        order, places, ends = kernels.sort_by_expert(experts, self.down_proj.shape[0], decode_start)
        num_prompt = decode_start * top_k
        y = self.product(self.first, x, order, ends, top_k, num_prompt)
        y = self.activated(self.biased(self.first, y, experts, order))
        y = self.product("down_proj", y, order, ends, 0, num_prompt)
        return kernels.combine_experts(self.biased("down_proj", y, experts, order), places, weights)

    def product(self, name: str, x: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int) -> Tensor:
        """`expert_linear` of rows and the matrices of a name."""
        weight: Tensor = getattr(self, name)
        return kernels.expert_linear(x, weight, order, ends, top_k, num_prompt, self.scales.get(name))

    def biased(self, name: str, y: Tensor, experts: Tensor, order: Tensor) -> Tensor:
        """What matrices of a name give for pairs of a token and an expert, with the biases of the experts; most have
        none."""
        return y

    def set_quantized(self, name: str, weight: Tensor, scales: Tensor) -> None:
        """Take matrices of four bits in place of those of a name."""
        setattr(self, name, nn.Parameter(weight, requires_grad=False))
        self.scales[name] = scales

    def numbers(self, name: str) -> Tensor:
        """The matrices of a name, `[experts, out, in]`, or what those of four bits stand for, in fp32."""
        weight: Tensor = getattr(self, name)
        return unpack(weight, self.scales[name], self.sizes[name]) if name in self.scales else weight

    def activated(self, y: Tensor) -> Tensor:
        """What the second product takes, from what the first one gives."""
        return kernels.silu_and_mul(*y.chunk(2, dim=-1))

    def steps(self, name: str) -> Tensor:
        """How far the numbers are apart that matrices of four bits can have, for each of their numbers, in fp32."""
        return steps(self.scales[name], self.sizes[name])


class UngatedExperts(Experts):
    """Routed experts without gates."""

    first: str = "up_proj"

    def __init__(self, size: int, intermediate_size: int, num_experts: int) -> None:
        super().__init__(size, intermediate_size, num_experts)
        del self.gate_up_proj
        self.up_proj = weight(num_experts, intermediate_size, size)

    def activated(self, y: Tensor) -> Tensor:
        """What the second product takes, from what the first one gives."""
        return squared_relu(y)


class MoE(nn.Module):
    """Routed experts, beside which all tokens may use a shared part.

    Args:
        router, experts: the experts, and what chooses them.
        shared: used by all tokens; None: there is none.
        router_name, shared_name: their names in the checkpoint.
    """

    def __init__(
        self,
        router: ExpertRouter,
        experts: Experts,
        shared: nn.Module | None = None,
        router_name: str = "gate",
        shared_name: str = "shared_experts",
    ) -> None:
        super().__init__()
        self.add_module(router_name, router)
        self.experts = experts
        if shared is not None:
            self.add_module(shared_name, shared)
        self._router, self._shared = (router,), () if shared is None else (shared,)  # tuples: they have one name each

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        y = self.routed(x, batch)
        for shared in self._shared:
            y = self.with_shared(y, shared(x, batch), x, batch)
        return y

    def choose(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Choose the experts of rows, and their weights."""
        return self._router[0].choose(x, batch)

    def routed(self, x: Tensor, batch: Batch) -> Tensor:
        """Compute what the routed experts give."""
        return self.experts(x, *self.choose(x, batch), batch)

    def with_shared(self, routed: Tensor, shared: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """Add what the shared part gives for rows `x`."""
        return routed + shared


class SparseMoE(MoE):
    """Routed experts, and a shared one with a gate, as Qwen has them."""

    def __init__(self, config: Any, normalise: bool) -> None:
        size, count = config.hidden_size, config.num_experts
        super().__init__(
            ExpertRouter(size, count, config.num_experts_per_tok, normalise),
            Experts(size, config.moe_intermediate_size, count),
            MLP(size, config.shared_expert_intermediate_size),
            shared_name="shared_expert",
        )
        self.shared_expert_gate = Linear(size, 1)

    def with_shared(self, routed: Tensor, shared: Tensor, x: Tensor, batch: Batch) -> Tensor:
        """Add what the shared expert gives, times its gate."""
        return kernels.add_shared(routed, shared, self.shared_expert_gate(x, batch))


NAMES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The matrices of experts, and those of one expert on disk that make them up, one below the other."""

NUMBERED = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
"""The same, where the matrices of an expert have numbers."""


@dataclass(frozen=True)
class ExpertsOnDisk:
    """How experts are stored: together, like the parameter, or one by one.

    Attributes:
        count, size: what a configuration calls the number of experts, and their intermediate size.
        names: as `NAMES`.
    """

    count: str
    size: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: NAMES)

    def __call__(self, parameter: str, config: Any) -> Layouts | None:
        """Return the layouts of a parameter; None: it is not one of experts."""
        prefix, _, kind = parameter.rpartition(".experts.")
        if not prefix or kind not in self.names:
            return None
        parts, sources, size = self.names[kind], [], getattr(config, self.size)
        for expert in range(getattr(config, self.count)):
            for at, name in enumerate(parts):
                place = (expert, slice(at * size, (at + 1) * size)) if len(parts) > 1 else (expert,)
                sources.append(Source(f"{prefix}.experts.{expert}.{name}.weight", at=place))
        return (Source(parameter),), tuple(sources)
