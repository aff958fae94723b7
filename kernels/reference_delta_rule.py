"""The twins of the linear-attention kernels: convolution and gated delta rule over state slots, in plain torch."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.reference_elementwise import l2norm, sigmoid, silu, softplus


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """Depthwise causal convolution with silu over a packed batch, each request going on from its window.

    Args:
        x: `[T, channels]`.
        weight: `[channels, width]`.
        state: one layer's windows, `[slots, width - 1, channels]`: the last inputs of a sequence, oldest first;
            written.
        state_read, state_write: `[R]` slots.
        captures: `[C, 3]` rows of (request, new tokens, slot): the window after so many of its new tokens goes to the
            slot too.

    Returns:
        `[T, channels]`.
    """
    return silu(convolve(x, weight, state, cu_seqlens, state_read, state_write, captures)).to(x.dtype)


def convolve(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """`causal_conv1d` before its silu, in fp32."""
    past = weight.shape[1] - 1
    starts = cu_seqlens.tolist()
    pieces: list[Tensor] = []
    for row, slot in enumerate(state_read.tolist()):
        pieces += [state[slot], x[starts[row] : starts[row + 1]]]
    extended = torch.cat(pieces)  # request r's tokens begin at starts[r] + (r + 1) * past
    for row, slot in enumerate(state_write.tolist()):
        end = starts[row + 1] + (row + 1) * past
        state[slot] = extended[end - past : end]
    for row, count, slot in captures.tolist():
        end = starts[row] + (row + 1) * past + count
        state[slot] = extended[end - past : end]
    length = extended.shape[0] - past
    extended, weight = extended.float(), weight.float()
    mixed = extended[:length] * weight[:, 0]
    for tap in range(1, past + 1):
        mixed.addcmul_(extended[tap : tap + length], weight[:, tap])
    if len(starts) > 2:
        mixed = torch.cat(
            [mixed[starts[row] + row * past : starts[row + 1] + row * past] for row in range(len(starts) - 1)]
        )
    return mixed


def causal_conv1d_update(x: Tensor, weight: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor) -> Tensor:
    """One step of `causal_conv1d`: one new token per request.

    Args:
        x: `[R, channels]`.
    """
    return silu(convolve_step(x, weight, state, state_read, state_write)).to(x.dtype)


def convolve_step(x: Tensor, weight: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor) -> Tensor:
    """`causal_conv1d_update` before its silu, in fp32."""
    window = torch.cat((state[state_read], x.unsqueeze(1)), dim=1)
    state[state_write] = window[:, 1:]
    window, weight = window.float(), weight.float()
    mixed = window[:, 0] * weight[:, 0]
    for tap in range(1, window.shape[1]):
        mixed.addcmul_(window[:, tap], weight[:, tap])
    return mixed


def chunk_gated_delta_rule(
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
    """The gated delta rule over a packed batch, chunk by chunk, each request going on from its state.

    S_t = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T and o_t = S_t q_t / sqrt(key_dim), with q and k
    l2-normalised, in the chunked form of Yang et al., "Gated Delta Networks" (2024). Every request's tokens begin at a
    multiple of `chunk_size`; the last chunk may be short. All arithmetic is fp32.

    Args:
        q, k: `[T, key_heads, key_dim]`; value head h uses key head `h // (value_heads / key_heads)`.
        v: `[T, value_heads, value_dim]`.
        g: `[T, value_heads]` fp32, the log of the decay, at most 0.
        beta: `[T, value_heads]`, how much of the old value is replaced.
        state: one layer's states, `[slots, value_heads, key_dim, value_dim]` fp32; written.
        state_read, state_write: `[R]` slots.
        captures: `[C, 3]` rows of (request, new tokens, slot): the state after so many of its new tokens, a multiple of
            `chunk_size`, goes to the slot too.

    Returns:
        `[T, value_heads, value_dim]` in the type of `v`.
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
        state[writes[row]] = current
    flat = output.transpose(1, 2).flatten(0, 1)
    return (flat if layout.tokens is None else flat[layout.tokens.to(flat.device)]).to(dtype)


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """One step of the gated delta rule: one new token per request. Arguments as for `chunk_gated_delta_rule`, with T =
    R."""
    group = v.shape[1] // k.shape[1]
    rows, heads = v.shape[:2]
    unit = l2norm(torch.cat((q, k), dim=1).float())  # [R, 2 * key_heads, key_dim]
    unit = unit.unsqueeze(2).expand(-1, -1, group, -1).reshape(rows, 2, heads, 1, -1)
    q, k = unit[:, 0] * unit.shape[-1] ** -0.5, unit[:, 1]  # [R, value_heads, 1, key_dim]
    values, decay, rate = v.float().unsqueeze(2), g.float().exp()[..., None, None], beta.float()[..., None, None]
    output = torch.empty_like(values)
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        current = state[write]  # changed where it lies: to gather and scatter costs more than the rule itself
        if read != write:
            current.copy_(state[read])
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
        cu_seqlens: `[R + 1]` where each request's tokens begin.
        state_read: `[T]` the slot that a token goes on from; -1: from the token before it.
        state_write: `[T]` the slot that holds what is after it; -1: it is not kept.

    Returns:
        `[T, value_heads, value_dim]`.
    """
    heads, key_dim, value_dim = recurrent.shape[1:]
    keys = (mixed.shape[1] - heads * value_dim) // 2
    beta, decay = sigmoid(b), rate * softplus(a.float() + dt_bias)
    reads, writes = state_read.tolist(), state_write.tolist()
    tokens = mixed.shape[0]
    alone = tokens == cu_seqlens.numel() - 1 and min(writes, default=0) >= 0

    def rule(rows: slice, x: Tensor, states: Tensor, read: Tensor, write: Tensor) -> Tensor:
        q, k, v = x.split((keys, keys, heads * value_dim), dim=-1)
        q, k, v = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (heads, value_dim))
        return recurrent_gated_delta_rule(q, k, v, decay[rows], beta[rows], states, read, write)

    if alone:
        x = causal_conv1d_update(mixed, weight, conv, state_read, state_write)
        return rule(slice(None), x, recurrent, state_read, state_write)
    # one token after another, through a slot of their own: what is not kept is needed by the next token only
    windows, states = conv.new_empty(1, *conv.shape[1:]), recurrent.new_empty(1, *recurrent.shape[1:])
    here = torch.zeros(1, dtype=torch.int64, device=mixed.device)
    output = mixed.new_empty(tokens, heads, value_dim)
    for token in range(tokens):
        rows = slice(token, token + 1)
        if reads[token] >= 0:
            windows[0], states[0] = conv[reads[token]], recurrent[reads[token]]
        output[rows] = rule(rows, causal_conv1d_update(mixed[rows], weight, windows, here, here), states, here, here)
        if writes[token] >= 0:
            conv[writes[token]], recurrent[writes[token]] = windows[0], states[0]
    return output


class ChunkLayout(NamedTuple):
    """How packed tokens lie in chunks.

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
    """Where the tokens of requests that begin at `starts` lie in chunks; the last start is the end."""
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
