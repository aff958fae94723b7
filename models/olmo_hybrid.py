"""OLMo hybrid: gated delta rule in most layers, full attention in the rest, mostly without rotary positions.

A token may replace up to twice an old value (`linear_allow_neg_eigval`). Layers of full attention have norms after
their parts rather than before, and queries and keys are normalised over all heads together.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid.batch import StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import delta_rule
from hybrid.models.attention import PlainAttention, head_dim_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, DepthwiseWeight, GatedRMSNorm, Linear, Projections, RMSNorm, weight
from hybrid.models.mixers import Block, Context, ConvolvedMixer
from hybrid.models.weights import Layouts, Source

PUBLISHED = {
    ".input_layernorm.": ".attention_layer_norm.",
    ".post_attention_layernorm.": ".feedforward_layer_norm.",
}
"""Parts of the names of layers with the delta rule, and what they are in published checkpoints; transformers also
writes those of layers with attention so."""


class OlmoDeltaNet(ConvolvedMixer):
    """A linear-attention layer: causal convolution and gated delta rule, each with its state in a state slot. Drafts
    are split into runs on the host."""

    has_kernel = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * key_dim, heads * value_dim
        self.state_shape = (heads, key_dim, value_dim)
        key_heads = config.linear_num_key_heads, key_dim
        self.parts = (key_heads, key_heads, (heads, value_dim))
        self.most: float = 2.0 if config.linear_allow_neg_eigval else 1.0
        self.q_proj = Linear(size, keys)
        self.k_proj = Linear(size, keys)
        self.v_proj = Linear(size, values)
        self.g_proj = Linear(size, values)
        self.a_proj = Linear(size, heads)
        self.b_proj = Linear(size, heads)
        self.inputs = Projections(self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj)
        self.conv1d = DepthwiseWeight(2 * keys + values, config.linear_conv_kernel_dim)
        self.A_log = weight(heads)
        self.dt_bias = weight(heads)
        self.o_norm = GatedRMSNorm(value_dim, 1e-5)
        self.o_proj = Linear(values, size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        q, k, v, gate, a, b = self.inputs(x, context.batch)
        mixed = torch.cat((q, k, v), dim=-1)
        g, beta = kernels.delta_gates(a, b, self.decays(), self.dt_bias)
        y = self.mix((mixed, g, beta * self.most), context)
        return self.o_proj(self.o_norm(y, gate.unflatten(-1, y.shape[1:])).flatten(1), context.batch)

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the rule for prompts: `inputs` are queries, keys, values and gates."""
        states, slots = self.states(context.state), context.batch.prompt_slots
        y: Tensor = _computes(inputs[0]).chunk_delta_rule(*inputs, states, *slots, context.chunk_size)
        return y

    def rule_step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the rule for decoded tokens."""
        rule = _computes(inputs[0]).recurrent_gated_delta_rule
        y: Tensor = rule(*inputs, self.states(state), steps.read, steps.write)
        return y


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the rule."""
    return kernels.compiled_for("delta_rule", x) or delta_rule


class OlmoAttention(PlainAttention):
    """A full-attention layer whose queries and keys are normalised over all heads together."""

    def add_norms(self, config: Any) -> None:
        """Make the norms of queries and keys."""
        self.q_norm = RMSNorm(self.heads * self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.kv_heads * self.head_dim, config.rms_norm_eps)

    def store(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Write keys and values to the slots of the batch. Returns the queries, normalised and rotated."""
        q = self.q_norm(q.flatten(1)).unflatten(-1, (self.heads, -1))
        return super().store(q, self.k_norm(k), v, context)


def convolution_layouts(parameter: str, config: Any) -> Layouts | None:
    """Return the layouts of a convolution, which may be stored in parts; None: the parameter is none."""
    prefix, found, _ = parameter.partition(".linear_attn.conv1d.")
    if not found:
        return None
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    ends = {"q": slice(0, keys), "k": slice(keys, 2 * keys), "v": slice(2 * keys, None)}
    parts = (Source(f"{prefix}.linear_attn.{name}_conv1d.weight", at=(at,)) for name, at in ends.items())
    return (*parts,), (Source(parameter),)


class OlmoHybridForCausalLM(CausalLM):
    """OLMo hybrid with its head: of an `OlmoHybridConfig`."""

    names_on_disk = (PUBLISHED, {})
    parts_on_disk = (convolution_layouts,)

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int) -> tuple[Block, ...]:
        """Make the parts of a layer: norms come before those of linear attention, and after the others."""
        mlp = MLP(config.hidden_size, config.intermediate_size)
        if kind == "linear_attention":
            mixer = Block("input_layernorm", linear_attn=OlmoDeltaNet(config))
            return mixer, Block("post_attention_layernorm", mlp=mlp)
        mixer = Block(None, "post_attention_layernorm", self_attn=OlmoAttention(config))
        return mixer, Block(None, "post_feedforward_layernorm", mlp=mlp)

    @classmethod
    def rotated_dim(cls, config: Any) -> int:
        """Return the size of a head that is rotated; 0: none is."""
        rope = config.rope_parameters or {}
        return head_dim_of(config) if rope.get("rope_theta") is not None else 0
