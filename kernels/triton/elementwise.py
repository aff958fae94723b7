"""Kernels that take each row by itself: norms, gates, and what happens to queries, keys and values before attention.

They follow the twins in `hybrid.kernels.reference` in what is rounded to the type of the tensors in between; sums and
functions are in fp32. What a program does depends on the length of a row alone, so a row's result does not depend on
how many there are. Rows may lie anywhere (views of a wider projection are read where they are); a last dimension that
is not contiguous is copied first. Results are contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.packed_kv import is_packed
from hybrid.kernels.reference.elementwise import rotate
from hybrid.kernels.triton.packed_kv import store_packed

ELEMENTS = 2048
"""Elements of a program where it is free to choose: two 16-byte reads per thread."""


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * scale` over the last dimension.

    Args:
        x: `[..., size]`.
        scale: `[size]` fp32, contiguous.
    """
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, None, scale, eps, output, None)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + residual`, and its `rms_norm`. Arguments as for `rms_norm`; both tensors have one shape and type."""
    total, output = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, residual, scale, eps, output, total)
    return total, output


def _norm(x: Tensor, residual: Tensor | None, scale: Tensor, eps: float, output: Tensor, total: Tensor | None) -> None:
    num_rows, inner, size = _shape(x)
    if num_rows == 0:
        return
    tile = _row_tile(size)
    left = _rows(x)
    right = left if residual is None else _rows(residual)
    _norm_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
        *left,
        *right,
        scale,
        output,
        output if total is None else total,
        num_rows,
        inner,
        eps,
        ADD=residual is not None,
        **tile,
    )


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / rms(x)` over the last dimension, times silu of the gate.

    Args:
        x, gate: `[T, heads, size]`.
        weight: `[size]`, contiguous.
    """
    num_rows, inner, size = _shape(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    tile = _row_tile(size)
    _gated_norm_kernel[(triton.cdiv(num_rows, tile["ROWS"]),)](
        *_rows(x),
        *_rows(gate),
        weight,
        output,
        num_rows,
        inner,
        eps,
        **tile,
    )
    return output


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`; both `[..., size]`."""
    return _gated(up, gate, silu=True)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`; both `[..., size]`."""
    return _gated(x, gate, silu=False)


def _gated(x: Tensor, gate: Tensor, silu: bool) -> Tensor:
    num_rows, inner, size = _shape(x)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return output
    block = min(triton.next_power_of_2(size), ELEMENTS)
    rows = ELEMENTS // block
    _gate_kernel[(triton.cdiv(num_rows, rows), triton.cdiv(size, block))](
        *_rows(x), *_rows(gate), output, num_rows, inner, SILU=silu, SIZE=size, ROWS=rows, BLOCK=block, num_warps=4
    )
    return output


def norm_rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and rotary position embedding of queries and keys; keys and values to their places in the pages.

    Arguments as for the twin in `hybrid.kernels.reference`; `q_scale` and `k_scale` are contiguous.
    """
    if is_packed(cache):
        store_packed(rotate(rms_norm(k, k_scale, eps), cos, sin), v, cache, slot_mapping)
        return rotate(rms_norm(q, q_scale, eps), cos, sin)
    num_tokens, heads, head_dim = q.shape
    kv_heads, rotary_dim = k.shape[1], cos.shape[1]
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return output
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    block = triton.next_power_of_2(head_dim)
    tile_heads = max(1, ELEMENTS // 2 // block)
    query_tiles = triton.cdiv(heads, tile_heads)
    _norm_rotate_store_kernel[(num_tokens, query_tiles + triton.cdiv(kv_heads, tile_heads))](
        *_rows(q),
        *_rows(k),
        *_rows(v),
        q_scale,
        k_scale,
        eps,
        cos,
        sin,
        *cos.stride(),
        cache,
        *cache.stride()[:4],
        slot_mapping,
        output,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        PAGE_SIZE=cache.shape[2],
        QUERY_TILES=query_tiles,
        TILE_HEADS=tile_heads,
        BLOCK=block,
        HALF_BLOCK=triton.next_power_of_2(rotary_dim // 2),
        num_warps=4,
    )
    return output


def _shape(x: Tensor) -> tuple[int, int, int]:
    """(rows, rows of the inner one of the outer dimensions, elements of a row)."""
    size = x.shape[-1]
    return x.numel() // max(size, 1), x.shape[-2] if x.dim() > 2 else 1, size


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """(data, stride of the outer rows, stride of the inner rows)."""
    if x.dim() > 3:
        x = x.flatten(0, -3)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x, x.stride(0), x.stride(1) if x.dim() == 3 else 0


def _row_tile(size: int) -> dict[str, int]:
    """Constants of a program that needs whole rows: their elements, how many rows, a power of two that holds one."""
    block = triton.next_power_of_2(size)
    rows = max(1, ELEMENTS // 2 // block)
    return {"SIZE": size, "ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 256))}


@triton.jit
def _row_places(row, inner, outer_stride, inner_stride):
    return ((row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride)[:, None]


@triton.jit
def _columns(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Column numbers of a whole tile: what is read for every row alike then lies in threads as the rows do."""
    return tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))


@triton.jit
def _inverse_rms(x, eps, SIZE: tl.constexpr):
    return tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x,
    x_outer_stride,
    x_inner_stride,
    residual,
    residual_outer_stride,
    residual_inner_stride,
    scale,
    output,
    total,
    num_rows,
    inner,
    eps,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = _columns(ROWS, BLOCK)
    exists = (row < num_rows)[:, None] & (at < SIZE)
    place = row.to(tl.int64)[:, None] * SIZE + at
    y = tl.load(x + _row_places(row, inner, x_outer_stride, x_inner_stride) + at, mask=exists, other=0.0)
    if ADD:
        residual += _row_places(row, inner, residual_outer_stride, residual_inner_stride) + at
        added = tl.load(residual, mask=exists, other=0.0)
        y = (y.to(tl.float32) + added.to(tl.float32)).to(y.dtype)
        tl.store(total + place, y, mask=exists)
    factor = tl.load(scale + at, mask=exists, other=0.0)
    y = y.to(tl.float32)
    y = y * _inverse_rms(y, eps, SIZE) * factor
    tl.store(output + place, y.to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    x,
    x_outer_stride,
    x_inner_stride,
    gate,
    gate_outer_stride,
    gate_inner_stride,
    weight,
    output,
    num_rows,
    inner,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = _columns(ROWS, BLOCK)
    exists = (row < num_rows)[:, None] & (at < SIZE)
    y = tl.load(x + _row_places(row, inner, x_outer_stride, x_inner_stride) + at, mask=exists, other=0.0)
    gate += _row_places(row, inner, gate_outer_stride, gate_inner_stride) + at
    opened = tl.load(gate, mask=exists, other=0.0).to(tl.float32)
    factor = tl.load(weight + at, mask=exists, other=0.0)
    unit = y.to(tl.float32)
    scaled = factor * (unit * _inverse_rms(unit, eps, SIZE)).to(y.dtype)
    opened = opened / (1 + tl.exp(-opened))
    place = row.to(tl.int64)[:, None] * SIZE + at
    tl.store(output + place, (scaled.to(tl.float32) * opened).to(output.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_kernel(
    x,
    x_outer_stride,
    x_inner_stride,
    gate,
    gate_outer_stride,
    gate_inner_stride,
    output,
    num_rows,
    inner,
    SILU: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.program_id(1) * BLOCK + _columns(ROWS, BLOCK)
    exists = (row < num_rows)[:, None] & (at < SIZE)
    y = tl.load(x + _row_places(row, inner, x_outer_stride, x_inner_stride) + at, mask=exists, other=0.0)
    gate += _row_places(row, inner, gate_outer_stride, gate_inner_stride) + at
    closed = tl.load(gate, mask=exists, other=0.0)
    opened = closed.to(tl.float32)
    opened = (opened if SILU else 1.0) / (1 + tl.exp(-opened))
    y = y.to(tl.float32) * opened.to(closed.dtype).to(tl.float32)
    tl.store(output + row.to(tl.int64)[:, None] * SIZE + at, y.to(output.dtype.element_ty), mask=exists)


@triton.jit
def _norm_rotate(
    source,
    target,
    exists,
    scale,
    eps,
    cos,
    sin,
    angle_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Heads of one token, normed and turned; `source`, `target`, `exists` are columns with one element per head.

    The part that turns is read once more, by halves: it is in L1.
    """
    DTYPE: tl.constexpr = source.dtype.element_ty
    HALF: tl.constexpr = ROTARY_DIM // 2
    at = _columns(source.shape[0], BLOCK)
    within = exists & (at < HEAD_DIM)
    x = tl.load(source + at, mask=within, other=0.0).to(tl.float32)
    factor = tl.load(scale + at, mask=within, other=0.0)
    inverse = _inverse_rms(x, eps, HEAD_DIM)
    tl.store(target + at, (x * inverse * factor).to(DTYPE), mask=within & (at >= ROTARY_DIM))

    at = _columns(source.shape[0], HALF_BLOCK)
    turned = exists & (at < HALF)
    first = tl.load(source + at, mask=turned, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at, mask=turned, other=0.0).to(tl.float32)
    first = (first * inverse * tl.load(scale + at, mask=turned, other=0.0)).to(DTYPE).to(tl.float32)
    second = (second * inverse * tl.load(scale + HALF + at, mask=turned, other=0.0)).to(DTYPE).to(tl.float32)
    cos += at * angle_stride
    sin += at * angle_stride
    cos_first = tl.load(cos, mask=turned, other=0.0).to(tl.float32)
    sin_first = tl.load(sin, mask=turned, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF * angle_stride, mask=turned, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF * angle_stride, mask=turned, other=0.0).to(tl.float32)
    low = (first * cos_first).to(DTYPE).to(tl.float32) - (second * sin_first).to(DTYPE).to(tl.float32)
    high = (second * cos_second).to(DTYPE).to(tl.float32) + (first * sin_second).to(DTYPE).to(tl.float32)
    tl.store(target + at, low.to(DTYPE), mask=turned)
    tl.store(target + HALF + at, high.to(DTYPE), mask=turned)


@triton.jit
def _norm_rotate_store_kernel(
    q,
    q_token_stride,
    q_head_stride,
    k,
    k_token_stride,
    k_head_stride,
    v,
    v_token_stride,
    v_head_stride,
    q_scale,
    k_scale,
    eps,
    cos,
    sin,
    angle_token_stride,
    angle_stride,
    cache,
    page_stride,
    kind_stride,
    offset_stride,
    head_stride,
    slot_mapping,
    output,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos += token * angle_token_stride
    sin += token * angle_token_stride
    if tile < QUERY_TILES:
        head = (tile * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
        exists = head < HEADS
        source = q + token * q_token_stride + head * q_head_stride
        target = output + (token * HEADS + head) * HEAD_DIM
        _norm_rotate(
            source, target, exists, q_scale, eps, cos, sin, angle_stride, HEAD_DIM, ROTARY_DIM, BLOCK, HALF_BLOCK
        )
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            head = ((tile - QUERY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS))[:, None]
            exists = head < KV_HEADS
            source = k + token * k_token_stride + head * k_head_stride
            target = cache + slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * offset_stride + head * head_stride
            _norm_rotate(
                source, target, exists, k_scale, eps, cos, sin, angle_stride, HEAD_DIM, ROTARY_DIM, BLOCK, HALF_BLOCK
            )
            at = _columns(TILE_HEADS, BLOCK)
            stored = exists & (at < HEAD_DIM)
            value = tl.load(v + token * v_token_stride + head * v_head_stride + at, mask=stored)
            tl.store(target + kind_stride + at, value, mask=stored)
