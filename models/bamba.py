"""Bamba: Mamba-2 layers, and a few of full attention. Its state differs from Qwen's and has the same interface: `spec`
lists the tensors of its layers, and cache and engine do the rest.

The linear layers are compiled on a CPU (`hybrid.kernels.cpu.state_space`), and run in plain torch elsewhere
(`hybrid.kernels.reference.state_space`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import state_space
from hybrid.models.attention import Attention, copy_keys_and_values
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import (
    MLP,
    DepthwiseWeight,
    Linear,
    ResidualLayer,
    RMSNorm,
    Rotary,
    decode_linear,
    rotate,
)
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec, StateTensor, TokenTensor


def _computes(x: Tensor) -> Any:
    """The module whose functions compute what follows from a tensor."""
    return kernels.compiled_for("state_space", x) or state_space


class GroupedGatedNorm(nn.Module):
    """Root-mean-square norm per group of `x * silu(gate)`."""

    def __init__(self, size: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight: nn.Parameter = nn.Parameter(torch.empty(size), requires_grad=False)
        self.groups: int = groups
        self.eps: float = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm of `x` `[T, size]`, fp32, times silu of `gate` `[T, size]`; returns the dtype of `gate`."""
        y: Tensor = _computes(x).grouped_gated_norm(x, gate, self.weight, self.groups, self.eps)
        return y


class Mamba2(nn.Module):
    """A linear layer: causal convolution and state space rule, each with its state in a state slot."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads: int = config.mamba_n_heads
        self.head_dim: int = config.mamba_d_head
        self.groups: int = config.mamba_n_groups
        self.state_size: int = config.mamba_d_state
        self.limits: tuple[float, float] = config.time_step_limit or (0.0, float("inf"))
        inner, shared = self.heads * self.head_dim, self.groups * self.state_size
        self.widths: tuple[int, int, int] = (inner, inner + 2 * shared, self.heads)
        self.inner_widths: tuple[int, int, int] = (inner, shared, shared)
        self.in_proj: Linear = Linear(config.hidden_size, sum(self.widths), config.mamba_proj_bias)
        self.conv1d: DepthwiseWeight = DepthwiseWeight(inner + 2 * shared, config.mamba_d_conv, config.mamba_conv_bias)
        self.A_log: nn.Parameter = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.D = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.dt_bias: nn.Parameter = nn.Parameter(torch.empty(self.heads), requires_grad=False)
        self.norm: GroupedGatedNorm = GroupedGatedNorm(inner, self.groups, config.rms_norm_eps)
        self.out_proj: Linear = Linear(inner, config.hidden_size, config.mamba_proj_bias)
        self.rate: Tensor | None = None

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        gate, mixed, dt = self.in_proj(x, batch).split(self.widths, dim=-1)
        computes = _computes(x)
        dt = computes.time_steps(dt, self.dt_bias, self.limits)
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        parts = []
        if (prompts := batch.prefills) is not None:
            slots = (prompts.cu_seqlens, prompts.state_read, prompts.state_write, batch.checkpoints)
            y, b, c = self._split(computes.causal_conv1d(mixed[prompts.rows], weight, conv, *slots, bias))
            rule = computes.chunk_state_space(y, dt[prompts.rows], b, c, self._rate(), recurrent, *slots, chunk_size)
            parts.append(computes.add_skip(rule, y, self.D))
        if (decodes := batch.decodes) is not None:
            inputs = (mixed[decodes.rows], dt[decodes.rows])
            parts.append(decode_linear(self, inputs, decodes, batch, state))
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out_proj(self.norm(total.flatten(1), gate), batch)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The convolution and the rule for decoded tokens: `inputs` are the rows of `mixed` and `dt`."""
        mixed, dt = inputs
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        computes = _computes(mixed)
        weight, bias, slots = self.conv1d.weight.squeeze(1), self.conv1d.bias, (steps.read, steps.write)
        y, b, c = self._split(computes.causal_conv1d_update(mixed, weight, conv, *slots, bias))
        rule = computes.state_space_step(y, dt, b, c, self._rate(), recurrent, *slots)
        result: Tensor = computes.add_skip(rule, y, self.D)
        return result

    def _rate(self) -> Tensor:
        """`-exp(A_log)` in fp32, computed once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp()
        return self.rate

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, b, c = mixed.split(self.inner_widths, dim=-1)
        shared = (self.groups, self.state_size)
        return y.unflatten(-1, (self.heads, self.head_dim)), b.unflatten(-1, shared), c.unflatten(-1, shared)


class BambaAttention(Attention):
    """A full-attention layer without norms; keys and values are in pages."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer, config.hidden_size // config.num_attention_heads)

    def add_norms(self, config: Any) -> None:
        """Make none."""

    def store(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, rotary: Rotary, kv: Tensor) -> Tensor:
        """Write keys and values to the slots of the batch. Returns the queries, rotated."""
        pages, (k, v) = kv[:, self.layer], self.of_heads(k, v)
        kernels.store_kv(rotate(k, rotary.cos, rotary.sin), v, pages, batch.slot_mapping)
        copy_keys_and_values(pages, batch.copies)
        return rotate(q, rotary.cos, rotary.sin)


class BambaLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint."""

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        self.is_linear: bool = layer_type == "linear_attention"
        if self.is_linear:
            mixer: nn.Module = Mamba2(config, index_of_type)
            self.mamba = mixer
        else:
            mixer = BambaAttention(config, index_of_type)
            self.self_attn = mixer
        self.feed_forward: MLP = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.input_layernorm: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        self.pre_ff_layernorm: RMSNorm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            mixer,
            self.pre_ff_layernorm,
            self.feed_forward,
        )


class BambaForCausalLM(CausalLM):
    """Bamba with its head.

    Args:
        config: a `BambaConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the state space rule reads the slots on the host

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layers_block_type
        layers = (BambaLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, config.hidden_size // config.num_attention_heads, layers, norm)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds = config.layers_block_type
        linear_layers, heads = kinds.count("linear_attention"), config.mamba_n_heads
        channels = heads * config.mamba_d_head + 2 * config.mamba_n_groups * config.mamba_d_state
        state = (linear_layers, heads, config.mamba_d_state, config.mamba_d_head)
        head_dim = config.hidden_size // config.num_attention_heads
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count("full_attention"), config.num_key_value_heads, head_dim, dtype),),
            state=(
                StateTensor("recurrent", state, torch.float32),
                StateTensor("conv", (linear_layers, config.mamba_d_conv - 1, channels), dtype),
            ),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        return ((Source("model.final_layernorm.weight" if parameter == "model.norm.weight" else parameter),),)
