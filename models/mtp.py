"""The predictor of Qwen's checkpoints (`mtp.`): it drafts the token after the next one.

Its input for a token is the norm of the token's embedding, and the norm of the model's last hidden state before it,
concatenated and multiplied by `fc`; then follow one layer of full attention, a norm, and the model's own head. As
published (Qwen3-Next and Qwen3.5 in vLLM and SGLang) a hidden state is the output of the model's final norm, and where
drafts are chained it is the predictor's own output.

What it keeps of a token depends on the tokens up to this one, as what every layer keeps: the keys and values of its
layer are one more layer of the pages, and the last hidden state is part of a sequence's state. So hits bring both. The
first token of a sequence has no hidden state before it: what is kept for it is not seen.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.models.layers import Linear, RMSNorm
from hybrid.models.mixers import Context, Layer, StateMixer
from hybrid.spec import StateTensor

HIDDEN = "hidden"
"""Name of the last hidden state in a sequence's state."""


class _LastHidden(StateMixer):
    """The hidden state before each token of a batch: a mixer whose state is the last input."""

    waits_for_device = False

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor]:
        """Return the hidden state of a sequence, of which there is one for all layers."""
        return (StateTensor(HIDDEN, (self.size,), dtype),)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The rows before those of `[T, hidden_size]`; reads and writes the state slots of the batch."""
        return self.mix((x,), context)

    def prefill(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """The same for prompts."""
        (x,), slots = inputs, context.state[HIDDEN]
        before = x.roll(1, 0)
        starts, read, write, checkpoints = context.batch.prompt_slots
        before[starts[:-1]] = slots[read]
        requests, lengths, places = checkpoints.unbind(1)
        slots[places] = x[starts[requests] + lengths - 1]
        slots[write] = x[starts[1:] - 1]
        return before

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        (x,) = inputs
        before: Tensor = kernels.shift_rows(x, state[HIDDEN], *steps)
        return before


class MultiTokenPredictor(nn.Module):
    """The predictor. Its parts have the names of the checkpoint.

    Args:
        config: of the model.
        layer: a layer of full attention that leaves out the first token.
    """

    def __init__(self, config: Any, layer: Layer) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_hidden = RMSNorm(size, eps, offset=1.0)
        self.pre_fc_norm_embedding = RMSNorm(size, eps, offset=1.0)
        self.fc = Linear(2 * size, size)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(size, eps, offset=1.0)
        self.last_hidden = _LastHidden(size)

    def keep(self, embedded: Tensor, hidden: Tensor, context: Context) -> None:
        """Keep what is needed of a step's tokens to draft those after them.

        Args:
            embedded: `[T, hidden_size]` their embeddings.
            hidden: `[T, hidden_size]` the model's hidden states.
        """
        x = self._joined(embedded, self.last_hidden(hidden, context), context.batch)
        layer: Any = self.layers[0]
        layer.self_attn.keep(layer.input_layernorm(x), context)

    def forward(self, embedded: Tensor, hidden: Tensor, context: Context) -> Tensor:
        """`[T, hidden_size]`, of which the head makes the logits of the token after each; also kept as in `keep`.

        Args:
            hidden: `[T, hidden_size]` the hidden states before the tokens: of the model, or of this.
        """
        x, residual = self.layers[0](self._joined(embedded, hidden, context.batch), None, context)
        return self.norm.of_sum(x, residual)[1]

    def _joined(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        return self.fc(torch.cat(parts, dim=-1), batch)
