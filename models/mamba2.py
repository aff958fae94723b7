"""Mamba-2 as the model families share it: a causal convolution and the state space rule, each with its state in a state
slot.

It is compiled on a CPU (`hybrid.kernels.cpu.state_space`), and runs in plain torch elsewhere
(`hybrid.kernels.reference.state_space`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import state_space
from hybrid.models.layers import DepthwiseWeight, Linear, weight
from hybrid.models.mixers import Context, ConvolvedMixer


@dataclass(frozen=True)
class Mamba2Sizes:
    """The sizes of the linear layers of a model.

    Attributes:
        size: of a row of the model.
        heads, head_dim: of the values; groups, state_size: of what heads share.
        width: of the convolution, in tokens.
        conv_bias, in_bias, out_bias: whether the convolution and the projections have biases.
        limits: of the time steps.
        eps: of the norm.
        has_norm: the output is normalised, and not only gated.
        scales: factors of the parts of the input projection: gate, values, B, C and time steps; None: all are 1.
    """

    size: int
    heads: int
    head_dim: int
    groups: int
    state_size: int
    width: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    limits: tuple[float, float]
    eps: float
    has_norm: bool = True
    scales: tuple[float, ...] | None = None

    @classmethod
    def of(cls, config: Any, **others: Any) -> "Mamba2Sizes":
        """The sizes of a configuration with the names of Bamba's.

        Args:
            others: attributes that are other than those.
        """
        found = {
            "size": config.hidden_size,
            "heads": config.mamba_n_heads,
            "head_dim": config.mamba_d_head,
            "groups": config.mamba_n_groups,
            "state_size": config.mamba_d_state,
            "width": config.mamba_d_conv,
            "conv_bias": config.mamba_conv_bias,
            "in_bias": config.mamba_proj_bias,
            "out_bias": config.mamba_proj_bias,
            "limits": config.time_step_limit or (0.0, float("inf")),
            "eps": config.rms_norm_eps,
        }
        return cls(**{**found, **others})

    @property
    def inner(self) -> int:
        """Size of the values of a token."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Size of the B, and of the C, of a token."""
        return self.groups * self.state_size


def _computes(x: Tensor) -> Any:
    """The module whose functions compute what follows from a tensor."""
    return kernels.compiled_for("state_space", x) or state_space


class GroupedGatedNorm(nn.Module):
    """Root-mean-square norm per group of `x * silu(gate)`."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = weight(size)
        self.groups: int = groups
        self.eps: float = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm of `x` `[T, size]`, fp32, times silu of `gate` `[T, size]`; returns the dtype of `gate`."""
        y: Tensor = _computes(x).grouped_gated_norm(x, gate, self.weight, self.groups, self.eps)
        return y


class Mamba2(ConvolvedMixer):
    """A linear layer: causal convolution and state space rule, each with its state in a state slot.

    Args:
        sizes: of the layer.
    """

    def __init__(self, sizes: Mamba2Sizes) -> None:
        super().__init__()
        self.sizes: Mamba2Sizes = sizes
        inner, shared, heads = sizes.inner, sizes.shared, sizes.heads
        self.widths: tuple[int, int, int] = (inner, inner + 2 * shared, heads)
        groups = sizes.groups, sizes.state_size
        self.parts = ((heads, sizes.head_dim), groups, groups)
        self.in_proj = Linear(sizes.size, sum(self.widths), sizes.in_bias)
        self.conv1d = DepthwiseWeight(inner + 2 * shared, sizes.width, sizes.conv_bias)
        self.state_shape = (heads, sizes.state_size, sizes.head_dim)
        self.A_log = weight(heads)
        self.D = weight(heads)
        self.dt_bias = weight(heads)
        if sizes.has_norm:
            self.norm = GroupedGatedNorm(inner, sizes.groups, sizes.eps)
        self.out_proj = Linear(inner, sizes.size, sizes.out_bias)
        self.factors: Tensor | None = None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        projected = self.in_proj(x, context.batch)
        if self.sizes.scales is not None:
            projected = projected * self._factors(projected)
        gate, mixed, dt = projected.split(self.widths, dim=-1)
        dt = _computes(x).time_steps(dt, self.dt_bias, self.sizes.limits)
        flat = self.mix((mixed, dt), context).flatten(1)
        y = self.norm(flat, gate) if self.sizes.has_norm else kernels.silu_and_mul(gate, flat.to(gate.dtype))
        return self.out_proj(y, context.batch)

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the rule for prompts: `inputs` are values, B, C and time steps."""
        values, b, c, dt = inputs
        computes, states, slots = _computes(values), self.states(context.state), context.batch.prompt_slots
        y = computes.chunk_state_space(values, dt, b, c, self.decays(), states, *slots, context.chunk_size)
        skipped: Tensor = computes.add_skip(y, values, self.D)
        return skipped

    def rule_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the rule for decoded tokens."""
        values, b, c, dt = inputs
        computes, states = _computes(values), self.states(state)
        y = computes.state_space_step(values, dt, b, c, self.decays(), states, steps.read, steps.write)
        skipped: Tensor = computes.add_skip(y, values, self.D)
        return skipped

    def _factors(self, like: Tensor) -> Tensor:
        """The factors of the input projection, in the type of what it gives, computed once."""
        if self.factors is None:
            assert self.sizes.scales is not None
            inner, shared = self.sizes.inner, self.sizes.shared
            widths = (inner, inner, shared, shared, self.sizes.heads)
            each = [like.new_full((width,), scale) for width, scale in zip(widths, self.sizes.scales, strict=True)]
            self.factors = torch.cat(each)
        return self.factors
