"""Attention over keys and values in pages (`hybrid.kernels.cpu.compiled.attention`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KEPT, KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.sizes import TOKENS, UNPACKED
from hybrid.kernels.cpu.tasks import bits, run
from hybrid.kernels.reference import attention as twins

MIN_SHARED = 1 << 16
"""Elements of keys that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_attend = Compiled(f"{COMPILED}.attention", "attend")


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
    """`reference.paged_attention`; trees of drafts are left to the twin. Packed pages give the bits of pages with what
    the rows are unpacked to."""
    kept = KEPT.get(cache.dtype, UNPACKED)
    is_known = query.dtype in DTYPES and (kept or cache.dtype == query.dtype) and cache.stride(-1) == 1
    if not is_known or visible is not None:
        return twins.paged_attention(
            query, cache, block_table, cu_seqlens, seq_lens, scale, chunk_size, num_splits, visible, first
        )
    return _paged(query, cache, block_table, cu_seqlens, seq_lens, scale, first, 0)


def attend_in_window(query: Tensor, page: Tensor, scale: float, window: int) -> Tensor:
    """Attention of the last tokens of a sequence, each over the last `window` keys up to its own.

    Args:
        query: `[T, heads, head_dim]`.
        page: `[2, tokens, kv_heads, head_dim]` keys and values from a position on that is a multiple of `BLOCK`, those
            of the queries included. What is before the window of the first query may be any finite numbers.

    Returns:
        `[T, heads, head_dim]`.
    """
    starts = torch.tensor([0, len(query)])
    table, lengths = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([page.shape[1]])
    return _paged(query, page.unsqueeze(0), table, starts, lengths, scale, 0, window)


def _paged(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
    first: int,
    window: int,
) -> Tensor:
    kept = KEPT.get(cache.dtype, UNPACKED)
    query, output = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
    table, starts, seq_lens = block_table.contiguous(), cu_seqlens.contiguous(), seq_lens.contiguous()
    (tokens, heads, size), requests = query.shape, len(seq_lens)
    page_size, kv_heads, row_bytes = cache.shape[2:]
    addresses = tuple(tensor.data_ptr() for tensor in (query, cache, table, starts, seq_lens, output))
    strides = (*cache.stride()[:4], query.stride(0), table.shape[1])
    args = (
        *addresses,
        *strides,
        requests,
        heads,
        kv_heads,
        size,
        page_size,
        bits(scale),
        first,
        kept,
        row_bytes,
        window,
    )
    tiles = min(tokens, requests + tokens // TOKENS)  # at most: how long each request is, is not read here
    work = table.numel() * page_size * kv_heads * size * tokens // max(requests, 1)
    run(_attend, KINDS[query.dtype], args, tiles * kv_heads, 1, work // MIN_SHARED)
    return output
