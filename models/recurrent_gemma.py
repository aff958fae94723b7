"""RecurrentGemma (De et al., "Griffin", 2024): gated linear recurrences in most layers, attention with a sliding window
in the rest. Nothing is kept for each token: pages are empty, and a state is all that a hit needs.

The recurrence is computed token by token: by compiled code on a CPU, elsewhere in plain torch
(`hybrid.kernels.reference.rg_lru`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import linear
from hybrid.kernels.reference import elementwise, rg_lru
from hybrid.models.attention import PlainWindowAttention
from hybrid.models.causal_lm import CausalLM, Factors
from hybrid.models.layers import MLP, DepthwiseWeight, Linear, Projections, gelu_and_mul, weight
from hybrid.models.mixers import Block, Context, Mixer, SelectiveMixer
from hybrid.models.weights import Layouts, Source

RECURRENT, SLIDING = "recurrent", "attention"
"""Types of layers, as `block_types` has them."""

STEEPNESS = -8.0
"""The log of a decay is at most this many times the softplus of a channel's parameter."""


class LocalAttention(PlainWindowAttention):
    """A layer with a sliding window, whose last product has a bias."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, config.attention_window_size)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=True)


class Gates(nn.Module):
    """The parameters of a recurrence: gates of the input and of the decay, each a matrix for a head's channels.

    Attributes:
        weight: `[heads, 2 * size, size]`: of a head the rows of the gate of the input, then those of the decay's.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size: int = size
        self.weight = weight(heads, 2 * size, size)
        self.input_gate_bias = weight(heads, size)
        self.recurrent_gate_bias = weight(heads, size)
        self.recurrent_param = weight(heads * size)
        self.rate: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The gates of the input and of the decay of rows `[T, channels]`, before the logistic function."""
        heads = zip(x.split(self.size, dim=-1), self.weight, strict=True)
        calls = [partial(linear, own, matrix, batch.decode_start) for own, matrix in heads]
        tasks: Any = kernels.compiled_for("tasks", x)
        each = [call() for call in calls] if tasks is None else tasks.side_by_side(calls)
        entry = torch.cat([part[:, : self.size] for part in each], dim=-1)
        forget = torch.cat([part[:, self.size :] for part in each], dim=-1)
        return entry + self.input_gate_bias.flatten(), forget + self.recurrent_gate_bias.flatten()

    def steepest(self) -> Tensor:
        """`[channels]` fp32, the log of the decay of an open gate, computed once."""
        if self.rate is None:
            self.rate = STEEPNESS * elementwise.softplus(self.recurrent_param.float())
        return self.rate


class RecurrentBlock(SelectiveMixer):
    """A recurrent layer: a causal convolution, the recurrence, and a gate on what it gives."""

    has_silu = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner, heads = config.hidden_size, config.lru_width, config.num_attention_heads
        self.linear_y = Linear(size, inner, bias=True)
        self.linear_x = Linear(size, inner, bias=True)
        self.linear_out = Linear(inner, size, bias=True)
        self.inputs = Projections(self.linear_y, self.linear_x)
        self.conv1d = DepthwiseWeight(inner, config.conv1d_width, bias=True)
        self.rg_lru = Gates(heads, inner // heads)
        self.state_shape = (inner,)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        gate, mixed = self.inputs(x, context.batch)
        _, y = self.mix_convolved(mixed, context)
        return self.linear_out(gelu_and_mul(gate, y), context.batch)

    def gates(self, convolved: Tensor, batch: Batch) -> tuple[Tensor, ...]:
        """Make the gates of the input and of the decay, beside the positions."""
        return *self.rg_lru(convolved, batch), batch.positions

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the recurrence for prompts."""
        states, slots = self.states(context.state), context.batch.prompt_slots
        y: Tensor = _computes(inputs[0]).rg_lru(*inputs, self.rg_lru.steepest(), states, *slots)
        return y

    def rule_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the recurrence for decoded tokens."""
        states, rate = self.states(state), self.rg_lru.steepest()
        y: Tensor = _computes(inputs[0]).rg_lru_step(*inputs, rate, states, steps.read, steps.write)
        return y


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the recurrence."""
    return kernels.compiled_for("recurrences", x) or rg_lru


def gate_layouts(parameter: str, config: Any) -> Layouts | None:
    """Return the layout of the matrices of gates, which are stored apart, the other way round; None: the parameter is
    none of them."""
    prefix, found, _ = parameter.partition(".rg_lru.weight")
    if not found:
        return None
    size = config.lru_width // config.num_attention_heads
    places = {"input": slice(size), "recurrent": slice(size, 2 * size)}
    stored = (
        Source(f"{prefix}.rg_lru.{name}_gate_weight", at=(slice(None), rows), transposed=True)
        for name, rows in places.items()
    )
    return ((*stored,),)


class RecurrentGemmaForCausalLM(CausalLM):
    """RecurrentGemma with its head: of a `RecurrentGemmaConfig`."""

    norm_offset = 1.0
    rotates_partly = True
    layer_kinds = ()  # `unsupported` has its own line
    names_on_disk = ({"model.norm.": "model.final_norm.", ".temporal_block.conv1d.": ".temporal_block.conv_1d."},)
    parts_on_disk = (gate_layouts,)

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        super().__init__(config, chunk_size, has_predictor)
        self.cap: float = config.logits_soft_cap

    @classmethod
    def kinds(cls, config: Any) -> Sequence[str]:
        """Return the types of all layers: `block_types` again and again. Not all versions of transformers list them."""
        count: int = config.num_hidden_layers
        return (list(config.block_types) * count)[:count]

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        mixer: Mixer = RecurrentBlock(config) if kind == RECURRENT else LocalAttention(config)
        mlp = MLP(config.hidden_size, config.intermediate_size // 2, bias=True, activation=gelu_and_mul)
        return Block("temporal_pre_norm", temporal_block=mixer), Block("channel_pre_norm", mlp_block=mlp)

    @classmethod
    def factors_of(cls, config: Any) -> Factors:
        """Return the factors of a model: that of embeddings is rounded to bfloat16 in every type."""
        return Factors(torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16, device="cpu").item())

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.hidden_activation != "gelu_pytorch_tanh":
            return f"hidden_activation {config.hidden_activation!r} is not supported, only 'gelu_pytorch_tanh'"
        if {*cls.kinds(config)} != {RECURRENT, SLIDING}:
            return f"block_types {config.block_types!r} are not supported, only {RECURRENT!r} and {SLIDING!r}, both"
        return super().unsupported(config)

    def _logits(self, x: Tensor, batch: Batch) -> Tensor:
        logits = super()._logits(x, batch)
        compiled: Any = kernels.compiled_for("elementwise", logits)
        bounded: Tensor = (compiled or elementwise).soft_cap(logits, self.cap)
        return bounded
