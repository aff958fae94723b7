"""OLMo hybrid: gated delta rule in most layers, full attention in the rest, mostly without rotary positions.

A token may replace up to twice an old value (`linear_allow_neg_eigval`). Layers of full attention have norms after
their parts rather than before, and queries and keys are normalised over all heads together.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import convolution, delta_rule
from hybrid.models.attention import PlainAttention, head_dim_of
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
from hybrid.models.qwen3_5 import delta_states
from hybrid.models.weights import Layouts, Source, renamed
from hybrid.spec import HybridSpec, TokenTensor

ON_DISK = {
    ".input_layernorm.": ".attention_layer_norm.",
    ".post_attention_layernorm.": ".feedforward_layer_norm.",
}
"""Parts of the names of layers with the delta rule, and what they are in published checkpoints; transformers also
writes those of layers with attention so."""


class OlmoDeltaNet(nn.Module):
    """A linear-attention layer: causal convolution and gated delta rule, each with its state in a state slot."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        size, heads = config.hidden_size, config.linear_num_value_heads
        self.key_dim: int = config.linear_key_head_dim
        self.value_dim: int = config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * self.key_dim, heads * self.value_dim
        self.widths: tuple[int, int, int] = (keys, keys, values)
        self.most: float = 2.0 if config.linear_allow_neg_eigval else 1.0
        self.q_proj = Linear(size, keys)
        self.k_proj = Linear(size, keys)
        self.v_proj = Linear(size, values)
        self.g_proj = Linear(size, values)
        self.a_proj = Linear(size, heads)
        self.b_proj = Linear(size, heads)
        self.inputs = Projections(self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj)
        self.conv1d = DepthwiseWeight(2 * keys + values, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.o_norm = GatedRMSNorm(self.value_dim, 1e-5)
        self.o_proj = Linear(values, size)
        self.rate: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        q, k, v, gate, a, b = self.inputs(x, batch)
        mixed = torch.cat((q, k, v), dim=-1)
        g, beta = kernels.delta_gates(a, b, self._rate(), self.dt_bias)
        y = mix_tokens(self, (mixed, g, beta * self.most), batch, state, chunk_size)
        return self.o_proj(self.o_norm(y, gate.unflatten(-1, (-1, self.value_dim))).flatten(1), batch)

    def prefill(self, inputs: tuple[Tensor, ...], batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """The convolution and the rule for prompts: `inputs` are their rows of `mixed`, and their gates."""
        mixed, g, beta = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        taps, slots, own = self.conv1d.weight.squeeze(1), batch.prompt_slots, batch.needs_own_kernels
        values = self._split(kernels.causal_conv1d(mixed, taps, conv, *slots, batch_invariant=own))
        y: Tensor = _computes(mixed).chunk_delta_rule(*values, g, beta, recurrent, *slots, chunk_size)
        return y

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        mixed, g, beta = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        taps, slots = self.conv1d.weight.squeeze(1), (steps.read, steps.write)
        convolved: Any = kernels.compiled_for("convolution", mixed) or convolution
        values = self._split(convolved.causal_conv1d_update(mixed, taps, conv, *slots))
        y: Tensor = _computes(mixed).recurrent_gated_delta_rule(*values, g, beta, recurrent, *slots)
        return y

    def _rate(self) -> Tensor:
        """`-exp(A_log)` in fp32, computed once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp()
        return self.rate

    def _split(self, mixed: Tensor) -> tuple[Tensor, ...]:
        sizes = (self.key_dim, self.key_dim, self.value_dim)
        parts = mixed.split(self.widths, dim=-1)
        return tuple(part.unflatten(-1, (-1, size)) for part, size in zip(parts, sizes, strict=True))


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the rule."""
    return kernels.compiled_for("delta_rule", x) or delta_rule


class OlmoAttention(PlainAttention):
    """A full-attention layer whose queries and keys are normalised over all heads together."""

    def add_norms(self, config: Any) -> None:
        """Make the norms of queries and keys."""
        self.q_norm = RMSNorm(self.heads * self.head_dim, config.rms_norm_eps, offset=0.0)
        self.k_norm = RMSNorm(self.kv_heads * self.head_dim, config.rms_norm_eps, offset=0.0)

    def store(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, rotary: Rotary, kv: Tensor) -> Tensor:
        """Write keys and values to the slots of the batch. Returns the queries, normalised and rotated."""
        q = self.q_norm(q.flatten(1)).unflatten(-1, (self.heads, -1))
        return super().store(q, self.k_norm(k), v, batch, rotary, kv)


class OlmoLinearLayer(ResidualLayer):
    """A layer with the delta rule. Its parts have the names of transformers."""

    is_linear: bool = True

    def __init__(self, config: Any, index_of_type: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.linear_attn = OlmoDeltaNet(config, index_of_type)
        self.mlp = MLP(size, config.intermediate_size)
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            self.linear_attn,
            self.post_attention_layernorm,
            self.mlp,
        )


class OlmoAttentionLayer(nn.Module):
    """A layer with full attention: norms come after its parts.

    Attributes:
        linear: the mixer whose state is in state slots: there is none.
    """

    linear: None = None

    def __init__(self, config: Any, index_of_type: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = OlmoAttention(config, index_of_type)
        self.mlp = MLP(size, config.intermediate_size)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=0.0)

    @property
    def attention(self) -> OlmoAttention:
        """The mixer whose keys and values are in pages."""
        return self.self_attn

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        batch: Batch,
        rotary: Rotary,
        kv: Tensor,
        state: dict[str, Tensor],
        chunk_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on `x + residual`, as `ResidualLayer.forward`."""
        x = x if residual is None else residual + x
        x = x + self.post_attention_layernorm(self.self_attn(x, batch, rotary, kv, chunk_size))
        return self.post_feedforward_layernorm(self.mlp(x, batch)), x


class OlmoHybridForCausalLM(CausalLM):
    """OLMo hybrid with its head.

    Args:
        config: an `OlmoHybridConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # drafts are split into runs on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layer_types
        layers: list[nn.Module] = []
        for index, kind in enumerate(kinds):
            layer = OlmoLinearLayer if kind == "linear_attention" else OlmoAttentionLayer
            layers.append(layer(config, kinds[:index].count(kind)))
        rope = config.rope_parameters or {}
        rotated = head_dim_of(config) if rope.get("rope_theta") is not None else 0
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, rotated, layers, norm)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        full, heads = config.layer_types.count("full_attention"), config.num_key_value_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(full, heads, head_dim_of(config), dtype),), state=delta_states(config, dtype)
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        prefix, found, _ = parameter.partition(".linear_attn.conv1d.")
        if found:
            keys = config.linear_num_key_heads * config.linear_key_head_dim
            ends = {"q": slice(0, keys), "k": slice(keys, 2 * keys), "v": slice(2 * keys, None)}
            return (
                tuple(Source(f"{prefix}.linear_attn.{name}_conv1d.weight", at=(at,)) for name, at in ends.items()),
                (Source(parameter),),
            )
        stored = renamed(parameter, ON_DISK)
        return (*stored, (Source(parameter),))
