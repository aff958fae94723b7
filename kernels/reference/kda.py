"""Kimi delta attention over state slots, in plain torch: the delta rule with a decay for each channel of the keys.

S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T and o_t = S_t^T q_t / sqrt(key_dim), with q and k
l2-normalised (Kimi Team, "Kimi Linear", 2025). Slots, packed batches, captures and what must stay bitwise are as in
`hybrid.kernels.reference`. Chunks are computed one at a time, in tensors of one shape: so no bit of one depends on what
else is computed.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.reference.elementwise import l2norm

BLOCK = 16
"""Tokens whose decays since each other are computed for each pair and channel. Those of tokens further apart are
products of two decays, since and until the start of a block, none of which is above 1."""


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    chunk_size: int,
) -> Tensor:
    """The rule over a packed batch, chunk by chunk, each request continuing from its state. All arithmetic is fp32.

    Args:
        q, k: `[T, heads, key_dim]`.
        v: `[T, heads, value_dim]`.
        g: `[T, heads, key_dim]` fp32, the log of the decay, not above 0.
        beta: `[T, heads]`, how much of the old value is replaced.
        state: one layer's states, `[slots, heads, key_dim, value_dim]` fp32; written.
        cu_seqlens, state_read, state_write, captures, chunk_size: as for `reference.chunk_gated_delta_rule`.

    Returns:
        `[T, heads, value_dim]` fp32.
    """
    output = v.new_empty(v.shape, dtype=torch.float32)
    captured = {(row, count): slot for row, count, slot in captures.tolist()}
    starts, reads, writes = cu_seqlens.tolist(), state_read.tolist(), state_write.tolist()
    for row, (read, write) in enumerate(zip(reads, writes, strict=True)):
        current = state[read].clone()
        for start in range(starts[row], starts[row + 1], chunk_size):
            tokens = slice(start, min(start + chunk_size, starts[row + 1]))
            own = [_of_chunk(part[tokens], chunk_size) for part in (q, k, v, g, beta.unsqueeze(-1))]
            y, current = _chunk(own, current)
            output[tokens] = y.transpose(0, 1)[: tokens.stop - start]
            slot = captured.get((row, start + chunk_size - starts[row]))
            if slot is not None:
                state[slot] = current
        if write >= 0:
            state[write] = current
    return output


def _of_chunk(part: Tensor, chunk_size: int) -> Tensor:
    """`[tokens, heads, size]` as `[heads, chunk_size, size]` in fp32, filled with zeros, which change no state."""
    return F.pad(part.float().transpose(0, 1), (0, 0, 0, chunk_size - len(part))).contiguous()


def _chunk(inputs: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk, and the state after it.

    Args:
        inputs: q, k, v, g and beta, `[heads, chunk_size, size]`.
        state: `[heads, key_dim, value_dim]`.
    """
    q, k, v, g, beta = inputs
    q, k = l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)
    decay = g.cumsum(1)  # log of the decay since the start of the chunk
    size = q.shape[1]
    inner, system = (q.new_zeros(len(q), size, size) for _ in range(2))
    for start in range(0, size, BLOCK):
        rows = slice(start, start + BLOCK)
        own, past = decay[:, rows], slice(0, start)
        if start:
            since = decay[:, start - 1 : start]
            before = (k[:, past] * (since - decay[:, past]).exp()).transpose(1, 2)
            grown = (own - since).exp()
            inner[:, rows, past] = (q[:, rows] * grown) @ before
            system[:, rows, past] = (k[:, rows] * grown) @ before
        between = own.unsqueeze(2) - own.unsqueeze(1)  # not above 0 where the second token is not after the first
        weighted = between.clamp(max=0).exp() * k[:, rows].unsqueeze(1)
        inner[:, rows, rows] = (weighted @ q[:, rows].unsqueeze(-1)).squeeze(-1).tril()
        system[:, rows, rows] = (weighted @ k[:, rows].unsqueeze(-1)).squeeze(-1).tril(-1)
    grown = decay.exp()
    right = torch.cat((v * beta, k * grown * beta), dim=-1)
    solved = torch.linalg.solve_triangular(system * beta, right, upper=False, unitriangular=True)
    values, seen = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    new = values - seen @ state
    y = inner @ new + (q * grown) @ state
    left = (k * (decay[:, -1:] - decay).exp()).transpose(1, 2)
    return y, state * grown[:, -1].unsqueeze(-1) + left @ new


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """One step of the rule per token, one after another. Arguments as for `chunk_kda`; slots as for
    `reference.gated_delta_step`, one each per token."""
    unit_q, unit_k = (l2norm(part.float()).unsqueeze(2) for part in (q, k))
    values, decay, rate = v.float().unsqueeze(2), g.exp().unsqueeze(-1), beta.float()[..., None, None]
    unit_q = unit_q * q.shape[-1] ** -0.5
    output = torch.empty_like(values)
    current = state.new_zeros(state.shape[1:])
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        current = (state[read] if read >= 0 else current) * decay[row]
        added = (values[row] - torch.bmm(unit_k[row], current)) * rate[row]
        current = current + unit_k[row].transpose(1, 2) * added
        torch.bmm(unit_q[row], current, out=output[row])
        if write >= 0:
            state[write] = current
    return output.squeeze(2)
