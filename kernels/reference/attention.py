"""The twins of attention over keys and values in pages, and over a sliding window whose keys and values are a
sequence's state, in plain torch.

A state slot of window layers holds a *ring*: the keys and values of the last `window` tokens, those of position p in
place `p % window`. A sequence that is shorter fills the first places, and the others are zeros. In what order a decoded
token takes its keys follows from its position alone.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.packed_kv import is_packed, unpack


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
    chunk_size: int,
    num_splits: int | None = None,
    first: int = 0,
) -> Tensor:
    """Attention of new tokens over a cached prefix and over themselves, K and V of both in pages.

    The new tokens are the last of their sequence (right-aligned). Decoding is the case of one new token. Here queries
    are taken in chunks that end at multiples of `chunk_size`, each over exactly the keys that it may see, so that a
    token's output is the same bits however the prompt is cut at such multiples.

    Args:
        query: `[T, heads, head_dim]`; `heads` is a multiple of `kv_heads`, head h reads KV head `h // (heads /
            kv_heads)`.
        cache: one layer's pages, `[num_pages, 2, page_size, kv_heads, head_dim]`, any strides; or packed rows, as for
            `store_kv`.
        block_table: `[R, max_pages]` page ids of each request in order.
        cu_seqlens: `[R + 1]` where each request's new tokens begin.
        seq_lens: `[R]` tokens of each request, new ones included; 0: the request is none, its output zeros.
        num_splits: number of pieces in which the keys of a request are taken, which a GPU computes side by side; None:
            as many as keep it busy, and then the last bits depend on the batch. Here there are no pieces.
        first: tokens of a sequence before this one are not seen.

    Returns:
        `[T, heads, head_dim]`.
    """
    heads, head_dim = query.shape[1:]
    page_size, kv_heads = cache.shape[2:4]
    group, output = heads // kv_heads, query.new_empty(query.shape)
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if not length:
            output[start:end] = 0
            continue
        pages = block_table[row, : -(-length // page_size)]
        keys = gathered(cache[:, 0], pages, head_dim, query.dtype).transpose(0, 1)[:, None]
        values = gathered(cache[:, 1], pages, head_dim, query.dtype).transpose(0, 1)[:, None]
        position = length - (end - start)
        while start < end:
            stop = min((position // chunk_size + 1) * chunk_size, length)
            count = stop - position
            mask = _causal(count, stop, query.device) if count > 1 else None
            grouped = query[start : start + count].reshape(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            mixed = F.scaled_dot_product_attention(
                grouped,
                keys[:, :, first:stop].expand(-1, group, -1, -1),
                values[:, :, first:stop].expand(-1, group, -1, -1),
                attn_mask=mask[:, first:] if mask is not None else None,
                scale=scale,
            )
            output[start : start + count] = mixed.permute(2, 0, 1, 3).reshape(count, heads, head_dim)
            start, position = start + count, stop
    return output


def gathered(cache: Tensor, pages: Tensor, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The keys, or the values, of some pages, `[tokens, kv_heads, head_dim]`; packed ones in a type of their own."""
    if not is_packed(cache):
        return cache[pages].flatten(0, 1)
    rows = cache.view(torch.uint8)[pages].flatten(0, 1)
    return unpack(rows, head_dim, cache.dtype, dtype)


def _causal(count: int, length: int, device: torch.device) -> Tensor:
    """`[count, length]`: whether each of the last `count` tokens may see each of `length`. A view of one buffer."""
    rows = 1 << (count - 1).bit_length()
    width = max(1024, 1 << (length - 1).bit_length())
    end = width + count
    return _causal_buffer(rows, width, device)[:count, end - length : end]


@lru_cache(maxsize=4)
def _causal_buffer(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.ones(rows, width + rows, dtype=torch.bool, device=device).tril_(width)


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
