"""The twins of the gated delta rule over state slots, in chunks and token by token, in plain torch, and how the tokens
of a packed batch are laid out in chunks."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.reference.convolution import causal_conv1d_update
from hybrid.kernels.reference.elementwise import l2norm, sigmoid, softplus


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gates of the gated delta rule, from their projections.

    Args:
        a, b: `[T, value_heads]`.
        rate: `[value_heads]` fp32, `-exp(A_log)`.
        dt_bias: `[value_heads]`.

    Returns:
        g: fp32, `rate * softplus(a + dt_bias)`; beta: `sigmoid(b)` in the type of `b`. Both `[T, value_heads]`.
    """
    return rate * softplus(a.float() + dt_bias), sigmoid(b)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    chunk_size: int,
) -> Tensor:
    """The gated delta rule over a packed batch, chunk by chunk, each request continuing from its state.

    Args:
        q, k: `[T, key_heads, key_dim]`; value head h uses key head `h // (value_heads / key_heads)`.
        v: `[T, value_heads, value_dim]`.
        a, b, rate, dt_bias: as for `delta_gates`.
        state: one layer's states, `[slots, value_heads, key_dim, value_dim]` fp32; written.
        cu_seqlens: `[R + 1]` where each request's tokens begin. A request that keeps no state may have none.
        state_read, state_write: `[R]` slots; -1 in `state_write`: the request keeps no state.
        captures: `[C, 3]` rows of (request, new tokens, slot): the state after `new tokens`, a multiple of
            `chunk_size`, goes to the slot too. A row of the request -1 is none.

    Returns:
        `[T, value_heads, value_dim]` in the type of `v`.
    """
    g, beta = delta_gates(a, b, rate, dt_bias)
    return chunk_delta_rule(q, k, v, g, beta, state, cu_seqlens, state_read, state_write, captures, chunk_size)


