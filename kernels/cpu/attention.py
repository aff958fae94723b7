"""Attention over keys and values in pages, and of prompts over sliding windows, whose keys and values are state
(`hybrid.kernels.cpu.compiled.attention`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import UNPACKED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.target import BLOCK, TOKENS
from hybrid.kernels.cpu.tasks import KEPT, bits, kind_of, run
from hybrid.kernels.reference.attention import over_rings

MIN_SHARED = 1 << 16
"""Elements of keys that are worth a thread."""

_attend = Compiled(f"{COMPILED}.attention", "attend")
_advance_rings = Compiled(f"{COMPILED}.attention", "advance_rings")


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
    """`reference.paged_attention`. Packed pages give the bits of pages with what the rows are unpacked to."""
    return _paged(query, cache, block_table, cu_seqlens, seq_lens, scale, first, 0)


def paged_attention_with_sinks(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
    sinks: Tensor,
) -> Tensor:
    """`paged_attention` of heads that have a score beside those of their keys, `[heads]` fp32, which takes a share of
    the attention and gives nothing."""
    return _paged(query, cache, block_table, cu_seqlens, seq_lens, scale, 0, 0, sinks)


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
    sinks: Tensor | None = None,
) -> Tensor:
    """`reference.attention.window_attention`; a token's bits depend on its position and on what it sees alone, wherever
    the prompt is cut. `sinks`: as of `paged_attention_with_sinks`."""
    kind_of("window_attention", query, key, value, rings)
    window = rings.shape[2]

    def attend(rows: Tensor, both: Tensor, base: int) -> Tensor:
        """The keys and values of one request are a page; blocks of it end at fixed positions of the sequence."""
        page = F.pad(both, (0, 0, 0, 0, base % BLOCK, 0)).unsqueeze(0)
        starts, lengths = torch.tensor([0, len(rows)]), torch.tensor([page.shape[2]])
        return _paged(rows, page, torch.zeros(1, 1, dtype=torch.int64), starts, lengths, scale, 0, window, sinks)

    slots = state_read, state_write, captures
    return over_rings(query, key, value, rings, cu_seqlens, seq_lens, *slots, attend)


def decode_windows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    rings: Tensor,
    starts: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """`hybrid.models.attention.decode_windows`, by the numbers of its steps; a token that reads `LEFT_OUT` is not
    computed. `sinks`: as of `paged_attention_with_sinks`."""
    heads_lie_right = all(each.stride()[1:] == (each.shape[2], 1) for each in (key, value))
    kind = kind_of("window_attention", query, key, value, rings, lies_right=heads_lie_right and rings.stride(4) == 1)
    positions, state_read, state_write = positions.contiguous(), state_read.contiguous(), state_write.contiguous()
    (tokens, kv_heads, size), window = key.shape, rings.shape[2]
    pages, own = rings, 0
    if tokens >= len(starts):  # there are drafts: a token does not see those after it
        pages = torch.empty(tokens, *rings.shape[1:], dtype=rings.dtype)
        own = pages.data_ptr()
    found = torch.empty(3 * tokens + 1, dtype=torch.int64)
    addresses = key.data_ptr(), value.data_ptr(), rings.data_ptr(), own, positions.data_ptr()
    slots = state_read.data_ptr(), state_write.data_ptr(), found.data_ptr()
    sizes = tokens, window, kv_heads, size
    strides = key.stride(0), value.stride(0), *rings.stride()[:4]
    args = (*addresses, *slots, *sizes, *strides)
    run(_advance_rings, kind, args, kv_heads, 1, 2 * tokens * key[0].numel() // MIN_SHARED)
    table, new, lengths = found.split((tokens, tokens + 1, tokens))
    return _paged(query, pages, table.unsqueeze(1), new, lengths, scale, 0, 0, sinks)


def _paged(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
    first: int,
    window: int,
    sinks: Tensor | None = None,
) -> Tensor:
    kept, exact = KEPT.get(cache.dtype, UNPACKED), () if sinks is None else (sinks,)
    kind = kind_of("paged_attention", query, *(() if kept else (cache,)), exact=exact, lies_right=cache.stride(-1) == 1)
    query, output = query.contiguous(), torch.empty(query.shape, dtype=query.dtype)
    table, starts, seq_lens = block_table.contiguous(), cu_seqlens.contiguous(), seq_lens.contiguous()
    (tokens, heads, size), requests = query.shape, len(seq_lens)
    page_size, kv_heads, row_bytes = cache.shape[2:]
    addresses = tuple(tensor.data_ptr() for tensor in (query, cache, table, starts, seq_lens, output))
    strides = (*cache.stride()[:4], query.stride(0), table.shape[1])
    sizes = requests, heads, kv_heads, size, page_size
    args = (*addresses, *strides, *sizes, bits(scale), first, kept, row_bytes, window)
    args = (*args, 0 if sinks is None else sinks.data_ptr())
    tiles = min(tokens, requests + tokens // TOKENS)  # at most: how long each request is, is not read here
    work = table.numel() * page_size * kv_heads * size * tokens // max(requests, 1)
    run(_attend, kind, args, tiles * kv_heads, 1, work // MIN_SHARED)
    return output
