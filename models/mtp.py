"""The predictor of Qwen's checkpoints (`mtp.`): it drafts the token after the next one.

Its input for a token is the norm of the token's embedding, and the norm of the model's last hidden state before it,
concatenated and multiplied by `fc`; then follow one layer of full attention, a norm, and the model's own head. As
published (Qwen3-Next and Qwen3.5 in vLLM and SGLang) a hidden state is the output of the model's final norm, and where
drafts are chained it is the predictor's own output.

What it keeps of a token depends on the tokens up to this one, as what every layer keeps: the keys and values of its
layer are one more layer of the pages, and the last hidden state is part of a sequence's state. So hits bring both. The
first token of a sequence has no hidden state before it: what is kept for it is not seen.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.models.layers import Linear, ResidualLayer, RMSNorm, Rotary, mix_tokens
from hybrid.spec import HybridSpec, StateTensor

HIDDEN = "hidden"
"""Name of the last hidden state in a sequence's state."""


class _LastHidden(nn.Module):
    """The hidden state before each token of a batch: a linear-attention layer whose state is the last input."""

    def forward(self, x: Tensor, batch: Batch, state: dict[str, Tensor]) -> Tensor:
        """The rows before those of `[T, hidden_size]`; reads and writes the state slots of the batch."""
        return mix_tokens(self, (x,), batch, state, chunk_size=1)  # nothing here is computed in chunks

    def prefill(self, inputs: tuple[Tensor, ...], batch: Batch, state: dict[str, Tensor], chunk_size: int) -> Tensor:
        """The same for prompts."""
        (x,), slots = inputs, state[HIDDEN]
        before = x.roll(1, 0)
        starts, read, write, checkpoints = batch.prompt_slots
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

    def __init__(self, config: Any, layer: ResidualLayer) -> None:
        super().__init__()
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.last_hidden = _LastHidden()

    @staticmethod
    def extend(spec: HybridSpec, hidden_size: int) -> HybridSpec:
        """Add what a predictor keeps to the spec of its model."""
        tokens = tuple(
            replace(tensor, outer=(tensor.outer[0] + 1, *tensor.outer[1:])) if tensor.name == "kv" else tensor
            for tensor in spec.tokens
        )
        dtype = next(tensor.dtype for tensor in spec.tokens if tensor.name == "kv")
        return replace(spec, tokens=tokens, state=(*spec.state, StateTensor(HIDDEN, (hidden_size,), dtype)))

    def keep(
        self, embedded: Tensor, hidden: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, state: dict[str, Tensor]
    ) -> None:
        """Keep what is needed of a step's tokens to draft those after them.

        Args:
            embedded: `[T, hidden_size]` their embeddings.
            hidden: `[T, hidden_size]` the model's hidden states.
            batch, rotary, kv, state: as for the layers of the model.
        """
        x = self._joined(embedded, self.last_hidden(hidden, batch, state), batch)
        layer: Any = self.layers[0]
        norm, attention, _, _ = layer.parts
        attention.keep(norm(x), batch, rotary, kv)

    def forward(
        self, embedded: Tensor, hidden: Tensor, batch: Batch, rotary: Rotary, kv: Tensor, chunk_size: int
    ) -> Tensor:
        """`[T, hidden_size]`, of which the head makes the logits of the token after each; also kept as in `keep`.

        Args:
            hidden: `[T, hidden_size]` the hidden states before the tokens: of the model, or of this.
        """
        x, residual = self.layers[0](self._joined(embedded, hidden, batch), None, batch, rotary, kv, {}, chunk_size)
        return self.norm.of_sum(x, residual)[1]

    def _joined(self, embedded: Tensor, hidden: Tensor, batch: Batch) -> Tensor:
        parts = self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)
        return self.fc(torch.cat(parts, dim=-1), batch)
