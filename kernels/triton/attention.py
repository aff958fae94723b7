"""Attention of new tokens over keys and values in pages: one kernel for decoding, drafts and prompts.

A program has one tile of rows of one KV head; its rows are (token, head of the group) pairs, so that a key is read once
for all the heads that share it. Keys and values come straight from the pages, block by block from key 0 on, with an
online softmax in fp32. What a row gets therefore depends on its own keys and on the shape of the tile alone: not on
what else is in the batch, and not on where its prompt is cut. Where the keys are taken in several pieces, each piece
leaves its output and the logarithm of its weight, and a second kernel merges them; where a piece begins depends on the
length of the request and on `num_splits` alone.

A tile's shape decides the last bits of what its rows get, so it follows from sizes that a caller can hold fixed, and
never from a measurement.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.packed_kv import is_packed, row_size
from hybrid.kernels.triton.packed_kv import KINDS, unpack_rows
from hybrid.kernels.triton.ragged import find_tile, max_tiles, padded_batch

_MERGE_ELEMENTS = 4096
"""Elements of the pieces that one program of the merge holds at once."""


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

    Arguments as for the twin in `hybrid.kernels.reference`. No request is without new tokens. The innermost dimension
    of `query` and `cache` is contiguous. `chunk_size` is not needed here.

    `num_splits` also says what a token's bits may depend on:
        1: nothing but its own keys. Any batch takes the tile for prompts, so a piece of one token gives what it gives
            within a longer piece. This is for prompts.
        more: its own keys and the length of its request. Up to `MAX_DRAFTS` tokens per request take the tile for
            decoding. This is for decoding and drafts.
        None: the tile and the number of pieces follow from the size of the batch.

    Raises:
        ValueError: shapes, strides or `num_splits` that the kernel cannot take.
    """
    num_tokens, heads, head_dim = query.shape
    page_size, kv_heads = cache.shape[2:4]
    num_requests = len(seq_lens)
    _check(query, cache, scale, num_splits)
    output = query.new_empty(query.shape)
    if num_tokens == 0:
        return output
    group = heads // kv_heads
    tile = choose_tile(num_tokens, num_requests, group, head_dim, query.dtype, num_splits, _shared_memory(query.device))
    packed, codes, scales = 0, cache, cache
    if is_packed(cache):
        packed, codes, scales = KINDS[cache.dtype], cache.view(torch.uint8), cache.view(torch.float32)
        tile = packed_tile(tile, head_dim, query.dtype)
    single = num_tokens == num_requests and group <= tile.rows
    tiles = num_requests if single else max_tiles(num_tokens * group, num_requests, tile.rows)
    splits = num_splits or choose_splits(
        tiles * kv_heads,
        _multiprocessors(query.device) * tile.resident,
        block_table.shape[1] * page_size,
        num_tokens <= MAX_DRAFTS * num_requests,
    )
    pieces, weights = output, output
    if splits > 1:
        pieces = query.new_empty((splits, *query.shape), dtype=torch.float32)
        weights = query.new_empty((splits, num_tokens, heads), dtype=torch.float32)
    _attention[(kv_heads * splits * tiles,)](  # along the first axis, the only one with room for more than 65535
        query,
        codes,
        scales,
        block_table,
        cu_seqlens,
        seq_lens,
        pieces,
        weights,
        scale * math.log2(math.e),
        num_tokens,
        num_requests,
        splits,
        query.stride(0),
        query.stride(1),
        *cache.stride()[:2],
        cache.stride(3),
        block_table.stride(0),
        TOKEN_STRIDE=cache.stride(2),
        HEADS=heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        PAGE_SIZE=page_size,
        ROWS=tile.rows,
        KEYS=tile.keys,
        MIN_PIECE=MIN_PIECE,
        REQUESTS=1 if single else padded_batch(num_requests),
        SINGLE=single,
        SPLIT=splits > 1,
        PACKED=packed,
        LAST=cache.shape[4] // 4 - 1,
        FIRST=first,
        PRECISION="ieee" if query.dtype == torch.float32 else None,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _merge_pieces(pieces, weights, output)
    return output


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types leave this one out
    return properties.shared_memory_per_block_optin


def _check(query: Tensor, cache: Tensor, scale: float, num_splits: int | None) -> None:
    heads, head_dim = query.shape[1:]
    width, kept = (row_size(head_dim), cache.dtype) if is_packed(cache) else (head_dim, query.dtype)
    if cache.shape[4] != width or head_dim > 256 or heads % cache.shape[3] or cache.dtype != kept:
        raise ValueError(
            f"query [T, heads, head_dim] is {tuple(query.shape)} {query.dtype} and cache {tuple(cache.shape)} "
            f"{cache.dtype}: head_dim and dtype must be equal, or the rows packed, head_dim at most 256, and heads a "
            "multiple of kv_heads"
        )
    if query.stride(2) != 1 or cache.stride(4) != 1 or cache.shape[2] * cache.stride(2) >= 2**31:
        raise ValueError(
            f"the innermost dimension must be contiguous and a page less than 2^31 elements wide; the strides are "
            f"{query.stride()} of query and {cache.stride()} of cache"
        )
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be None or from 1 to {MAX_SPLITS}, not {num_splits}")


def _merge_pieces(pieces: Tensor, weights: Tensor, output: Tensor) -> None:
    """Write the mean of the pieces' outputs, each by its weight.

    Args:
        pieces: `[splits, T, heads, head_dim]` fp32; what a piece of no weight holds is not read.
        weights: `[splits, T, heads]` fp32, logarithms to base 2.
        output: `[T, heads, head_dim]`; written.
    """
    splits, num_tokens, heads, head_dim = pieces.shape
    padded = triton.next_power_of_2(splits)
    block = min(triton.next_power_of_2(head_dim), max(16, _MERGE_ELEMENTS // padded))
    rows = num_tokens * heads
    _merge[(rows, triton.cdiv(head_dim, block))](
        pieces, weights, output, rows, splits, HEAD_DIM=head_dim, SPLITS=padded, BLOCK=block, num_warps=4
    )


@triton.jit
def _page_of(table, start, length, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Page ids of the block of keys from `start`: one for all where no block crosses pages, else one per key."""
    if PAGE_SIZE % KEYS == 0:
        return tl.load(table + start // PAGE_SIZE, mask=start < length, other=0).to(tl.int64)
    else:
        keys = start + tl.arange(0, KEYS)
        return tl.load(table + keys // PAGE_SIZE, mask=keys < length, other=0).to(tl.int64)


@triton.jit
def _place_of(row, first_token, count, kv_head, GROUP: tl.constexpr):
    """Token and head of a request's rows, and whether there is such a token."""
    index = row // GROUP
    return (first_token + index).to(tl.int64), kv_head * GROUP + row % GROUP, index < count


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "num_splits", "table_stride"])
def _attention(
    query,
    cache,
    scales,
    block_table,
    cu_seqlens,
    seq_lens,
    output,
    weights,
    scale,
    num_tokens,
    num_requests,
    num_splits,
    query_token_stride,
    query_head_stride,
    page_stride,
    value_offset,
    head_stride,
    table_stride,
    TOKEN_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_PIECE: tl.constexpr,
    REQUESTS: tl.constexpr,
    SINGLE: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,  # keys before this one are not seen
    PACKED: tl.constexpr,  # kind of codes; 0: keys and values are as they are computed with
    LAST: tl.constexpr,  # which of the 4-byte words of a packed row is its scale
    PRECISION: tl.constexpr,
):
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    index = tl.program_id(0) // KV_HEADS
    split = index % num_splits
    index = index // num_splits
    if SINGLE:
        request, tile, first_token, count = index, 0, index, 1
    else:
        # the last tiles see the most keys: they begin first
        request, tile = find_tile(
            cu_seqlens, num_requests, tl.num_programs(0) // (KV_HEADS * num_splits) - 1 - index, ROWS, GROUP, REQUESTS
        )
        if request >= num_requests:
            return
        first_token = tl.load(cu_seqlens + request).to(tl.int32)
        count = tl.load(cu_seqlens + request + 1).to(tl.int32) - first_token

    row = tile * ROWS + tl.arange(0, ROWS)
    token, head, exists = _place_of(row, first_token, count, kv_head, GROUP)
    d = tl.arange(0, BLOCK_DIM)
    inside = exists[:, None] & (d < HEAD_DIM)[None, :]

    length = tl.load(seq_lens + request).to(tl.int32)
    prefix = length - count
    first, end = 0, tl.minimum(length, prefix + (tile * ROWS + ROWS - 1) // GROUP + 1)
    if SPLIT:
        piece = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), KEYS) * KEYS, MIN_PIECE)
        first = split * piece
        end = tl.minimum(end, first + piece)
        output += split.to(tl.int64) * num_tokens * HEADS * HEAD_DIM
        weights += split.to(tl.int64) * num_tokens * HEADS
        if first >= end:
            tl.store(weights + token * HEADS + head, float("-inf"), mask=exists)
            return

    q = tl.load(
        query + (token * query_token_stride + head * query_head_stride)[:, None] + d[None, :], mask=inside, other=0.0
    )
    last = tl.minimum(prefix + row // GROUP, length - 1)  # the last key that a row sees
    table = block_table + request.to(tl.int64) * table_stride
    cache += kv_head.to(tl.int64) * head_stride
    if PACKED > 0:
        scales += kv_head.to(tl.int64) * head_stride // 4 + LAST
    at = tl.arange(0, KEYS)
    highest = tl.full((ROWS,), -1e30, tl.float32)  # not -inf: a row that sees nothing must not meet inf - inf
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK_DIM), tl.float32)

    page = _page_of(table, first, length, PAGE_SIZE, KEYS)
    for start in tl.range(first, end, KEYS):
        keys = start + at
        filled = ((keys >= FIRST) & (keys < length))[:, None] & (d < HEAD_DIM)[None, :]
        if PAGE_SIZE % KEYS == 0:
            place = cache + page * page_stride + start % PAGE_SIZE * TOKEN_STRIDE
            places = place + (at * TOKEN_STRIDE)[:, None] + d[None, :]
        else:
            places = cache + (page * page_stride + keys % PAGE_SIZE * TOKEN_STRIDE)[:, None] + d[None, :]
        k = tl.load(places, mask=filled, other=0.0)
        v = tl.load(places + value_offset, mask=filled, other=0.0)
        if PACKED > 0:
            rows = (page * page_stride + keys % PAGE_SIZE * TOKEN_STRIDE) // 4
            k = unpack_rows(k, tl.load(scales + rows, mask=keys < length, other=0.0), PACKED).to(q.dtype)
            v = unpack_rows(v, tl.load(scales + rows + value_offset // 4, mask=keys < length, other=0.0), PACKED)
            v = v.to(q.dtype)
        page = _page_of(table, start + KEYS, length, PAGE_SIZE, KEYS)  # in time for the block after this one

        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        seen = keys[None, :] <= last[:, None]
        if FIRST > 0:
            seen = seen & (keys >= FIRST)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - peak[:, None])
        kept = tl.exp2(highest - peak)
        total = total * kept + tl.sum(p, 1)
        mixed = tl.dot(p.to(v.dtype), v, mixed * kept[:, None], input_precision=PRECISION)
        highest = peak

    if not SINGLE:
        # where the rows go is worked out again, from a zero that the compiler cannot know to be one: kept across the
        # loop, it would not fit into the registers
        row += tl.load(seq_lens + request, volatile=True).to(tl.int32) - length
        token, head, exists = _place_of(row, first_token, count, kv_head, GROUP)
        inside = exists[:, None] & (d < HEAD_DIM)[None, :]
    mixed = mixed * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
    places = output + ((token * HEADS + head) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(places, mixed.to(output.dtype.element_ty), mask=inside)
    if SPLIT:
        weight = tl.where(total == 0, float("-inf"), highest + tl.log2(total))  # NaN stays NaN
        tl.store(weights + token * HEADS + head, weight, mask=exists)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge(
    pieces, weights, output, num_rows, num_splits, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS).to(tl.int64)
    weight = tl.load(weights + split * num_rows + row, mask=split < num_splits, other=float("-inf"))
    filled = weight != float("-inf")
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e30))
    inside = filled[:, None] & (d < HEAD_DIM)[None, :]
    piece = tl.load(pieces + ((split * num_rows + row) * HEAD_DIM)[:, None] + d[None, :], mask=inside, other=0.0)
    total = tl.sum(weight, 0)
    mixed = tl.sum(piece * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + row * HEAD_DIM + d, mixed.to(output.dtype.element_ty), mask=d < HEAD_DIM)


