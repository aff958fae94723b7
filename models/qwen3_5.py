"""Qwen3.5, the text model: gated delta rule in most layers, full attention in the rest. The feed-forward parts are
dense, or mixtures of experts (as in 35B-A3B). Qwen3-Next consists of the same layers.

Parameters have the names of the checkpoint. The model works on a packed batch and knows no requests: it reads and
writes the pages and state slots that are in the batch.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from hybrid.batch import StateSteps
from hybrid.kernels import ops as kernels
from hybrid.models.attention import Attention
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import MLP, DepthwiseWeight, GatedRMSNorm, Linear, Projections, weight
from hybrid.models.mixers import Block, Context, ConvolvedMixer, Layer
from hybrid.models.moe import ExpertsOnDisk, SparseMoE
from hybrid.models.mtp import MultiTokenPredictor


class GatedDeltaNet(ConvolvedMixer):
    """A linear-attention layer: causal convolution and gated delta rule, each with its state in a state slot."""

    has_kernel = True
    waits_for_device = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        heads = config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * key_dim, heads * value_dim
        self.state_shape = (heads, key_dim, value_dim)
        key_heads = config.linear_num_key_heads, key_dim
        self.parts = (key_heads, key_heads, (heads, value_dim))
        self.in_proj_qkv = Linear(config.hidden_size, 2 * keys + values)
        self.in_proj_z = Linear(config.hidden_size, values)
        self.in_proj_b = Linear(config.hidden_size, heads)
        self.in_proj_a = Linear(config.hidden_size, heads)
        self.inputs = Projections(self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
        self.conv1d = DepthwiseWeight(2 * keys + values, config.linear_conv_kernel_dim)
        self.A_log = weight(heads)
        self.dt_bias = weight(heads)
        self.norm = GatedRMSNorm(value_dim, config.rms_norm_eps)
        self.out_proj = Linear(values, config.hidden_size)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        mixed, gate, a, b = self.inputs(x, context.batch)
        y = self.mix((mixed, a, b), context)
        return self.out_proj(self.norm(y, gate.unflatten(-1, y.shape[1:])).flatten(1), context.batch)

    def rule(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Compute the rule for prompts: `inputs` are queries, keys, values, and the rows of `a` and `b`."""
        batch, rates, states = context.batch, (self.decays(), self.dt_bias), self.states(context.state)
        args = (*inputs, *rates, states, *batch.prompt_slots, context.chunk_size)
        return kernels.chunk_gated_delta_rule(*args, batch_invariant=batch.needs_own_kernels)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """Compute the convolution and the rule for decoded tokens, at once."""
        rates = (self.conv1d.taps, self.decays(), self.dt_bias)
        y: Tensor = kernels.gated_delta_step(
            *inputs, *rates, self.windows(state), self.states(state), steps.starts, steps.read, steps.write
        )
        return y


class GatedAttention(Attention):
    """A full-attention layer with a gated output.

    Args:
        first: tokens of a sequence before this one are not seen.
    """

    def __init__(self, config: Any, first: int = 0) -> None:
        super().__init__(config, query_parts=2, first=first)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; writes its keys and values to the slots of the batch."""
        q, k, v = self.inputs(x, context.batch)
        q, gate = q.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
        y = self.attend(self.store(q, k, v, context), context)
        return self.o_proj(kernels.sigmoid_and_mul(y, gate).flatten(1), context.batch)

    def keep(self, x: Tensor, context: Context) -> None:
        """Write the keys and values of `[T, hidden_size]`, and compute nothing else."""
        k, v = self.inputs(x, context.batch, first=1)
        no_queries = k.unflatten(-1, (self.kv_heads, self.head_dim))[:, :0]
        self.store(no_queries, k, v, context)


class Qwen3_5ForCausalLM(CausalLM):  # noqa: N801 (the checkpoint's name)
    """Qwen3.5 text with its head: of a `Qwen3_5TextConfig`. Checkpoints may have a predictor, whose pages come after
    those of the model's layers."""

    rotates_partly = True
    norm_offset = 1.0

    @classmethod
    def blocks(cls, config: Any, kind: str, index: int, first: int = 0) -> tuple[Block, ...]:
        """Make the parts of a layer.

        Args:
            first: tokens of a sequence before this one are not seen by full attention.
        """
        if kind == "linear_attention":
            mixer = Block("input_layernorm", linear_attn=GatedDeltaNet(config))
        else:
            mixer = Block("input_layernorm", self_attn=GatedAttention(config, first))
        return mixer, Block("post_attention_layernorm", mlp=cls.feed_forward(config, index))

    @classmethod
    def feed_forward(cls, config: Any, index: int) -> nn.Module:
        """Make the feed-forward part of a layer."""
        return MLP(config.hidden_size, config.intermediate_size)

    @classmethod
    def predictor(cls, config: Any) -> MultiTokenPredictor | None:
        """Make the predictor: its layer has the feed-forward part of the last one."""
        blocks = cls.blocks(config, "full_attention", len(config.layer_types) - 1, first=1)
        return MultiTokenPredictor(config, Layer(partial(cls.norm, config), *blocks))


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):  # noqa: N801 (the checkpoint's name)
    """Qwen3.5 MoE text with its head: of a `Qwen3_5MoeTextConfig`."""

    parts_on_disk = (ExpertsOnDisk("num_experts", "moe_intermediate_size"),)

    @classmethod
    def feed_forward(cls, config: Any, index: int) -> nn.Module:
        """Make the feed-forward part of a layer."""
        return SparseMoE(config, normalise=True)
