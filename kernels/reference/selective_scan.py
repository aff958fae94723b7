"""The selective scan of Mamba-1 over state slots, in plain torch.

h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t and y_t = C_t h_t, for each channel by itself, whose A is a number for each
element of its state (Gu and Dao, "Mamba", 2023). Slots, packed batches and captures are as in
`hybrid.kernels.reference`. Tokens are computed one after another, and elements by themselves: prompts and decoded
tokens have the same bits.
"""

import torch
from torch import Tensor

TOGETHER = 64
"""Tokens of which what does not depend on states is computed at once."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rate: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """The scan over a packed batch, each request continuing from its state. All arithmetic is fp32.

    Args:
        x: `[T, channels]`.
        dt: `[T, channels]` fp32, above 0.
        b, c: `[T, state_size]`.
        rate: `[state_size, channels]` fp32, A, below 0.
        state: one layer's states, `[slots, state_size, channels]` fp32; written.
        cu_seqlens, state_read, state_write, captures: as for `reference.causal_conv1d`.

    Returns:
        `[T, channels]` fp32.
    """
    output, x, b, c = torch.empty_like(dt), x.float() * dt, b.float().unsqueeze(-1), c.float().unsqueeze(-1)
    captured = {(row, count): slot for row, count, slot in captures.tolist()}
    starts, reads, writes = cu_seqlens.tolist(), state_read.tolist(), state_write.tolist()
    for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
        current = state[read].clone()
        for start in range(starts[row], starts[row + 1], TOGETHER):
            tokens = slice(start, min(start + TOGETHER, starts[row + 1]))
            decay, states = (dt[tokens].unsqueeze(1) * rate).exp_(), x[tokens].unsqueeze(1) * b[tokens]
            for at, after in enumerate(states):
                current = after.add_(decay[at].mul_(current))
                slot = captured.get((row, start + at + 1 - starts[row]))
                if slot is not None:
                    state[slot] = current
            output[tokens] = _seen(states, c[tokens])
        if write >= 0:
            state[write] = current
    return output


def selective_step(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """One step of the scan per token, one after another. Arguments as for `selective_scan`; slots as for
    `reference.gated_delta_step`, one each per token."""
    decay, states = (dt.unsqueeze(1) * rate).exp_(), (x.float() * dt).unsqueeze(1) * b.float().unsqueeze(-1)
    current = state.new_zeros(state.shape[1:])
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        current = states[row].add_(decay[row].mul_(state[read] if read >= 0 else current))
        if write >= 0:
            state[write] = current
    return _seen(states, c.float().unsqueeze(-1))


def _seen(states: Tensor, c: Tensor) -> Tensor:
    """The sum of states `[T, state_size, channels]`, each times its element of `c`, one after another."""
    total = states[:, 0] * c[:, 0]
    for index in range(1, states.shape[1]):
        total += states[:, index] * c[:, index]
    return total
