"""The operations that take each row by itself: norms, gates, and what comes between projection and attention.

Results are rounded once, from fp32. What an element becomes depends on its row alone; rows are shared among threads.
"""

import math

import numpy as np
import torch
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.packed_kv import KEPT, UNPACKED, pack
from hybrid.kernels.cpu.tasks import bits, run
from hybrid.kernels.cpu.tiles import dot
from hybrid.kernels.cpu.vectors import (
    INDEX,
    KINDS,
    ZERO,
    allocate,
    as_float,
    at,
    fma,
    get,
    numbers,
    put,
    release,
    sigmoid,
)
from hybrid.kernels.reference import elementwise as twins

MIN_SHARED = 1 << 12
"""Elements that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_ONE = np.float32(1)


def _are_known(*tensors: Tensor) -> bool:
    """Whether tensors have one type that is compiled."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(tensor.dtype == dtype for tensor in tensors)


def _rows(x: Tensor) -> Tensor:
    """`[rows, size]`, each row contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


@compiled_inline
def _inverse_rms(x, size, eps):  # type: ignore[no-untyped-def]
    return _ONE / np.float32(math.sqrt(dot(x, x, size) / np.float32(size) + eps))


@compiled
def _rms_norm(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    x, scale, y = numbers(a[0], kind), numbers(a[1], ZERO), numbers(a[2], kind)
    stride, size, eps = a[3], a[4], as_float(np.int32(a[5]))
    for row in range(first, last):
        own, out = at(x, row * stride), at(y, row * size)
        factor = _inverse_rms(own, size, eps)
        for i in range(size):
            put(out, i, (get(own, i) * factor) * get(scale, i))


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`."""
    if x.dtype not in DTYPES or scale.dtype != torch.float32:
        return twins.rms_norm(x, scale, eps)
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype)
    count, size = rows.shape
    args = rows.data_ptr(), scale.data_ptr(), y.data_ptr(), rows.stride(0), size, bits(eps)
    run(_rms_norm, KINDS[x.dtype], args, count, 1, count * size // MIN_SHARED)
    return y


@compiled
def _add_rms_norm(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    x, residual, scale = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], ZERO)
    total, y, size, eps = numbers(a[3], kind), numbers(a[4], kind), a[5], as_float(np.int32(a[6]))
    for i in range(first * size, last * size):
        put(total, i, get(residual, i) + get(x, i))
    for row in range(first, last):
        own, out = at(total, row * size), at(y, row * size)
        factor = _inverse_rms(own, size, eps)
        for i in range(size):
            put(out, i, (get(own, i) * factor) * get(scale, i))


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`."""
    if not _are_known(x, residual) or scale.dtype != torch.float32 or x.shape != residual.shape:
        return twins.add_rms_norm(x, residual, scale, eps)
    x, residual = x.contiguous(), residual.contiguous()
    total, y = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    size, count = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    addresses = x.data_ptr(), residual.data_ptr(), scale.data_ptr(), total.data_ptr(), y.data_ptr()
    run(_add_rms_norm, KINDS[x.dtype], (*addresses, size, bits(eps)), count, 1, count * size // MIN_SHARED)
    return total, y


@compiled
def _gated_rms_norm(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    x, gate, weight, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    size, eps = a[4], as_float(np.int32(a[5]))
    for row in range(first, last):
        own, other, out = at(x, row * size), at(gate, row * size), at(y, row * size)
        factor = _inverse_rms(own, size, eps)
        for i in range(size):
            z = get(other, i)
            put(out, i, (get(weight, i) * (get(own, i) * factor)) * (z * sigmoid(z)))


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.gated_rms_norm`."""
    if not _are_known(x, gate, weight):
        return twins.gated_rms_norm(x, gate, weight, eps)
    x, gate, y = x.contiguous(), gate.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    size, count = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr()
    run(_gated_rms_norm, KINDS[x.dtype], (*addresses, size, bits(eps)), count, 1, count * size // MIN_SHARED)
    return y


@compiled_inline
def _two_rows(args, kind, row):  # type: ignore[no-untyped-def]
    """A row of both inputs and of the output of `_of_two`, and its size."""
    a = numbers(args, INDEX)
    x, y, out = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind)
    return at(x, row * a[3]), at(y, row * a[4]), at(out, row * a[5]), a[5]


@compiled
def _silu_and_mul(args, kind, first, last):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        gate, up, out, size = _two_rows(args, kind, row)
        for i in range(size):
            x = get(gate, i)
            put(out, i, (x * sigmoid(x)) * get(up, i))


@compiled
def _sigmoid_and_mul(args, kind, first, last):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        x, gate, out, size = _two_rows(args, kind, row)
        for i in range(size):
            put(out, i, get(x, i) * sigmoid(get(gate, i)))


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.silu_and_mul`."""
    if not _are_known(gate, up) or gate.shape != up.shape:
        return twins.silu_and_mul(gate, up)
    return _of_two(_silu_and_mul, gate, up)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`reference.sigmoid_and_mul`."""
    if not _are_known(x, gate) or x.shape != gate.shape:
        return twins.sigmoid_and_mul(x, gate)
    return _of_two(_sigmoid_and_mul, x, gate)


def _of_two(function, first: Tensor, second: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    y = torch.empty(first.shape, dtype=first.dtype)
    a, b = _rows(first), _rows(second)
    count, size = a.shape
    args = a.data_ptr(), b.data_ptr(), y.data_ptr(), a.stride(0), b.stride(0), size
    run(function, KINDS[y.dtype], args, count, 1, count * size // MIN_SHARED)
    return y


@compiled_inline
def _norm_rotate(x, scale, cos, sin, y, size, rotary, eps):  # type: ignore[no-untyped-def]
    """Write a head, normalised and rotated, to y."""
    factor = _inverse_rms(x, size, eps)
    half = rotary // 2
    for i in range(half):
        a, b = (get(x, i) * factor) * get(scale, i), (get(x, half + i) * factor) * get(scale, half + i)
        put(y, i, fma(a, get(cos, i), -(b * get(sin, i))))
        put(y, half + i, fma(b, get(cos, half + i), a * get(sin, half + i)))
    for i in range(rotary, size):
        put(y, i, (get(x, i) * factor) * get(scale, i))


@compiled
def _norm_rotate_store(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    q, k, v, q_scale, k_scale = (
        numbers(a[0], kind),
        numbers(a[1], kind),
        numbers(a[2], kind),
        numbers(a[3], ZERO),
        numbers(a[4], ZERO),
    )
    cache, y = numbers(a[7], kind), numbers(a[9], kind)
    cos, sin, slots = numbers(a[5], kind), numbers(a[6], kind), numbers(a[8], INDEX)
    q_token, q_head, k_token, k_head, v_token, v_head = a[10], a[11], a[12], a[13], a[14], a[15]
    of_page, of_kind, of_offset, of_head = a[16], a[17], a[18], a[19]
    heads, kv_heads, size, rotary, page_size, eps = a[20], a[21], a[22], a[23], a[24], as_float(np.int32(a[25]))
    kept, row_bytes = a[26], a[27]
    memory = allocate(size)
    rotated = numbers(memory, kind)
    for token in range(first, last):
        c, s = at(cos, token * rotary), at(sin, token * rotary)
        for head in range(heads):
            place = at(y, (token * heads + head) * size)
            _norm_rotate(at(q, token * q_token + head * q_head), q_scale, c, s, place, size, rotary, eps)
        slot = slots[token]
        if slot < 0:
            continue
        page = slot // page_size * of_page + slot % page_size * of_offset
        for head in range(kv_heads):
            own, source = at(k, token * k_token + head * k_head), at(v, token * v_token + head * v_head)
            if kept != UNPACKED:
                _norm_rotate(own, k_scale, c, s, rotated, size, rotary, eps)
                address = a[7] + page + head * of_head
                pack(rotated, address, size, row_bytes, kept)
                pack(source, address + of_kind, size, row_bytes, kept)
                continue
            place = at(cache, page + head * of_head)
            _norm_rotate(own, k_scale, c, s, place, size, rotary, eps)
            for i in range(size):
                place[of_kind + i] = source[i]
    release(memory)


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
    """`reference.norm_rotate_store`."""
    kept, rows = KEPT.get(cache.dtype, UNPACKED), (q, k, v, cache)
    of_one_type = (q, k, v, cos, sin) if kept else (*rows, cos, sin)
    if not _are_known(*of_one_type) or any(tensor.stride(-1) != 1 for tensor in rows):
        return twins.norm_rotate_store(q, k, v, q_scale, k_scale, eps, cos, sin, cache, slot_mapping)
    y, cos, sin, slot_mapping = (
        torch.empty(q.shape, dtype=q.dtype),
        cos.contiguous(),
        sin.contiguous(),
        slot_mapping.contiguous(),
    )
    addresses = tuple(t.data_ptr() for t in (q, k, v, q_scale, k_scale, cos, sin, cache, slot_mapping, y))
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *cache.stride()[:4])
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    sizes = heads, kv_heads, size, cos.shape[-1], cache.shape[2]
    elements = tokens * (heads + 2 * kv_heads) * size
    args = (*addresses, *strides, *sizes, bits(eps), kept, cache.shape[4])
    run(_norm_rotate_store, KINDS[q.dtype], args, tokens, 1, elements // MIN_SHARED)
    return y
