"""The twin of attention over keys and values in pages, in plain torch."""

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
    visible: Tensor | None = None,
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
        visible: `[T, N]` bool, whether a new token sees the n-th new token of its own request, for drafts that form a
            tree; None: it sees those up to itself. The prefix before them it sees in any case.
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
        keys = _gathered(cache[:, 0], pages, query).transpose(0, 1)[:, None]
        values = _gathered(cache[:, 1], pages, query).transpose(0, 1)[:, None]
        position = length - (end - start)
        while start < end:
            if visible is None:
                stop = min((position // chunk_size + 1) * chunk_size, length)
                count = stop - position
                mask = _causal(count, stop, query.device) if count > 1 else None
            else:
                stop, count = length, end - start
                mask = torch.ones(count, length, dtype=torch.bool, device=query.device)
                mask[:, position:] = visible[start:end, :count]
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


def _gathered(cache: Tensor, pages: Tensor, query: Tensor) -> Tensor:
    """The keys, or the values, of some pages in the type of the queries, `[tokens, kv_heads, head_dim]`."""
    if not is_packed(cache):
        return cache[pages].flatten(0, 1)
    rows = cache.view(torch.uint8)[pages].flatten(0, 1)
    return unpack(rows, query.shape[-1], cache.dtype, query.dtype)


def _causal(count: int, length: int, device: torch.device) -> Tensor:
    """`[count, length]`: whether each of the last `count` tokens may see each of `length`. A view of one buffer."""
    rows = 1 << (count - 1).bit_length()
    width = max(1024, 1 << (length - 1).bit_length())
    end = width + count
    return _causal_buffer(rows, width, device)[:count, end - length : end]


@lru_cache(maxsize=4)
def _causal_buffer(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.ones(rows, width + rows, dtype=torch.bool, device=device).tril_(width)
