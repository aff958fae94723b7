"""Qwen3.5, the dense text model: gated delta rule in most layers, full attention in the rest.

Parameter names are the checkpoint's. The model works on a packed batch and knows nothing of requests: it reads and
writes pages and state slots where the step's plan says.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.linear import DECODE_ROWS, decode_rows_that_agree, linear, rows_that_agree
from hybrid.kernels.reference import sigmoid, softplus
from hybrid.spec import HybridSpec, StateTensor


@dataclass(frozen=True)
class Rotary:
    """The angles of a step: `[T, rotary_dim]` each."""

    cos: Tensor
    sin: Tensor


class Linear(nn.Module):
    """A matrix product whose weight may lie in memory by columns, and whose rows can be made independent of their
    number."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None
        self.most_rows = 0
        self.decode_rows: tuple[int, ...] = (DECODE_ROWS,)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = linear(x, self.weight, batch.blocks, self.most_rows, self.decode_rows)
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Root-mean-square norm around one: `x / rms(x) * (1 + weight)`, in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.factor(), self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`x + residual`, and its norm."""
        return kernels.add_rms_norm(x, residual, self.factor(), self.eps)

    def factor(self) -> Tensor:
        """`1 + weight` in fp32, made once."""
        if self.scale is None:
            self.scale = 1.0 + self.weight.float()
        return self.scale


class GatedRMSNorm(nn.Module):
    """Root-mean-square norm, then times silu of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return kernels.gated_rms_norm(x, gate, self.weight, self.eps)


class DepthwiseWeight(nn.Module):
    """The weight of the causal convolution, `[channels, 1, width]` as the checkpoint has it."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width), requires_grad=False)


class GatedDeltaNet(nn.Module):
    """A linear-attention layer: causal convolution and gated delta rule, both over a state slot."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.widths = (keys, keys, values)
        self.in_proj_qkv = Linear(config.hidden_size, 2 * keys + values)
        self.in_proj_z = Linear(config.hidden_size, values)
        self.in_proj_b = Linear(config.hidden_size, self.value_heads)
        self.in_proj_a = Linear(config.hidden_size, self.value_heads)
        self.conv1d = DepthwiseWeight(2 * keys + values, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(self.value_heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads), requires_grad=False)
        self.rate: Tensor | None = None
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size)

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        mixed = self.in_proj_qkv(x, batch)
        gate = self.in_proj_z(x, batch).unflatten(-1, (self.value_heads, self.value_dim))
        a, b = self.in_proj_a(x, batch), self.in_proj_b(x, batch)
        conv, recurrent = state["conv"][:, self.layer], state["recurrent"][:, self.layer]
        taps = self.conv1d.weight.squeeze(1)
        parts = []
        prompts, decodes = batch.prefills, batch.decodes
        if prompts is not None:
            tokens = prompts.rows
            slots = (prompts.cu_seqlens, prompts.state_read, prompts.state_write, batch.checkpoints)
            q, k, v = self._split(
                kernels.causal_conv1d(mixed[tokens], taps, conv, *slots, batch_invariant=batch.is_invariant)
            )
            decay = self._rate() * softplus(a[tokens].float() + self.dt_bias)
            beta = sigmoid(b[tokens])
            parts.append(
                kernels.chunk_gated_delta_rule(
                    q, k, v, decay, beta, recurrent, *slots, chunk_size, batch_invariant=batch.is_invariant
                )
            )
        if decodes is not None:
            tokens = decodes.rows
            parts.append(
                kernels.gated_delta_step(
                    mixed[tokens],
                    a[tokens],
                    b[tokens],
                    taps,
                    self._rate(),
                    self.dt_bias,
                    conv,
                    recurrent,
                    decodes.cu_seqlens,
                    decodes.state_read,
                    decodes.state_write,
                )
            )
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.out_proj(self.norm(y, gate).flatten(1), batch)

    def _rate(self) -> Tensor:
        """`-exp(A_log)` in fp32, made once."""
        if self.rate is None:
            self.rate = -self.A_log.float().exp()
        return self.rate

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = mixed.split(self.widths, dim=-1)
        keys = (self.key_heads, self.key_dim)
        return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (self.value_heads, self.value_dim))


