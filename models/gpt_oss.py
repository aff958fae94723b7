"""gpt-oss: sliding windows and full attention by turns, each head with a score that takes a share of the attention and
gives nothing (a sink), and mixtures of experts whose gates and products are bounded.

Published checkpoints keep experts as 4-bit floats (`hybrid.models.quantized_files`). Attention is compiled on a CPU,
and plain torch elsewhere (`hybrid.kernels.reference.scored_attention`).
"""

from typing import Any

from torch import Tensor

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import linear
from hybrid.kernels.reference.scored_attention import Scores, paged_scored_attention, scored_window_attention
from hybrid.models.attention import PlainAttention, PlainWindowAttention, ring_pages
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import weight
from hybrid.models.mixers import Block, Context, joined
from hybrid.models.moe import ExpertRouter, Experts, MoE
from hybrid.models.weights import Layouts, Source

FULL, SLIDING = "full_attention", "sliding_attention"


def exact_sinks(attention: Any) -> Tensor:
    """The sinks of a layer in fp32, computed once."""
    if attention.exact is None:
        attention.exact = attention.sinks.detach().float()
    found: Tensor = attention.exact
    return found


class SinkAttention(PlainAttention):
    """A full-attention layer with sinks; keys and values are in pages."""

    waits_for_device = True
    exact: Tensor | None = None

    def add_norms(self, config: Any) -> None:
        """Make the sinks, and no norms."""
        self.sinks = weight(self.heads)

    def attend(self, q: Tensor, context: Context) -> Tensor:
        """Attention of queries, `[T, heads, head_dim]`."""
        compiled: Any = kernels.compiled_for("attention", q)
        pages, parts = self.pages(context), []
        for part in context.batch.groups:
            places = q[part.rows], pages, part.block_table, part.cu_seqlens, part.seq_lens
            if compiled is not None:
                parts.append(compiled.paged_attention_with_sinks(*places, self.scale, exact_sinks(self)))
            else:
                parts.append(paged_scored_attention(*places, Scores(self.scale, None, self.sinks), context.chunk_size))
        return joined(parts)


class SinkWindowAttention(PlainWindowAttention):
    """A layer with a sliding window and sinks; the keys and values in it are in state slots."""

    exact: Tensor | None = None

    def add_norms(self, config: Any) -> None:
        """Make the sinks, and no norms."""
        self.sinks = weight(self.heads)

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
            y: Tensor = compiled.decode_windows(*inputs, self.rings(state), *steps, self.scale, exact_sinks(self))
            return y
        pages = ring_pages(k, v, positions, self.rings(state), steps)
        return paged_scored_attention(q, *pages, Scores(self.scale, None, self.sinks), chunk_size=1)


class BiasedRouter(ExpertRouter):
    """Chooses experts by logits with biases; weights of a token sum to one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_local_experts, config.num_experts_per_tok, normalise=True)
        self.bias = weight(config.num_local_experts)
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
        self.gate_up_proj_bias = weight(experts, 2 * intermediate)
        self.down_proj_bias = weight(experts, size)
        self.alpha: float = getattr(config, "swiglu_alpha", 1.702)
        self.limit: float = getattr(config, "swiglu_limit", 7.0)

    def biased(self, name: str, y: Tensor, experts: Tensor, order: Tensor) -> Tensor:
        """What matrices of a name give for pairs of a token and an expert, with the biases of the experts."""
        biases: Tensor = getattr(self, f"{name}_bias")
        compiled: Any = kernels.compiled_for("experts", y)
        if compiled is not None:
            found: Tensor = compiled.add_biases(y, biases, experts, order)
            return found
        return y + biases[experts.flatten()[order]]

    def activated(self, y: Tensor) -> Tensor:
        """What the second product takes, from what the first one gives."""
        compiled: Any = kernels.compiled_for("elementwise", y)
        if compiled is not None:
            found: Tensor = compiled.bounded_silu_and_mul(y, self.alpha, self.limit)
            return found
        gate = y[..., ::2].float().clamp(max=self.limit)
        up = y[..., 1::2].float().clamp(-self.limit, self.limit)
        return ((up + 1) * kernels.sigmoid_and_mul(gate, gate * self.alpha)).to(y.dtype)


def expert_layouts(parameter: str, config: Any) -> Layouts | None:
    """Return the layouts of matrices of experts: in floats the other way round, or in blocks of 4 bits; None: the
    parameter is not one of them."""
    if parameter.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return (Source(parameter, transposed=True),), (Source(f"{parameter}_blocks"),)
    return None


class GptOssForCausalLM(CausalLM):
    """gpt-oss with its head: of a `GptOssConfig`."""

    layer_kinds = (SLIDING, FULL)
    parts_on_disk = (expert_layouts,)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer."""
        has_window = kind == SLIDING
        attention = SinkWindowAttention(config, config.sliding_window) if has_window else SinkAttention(config)
        experts = MoE(BiasedRouter(config), BoundedExperts(config), router_name="router")
        return Block("input_layernorm", self_attn=attention), Block("post_attention_layernorm", mlp=experts)

    @classmethod
    def unsupported(cls, config: Any) -> str | None:
        """Return what of a configuration is not computed here; None: all of it is."""
        if not isinstance(config.sliding_window, int) or config.sliding_window < 1:
            return f"sliding_window {config.sliding_window!r} is not a number of tokens"
        return super().unsupported(config)
