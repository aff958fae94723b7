"""Lightning attention (Qin et al., "Lightning Attention-2", 2024): linear attention whose state decays by a number of
each head. It is Mamba-2's state space rule with time steps of 1, and computed as such.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid.batch import StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import state_space
from hybrid.models.layers import Linear, RMSNorm, silu
from hybrid.models.mixers import Context, StateMixer
from hybrid.spec import StateTensor


class LightningAttention(StateMixer):
    """A linear-attention layer.

    Args:
        head_dim: size of a head.
        depth: the number of the layer in the model: how fast states decay depends on it.
    """

    def __init__(self, config: Any, head_dim: int, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.head_dim: int = head_dim
        size, inner = config.hidden_size, self.heads * head_dim
        self.qkv_proj = Linear(size, 3 * inner)
        self.output_gate = Linear(size, inner)
        self.norm = RMSNorm(inner, 1e-6)
        self.out_proj = Linear(inner, size)
        self.rate: Tensor | None = None

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor]:
        """Return the state of the rule."""
        return (StateTensor("recurrent", (1, self.heads, self.head_dim, self.head_dim), torch.float32),)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        batch = context.batch
        mixed = silu(self.qkv_proj(x, batch)).unflatten(-1, (self.heads, 3 * self.head_dim))
        q, k, v = (part.contiguous() for part in mixed.chunk(3, dim=-1))
        y = self.norm(self.mix((q, k, v), context).flatten(1).to(x.dtype))
        return self.out_proj(kernels.sigmoid_and_mul(y, self.output_gate(x, batch)), batch)

    def prefill(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """The rule for prompts: `inputs` are their queries, keys and values."""
        (q, k, v), rule = inputs, _computes(inputs[0]).chunk_state_space
        slots, recurrent = context.batch.prompt_slots, context.state["recurrent"][:, self.row]
        y: Tensor = rule(v, self._times(q), k, q, self._rate(q), recurrent, *slots, context.chunk_size)
        return y

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        (q, k, v), rule = inputs, _computes(inputs[0]).state_space_step
        recurrent = state["recurrent"][:, self.row]
        y: Tensor = rule(v, self._times(q), k, q, self._rate(q), recurrent, steps.read, steps.write)
        return y

    def _times(self, q: Tensor) -> Tensor:
        """The time steps of tokens, `[T, heads]`."""
        return q.new_empty(len(q), self.heads, dtype=torch.float32).fill_(1.0)

    def _rate(self, like: Tensor) -> Tensor:
        """The logs of the decays of a token, `[heads]` fp32, computed once."""
        if self.rate is None:
            share = 1 - self.depth / (self.layers - 1 + 1e-5) + 1e-5
            head = torch.arange(1, self.heads + 1, device=like.device)
            self.rate = -((1 / 2 ** (8 / self.heads)) ** head).float() * share
        return self.rate


def _computes(x: Tensor) -> Any:
    """The module whose functions compute the rule."""
    return kernels.compiled_for("state_space", x) or state_space