MIN_PIECE = 256
"""Keys below which another piece costs more than it gives; a multiple of every tile's keys."""
MAX_SPLITS = 128
MAX_DRAFTS = 8
"""New tokens per request up to which a batch counts as decoding."""
HOPPER_SHARED_MEMORY = 232448
"""Bytes of shared memory that a program may have on an H100 or H200."""

_LONG_PIECE = 2048
"""Keys above which a piece is worth cutting even where the device is busy: the batch may hold one long request."""
_LONG_SPLITS = 16


class Tile(NamedTuple):
    """The shape of one program's work.

    Attributes:
        rows: (token, head) pairs.
        keys: keys of a block.
        warps, stages: Triton's `num_warps` and `num_stages`.
        resident: how many such programs a multiprocessor holds at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


def choose_tile(
    num_tokens: int,
    num_requests: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    num_splits: int | None,
    shared_memory: int,
) -> Tile:
    """The tile for a batch, from its sizes alone.

    Args:
        group: query heads per KV head.
        shared_memory: bytes that a program may have.
    """
    decoding = num_splits != 1 and num_tokens <= MAX_DRAFTS * num_requests
    rows = triton.cdiv(num_tokens, num_requests) * group
    if decoding and (rows <= 16 or num_splits is not None or num_tokens == num_requests):
        return _decode_tile(group, head_dim, dtype.itemsize)
    few = rows <= 64 and num_splits is None
    return _extend_tile(few, head_dim, dtype.itemsize, shared_memory)


def packed_tile(tile: Tile, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile where keys and values are packed rows: they are unpacked in registers, which hold fewer of them."""
    if dtype.itemsize == 4:
        return tile
    if tile.rows <= 32:
        return tile._replace(keys=max(16, tile.keys // 2))
    return tile if head_dim <= 128 else Tile(64, 16, 8, 2, 1)


def _decode_tile(group: int, head_dim: int, size: int) -> Tile:
    """Few rows: the time goes into reading keys and values, so enough bytes must be on their way at any time."""
    rows = max(16, triton.next_power_of_2(group))
    width = head_dim * size
    if width <= 256:
        return Tile(rows, 64, 4, 3 if width > 128 else 4, 3)
    return Tile(rows, 32 if width <= 512 else 16, 4, 3, 3)


def _extend_tile(few: bool, head_dim: int, size: int, shared_memory: int) -> Tile:
    """Many rows: the time goes into the products, so the tile is as large as registers and shared memory allow."""
    if size == 4:
        return Tile(32, 32 if head_dim <= 128 else 16, 4, 2, 1)
    if shared_memory < HOPPER_SHARED_MEMORY:
        return Tile(128, 32, 8, 3, 1) if head_dim <= 128 else Tile(64, 32, 8, 3 if shared_memory > 102400 else 2, 1)
    if few:
        return Tile(64, 32, 4, 2, 2)
    return Tile(128, 64, 8, 3 if head_dim <= 128 else 2, 1)


def choose_splits(programs: int, slots: int, width: int, decoding: bool) -> int:
    """Pieces that keep a device busy for about two rounds.

    Args:
        programs: programs without a split.
        slots: programs that the device holds at once.
        width: keys that the longest request may have.
        decoding: whether tokens are few. Then a piece of the longest request is not left very long either: the others
            may be short. Where they are many, pieces are more to write, and only an idle device is worth it.
    """
    if decoding:
        wanted = max(2 * slots // programs, min(_LONG_SPLITS, width // _LONG_PIECE))
    else:
        wanted = 2 * slots // programs if programs < slots else 1
    return max(1, min(wanted, width // MIN_PIECE, MAX_SPLITS))
