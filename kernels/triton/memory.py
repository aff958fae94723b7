"""Kernels that only move memory: new keys and values to their pages, whole rows of a pool to other rows, sampled tokens
into the numbers of the next pass.

Nothing but the named places is written. Addresses are 64 bits wide: pools hold more than 2^31 elements.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.packed_kv import is_packed
from hybrid.kernels.triton.packed_kv import store_packed

_COPY_BLOCK = 2048
"""Words that one program of `copy_states` moves: enough loads in flight, and programs enough for one row alone."""
_COPY_WARPS = 4
_SHIFT_BLOCK = 1024
"""Elements of a row that one program of `shift_rows` moves."""


_LINKS = 32
"""Links that one program of `fill_in_tokens` follows: one per thread of a warp."""


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of new tokens to their places in the pages.

    Arguments as for the twin in `hybrid.kernels.reference`; `key` and `value` may have any strides.
    """
    if is_packed(cache):
        store_packed(key, value, cache, slot_mapping)
        return
    num_tokens, kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(kv_heads * head_dim)
    _store_kv[(num_tokens,)](
        key,
        value,
        cache,
        slot_mapping,
        *key.stride(),
        *value.stride(),
        *cache.stride(),
        PAGE_SIZE=cache.shape[2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=block,
        num_warps=max(1, min(4, block // 256)),
    )


def copy_states(rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy rows of a pool to other rows of it, all moves in one launch.

    Args:
        rows: `[N, num_bytes]` uint8, innermost contiguous, any row stride; `rows[target[i]]` is written.
        source, target: `[M]` indices of rows; no target is a source, and no two targets are equal.
    """
    words = _as_words(rows)
    if len(source) == 0 or words.shape[1] == 0:
        return
    blocks = triton.cdiv(words.shape[1], _COPY_BLOCK)
    _copy_rows[(blocks * len(source),)](
        words,
        source,
        target,
        words.shape[1],
        words.stride(0),
        blocks,
        BLOCK=_COPY_BLOCK,
        num_warps=_COPY_WARPS,
    )


def shift_rows(x: Tensor, state: Tensor, cu_seqlens: Tensor, state_read: Tensor, state_write: Tensor) -> Tensor:
    """The row before each decoded token. Arguments as for the twin in `hybrid.kernels.reference`; the innermost
    dimensions of `x` and `state` are contiguous."""
    num_tokens, size = x.shape
    output = x.new_empty(num_tokens, size)
    num_requests = len(cu_seqlens) - 1
    if num_requests > 0:
        _shift_rows[(num_requests, triton.cdiv(size, _SHIFT_BLOCK))](
            x,
            state,
            output,
            cu_seqlens,
            state_read,
            state_write,
            size,
            x.stride(0),
            state.stride(0),
            BLOCK=_SHIFT_BLOCK,
            num_warps=_COPY_WARPS,
        )
    return output


def fill_in_tokens(numbers: Tensor, tokens: Tensor, links: Tensor) -> None:
    """Arguments as for the twin in `hybrid.kernels.reference`; all are contiguous."""
    _fill_in_tokens[(triton.cdiv(len(links), _LINKS),)](numbers, tokens, links, len(links), BLOCK=_LINKS, num_warps=1)


def _as_words(rows: Tensor) -> Tensor:
    """The same rows in the widest integers that their size, stride and place in memory allow."""
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.stride(1) != 1:
        raise ValueError(
            f"rows must be [N, num_bytes] uint8 with contiguous rows, not {tuple(rows.shape)} {rows.dtype} "
            f"with strides {rows.stride()}; view them as bytes first"
        )
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(number % dtype.itemsize == 0 for number in (rows.shape[1], rows.stride(0), rows.data_ptr())):
            return rows.view(dtype)
    return rows


@triton.jit
def _store_kv(
    key,
    value,
    cache,
    slot_mapping,
    key_token_stride,
    key_head_stride,
    key_stride,
    value_token_stride,
    value_head_stride,
    value_stride,
    page_stride,
    kind_stride,
    offset_stride,
    head_stride,
    stride,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    head, d = at // HEAD_DIM, at % HEAD_DIM
    exists = at < KV_HEADS * HEAD_DIM
    k = tl.load(key + token * key_token_stride + head * key_head_stride + d * key_stride, mask=exists)
    v = tl.load(value + token * value_token_stride + head * value_head_stride + d * value_stride, mask=exists)
    if slot >= 0:
        place = cache + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * offset_stride
        places = place + head * head_stride + d * stride
        tl.store(places, k, mask=exists)
        tl.store(places + kind_stride, v, mask=exists)


@triton.jit
def _copy_rows(rows, source, target, num_words, row_stride, blocks, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    move, block = program // blocks, program % blocks
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < num_words
    read = rows + tl.load(source + move).to(tl.int64) * row_stride
    write = rows + tl.load(target + move).to(tl.int64) * row_stride
    tl.store(write + at, tl.load(read + at, mask=exists), mask=exists)


@triton.jit
def _shift_rows(
    x, state, output, cu_seqlens, state_read, state_write, size, x_stride, state_stride, BLOCK: tl.constexpr
):
    request = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    before = tl.zeros((BLOCK,), x.dtype.element_ty)
    first, end = tl.load(cu_seqlens + request), tl.load(cu_seqlens + request + 1)
    x += first.to(tl.int64) * x_stride
    output += first.to(tl.int64) * size
    for token in range(first, end):
        row = tl.load(x + at, mask=exists)
        read = tl.load(state_read + token).to(tl.int64)
        write = tl.load(state_write + token).to(tl.int64)
        if read >= 0:  # what an earlier token wrote was written by the same threads
            before = tl.load(state + read * state_stride + at, mask=exists)
        tl.store(output + at, before, mask=exists)
        if write >= 0:
            tl.store(state + write * state_stride + at, row, mask=exists)
        before = row
        x += x_stride
        output += size


@triton.jit(do_not_specialize=["num_links"])
def _fill_in_tokens(numbers, tokens, links, num_links, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_links
    link = links + index * 5
    token = tl.load(tokens + tl.load(link, mask=exists, other=0), mask=exists, other=-1)
    tl.store(numbers + tl.load(link + 1, mask=exists, other=0), tl.maximum(token, 0), mask=exists)
    is_idle = exists & (token < 0)
    tl.store(numbers + tl.load(link + 2, mask=exists, other=0), -1, mask=is_idle)
    tl.store(numbers + tl.load(link + 3, mask=exists, other=0), 0, mask=is_idle)
    tl.store(numbers + tl.load(link + 4, mask=exists, other=0), -1, mask=is_idle)
