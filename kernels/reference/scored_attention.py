"""Attention with what the kernels do not know: bounds of scores, sinks, and windows over pages. In plain torch, in
fp32, sequence by sequence.

Queries are taken in chunks that end at multiples of `chunk_size`, each over copies of the keys that some of them see:
so a token's bits depend on its sequence alone, however the prompt is cut at such multiples.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.reference.attention import gathered, over_rings


class Scores(NamedTuple):
    """How attention scores keys.

    Attributes:
        scale: of the products of queries and keys.
        softcap: scores are bounded by it; None: they are not.
        sinks: `[heads]` a score that each head has beside those of its keys; None: there is none.
    """

    scale: float
    softcap: float | None
    sinks: Tensor | None


def paged_scored_attention(
    query: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scores: Scores,
    chunk_size: int,
    window: int | None = None,
) -> Tensor:
    """Attention over keys and values in pages.

    Args:
        query, block_table, cu_seqlens, seq_lens, chunk_size: as for `reference.paged_attention`.
        pages: one layer's, `[num_pages, 2, page_size, kv_heads, head_dim]`, or packed.
        window: tokens that are seen, the token itself included; None: all.

    Returns:
        `[T, heads, head_dim]`.
    """
    output, page_size, size = torch.zeros_like(query), pages.shape[2], query.shape[-1]
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        if start == end or not length:
            continue
        first = 0 if window is None else max(0, length - (end - start) - window + 1) // page_size
        table = block_table[request, first : -(-length // page_size)]
        both = torch.stack([gathered(pages[:, part], table, size, query.dtype) for part in (0, 1)])
        before = first * page_size
        own = both[:, : length - before]
        output[start:end] = _in_chunks(query[start:end], own, before, scores, chunk_size, window)
    return output


def scored_window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rings: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    scores: Scores,
    chunk_size: int,
) -> Tensor:
    """`reference.attention.window_attention` with these scores."""

    def attend(rows: Tensor, both: Tensor, base: int) -> Tensor:
        return _in_chunks(rows, both, base, scores, chunk_size, rings.shape[2])

    slots = (state_read, state_write, captures)
    return over_rings(query, key, value, rings, cu_seqlens, seq_lens, *slots, attend)


def _in_chunks(query: Tensor, both: Tensor, base: int, scores: Scores, chunk_size: int, window: int | None) -> Tensor:
    """Attention of the last tokens over keys and values `[2, tokens, kv_heads, head_dim]`, the first of which is at
    position `base`, themselves included."""
    length, output = base + both.shape[1], torch.empty_like(query)
    position = first = length - len(query)
    while position < length:
        stop = min((position // chunk_size + 1) * chunk_size, length)
        low = 0 if window is None else max(0, position - window + 1)
        keys, values = both[:, low - base : stop - base]
        own = slice(position - first, stop - first)
        output[own] = scored_attention(query[own], keys, values, low, scores, window)
        position = stop
    return output


def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, first: int, scores: Scores, window: int | None = None
) -> Tensor:
    """Causal attention of the last Q tokens of a sequence.

    Args:
        query: `[Q, heads, head_dim]`.
        key, value: `[K, kv_heads, dim]`.
        first: position of the first key.
        window: tokens that are seen, the token itself included; None: all.

    Returns:
        `[Q, heads, value_dim]`.
    """
    (count, heads, _), kv_heads, end = query.shape, key.shape[1], first + len(key)
    rows = query.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    keys, values = (part.float().transpose(0, 1).contiguous() for part in (key, value))
    products = (rows @ keys.transpose(1, 2)).view(heads, count, -1) * scores.scale
    if scores.softcap is not None:
        products = scores.softcap * (products / scores.softcap).tanh()
    at = torch.arange(end - count, end, device=query.device)[:, None]
    position = torch.arange(first, end, device=query.device)
    seen = position <= at
    if window is not None:
        seen &= position > at - window
    products = products.masked_fill(~seen, float("-inf"))
    if scores.sinks is not None:
        beside = scores.sinks.float()[:, None, None].expand(-1, count, 1)
        products = torch.cat([products, beside], -1)
    weights = products.softmax(-1)[..., : len(key)]
    mixed = weights.reshape(kv_heads, -1, len(key)) @ values
    return mixed.view(heads, count, -1).transpose(0, 1).to(query.dtype)