def chunk_delta_rule(
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
    """`chunk_gated_delta_rule` with gates that are given.

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t / sqrt(key_dim), with q and k
    l2-normalised, in the chunked form of Yang et al., "Gated Delta Networks" (2024). Every request's tokens begin at a
    multiple of `chunk_size`; the last chunk may be short. All arithmetic is fp32.

    Args:
        g: `[T, value_heads]` fp32, the log of the decay.
        beta: `[T, value_heads]` in the type of `v`, how much of the old value is replaced.
    """
    layout = chunk_layout(tuple(cu_seqlens.tolist()), chunk_size)
    group, dtype = v.shape[1] // k.shape[1], v.dtype

    def chunks(x: Tensor) -> Tensor:
        """`[T, heads, ...]` to `[chunks, heads, chunk_size, ...]` in fp32, short chunks filled with zeros."""
        x = x.float()
        if layout.rows is not None:
            x = torch.cat((x, x.new_zeros(1, *x.shape[1:])))[layout.rows.to(x.device)]
        return x.unflatten(0, (-1, chunk_size)).transpose(1, 2)

    q, k = (chunks(l2norm(x.float())) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    v, g, beta = chunks(v), chunks(g), chunks(beta)
    decay = g.cumsum(-1)  # log of the decay from the start of the chunk to each of its tokens
    ratio = (
        (decay.unsqueeze(-1) - decay.unsqueeze(-2))
        .masked_fill_(above_diagonal(chunk_size, q.device), float("-inf"))
        .exp_()
    )
    grown = decay.exp()

    def per_value_head(x: Tensor) -> Tensor:
        return x if group == 1 else x.unsqueeze(2).expand(-1, -1, group, *x.shape[2:]).flatten(1, 2)

    inner = per_value_head(q @ k.transpose(-1, -2)) * ratio
    # (I + A) [u | w] = beta [v | grown k]: what each token adds, given the old state (Yang et al., section 3.3)
    system = per_value_head(k @ k.transpose(-1, -2)) * ratio * beta.unsqueeze(-1)
    q, k = per_value_head(q), per_value_head(k)
    right = torch.cat((v * beta.unsqueeze(-1), k * (beta * grown).unsqueeze(-1)), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    q = q * grown.unsqueeze(-1)
    k = (k * (decay[..., -1:] - decay).exp().unsqueeze(-1)).transpose(-1, -2)
    total = grown[..., -1, None, None]

    output = torch.empty_like(v)
    captured = {(row, count): slot for row, count, slot in captures.tolist()}
    reads, writes = state_read.tolist(), state_write.tolist()
    for row, (first, last) in enumerate(layout.spans):
        current = state[reads[row]]
        for index in range(first, last):
            new = u[index] - w[index] @ current
            output[index] = torch.baddbmm(inner[index] @ new, q[index], current)
            current = torch.baddbmm(current * total[index], k[index], new)
            slot = captured.get((row, (index + 1 - first) * chunk_size))
            if slot is not None:
                state[slot] = current
        if writes[row] >= 0:
            state[writes[row]] = current
    flat = output.transpose(1, 2).flatten(0, 1)
    return (flat if layout.tokens is None else flat[layout.tokens.to(flat.device)]).to(dtype)


class ChunkLayout(NamedTuple):
    """The layout of packed tokens in chunks.

    Attributes:
        spans: chunk indices `[first, last)` of each request.
        rows: for every place of every chunk its token, or T for none; None when the chunks are just the tokens.
        tokens: for every token its place; None likewise.
    """

    spans: tuple[tuple[int, int], ...]
    rows: Tensor | None
    tokens: Tensor | None


@lru_cache(maxsize=32)  # every layer of a step asks for the same one
def chunk_layout(starts: tuple[int, ...], chunk_size: int) -> ChunkLayout:
    """Return where the tokens of requests that begin at `starts` lie in chunks; the last start is the end."""
    spans: list[tuple[int, int]] = []
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for start, end in pairwise(starts):
        count = -(-(end - start) // chunk_size)
        spans.append((first, first + count))
        rows += [*range(start, end)] + [starts[-1]] * (count * chunk_size - (end - start))
        tokens += range(first * chunk_size, first * chunk_size + end - start)
        first += count
    if len(rows) == starts[-1]:
        return ChunkLayout(tuple(spans), None, None)
    return ChunkLayout(tuple(spans), torch.tensor(rows), torch.tensor(tokens))


@lru_cache(maxsize=256)
def above_diagonal(size: int, device: torch.device) -> Tensor:
    """`[size, size]` bool, true where the column is larger than the row."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """One step of the gated delta rule per token, one after another. Arguments as for `chunk_gated_delta_rule`; slots
    as for `gated_delta_step`, one each per token."""
    group = v.shape[1] // k.shape[1]
    rows, heads = v.shape[:2]
    unit = l2norm(torch.cat((q, k), dim=1).float())  # [R, 2 * key_heads, key_dim]
    unit = unit.unsqueeze(2).expand(-1, -1, group, -1).reshape(rows, 2, heads, 1, -1)
    q, k = unit[:, 0] * unit.shape[-1] ** -0.5, unit[:, 1]  # [R, value_heads, 1, key_dim]
    values, decay, rate = v.float().unsqueeze(2), g.float().exp()[..., None, None], beta.float()[..., None, None]
    output = torch.empty_like(values)
    current, alone = state[:0], state.new_empty(state.shape[1:])
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        source = state[read] if read >= 0 else current
        current = state[write] if write >= 0 else alone  # changed where it lies: to gather and scatter costs more
        if current.data_ptr() != source.data_ptr():
            current.copy_(source)
        current.mul_(decay[row])
        added = (values[row] - torch.bmm(k[row], current)).mul_(rate[row])
        current.baddbmm_(k[row].transpose(1, 2), added)
        torch.bmm(q[row], current, out=output[row])
    return output.squeeze(2).to(v.dtype)


def gated_delta_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
) -> Tensor:
    """A linear-attention layer's decode: convolution and delta rule, one to eight tokens of each request, in a row or
    as a tree of drafts.

    The decay of a token is `exp(rate * softplus(a + dt_bias))`, its beta `sigmoid(b)`. Tokens of a request come in
    order, parents first. A slot that a token writes may be read by later ones of the same request, and by no other.

    Args:
        mixed: `[T, channels]`, what goes into the convolution: q, k, v; channels = 2 * key_heads * key_dim +
            value_heads * value_dim.
        a, b: `[T, value_heads]`.
        weight: `[channels, width]`, of the convolution.
        rate: `[value_heads]` fp32, below 0.
        dt_bias: `[value_heads]`.
        conv: one layer's windows, `[slots, width - 1, channels]`; written.
        recurrent: one layer's states, `[slots, value_heads, key_dim, value_dim]` fp32; written.
        cu_seqlens: `[R + 1]` where each request's tokens begin. A request may have none, unless R is T.
        state_read: `[T]` the slot that a token continues from; -1: from the token before it. A request whose first
            token has none keeps nothing, and what is returned for it has no meaning.
        state_write: `[T]` the slot that holds what is after it; -1: it is not kept.

    Returns:
        `[T, value_heads, value_dim]`.
    """
    heads, key_dim, value_dim = recurrent.shape[1:]
    keys = (mixed.shape[1] - heads * value_dim) // 2
    beta, decay = sigmoid(b), rate * softplus(a.float() + dt_bias)
    x = causal_conv1d_update(mixed, weight, conv, state_read, state_write)
    q, k, v = x.split((keys, keys, heads * value_dim), dim=-1)
    q, k, v = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (heads, value_dim))
    return recurrent_gated_delta_rule(q, k, v, decay, beta, recurrent, state_read, state_write)
