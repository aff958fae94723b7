"""Mamba-1, as in Jamba: a causal convolution and the selective scan, each with its state in a state slot.

The scan is computed token by token: by compiled code on a CPU, elsewhere in plain torch
(`hybrid.kernels.reference.selective_scan`).
"""

from typing import Any

from torch import Tensor

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import selective_scan, state_space
from hybrid.models.layers import DepthwiseWeight, Linear, RMSNorm, weight
from hybrid.models.mixers import Context, SelectiveMixer


class Mamba1(SelectiveMixer):
    """A linear layer.

    Args:
        config: has the sizes, by the names of Jamba's.

    Attributes:
        dt_bias: of `dt_proj`: it is added in fp32.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.mamba_expand * config.hidden_size
        rank, states, eps = config.mamba_dt_rank, config.mamba_d_state, config.rms_norm_eps
        self.widths: tuple[int, int, int] = (rank, states, states)
        self.in_proj = Linear(size, 2 * inner, config.mamba_proj_bias)
        self.conv1d = DepthwiseWeight(inner, config.mamba_d_conv, config.mamba_conv_bias)
        self.x_proj = Linear(inner, sum(self.widths))
        self.dt_proj = Linear(rank, inner)
        self.dt_bias = weight(inner)
        self.A_log = weight(inner, states)
        self.D = weight(inner)
        self.state_shape = (states, inner)
        self.dt_layernorm = RMSNorm(rank, eps)
        self.b_layernorm = RMSNorm(states, eps)
        self.c_layernorm = RMSNorm(states, eps)
        self.out_proj = Linear(inner, size, config.mamba_proj_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        mixed, gate = self.in_proj(x, context.batch).chunk(2, dim=-1)
        x, y = self.mix_convolved(mixed, context)
        y = y + self.D.float() * x.float()
        return self.out_proj(kernels.silu_and_mul(gate, y.to(gate.dtype)), context.batch)

    def gates(self, convolved: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Make the time steps in fp32, B and C."""
        dt, b, c = self.x_proj(convolved, batch).split(self.widths, dim=-1)
        dt = self.dt_proj(self.dt_layernorm(dt), batch)
        computes = kernels.compiled_for("state_space", dt) or state_space
        return computes.time_steps(dt, self.dt_bias, (0.0, float("inf"))), self.b_layernorm(b), self.c_layernorm(c)

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the scan for prompts."""
        states, slots = self.states(context.state), context.batch.prompt_slots
        y: Tensor = _computes(inputs[0]).selective_scan(*inputs, self.decays(), states, *slots)
        return y

    def rule_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the scan for decoded tokens."""
        states = self.states(state)
        y: Tensor = _computes(inputs[0]).selective_step(*inputs, self.decays(), states, steps.read, steps.write)
        return y

    def decays(self) -> Tensor:
        """Return `-exp(A_log)`, `[state_size, channels]` fp32, computed once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp().t().contiguous()
        return self.rate


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the scan."""
    return kernels.compiled_for("recurrences", x) or selective_scan
