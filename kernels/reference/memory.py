"""Twins of the kernels that only move memory, in plain torch."""

import torch
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of new tokens to their places in the pages.

    Args:
        key, value: `[T, kv_heads, head_dim]`.
        cache: one layer's pages, `[num_pages, 2, page_size, kv_heads, head_dim]`, any strides; written.
        slot_mapping: `[T]` int64, `page * page_size + offset` per token; -1 writes nothing: the page holds the token
            already.
    """
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    if rows.numel() < slot_mapping.numel():
        key, value, slot_mapping = key[rows], value[rows], slot_mapping[rows]
    page_size = cache.shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    cache[:, 0].index_put_((page, offset), key)
    cache[:, 1].index_put_((page, offset), value)


def copy_states(rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy state slots, or pages, within their pool.

    Args:
        rows: `[N, num_bytes]` uint8, the innermost contiguous; written.
        source, target: `[M]` indices: row `source[i]` goes to row `target[i]`. No target is a source.
    """
    rows[target] = rows[source]


def shift_rows(x: Tensor, state: Tensor, cu_seqlens: Tensor, state_read: Tensor, state_write: Tensor) -> Tensor:
    """The row before each decoded token: a convolution whose window is one row, and whose only tap is on that.

    A slot that a token writes may be read by later ones of the same request, and by no other.

    Args:
        x: `[T, size]`; tokens of a request come in order, parents first.
        state: the last row of sequences, `[slots, size]`; written.
        cu_seqlens: `[R + 1]` where each request's tokens begin.
        state_read: `[T]` the slot that a token continues from; -1: from the token before it.
        state_write: `[T]` the slot that holds what is after it; -1: it is not kept.

    Returns:
        `[T, size]`.
    """
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, (read, write) in enumerate(zip(state_read.tolist(), state_write.tolist(), strict=True)):
        output[row] = state[read] if read >= 0 else x[row - 1]
        if write >= 0:
            state[write] = x[row]
    return output
