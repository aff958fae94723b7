"""The twins of Mamba-2's layer over state slots, in plain torch: the state space rule, and what comes before and after
it. Its convolution is that of `hybrid.kernels.reference.convolution`.

S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T and y_t = C_t S_t, per head, with a scalar A (Dao and Gu, "Transformers are
SSMs", 2024). Slots, packed batches, captures and what must stay bitwise are as in `hybrid.kernels.reference`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.reference.convolution import causal_conv1d, causal_conv1d_update
from hybrid.kernels.reference.delta_rule import above_diagonal, chunk_layout
from hybrid.kernels.reference.elementwise import silu, softplus

__all__ = [
    "add_skip",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_state_space",
    "grouped_gated_norm",
    "state_space_step",
    "time_steps",
]


def chunk_state_space(
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
    chunk_size: int,
) -> Tensor:
    """The rule over a packed batch, chunk by chunk, each request continuing from its state. All arithmetic is fp32.

    Args:
        x: `[T, heads, head_dim]`.
        dt: `[T, heads]` fp32, above 0.
        b, c: `[T, groups, state_size]`; head h uses group `h // (heads / groups)`.
        rate: `[heads]` fp32, A, below 0.
        state: one layer's states, `[slots, heads, state_size, head_dim]` fp32; written.
        state_read, state_write, captures, chunk_size: as for `reference.chunk_gated_delta_rule`.

    Returns:
        `[T, heads, head_dim]` fp32.
    """
    layout = chunk_layout(tuple(cu_seqlens.tolist()), chunk_size)
    group = x.shape[1] // b.shape[1]

    def chunks(part: Tensor) -> Tensor:
        """`[T, heads, ...]` to `[chunks, heads, chunk_size, ...]`, short chunks filled with zeros."""
        if layout.rows is not None:
            part = torch.cat((part, part.new_zeros(1, *part.shape[1:])))[layout.rows.to(part.device)]
        return part.unflatten(0, (-1, chunk_size)).transpose(1, 2)

    def per_head(part: Tensor) -> Tensor:
        return part if group == 1 else part.unsqueeze(2).expand(-1, -1, group, *part.shape[2:]).flatten(1, 2)

    v, decay = chunks(x.float() * dt.unsqueeze(-1)), chunks(dt * rate).cumsum(-1)
    b, c = chunks(b.float()), chunks(c.float())
    ratio = decay.unsqueeze(-1) - decay.unsqueeze(-2)
    ratio = ratio.masked_fill_(above_diagonal(chunk_size, x.device), float("-inf")).exp_()
    inner = (per_head(c @ b.transpose(-1, -2)) * ratio) @ v
    c = per_head(c) * decay.exp().unsqueeze(-1)
    b = (per_head(b) * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    total = decay[..., -1, None, None].exp()

    output = torch.empty_like(v)
    captured = {(row, count): slot for row, count, slot in captures.tolist()}
    reads, writes = state_read.tolist(), state_write.tolist()
    for row, (first, last) in enumerate(layout.spans):
        current = state[reads[row]]
        for index in range(first, last):
            output[index] = torch.baddbmm(inner[index], c[index], current)
            current = torch.baddbmm(current * total[index], b[index], v[index])
            slot = captured.get((row, (index + 1 - first) * chunk_size))
            if slot is not None:
                state[slot] = current
        if writes[row] >= 0:
            state[writes[row]] = current
    flat = output.transpose(1, 2).flatten(0, 1)
    return flat if layout.tokens is None else flat[layout.tokens.to(flat.device)]


def state_space_step(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """One step per token, one after another. Arguments as for `chunk_state_space`; slots as for
    `reference.gated_delta_step`, one each per token."""
    group = x.shape[1] // b.shape[1]
    v = (x.float() * dt.unsqueeze(-1)).unsqueeze(2)  # [R, heads, 1, head_dim]
    grown = (dt * rate).exp()[..., None, None]
    b = b.float().repeat_interleave(group, dim=1).unsqueeze(-1)  # [R, heads, state_size, 1]
    c = c.float().repeat_interleave(group, dim=1).unsqueeze(2)  # [R, heads, 1, state_size]
    output, current = torch.empty_like(v), state[:0]
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        current = torch.baddbmm((state[read] if read >= 0 else current) * grown[row], b[row], v[row])
        torch.bmm(c[row], current, out=output[row])
        if write >= 0:
            state[write] = current
    return output.squeeze(2)


def time_steps(dt: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """Softplus of `dt + bias` in fp32, within limits; `[T, heads]`."""
    return softplus(dt.float() + bias.float()).clamp(*limits)


def add_skip(y: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """`y + d * x` in fp32.

    Args:
        y, x: `[T, heads, head_dim]`.
        d: `[heads]`.
    """
    return y + d.float().unsqueeze(-1) * x.float()


def grouped_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Root-mean-square norm of each of a row's groups of `x * silu(gate)`, times the weight.

    Args:
        x: `[T, size]` fp32.
        gate: `[T, size]`; its type is that of the result.
        weight: `[size]`.
    """
    y = (x * silu(gate.float())).unflatten(-1, (groups, -1))
    return (F.rms_norm(y, y.shape[-1:], None, eps).flatten(-2) * weight).to(gate.dtype)
