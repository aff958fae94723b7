"""Mamba-1, as in Jamba: a causal convolution and the selective scan, each with its state in a state slot.

The scan is computed token by token: by compiled code on a CPU, elsewhere in plain torch
(`hybrid.kernels.reference.selective_scan`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import selective_scan, state_space
from hybrid.models.layers import DepthwiseWeight, Linear, RMSNorm, unrolled
from hybrid.spec import StateTensor


class Mamba1(nn.Module):
    """A linear layer.

    Args:
        config: has the sizes, by the names of Jamba's.
        layer: its row in the states.

    Attributes:
        dt_bias: of `dt_proj`: it is added in fp32.
    """

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        size, inner = config.hidden_size, config.mamba_expand * config.hidden_size
        rank, states, eps = config.mamba_dt_rank, config.mamba_d_state, config.rms_norm_eps
        self.widths: tuple[int, int, int] = (rank, states, states)
        self.in_proj = Linear(size, 2 * inner, config.mamba_proj_bias)
        self.conv1d = DepthwiseWeight(inner, config.mamba_d_conv, config.mamba_conv_bias)
        self.x_proj = Linear(inner, sum(self.widths))
        self.dt_proj = Linear(rank, inner)
        self.dt_bias = nn.Parameter(torch.empty(inner), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(inner, states), requires_grad=False)
        self.D = nn.Parameter(torch.empty(inner), requires_grad=False)
        self.dt_layernorm = RMSNorm(rank, eps, offset=0.0)
        self.b_layernorm = RMSNorm(states, eps, offset=0.0)
        self.c_layernorm = RMSNorm(states, eps, offset=0.0)
        self.out_proj = Linear(inner, size, config.mamba_proj_bias)
        self.rate: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        mixed, gate = self.in_proj(x, batch).chunk(2, dim=-1)
        prompts, decodes, convolved = batch.prefills, batch.decodes, []
        if prompts is not None:
            slots = batch.prompt_slots
            taps, windows = self.conv1d.weight.squeeze(1), state["conv"][:, self.layer]
            conv = _computes(x).causal_conv1d
            convolved.append(conv(mixed[prompts.rows], taps, windows, *slots, self.conv1d.bias))
        if decodes is not None:
            convolved.append(unrolled(self._convolve, (mixed[decodes.rows],), decodes, state))
        x = torch.cat(convolved)
        dt, b, c = self._chosen(x, batch)
        parts = []
        if prompts is not None:
            rows, recurrent = prompts.rows, state["recurrent"][:, self.layer]
            scan = _scans(x).selective_scan
            parts.append(scan(x[rows], dt[rows], b[rows], c[rows], self._rate(), recurrent, *slots))
        if decodes is not None:
            inputs = tuple(part[decodes.rows] for part in (x, dt, b, c))
            if batch.log is not None:
                batch.log.append((mixed[decodes.rows], *inputs))
            parts.append(unrolled(self._scan, inputs, decodes, state))
        y = torch.cat(parts) + self.D.float() * x.float()
        return self.out_proj(kernels.silu_and_mul(gate, y.to(gate.dtype)), batch)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The convolution and the scan for decoded tokens: `inputs` are their rows of what goes into both."""
        self._convolve(inputs[:1], steps, state)
        return self._scan(inputs[1:], steps, state)

    def _convolve(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        (mixed,), windows = inputs, state["conv"][:, self.layer]
        taps = self.conv1d.weight.squeeze(1)
        y: Tensor = _computes(mixed).causal_conv1d_update(
            mixed, taps, windows, steps.read, steps.write, self.conv1d.bias
        )
        return y

    def _chosen(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The time steps in fp32, B and C of rows after the convolution."""
        dt, b, c = self.x_proj(x, batch).split(self.widths, dim=-1)
        dt = self.dt_proj(self.dt_layernorm(dt), batch)
        dt = _computes(x).time_steps(dt, self.dt_bias, (0.0, float("inf")))
        return dt, self.b_layernorm(b), self.c_layernorm(c)

    def _scan(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        (x, *rest), recurrent = inputs, state["recurrent"][:, self.layer]
        y: Tensor = _scans(x).selective_step(x, *rest, self._rate(), recurrent, steps.read, steps.write)
        return y

    def _rate(self) -> Tensor:
        """`-exp(A_log)`, `[state_size, channels]` fp32, computed once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp().t().contiguous()
        return self.rate


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the convolution and the time steps."""
    return kernels.compiled_for("state_space", x) or state_space


def _scans(x: Tensor) -> Any:
    """The module whose functions compute the scan."""
    return kernels.compiled_for("recurrences", x) or selective_scan


def mamba1_states(config: Any, layers: int, dtype: torch.dtype) -> tuple[StateTensor, StateTensor]:
    """The tensors per sequence of some layers."""
    inner = config.mamba_expand * config.hidden_size
    return (
        StateTensor("recurrent", (layers, config.mamba_d_state, inner), torch.float32),
        StateTensor("conv", (layers, config.mamba_d_conv - 1, inner), dtype),
    )
