"""Qwen3.5, the text model: gated delta rule in most layers, full attention in the rest. The feed-forward parts are
dense, or mixtures of experts (as in 35B-A3B). Qwen3-Next consists of the same layers.

Parameters have the names of the checkpoint. The model works on a packed batch and knows no requests: it reads and
writes the pages and state slots that are in the batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.models.attention import Attention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import (
    MLP,
    DepthwiseWeight,
    GatedRMSNorm,
    Linear,
    Projections,
    ResidualLayer,
    RMSNorm,
    Rotary,
    mix_tokens,
)
from hybrid.models.moe import SparseMoE, expert_layouts
from hybrid.models.mtp import MultiTokenPredictor
from hybrid.models.weights import Layouts
from hybrid.spec import HybridSpec, StateTensor, TokenTensor


class GatedDeltaNet(nn.Module):
    """A linear-attention layer: causal convolution and gated delta rule, each with its state in a state slot."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.key_heads: int = config.linear_num_key_heads
        self.value_heads: int = config.linear_num_value_heads
        self.key_dim: int = config.linear_key_head_dim
        self.value_dim: int = config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths: tuple[int, int, int] = (keys, keys, values)
        self.in_proj_qkv = Linear(config.hidden_size, 2 * keys + values)
        self.in_proj_z = Linear(config.hidden_size, values)
        self.in_proj_b = Linear(config.hidden_size, self.value_heads)
        self.in_proj_a = Linear(config.hidden_size, self.value_heads)
        self.inputs = Projections(self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        self.conv1d = DepthwiseWeight(2 * keys + values, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(self.value_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads), requires_grad=False)
        self.rate: Tensor | None = None
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size)

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        mixed, gate, a, b = self.inputs(x, batch)
        gate = gate.unflatten(-1, (self.value_heads, self.value_dim))
        y = mix_tokens(self, (mixed, a, b), batch, state, chunk_size)
        return self.out_proj(self.norm(y, gate).flatten(1), batch)

    def prefill(self, inputs: tuple[Tensor, ...], batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """The convolution and the rule for prompts: `inputs` are the rows of `mixed`, `a` and `b`."""
        mixed, a, b = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        taps, slots, own = self.conv1d.weight.squeeze(1), batch.prompt_slots, batch.needs_own_kernels
        q, k, v = self._split(kernels.causal_conv1d(mixed, taps, conv, *slots, batch_invariant=own))
        gates = (a, b, self._rate(), self.dt_bias)
        return kernels.chunk_gated_delta_rule(q, k, v, *gates, recurrent, *slots, chunk_size, batch_invariant=own)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        mixed, a, b = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        rates = (self.conv1d.weight.squeeze(1), self._rate(), self.dt_bias)
        y: Tensor = kernels.gated_delta_step(
            mixed, a, b, *rates, conv, recurrent, steps.starts, steps.read, steps.write
        )
        return y

    def _rate(self) -> Tensor:
        """`-exp(A_log)` in fp32, computed once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp()
        return self.rate

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = mixed.split(self.widths, dim=-1)
        keys = (self.key_heads, self.key_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (self.value_heads, self.value_dim))


def delta_states(config: Any, dtype: torch.dtype) -> tuple[StateTensor, StateTensor]:
    """The tensors per sequence of the linear layers of a model."""
    layers, heads = config.layer_types.count("linear_attention"), config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
    return (
        StateTensor("recurrent", (layers, heads, key_dim, value_dim), torch.float32),
        StateTensor("conv", (layers, config.linear_conv_kernel_dim - 1, channels), dtype),
    )


class GatedAttention(Attention):
    """A full-attention layer with a gated output.

    Args:
        layer: its place in a page.
        first: tokens of a sequence before this one are not seen.
    """

    def __init__(self, config: Any, layer: int, first: int = 0) -> None:
        super().__init__(config, layer, config.head_dim, query_parts=2, first=first)

    def forward(self, x: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; writes its keys and values to the slots of the batch."""
        q, k, v = self.inputs(x, batch)
        q, gate = q.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
        y = self.attend(self.store(q, k, v, batch, rotary, kv), batch, kv, chunk_size)
        return self.o_proj(kernels.sigmoid_and_mul(y, gate).flatten(1), batch)

    def keep(self, x: Tensor, batch: Batch, rotary: Rotary, kv: Tensor) -> None:
        """Write the keys and values of `[T, hidden_size]`, and compute nothing else."""
        k, v = self.inputs(x, batch, first=1)
        no_queries = k.unflatten(-1, (self.kv_heads, self.head_dim))[:, :0]
        self.store(no_queries, k, v, batch, rotary, kv)


class DecoderLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint.

    Args:
        first: tokens of a sequence before this one are not seen by full attention.
    """

    def __init__(self, config: Any, layer_type: str, index_of_type: int, mlp: nn.Module, first: int = 0) -> None:
        super().__init__()
        self.is_linear: bool = layer_type == "linear_attention"
        if self.is_linear:
            mixer: nn.Module = GatedDeltaNet(config, index_of_type)
            self.linear_attn = mixer
        else:
            mixer = GatedAttention(config, index_of_type, first)
            self.self_attn = mixer
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            mixer,
            self.post_attention_layernorm,
            self.mlp,
        )


class Qwen3_5ForCausalLM(CausalLM):  # noqa: N801 (the checkpoint's name)
    """Qwen3.5 text with its head.

    Args:
        config: a `Qwen3_5TextConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: it has the layer for multi-token prediction, whose pages come after those of the model's layers.
    """

    rotates_partly: bool = True

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        kinds = config.layer_types
        layers = (
            DecoderLayer(config, kind, kinds[:index].count(kind), self.feed_forward(config, index))
            for index, kind in enumerate(kinds)
        )
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        predictor = None
        if has_predictor:
            place, last = kinds.count("full_attention"), len(kinds) - 1
            layer = DecoderLayer(config, "full_attention", place, self.feed_forward(config, last), first=1)
            predictor = MultiTokenPredictor(config, layer)
        super().__init__(config, chunk_size, config.head_dim, layers, norm, predictor)

    @classmethod
    def feed_forward(cls, config: Any, layer: int) -> nn.Module:
        """The feed-forward part of a layer."""
        return MLP(config.hidden_size, config.intermediate_size)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        full_layers = config.layer_types.count("full_attention")
        return HybridSpec(
            tokens=(TokenTensor.kv(full_layers, config.num_key_value_heads, config.head_dim, dtype),),
            state=delta_states(config, dtype),
        )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801 (the checkpoint's name)
    """Qwen3.5 MoE text with its head.

    Args:
        config: a `Qwen3_5MoeTextConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: it has the layer for multi-token prediction.
    """

    @classmethod
    def feed_forward(cls, config: Any, layer: int) -> nn.Module:
        """The feed-forward part of a layer."""
        return SparseMoE(config, normalise=True)

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        return expert_layouts(
            parameter, config.num_experts, config.moe_intermediate_size
        ) or Qwen3_5ForCausalLM.layouts(parameter, config)
