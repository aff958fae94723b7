"""RecurrentGemma (De et al., "Griffin", 2024): gated linear recurrences in most layers, attention with a sliding window
in the rest. Nothing is kept for each token: pages are empty, and a state is all that a hit needs.

The recurrence is computed token by token: by compiled code on a CPU, elsewhere in plain torch
(`hybrid.kernels.reference.rg_lru`).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import linear
from hybrid.kernels.reference import convolution, elementwise, rg_lru
from hybrid.models.attention import WINDOW, WindowAttention, rings
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import (
    MLP,
    DepthwiseWeight,
    Linear,
    Projections,
    ResidualLayer,
    RMSNorm,
    Rotary,
    gelu_and_mul,
    rotate,
    unrolled,
)
from hybrid.models.weights import Layouts, Source, renamed
from hybrid.spec import HybridSpec, StateTensor, TokenTensor

RECURRENT, SLIDING = "recurrent", "attention"
"""Types of layers, as `block_types` has them."""

STEEPNESS = -8.0
"""The log of a decay is at most this many times the softplus of a channel's parameter."""


def kinds_of(config: Any) -> list[str]:
    """The types of all layers: `block_types` again and again. Not all versions of transformers list them."""
    count: int = config.num_hidden_layers
    return (list(config.block_types) * count)[:count]