class Attention(nn.Module):
    """A full-attention layer over pages, its output gated."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = bool(config.attention_bias)
        self.q_proj = Linear(config.hidden_size, 2 * self.heads * self.head_dim, bias)
        self.k_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias)
        self.v_proj = Linear(config.hidden_size, self.kv_heads * self.head_dim, bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, chunk_size: int) -> Tensor:
        q, gate = self.q_proj(x, batch).unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
        k = self.k_proj(x, batch).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x, batch).unflatten(-1, (self.kv_heads, self.head_dim))
        pages, norms = kv[:, self.layer], (self.q_norm.factor(), self.k_norm.factor(), self.q_norm.eps)
        q = kernels.norm_rotate_store(q, k, v, *norms, rotary.cos, rotary.sin, pages, batch.slot_mapping)
        # prompts and decoded tokens by kernels of their own: a tile of queries, or keys taken in pieces side by side
        parts = [
            kernels.paged_attention(
                q[part.rows],
                pages,
                part.block_table,
                part.cu_seqlens,
                part.seq_lens,
                self.head_dim**-0.5,
                chunk_size,
                part.num_splits,
            )
            for part in batch.groups
        ]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(kernels.sigmoid_and_mul(y, gate).flatten(1), batch)


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down_proj(kernels.silu_and_mul(self.gate_proj(x, batch), self.up_proj(x, batch)), batch)


class DecoderLayer(nn.Module):
    """One layer: a mixer, then a feed-forward part, each added to what came in."""

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        if layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(config, index_of_type)
        else:
            self.self_attn = Attention(config, index_of_type)
        self.is_linear = layer_type == "linear_attention"
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

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
        """What goes into the layer is `x + residual`, and likewise what comes out: the next norm adds them."""
        if residual is None:
            residual, y = x, self.input_layernorm(x)
        else:
            residual, y = self.input_layernorm.of_sum(x, residual)
        if self.is_linear:
            y = self.linear_attn(y, batch, state, chunk_size)
        else:
            y = self.self_attn(y, batch, rotary, kv, chunk_size)
        residual, y = self.post_attention_layernorm.of_sum(y, residual)
        return self.mlp(y, batch), residual


class TextModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        # from_pretrained: an Embedding made otherwise fills itself, which costs seconds where the device is "meta"
        self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
        kinds = config.layer_types
        self.layers = nn.ModuleList(
            DecoderLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Qwen3_5ForCausalLM(nn.Module):  # noqa: N801 (the checkpoint's name)
    """Qwen3.5 text with its head.

    Args:
        config: a `Qwen3_5TextConfig` of transformers.
        chunk_size: chunk of the linear layers, in tokens.
    """

    def __init__(self, config: Any, chunk_size: int) -> None:
        super().__init__()
        self.config = config
        self.chunk_size = chunk_size
        self.rows_are_independent = False
        self.model = TextModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.tie_head()
        rope = config.rope_parameters
        rotary_dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        self.inverse_frequencies = 1.0 / (rope["rope_theta"] ** exponents)

    def tie_head(self) -> None:
        """Let the head share the embedding's weight."""
        self.lm_head.weight = nn.Parameter(self.model.embed_tokens.weight, requires_grad=False)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """What a model of this configuration keeps per token and per sequence."""
        linear_layers = config.layer_types.count("linear_attention")
        heads, key_dim, value_dim = (
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        channels = 2 * config.linear_num_key_heads * key_dim + heads * value_dim
        return HybridSpec(
            page_layers=config.layer_types.count("full_attention"),
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            kv_dtype=dtype,
            state=(
                StateTensor("recurrent", (linear_layers, heads, key_dim, value_dim), torch.float32),
                StateTensor("conv", (linear_layers, config.linear_conv_kernel_dim - 1, channels), dtype),
            ),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Run a step.

        Args:
            kv: the pages, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; written at the plan's slots.
            state: the state pool's tensors by name; written at the plan's slots.

        Returns:
            `[S, vocab]` fp32 logits of the plan's `sample_rows`.
        """
        x: Tensor = self.model.embed_tokens(batch.token_ids)
        residual: Tensor | None = None
        rotary = self._rotary(batch.positions, x.dtype)
        for layer in self.model.layers:
            x, residual = layer(x, residual, batch, rotary, kv, state, self.chunk_size)
        assert residual is not None
        rows = batch.sample_rows
        x = self.model.norm.of_sum(x[rows], residual[rows])[1]
        blocks = batch.blocks.of_single_rows(x.shape[0]) if batch.blocks is not None else None
        return linear(x, self.lm_head.weight, blocks, decode_rows=self.lm_head.decode_rows).float()

    def _rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        angles = positions.float().unsqueeze(-1) * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))

    def make_rows_independent(self) -> None:
        """Find out, per shape of weight, which numbers of rows this machine multiplies without changing a row's bits.
        Kernels of ours do so by themselves."""
        if self.rows_are_independent or kernels.uses_triton(self.lm_head.weight.device):
            return
        self.rows_are_independent = True
        found: dict[object, tuple[int, tuple[int, ...]]] = {}
        for module in self.modules():
            if isinstance(module, Linear):
                weight = module.weight
                kind = (*weight.shape, *weight.stride())
                if kind not in found:
                    most_rows = 0 if module is self.lm_head else rows_that_agree(weight, self.chunk_size)
                    found[kind] = most_rows, decode_rows_that_agree(weight)
                module.most_rows, module.decode_rows = found[kind]
