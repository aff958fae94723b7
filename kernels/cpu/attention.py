"""Attention of one token over keys and values in pages.

Scores of a token over all its keys, their softmax, and the sum of its values are computed head by head, positions in
their order: a token's bits depend on its own sequence alone.
"""

import numpy as np
import torch
from torch import Tensor

from hybrid.kernels.cpu.tasks import bits, run
from hybrid.kernels.cpu.vectors import (
    INDEX,
    KINDS,
    LANES,
    ZERO,
    as_float,
    at,
    compiled,
    dot,
    exp,
    fma,
    get,
    keep,
    numbers,
    put,
)
from hybrid.kernels.reference import attention as twins

MIN_SHARED = 1 << 16
"""Elements of keys that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_LOWEST = np.float32(-np.inf)


@compiled
def _attend(args, kind, first, last):  # type: ignore[no-untyped-def]
    """The KV heads `[first, last)`, counted through all requests, with the query heads that read them.

    `rows` are the rows of query and output of each request.
    """
    a = numbers(args, INDEX)
    query, cache, output = numbers(a[0], kind), numbers(a[1], kind), numbers(a[5], kind)
    table, rows, lengths = numbers(a[2], INDEX), numbers(a[3], INDEX), numbers(a[4], INDEX)
    of_page, of_kind, of_offset, of_head, of_query, width = a[6], a[7], a[8], a[9], a[10], a[11]
    heads, kv_heads, size, page_size, scale = a[12], a[13], a[14], a[15], as_float(np.int32(a[16]))
    begin = a[17]
    group, longest = heads // kv_heads, 0
    for each in range(first, last):
        longest = max(longest, lengths[each // kv_heads])
    memory = np.empty(group * (longest + LANES) + size, np.float32)
    scores, total = numbers(memory.ctypes.data, ZERO), at(numbers(memory.ctypes.data, ZERO), group * (longest + LANES))
    for each in range(first, last):
        request, kv_head = each // kv_heads, each % kv_heads
        length, row = lengths[request], rows[request]
        for position in range(begin, length):
            page = table[request * width + position // page_size]
            key = at(cache, page * of_page + position % page_size * of_offset + kv_head * of_head)
            for i in range(group):
                q = at(query, row * of_query + (kv_head * group + i) * size)
                put(scores, i * length + position, dot(q, key, size) * scale)
        for i in range(group):
            own = at(scores, i * length)
            most = _LOWEST
            for position in range(begin, length):
                most = get(own, position) if not get(own, position) <= most else most  # NaN stays
            for position in range(begin, length):
                put(own, position, exp(get(own, position) - most))
            summed = ZERO
            for position in range(begin, length):
                summed += get(own, position)
            for j in range(size):
                put(total, j, ZERO)
            position = begin
            while position < length:
                page = table[request * width + position // page_size]
                values = at(cache, page * of_page + of_kind + kv_head * of_head)
                start = position % page_size
                count = min(page_size - start, length - position)
                for offset in range(count):
                    weight, value = get(own, position + offset), at(values, (start + offset) * of_offset)
                    for j in range(size):
                        put(total, j, fma(weight, get(value, j), get(total, j)))
                position += count
            y = at(output, (row * heads + kv_head * group + i) * size)
            for j in range(size):
                put(y, j, get(total, j) / summed if length > begin else ZERO)
    keep(memory)


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
    """`reference.paged_attention`. A token that is alone in its chunk is compiled, others are left to the twin."""
    is_known = query.dtype in DTYPES and cache.dtype == query.dtype and cache.stride(-1) == 1
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    if is_known and visible is None:
        rows, starts, lengths = _last_ones_apart(starts, lengths, chunk_size)
        if len(rows) > len(seq_lens):
            block_table = block_table[rows]
            cu_seqlens, seq_lens = cu_seqlens.new_tensor(starts), seq_lens.new_tensor(lengths)
    single = [row for row in range(len(lengths)) if starts[row + 1] - starts[row] == 1]
    if not is_known or visible is not None or not single:
        return twins.paged_attention(
            query, cache, block_table, cu_seqlens, seq_lens, scale, chunk_size, num_splits, visible, first
        )
    query = query.contiguous()
    if len(single) == len(lengths):
        output = torch.empty(query.shape, dtype=query.dtype)
        queries, table = cu_seqlens, block_table
    else:
        others = [row for row in range(len(lengths)) if row not in single]
        output = query.new_empty(query.shape)
        for row in others:
            start, end = starts[row], starts[row + 1]
            own = cu_seqlens[row : row + 2] - start
            part = block_table[row : row + 1], own, seq_lens[row : row + 1]
            output[start:end] = twins.paged_attention(query[start:end], cache, *part, scale, chunk_size, first=first)
        queries, table, seq_lens = cu_seqlens[:-1][single], block_table[single], seq_lens[single]
    table, queries, seq_lens = table.contiguous(), queries.contiguous(), seq_lens.contiguous()
    heads, size = query.shape[1:]
    page_size, kv_heads = cache.shape[2:4]
    addresses = tuple(tensor.data_ptr() for tensor in (query, cache, table, queries, seq_lens, output))
    strides = (*cache.stride()[:4], query.stride(0), table.shape[1])
    args = (*addresses, *strides, heads, kv_heads, size, page_size, bits(scale), first)
    most = table.numel() * page_size * kv_heads * size // MIN_SHARED
    run(_attend, KINDS[query.dtype], args, len(single) * kv_heads, 1, most)
    return output


def _last_ones_apart(starts: list[int], lengths: list[int], chunk_size: int) -> tuple[list[int], list[int], list[int]]:
    """The requests with the last token of a prompt as a request of its own, where it begins a chunk: after a hit it may
    be the only one that is computed, and it must have the same bits. Returns rows, starts and lengths."""
    rows, ends, totals = [], [0], []
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if end - start > 1 and length % chunk_size == 1:
            rows.append(row)
            ends.append(end - 1)
            totals.append(length - 1)
        rows.append(row)
        ends.append(end)
        totals.append(length)
    return rows, ends, totals
