"""Kimi delta attention as the model families share it: a causal convolution, and the delta rule with a decay for each
channel of the keys, each with its state in a state slot.

The rule is computed token by token by compiled code on a CPU, and chunk by chunk in plain torch elsewhere
(`hybrid.kernels.reference.kda`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import kda, state_space
from hybrid.models.layers import DepthwiseWeight, Linear, RMSNorm, weight
from hybrid.models.mixers import Context, ConvolvedMixer
from hybrid.models.weights import Layouts, Source

GATES = {
    ".f_proj.": ".forget_gate.f_proj.",
    ".f_a_proj.": ".forget_gate.f_a_proj.",
    ".f_b_proj.": ".forget_gate.f_b_proj.",
    ".A_log": ".forget_gate.A_log",
    ".dt_bias": ".forget_gate.dt_bias",
}
"""Parts of names, as published, and what transformers has for them in memory."""


class KimiDeltaAttention(ConvolvedMixer):
    """A linear-attention layer.

    Args:
        config: has the sizes `linear_num_heads`, `linear_head_dim` and `linear_conv_kernel_dim`.
        decay: the projections of the decays, which are products one after another, and likewise of the output's gate,
            by name.
        rates: shape of the rates of decay as they are stored.
        lowest: the log of a decay is above it; None: it has no bound.
    """

    has_kernel = True

    def __init__(
        self,
        config: Any,
        decay: Mapping[str, Linear],
        gate: Mapping[str, Linear],
        rates: tuple[int, ...],
        lowest: float | None,
    ) -> None:
        super().__init__()
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
        self.state_shape = (heads, self.head_dim, self.head_dim)
        self.parts = ((heads, self.head_dim),) * 3
        self.A_log = weight(*rates)
        self.dt_bias = weight(inner)
        self.o_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(inner, size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        batch = context.batch
        mixed = torch.cat([each(x, batch) for each in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        b = self.b_proj(x, batch)
        g, beta = self._decays(_chained(self._decay, x, batch)), kernels.sigmoid_and_mul(self._ones(b), b)
        y = self.o_norm(self.mix((mixed, g, beta), context))
        gate = _chained(self._gate, x, batch).float().view(y.shape)
        return self.o_proj(kernels.sigmoid_and_mul(y.flatten(1), gate.flatten(1)).to(x.dtype), batch)

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the rule for prompts: `inputs` are queries, keys, values and gates."""
        states, slots = self.states(context.state), context.batch.prompt_slots
        y: Tensor = _computes(inputs[0]).chunk_kda(*inputs, states, *slots, context.chunk_size)
        return y

    def rule_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the rule for decoded tokens."""
        y: Tensor = _computes(inputs[0]).kda_step(*inputs, self.states(state), steps.read, steps.write)
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


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the rule."""
    return kernels.compiled_for("recurrences", x) or kda


def _chained(products: tuple[Linear, ...], x: Tensor, batch: Batch) -> Tensor:
    """What products give, each of what the one before it gives."""
    for product in products:
        x = product(x, batch)
    return x


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
