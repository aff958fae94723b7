"""Twins of the kernels that only move memory, in plain torch."""

import torch
from torch import Tensor

from hybrid.kernels.packed_kv import is_packed, pack


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of new tokens to their places in the pages.

    Args:
        key, value: `[T, kv_heads, head_dim]`.
        cache: one layer's pages, `[num_pages, 2, page_size, kv_heads, head_dim]`, any strides; written. Where they are
            kept in a byte per element, `head_dim` is that of packed rows (`hybrid.kernels.packed_kv`).
        slot_mapping: `[T]` int64, `page * page_size + offset` per token; -1 writes nothing: the page holds the token
            already.
    """
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    if rows.numel() < slot_mapping.numel():
        key, value, slot_mapping = key[rows], value[rows], slot_mapping[rows]
    if is_packed(cache):
        key, value = pack(key, cache.dtype), pack(value, cache.dtype)
        cache = cache.view(torch.uint8)
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


def fill_in_tokens(numbers: Tensor, tokens: Tensor, links: Tensor) -> None:
    """Write tokens that only the device knows into the numbers of a pass that continues from them.

    Args:
        numbers: `[N]` int64; written.
        tokens: `[S]` int64. A negative one is no token: what would continue from it becomes padding, which reads and
            writes nothing.
        links: `[M, 5]` int64: a row of `tokens`, and the places in `numbers` of the token, its slot of K and V, the
            length of its sequence, and the slot that its state is written to. No two places are equal.
    """
    source, *places = links.clone().unbind(1)  # they may lie in the same memory
    found = tokens[source]
    exists = found >= 0
    numbers[places[0]] = found.clamp(min=0)
    for place, idle in zip(places[1:], (-1, 0, -1), strict=True):
        numbers[place] = torch.where(exists, numbers[place], idle)