class LocalAttention(WindowAttention):
    """A layer with a sliding window and without norms, whose last product has a bias."""

    state_names: tuple[str, ...] = (WINDOW,)

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer, config.head_dim)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=True)

    def add_norms(self, config: Any) -> None:
        """Make none."""

    def turned(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated."""
        return rotate(q, rotary.cos, rotary.sin), rotate(k, rotary.cos, rotary.sin)


class Gates(nn.Module):
    """The parameters of a recurrence: gates of the input and of the decay, each a matrix for a head's channels.

    Attributes:
        weight: `[heads, 2 * size, size]`: of a head the rows of the gate of the input, then those of the decay's.
    """

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.size: int = size
        self.weight = nn.Parameter(torch.empty(heads, 2 * size, size), requires_grad=False)
        self.input_gate_bias = nn.Parameter(torch.empty(heads, size), requires_grad=False)
        self.recurrent_gate_bias = nn.Parameter(torch.empty(heads, size), requires_grad=False)
        self.recurrent_param = nn.Parameter(torch.empty(heads * size), requires_grad=False)
        self.rate: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The gates of the input and of the decay of rows `[T, channels]`, before the logistic function."""
        heads = zip(x.split(self.size, dim=-1), self.weight, strict=True)
        calls = [partial(linear, own, weight, batch.decode_start) for own, weight in heads]
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


class RecurrentBlock(nn.Module):
    """A recurrent layer: a causal convolution, the recurrence, and a gate on what it gives."""

    state_names: tuple[str, ...] = ("recurrent", "conv")

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        size, inner, heads = config.hidden_size, config.lru_width, config.num_attention_heads
        self.linear_y = Linear(size, inner, bias=True)
        self.linear_x = Linear(size, inner, bias=True)
        self.linear_out = Linear(inner, size, bias=True)
        self.inputs = Projections(self.linear_y, self.linear_x)
        self.conv_1d = DepthwiseWeight(inner, config.conv1d_width, bias=True)
        self.rg_lru = Gates(heads, inner // heads)

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        gate, mixed = self.inputs(x, batch)
        prompts, decodes, convolved = batch.prefills, batch.decodes, []
        if prompts is not None:
            slots = batch.prompt_slots
            taps, windows = self.conv_1d.weight.squeeze(1), state["conv"][:, self.layer]
            sums = _convolutions(x).causal_sums(mixed[prompts.rows], taps, windows, *slots, self.conv_1d.bias)
            convolved.append(sums.to(x.dtype))
        if decodes is not None:
            convolved.append(unrolled(self._convolve, (mixed[decodes.rows],), decodes, state))
        values = convolved[0] if len(convolved) == 1 else torch.cat(convolved)
        inputs, parts = (values, *self.rg_lru(values, batch), batch.positions), []
        if prompts is not None:
            own, recurrent = tuple(part[prompts.rows] for part in inputs), state["recurrent"][:, self.layer]
            parts.append(_recurrences(x).rg_lru(*own, self.rg_lru.steepest(), recurrent, *slots))
        if decodes is not None:
            own = tuple(part[decodes.rows] for part in inputs)
            if batch.log is not None:
                batch.log.append((mixed[decodes.rows], *own))
            parts.append(unrolled(self._recur, own, decodes, state))
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.linear_out(gelu_and_mul(gate, y), batch)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The convolution and the recurrence for decoded tokens: `inputs` are their rows of what goes into both."""
        self._convolve(inputs[:1], steps, state)
        return self._recur(inputs[1:], steps, state)

    def _convolve(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        (mixed,), taps, windows = inputs, self.conv_1d.weight.squeeze(1), state["conv"][:, self.layer]
        sums: Tensor = _convolutions(mixed).causal_sums_update(
            mixed, taps, windows, steps.read, steps.write, self.conv_1d.bias
        )
        return sums.to(mixed.dtype)

    def _recur(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        recurrent, rate = state["recurrent"][:, self.layer], self.rg_lru.steepest()
        y: Tensor = _recurrences(inputs[0]).rg_lru_step(*inputs, rate, recurrent, steps.read, steps.write)
        return y


def _convolutions(x: Tensor) -> Any:
    """The module whose functions compute the convolution."""
    return kernels.compiled_for("convolution", x) or convolution


def _recurrences(x: Tensor) -> Any:
    """The module whose functions compute the recurrence."""
    return kernels.compiled_for("recurrences", x) or rg_lru


class RecurrentGemmaLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    is_linear: bool = True  # keys and values, too, are state: they have a window

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_recurrent: bool = layer_type == RECURRENT
        kind = RecurrentBlock if self.is_recurrent else LocalAttention
        self.temporal_block: nn.Module = kind(config, index_of_type)
        self.mlp_block = MLP(size, config.intermediate_size // 2, bias=True, activation=gelu_and_mul)
        self.temporal_pre_norm = RMSNorm(size, eps)
        self.channel_pre_norm = RMSNorm(size, eps)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.temporal_pre_norm,
            self.temporal_block,
            self.channel_pre_norm,
            self.mlp_block,
        )

    def mix(
        self, y: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, state: dict[str, Tensor], chunk_size: int
    ) -> Tensor:
        """What the mixer gives for normalised rows."""
        places = () if self.is_recurrent else (rotary,)
        mixed: Tensor = self.temporal_block(y, batch, *places, state, chunk_size)
        return mixed


class RecurrentGemmaForCausalLM(CausalLM):
    """RecurrentGemma with its head.

    Args:
        config: a `RecurrentGemmaConfig` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the recurrence reads the slots on the host
    rotates_partly: bool = True
    layer_kinds: tuple[str, ...] = ()  # `unsupported` knows them by other names

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = kinds_of(config)
        layers = (RecurrentGemmaLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        super().__init__(config, chunk_size, config.head_dim, layers, RMSNorm(config.hidden_size, config.rms_norm_eps))
        # rounded to bfloat16 in every type
        self.embedding_scale: float = torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16, device="cpu").item()
        self.cap: float = config.logits_soft_cap

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if config.hidden_activation != "gelu_pytorch_tanh":
            return f"hidden_activation {config.hidden_activation!r} is not supported, only 'gelu_pytorch_tanh'"
        if {*kinds_of(config)} != {RECURRENT, SLIDING}:
            return f"block_types {config.block_types!r} are not supported, only {RECURRENT!r} and {SLIDING!r}, both"
        return super().unsupported(config)

    def _logits(self, x: Tensor, batch: Batch) -> Tensor:
        logits = super()._logits(x, batch)
        compiled: Any = kernels.compiled_for("elementwise", logits)
        bounded: Tensor = (compiled or elementwise).soft_cap(logits, self.cap)
        return bounded

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token, of which there are none, and per sequence of a model of this configuration."""
        kinds, heads, size = kinds_of(config), config.num_key_value_heads, config.head_dim
        recurrent, width = kinds.count(RECURRENT), config.lru_width
        return HybridSpec(
            tokens=(TokenTensor.kv(0, heads, size, dtype),),
            state=(
                StateTensor("recurrent", (recurrent, width), torch.float32),
                StateTensor("conv", (recurrent, config.conv1d_width - 1, width), dtype),
                rings(kinds.count(SLIDING), config.attention_window_size, heads, size, dtype),
            ),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        prefix, found, _ = parameter.partition(".rg_lru.weight")
        if not found:
            return renamed(parameter, {"model.norm.": "model.final_norm."})
        size = config.lru_width // config.num_attention_heads
        places = {"input": slice(size), "recurrent": slice(size, 2 * size)}
        stored = (
            Source(f"{prefix}.rg_lru.{name}_gate_weight", at=(slice(None), rows), transposed=True)
            for name, rows in places.items()
        )
        return ((*stored,),)
