"""Attention over a sliding window whose keys and values are a sequence's state, in plain torch.

A state slot holds a *ring*: the keys and values of the last `window` tokens, those of position p in place
`p % window`. A sequence that is shorter fills the first places, and the others are zeros. In what order a decoded token
takes its keys follows from its position alone.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rings: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    scale: float,
    chunk_size: int,
) -> Tensor:
    """Attention of the new tokens of prompts, each over the last `window` tokens up to itself.

    Queries are taken in chunks that end at multiples of `chunk_size`, each over exactly the keys that some of them see,
    copied to a tensor of its own: a token's output is the same bits however the prompt is cut at such multiples.

    Args:
        query: `[T, heads, head_dim]`; `heads` is a multiple of `kv_heads`.
        key, value: `[T, kv_heads, head_dim]`.
        rings: one layer's rings, `[slots, 2, window, kv_heads, head_dim]`, any strides; written.
        cu_seqlens: `[R + 1]` where each request's new tokens begin.
        seq_lens: `[R]` tokens of each request, new ones included; 0: the request is none, its output zeros.
        state_read, state_write: `[R]` slots; they may be equal. -1 in `state_write`: the request keeps no state.
        captures: `[C, 3]` rows of (request, new tokens, slot): the ring after `new tokens` goes to the slot too. A row
            of the request -1 is none.

    Returns:
        `[T, heads, head_dim]`.
    """
    window = rings.shape[2]

    def attend(rows: Tensor, both: Tensor, base: int) -> Tensor:
        length, output = base + both.shape[1], torch.empty_like(rows)
        position = first = length - len(rows)
        while position < length:
            stop = min((position // chunk_size + 1) * chunk_size, length)
            seen = both[:, max(0, position - window + 1) - base : stop - base]
            own = slice(position - first, stop - first)
            output[own] = _attend(rows[own], seen, window, scale)
            position = stop
        return output

    slots = (state_read, state_write, captures)
    return over_rings(query, key, value, rings, cu_seqlens, seq_lens, *slots, attend)


def over_rings(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rings: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    attend: Callable[[Tensor, Tensor, int], Tensor],
) -> Tensor:
    """`window_attention` by a function that attends to the keys and values of one sequence, which are copied.

    Args:
        attend: computes the outputs of queries of a request from keys and values `[2, tokens, kv_heads, head_dim]`,
            those of the queries at their end, and the position of the first of these.
    """
    window, output = rings.shape[2], query.new_empty(query.shape)
    starts, reads, writes = cu_seqlens.tolist(), state_read.tolist(), state_write.tolist()
    kept = [(row, starts[row + 1] - starts[row], slot) for row, slot in enumerate(writes) if slot >= 0]
    kept += [(row, count, slot) for row, count, slot in captures.tolist() if row < len(reads)]
    for row, length in enumerate(seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if not length:
            output[start:end] = 0
            continue
        first = length - (end - start)
        base = max(0, first - window)  # position of the first row of `both`
        places = torch.arange(base, first, device=query.device) % window
        new = torch.stack((key[start:end], value[start:end]))
        both = torch.cat((rings[reads[row]][:, places], new), dim=1)  # [2, tokens, kv_heads, head_dim]
        output[start:end] = attend(query[start:end], both, base)
        for of, count, slot in kept:
            if of == row:
                _keep(both[:, : first + count - base], base, rings[slot])
    return output


def _attend(query: Tensor, both: Tensor, window: int, scale: float) -> Tensor:
    """Attention of the last tokens over keys and values `[2, tokens, kv_heads, head_dim]`, themselves included."""
    count, heads, head_dim = query.shape
    total, kv_heads = both.shape[1:3]
    group, mask = heads // kv_heads, None
    if count > 1:
        distance = torch.arange(total - count, total, device=query.device).unsqueeze(1)
        distance = distance - torch.arange(total, device=query.device)
        mask = (distance >= 0) & (distance < window)
    grouped = query.reshape(count, kv_heads, group, head_dim).permute(1, 2, 0, 3).contiguous()
    keys, values = both.transpose(1, 2).contiguous().unsqueeze(2).expand(-1, -1, group, -1, -1)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return mixed.permute(2, 0, 1, 3).reshape(count, heads, head_dim)


def _keep(both: Tensor, base: int, ring: Tensor) -> None:
    """Write the last tokens of `[2, tokens, kv_heads, head_dim]`, the first of which is at position `base`, to a
    ring."""
    window, length = ring.shape[1], base + both.shape[1]
    count = min(window, length)
    places = torch.arange(length - count, length, device=both.device) % window
    ring[:, count:] = 0
    ring[:, places] = both[:, both.shape[1] - count :]
