"""Kimi delta attention as the model families share it: a causal convolution, and the delta rule with a decay for each
channel of the keys, each with its state in a state slot.

The rule is computed token by token by compiled code on a CPU, and chunk by chunk in plain torch elsewhere
(`hybrid.kernels.reference.kda`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import convolution, kda, state_space
from hybrid.models.layers import DepthwiseWeight, Linear, RMSNorm, mix_tokens
from hybrid.models.weights import Layouts, Source
from hybrid.spec import StateTensor

GATES = {
    ".f_proj.": ".forget_gate.f_proj.",
    ".f_a_proj.": ".forget_gate.f_a_proj.",
    ".f_b_proj.": ".forget_gate.f_b_proj.",
    ".A_log": ".forget_gate.A_log",
    ".dt_bias": ".forget_gate.dt_bias",
}
"""Parts of names, as published, and what transformers has for them in memory."""


class KimiDeltaAttention(nn.Module):
    """A linear-attention layer.

    Args:
        config: has the sizes `linear_num_heads`, `linear_head_dim` and `linear_conv_kernel_dim`.
        layer: its row in the states.
        decay: the projections of the decays, which are products one after another, and likewise of the output's gate,
            by name.
        rates: shape of the rates of decay as they are stored.
        lowest: the log of a decay is above it; None: it has no bound.
    """

    def __init__(
        self,
        config: Any,
        layer: int,
        decay: Mapping[str, Linear],
        gate: Mapping[str, Linear],
        rates: tuple[int, ...],
        lowest: float | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim: int = config.linear_head_dim
        self.lowest: float | None = lowest
        size, heads = config.hidden_size, config.linear_num_heads
        inner = heads * self.head_dim
        self.q_proj = Linear(size, inner)
        self.k_proj = Linear(size, inner)
        self.v_proj = Linear(size, inner)
        self.b_proj = Linear(size, heads)
        for name, module in (*decay.items(), *gate.items()):
            self.add_module(name, module)
        self._decay, self._gate = (*decay.values(),), (*gate.values(),)
        self.rates: tuple[Tensor, Tensor] | None = None
        self.ones: dict[torch.dtype, Tensor] = {}
        self.conv1d = DepthwiseWeight(3 * inner, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(rates), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(inner), requires_grad=False)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps, offset=0.0)
        self.o_proj = Linear(inner, size)

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        mixed = torch.cat([each(x, batch) for each in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        b = self.b_proj(x, batch)
        g, beta = self._decays(_chained(self._decay, x, batch)), kernels.sigmoid_and_mul(self._ones(b), b)
        y = self.o_norm(mix_tokens(self, (mixed, g, beta), batch, state, chunk_size))
        gate = _chained(self._gate, x, batch).float().view(y.shape)
        return self.o_proj(kernels.sigmoid_and_mul(y.flatten(1), gate.flatten(1)).to(x.dtype), batch)

    def prefill(self, inputs: tuple[Tensor, ...], batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """The convolution and the rule for prompts: `inputs` are their rows of `mixed`, and their gates."""
        mixed, g, beta = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        taps, slots, own = self.conv1d.weight.squeeze(1), batch.prompt_slots, batch.needs_own_kernels
        q, k, v = self._split(kernels.causal_conv1d(mixed, taps, conv, *slots, batch_invariant=own))
        y: Tensor = _computes(q).chunk_kda(q, k, v, g, beta, recurrent, *slots, chunk_size)
        return y

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        mixed, g, beta = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        taps, slots = self.conv1d.weight.squeeze(1), (steps.read, steps.write)
        convolved: Any = kernels.compiled_for("convolution", mixed) or convolution
        q, k, v = self._split(convolved.causal_conv1d_update(mixed, taps, conv, *slots))
        y: Tensor = _computes(q).kda_step(q, k, v, g, beta, recurrent, *slots)
        return y

    def _decays(self, x: Tensor) -> Tensor:
        """The logs of the decays, `[T, heads, head_dim]` fp32, of their projection."""
        if self.rates is None:
            rates = self.A_log.float().exp().flatten().repeat_interleave(self.head_dim)
            self.rates = -rates if self.lowest is None else rates, self.dt_bias.float()
        rates, bias = self.rates
        if self.lowest is None:
            computes = kernels.compiled_for("state_space", x) or state_space
            g = computes.time_steps(x, self.dt_bias, (0.0, float("inf"))) * rates
        else:
            grown = (x.float() + bias) * rates
            g = kernels.sigmoid_and_mul(self._ones(grown), grown) * self.lowest
        return g.unflatten(-1, (-1, self.head_dim))

    def _ones(self, like: Tensor) -> Tensor:
        """As many ones as a tensor `[T, size]` has numbers, of its type: views of one."""
        one = self.ones.get(like.dtype)
        if one is None or one.shape[1] < like.shape[1]:
            one = self.ones[like.dtype] = like.new_ones(1, like.shape[1])
        return one[:, : like.shape[1]].expand_as(like)

    def _split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in mixed.chunk(3, dim=-1))


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the rule."""
    return kernels.compiled_for("recurrences", x) or kda


def _chained(products: tuple[Linear, ...], x: Tensor, batch: Batch) -> Tensor:
    """What products give, each of what the one before it gives."""
    for product in products:
        x = product(x, batch)
    return x


def kda_states(config: Any, layers: int, dtype: torch.dtype) -> tuple[StateTensor, StateTensor]:
    """The tensors per sequence of some layers."""
    heads, size = config.linear_num_heads, config.linear_head_dim
    return (
        StateTensor("recurrent", (layers, heads, size, size), torch.float32),
        StateTensor("conv", (layers, config.linear_conv_kernel_dim - 1, 3 * heads * size), dtype),
    )


def kda_layouts(parameter: str, config: Any) -> Layouts | None:
    """The layouts of a parameter of a layer: as transformers has it in memory, and as published; None: it is not one
    that they name or divide otherwise.

    Args:
        parameter: its name, where the layer is `self_attn`.
    """
    prefix, found, _ = parameter.partition(".self_attn.conv1d.")
    if found:
        inner = config.linear_num_heads * config.linear_head_dim
        places = {name: (slice(at * inner, (at + 1) * inner),) for at, name in enumerate("qkv")}
        parts = tuple(Source(f"{prefix}.self_attn.{name}_conv1d.weight", at=at) for name, at in places.items())
        return (Source(parameter),), parts
    for part, stored in GATES.items():
        if f".self_attn{part}" in parameter:
            return (Source(parameter.replace(part, stored)),), (Source(parameter),)
    return None
