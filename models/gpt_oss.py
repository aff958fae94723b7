"""gpt-oss: sliding windows and full attention by turns, each head with a score that takes a share of the attention and
gives nothing (a sink), and mixtures of experts whose gates and products are bounded.

Published checkpoints keep experts as 4-bit floats (`hybrid.models.quantized_files`). Attention is compiled on a CPU,
and plain torch elsewhere (`hybrid.kernels.reference.scored_attention`).
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import linear
from hybrid.kernels.reference.scored_attention import Scores, paged_scored_attention, scored_window_attention
from hybrid.models.attention import Heads, PlainAttention, WindowAttention, ring_pages, rings
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import ResidualLayer, RMSNorm, Rotary, rotate
from hybrid.models.moe import ExpertRouter, Experts
from hybrid.models.weights import Layouts, Source
from hybrid.spec import HybridSpec, TokenTensor

FULL, SLIDING = "full_attention", "sliding_attention"


def exact_sinks(attention: Any) -> Tensor:
    """The sinks of a layer in fp32, computed once."""
    if attention.exact is None:
        attention.exact = attention.sinks.detach().float()
    found: Tensor = attention.exact
    return found


class SinkAttention(PlainAttention):
    """A full-attention layer with sinks; keys and values are in pages."""

    exact: Tensor | None = None

    def add_norms(self, config: Any) -> None:
        """Make the sinks, and no norms."""
        self.sinks = nn.Parameter(torch.empty(self.heads), requires_grad=False)

    def attend(self, q: Tensor, batch: Batch, kv: Tensor, chunk_size: int) -> Tensor:
        """Attention of queries, `[T, heads, head_dim]`."""
        compiled: Any = kernels.compiled_for("attention", q)
        pages, parts = kv[:, self.layer], []
        for part in batch.groups:
            places = q[part.rows], pages, part.block_table, part.cu_seqlens, part.seq_lens
            if compiled is not None:
                parts.append(compiled.paged_attention_with_sinks(*places, self.scale, exact_sinks(self)))
            else:
                parts.append(paged_scored_attention(*places, Scores(self.scale, None, self.sinks), chunk_size))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class SinkWindowAttention(WindowAttention):
    """A layer with a sliding window and sinks; the keys and values in it are in state slots."""

    exact: Tensor | None = None

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer, config.head_dim)

    def add_norms(self, config: Any) -> None:
        """Make the sinks, and no norms."""
        self.sinks = nn.Parameter(torch.empty(self.heads), requires_grad=False)

    def turned(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated."""
        return rotate(q, rotary.cos, rotary.sin), rotate(k, rotary.cos, rotary.sin)

    def attend(self, *args: Any) -> Tensor:
        """Attention of prompts."""
        *inputs, chunk_size = args
        compiled: Any = kernels.compiled_for("attention", inputs[0])
        if compiled is not None:
            y: Tensor = compiled.window_attention(*inputs, self.scale, chunk_size, exact_sinks(self))
            return y
        given: list[Any] = [*inputs, Scores(self.scale, None, self.sinks), chunk_size]
        return scored_window_attention(*given)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Attention of decoded tokens: `inputs` are their queries, keys, values and positions."""
        q, k, v, positions = inputs
        compiled: Any = kernels.compiled_for("attention", q)
        if compiled is not None:
            y: Tensor = compiled.decode_windows(*inputs, self._rings(state), *steps, self.scale, exact_sinks(self))
            return y
        pages = ring_pages(k, v, positions, self._rings(state), steps)
        return paged_scored_attention(q, *pages, Scores(self.scale, None, self.sinks), chunk_size=1)


def _with_biases(y: Tensor, biases: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """What experts give for pairs, each with the bias of its expert."""
    compiled: Any = kernels.compiled_for("experts", y)
    if compiled is not None:
        found: Tensor = compiled.add_biases(y, biases, experts, order)
        return found
    return y + biases[experts.flatten()[order]]


class BiasedRouter(ExpertRouter):
    """Chooses experts by logits with biases; weights of a token sum to one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_local_experts, config.num_experts_per_tok, normalise=True)
        self.bias = nn.Parameter(torch.empty(config.num_local_experts), requires_grad=False)
        self.exact_bias: Tensor | None = None

    def choose(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The `[T, top_k]` fp32 weights, and the `[T, top_k]` experts, of rows `[T, size]`."""
        assert self.bias is not None
        if self.exact_bias is None:
            self.exact_bias = self.bias.detach().float()
        logits = linear(x.float(), self._matrix(), batch.decode_start) + self.exact_bias
        return kernels.route_experts(logits, self.top_k, self.normalise)


class BoundedExperts(Experts):
    """Routed experts with biases. Rows of gates and of what they are multiplied with come by turns.

    Attributes:
        alpha, limit: of the gate: how steep it is, and the bound of both factors.
    """

    def __init__(self, config: Any) -> None:
        size, intermediate, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
        super().__init__(size, intermediate, experts)
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * intermediate), requires_grad=False)
        self.down_proj_bias = nn.Parameter(torch.empty(experts, size), requires_grad=False)
        self.alpha: float = getattr(config, "swiglu_alpha", 1.702)
        self.limit: float = getattr(config, "swiglu_limit", 7.0)

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, batch: Batch) -> Tensor:
        """The weighted sum of each token's experts: `x` is `[T, size]`, the rest is the router's."""
        top_k, decode_start = experts.shape[1], 0
        if batch.prefills is not None and kernels.uses_triton(x.device):
            decode_start = batch.prefills.rows.stop
        order, places, ends = kernels.sort_by_expert(experts, self.down_proj.shape[0], decode_start)
        num_prompt = decode_start * top_k
        y = self.product(self.first, x, order, ends, top_k, num_prompt)
        y = self.activated(_with_biases(y, self.gate_up_proj_bias, experts, order))
        y = self.product("down_proj", y, order, ends, 0, num_prompt)
        return kernels.combine_experts(_with_biases(y, self.down_proj_bias, experts, order), places, weights)

    def activated(self, y: Tensor) -> Tensor:
        """What the second product takes, from what the first one gives."""
        compiled: Any = kernels.compiled_for("elementwise", y)
        if compiled is not None:
            found: Tensor = compiled.bounded_silu_and_mul(y, self.alpha, self.limit)
            return found
        gate = y[..., ::2].float().clamp(max=self.limit)
        up = y[..., 1::2].float().clamp(-self.limit, self.limit)
        return ((up + 1) * kernels.sigmoid_and_mul(gate, gate * self.alpha)).to(y.dtype)


class GptOssMoE(nn.Module):
    """A mixture of experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = BiasedRouter(config)
        self.experts = BoundedExperts(config)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Run the part on `[T, size]`."""
        return self.experts(x, *self.router.choose(x, batch), batch)


class GptOssLayer(ResidualLayer):
    """One layer. Its parts have the names of the checkpoint.

    Attributes:
        is_linear: its keys and values are state: it has a window.
    """

    def __init__(self, config: Any, layer_type: str, index_of_type: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.is_linear: bool = layer_type == SLIDING
        kind = SinkWindowAttention if self.is_linear else SinkAttention
        self.self_attn: Heads = kind(config, index_of_type)
        self.mlp = GptOssMoE(config)
        self.input_layernorm = RMSNorm(size, eps, offset=0.0)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=0.0)
        self.parts: tuple[RMSNorm, nn.Module, RMSNorm, nn.Module] = (
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.mlp,
        )

    def mix(
        self, y: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, state: dict[str, Tensor], chunk_size: int
    ) -> Tensor:
        """What attention gives for normalised rows."""
        kept = state if self.is_linear else kv
        mixed: Tensor = self.self_attn(y, batch, rotary, kept, chunk_size)
        return mixed


class GptOssForCausalLM(CausalLM):
    """gpt-oss with its head.

    Args:
        config: a `GptOssConfig` of transformers.
        chunk_size: prompts are computed in chunks of this many tokens.
        has_predictor: must be False; the family has no layer for multi-token prediction.
    """

    waits_for_device: bool = True  # the rings are read and written on the host's word
    layer_kinds: tuple[str, ...] = (SLIDING, FULL)

    def __init__(self, config: Any, chunk_size: int, has_predictor: bool = False) -> None:
        assert not has_predictor
        kinds = config.layer_types
        layers = (GptOssLayer(config, kind, kinds[:index].count(kind)) for index, kind in enumerate(kinds))
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=0.0)
        super().__init__(config, chunk_size, config.head_dim, layers, norm)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if not isinstance(config.sliding_window, int) or config.sliding_window < 1:
            return f"sliding_window {config.sliding_window!r} is not a number of tokens"
        return super().unsupported(config)

    @staticmethod
    def spec(config: Any, dtype: torch.dtype) -> HybridSpec:
        """The tensors per token and per sequence of a model of this configuration."""
        kinds, heads, size = config.layer_types, config.num_key_value_heads, config.head_dim
        return HybridSpec(
            tokens=(TokenTensor.kv(kinds.count(FULL), heads, size, dtype),),
            state=(rings(kinds.count(SLIDING), config.sliding_window, heads, size, dtype),),
        )

    @staticmethod
    def layouts(parameter: str, config: Any) -> Layouts:
        """The tensors on disk that make up a parameter."""
        if parameter.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return (Source(parameter, transposed=True),), (Source(f"{parameter}_blocks"),)
        return ((Source(parameter),),)
