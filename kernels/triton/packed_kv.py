"""Rows of keys and values in a byte per element (`hybrid.kernels.packed_kv`): packing, and unpacking in other kernels.

Codes of fp8 are made and read by integer arithmetic, so that any GPU does it. Both give the bits of plain torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

INT8, FP8 = 1, 2
"""Kinds of codes, for kernels; 0: rows are not packed."""

KINDS: dict[torch.dtype, int] = {torch.int8: INT8, torch.float8_e4m3fn: FP8}


def store_packed(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of new tokens to their places in pages of packed rows.

    Arguments as for `store_kv`; `key` and `value` may have any strides, `cache` has contiguous rows.
    """
    num_tokens, kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(head_dim)
    _store_packed[(num_tokens, kv_heads)](
        key,
        value,
        cache.view(torch.uint8),
        cache.view(torch.float32),
        slot_mapping,
        *key.stride(),
        *value.stride(),
        *cache.stride()[:4],
        PAGE_SIZE=cache.shape[2],
        HEAD_DIM=head_dim,
        LAST=cache.shape[4] // 4 - 1,
        BLOCK=block,
        PACKED=KINDS[cache.dtype],
        num_warps=max(1, min(4, block // 64)),
    )


@triton.jit
def unpack_rows(codes, scales, PACKED: tl.constexpr):
    """Values in fp32 of `codes` `[rows, columns]` and `scales` `[rows]`."""
    if PACKED == 1:
        values = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        byte = codes.to(tl.int32)
        exponent, digits = (byte >> 3) & 15, byte & 7
        # 2 to the power of `exponent - 10`; numbers without a leading one have the smallest exponent
        power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
        values = tl.where(exponent > 0, digits + 8, digits).to(tl.float32) * power
        values = tl.where(byte > 127, -values, values)
        values = tl.where((byte & 127) == 127, float("nan"), values)
    return values * scales[:, None]


@triton.jit
def _pack_row(values, exists, PACKED: tl.constexpr):
    """Codes, as integers of 32 bits, and scale of a row."""
    values = tl.where(exists, values.to(tl.float32), 0.0)
    has_nan = tl.max((values != values).to(tl.int32), 0) > 0
    largest = tl.where(has_nan, float("nan"), tl.max(tl.abs(values), 0))
    scale = tl.div_rn(largest, 127.0 if PACKED == 1 else 448.0)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = (scale.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    scaled = tl.div_rn(values, tl.zeros_like(values) + scale)
    if PACKED == 1:
        whole = (scaled + 12582912.0) - 12582912.0  # to the nearest integer, halves to the even one
        codes = tl.where(whole == whole, whole, 0.0).to(tl.int32)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        exponent = tl.maximum(((bits >> 23) & 255) - 127, -6)
        steps = tl.abs(scaled) * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
        digits = ((steps + 12582912.0) - 12582912.0).to(tl.int32)
        codes = tl.where(scaled == scaled, exponent * 8 + 48 + digits, 127) | ((bits >> 24) & 128)
    return codes, scale


@triton.jit
def _store_packed(
    key,
    value,
    codes,
    scales,
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
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LAST: tl.constexpr,  # which of the 4-byte words of a row is its scale
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    d = tl.arange(0, BLOCK)
    exists = d < HEAD_DIM
    k = tl.load(key + token * key_token_stride + head * key_head_stride + d * key_stride, mask=exists, other=0.0)
    v = tl.load(
        value + token * value_token_stride + head * value_head_stride + d * value_stride, mask=exists, other=0.0
    )
    k, k_scale = _pack_row(k, exists, PACKED)
    v, v_scale = _pack_row(v, exists, PACKED)
    if slot >= 0:
        row = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * offset_stride + head * head_stride
        inside = d < LAST * 4  # the codes, and zeros up to the scale
        tl.store(codes + row + d, tl.where(exists, k, 0).to(tl.uint8), mask=inside)
        tl.store(codes + row + kind_stride + d, tl.where(exists, v, 0).to(tl.uint8), mask=inside)
        tl.store(scales + row // 4 + LAST, k_scale)
        tl.store(scales + (row + kind_stride) // 4 + LAST, v_scale)
