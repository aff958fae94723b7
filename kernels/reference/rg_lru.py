"""The real-gated linear recurrent unit of Griffin over state slots, in plain torch.

h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t with a_t = exp(rate r_t), for each channel by itself, where the gates i_t of
the input and r_t of the decay are between 0 and 1 (De et al., "Griffin", 2024). The first token of a sequence is not
scaled. Slots, packed batches and captures are as in `hybrid.kernels.reference`. Tokens are computed one after another,
and elements by themselves: prompts and decoded tokens have the same bits.
"""

import torch
from torch import Tensor

from hybrid.kernels.reference.elementwise import sigmoid


def rg_lru(
    x: Tensor,
    entry: Tensor,
    forget: Tensor,
    positions: Tensor,
    rate: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """The recurrence over a packed batch, each request continuing from its state. All arithmetic is fp32.

    Args:
        x: `[T, channels]`.
        entry, forget: `[T, channels]` the gates of the input and of the decay, before the logistic function.
        positions: `[T]` int64, of the tokens in their sequences.
        rate: `[channels]` fp32, the log of the decay of an open gate, at most 0.
        state: one layer's states, `[slots, channels]` fp32; written.
        cu_seqlens, state_read, state_write, captures: as for `reference.causal_conv1d`.

    Returns:
        `[T, channels]` in the type of `x`.
    """
    decay, states = _decays_and_inputs(x, entry, forget, positions, rate)
    captured = {(row, count): slot for row, count, slot in captures.tolist()}
    starts, reads, writes = cu_seqlens.tolist(), state_read.tolist(), state_write.tolist()
    for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
        current = state[read].clone()
        for token in range(starts[row], starts[row + 1]):
            current = states[token].add_(decay[token].mul_(current))
            slot = captured.get((row, token + 1 - starts[row]))
            if slot is not None:
                state[slot] = current
        if write >= 0:
            state[write] = current
    return states.to(x.dtype)


def rg_lru_step(
    x: Tensor,
    entry: Tensor,
    forget: Tensor,
    positions: Tensor,
    rate: Tensor,
    state: Tensor,
    state_read: Tensor,
    state_write: Tensor,
) -> Tensor:
    """One step of the recurrence per token, one after another. Arguments as for `rg_lru`; slots as for
    `reference.gated_delta_step`, one each per token."""
    decay, states = _decays_and_inputs(x, entry, forget, positions, rate)
    current = state.new_zeros(state.shape[1:])
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        current = states[row].add_(decay[row].mul_(state[read] if read >= 0 else current))
        if write >= 0:
            state[write] = current
    return states.to(x.dtype)


def _decays_and_inputs(
    x: Tensor, entry: Tensor, forget: Tensor, positions: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """What a state is multiplied by, and what is added to it, `[T, channels]` fp32."""
    decay = (rate * sigmoid(forget.float())).exp_()
    share = torch.where(positions.unsqueeze(1) == 0, 1.0, (1 - decay * decay).clamp_(min=0).sqrt_())
    return decay, x.float() * sigmoid(entry.float()) * share
