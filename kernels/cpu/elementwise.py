"""The operations that take each row by itself: norms, gates, and what comes between projection and attention.

Results are rounded once, from fp32. What an element becomes depends on its row alone; rows are shared among threads.
"""

import math

import numpy as np
import torch
from torch import Tensor

from hybrid.kernels.cpu.threads import share
from hybrid.kernels.cpu.vectors import KINDS, ZERO, at, compiled, compiled_inline, dot, fma, get, numbers, put, sigmoid
from hybrid.kernels.reference import elementwise as twins

MIN_SHARED = 1 << 15
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
def _rms_norm(x, scale, y, stride, size, eps, kind, first, last):  # type: ignore[no-untyped-def]
    x, y, scale = numbers(x, kind), numbers(y, kind), numbers(scale, ZERO)
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
    numbers = rows.data_ptr(), scale.data_ptr(), y.data_ptr(), rows.stride(0), size, np.float32(eps), KINDS[x.dtype]
    share(lambda first, last: _rms_norm(*numbers, first, last), count, 1, count * size // MIN_SHARED)
    return y


@compiled
def _add_rms_norm(x, residual, scale, total, y, size, eps, kind, first, last):  # type: ignore[no-untyped-def]
    x, residual, total, y = numbers(x, kind), numbers(residual, kind), numbers(total, kind), numbers(y, kind)
    scale = numbers(scale, ZERO)
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
    numbers = size, np.float32(eps), KINDS[x.dtype]
    share(lambda first, last: _add_rms_norm(*addresses, *numbers, first, last), count, 1, count * size // MIN_SHARED)
    return total, y


@compiled
def _gated_rms_norm(x, gate, weight, y, size, eps, kind, first, last):  # type: ignore[no-untyped-def]
    x, gate, weight, y = numbers(x, kind), numbers(gate, kind), numbers(weight, kind), numbers(y, kind)
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
    numbers = size, np.float32(eps), KINDS[x.dtype]
    share(lambda first, last: _gated_rms_norm(*addresses, *numbers, first, last), count, 1, count * size // MIN_SHARED)
    return y


@compiled
def _silu_and_mul(gate, up, y, gate_stride, up_stride, size, kind, first, last):  # type: ignore[no-untyped-def]
    gate, up, y = numbers(gate, kind), numbers(up, kind), numbers(y, kind)
    for row in range(first, last):
        a, b, out = at(gate, row * gate_stride), at(up, row * up_stride), at(y, row * size)
        for i in range(size):
            x = get(a, i)
            put(out, i, (x * sigmoid(x)) * get(b, i))


@compiled
def _sigmoid_and_mul(x, gate, y, x_stride, gate_stride, size, kind, first, last):  # type: ignore[no-untyped-def]
    x, gate, y = numbers(x, kind), numbers(gate, kind), numbers(y, kind)
    for row in range(first, last):
        a, b, out = at(x, row * x_stride), at(gate, row * gate_stride), at(y, row * size)
        for i in range(size):
            put(out, i, get(a, i) * sigmoid(get(b, i)))


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
    numbers = a.data_ptr(), b.data_ptr(), y.data_ptr(), a.stride(0), b.stride(0), size, KINDS[y.dtype]
    share(lambda start, end: function(*numbers, start, end), count, 1, count * size // MIN_SHARED)
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
def _norm_rotate_store(  # type: ignore[no-untyped-def]
    q, k, v, q_scale, k_scale, cos, sin, cache, slots, y, strides, sizes, eps, kind, first, last
):
    q, k, v, y, cache = numbers(q, kind), numbers(k, kind), numbers(v, kind), numbers(y, kind), numbers(cache, kind)
    cos, sin, q_scale, k_scale = numbers(cos, kind), numbers(sin, kind), numbers(q_scale, ZERO), numbers(k_scale, ZERO)
    slots = numbers(slots, np.int64(0))
    q_token, q_head, k_token, k_head, v_token, v_head, of_page, of_kind, of_offset, of_head = strides
    heads, kv_heads, size, rotary, page_size = sizes
    for token in range(first, last):
        c, s = at(cos, token * rotary), at(sin, token * rotary)
        for head in range(heads):
            place = at(y, (token * heads + head) * size)
            _norm_rotate(at(q, token * q_token + head * q_head), q_scale, c, s, place, size, rotary, eps)
        slot = slots[token]
        if slot < 0:
            continue
        page = at(cache, slot // page_size * of_page + slot % page_size * of_offset)
        for head in range(kv_heads):
            place = at(page, head * of_head)
            _norm_rotate(at(k, token * k_token + head * k_head), k_scale, c, s, place, size, rotary, eps)
            source, place = at(v, token * v_token + head * v_head), at(place, of_kind)
            for i in range(size):
                place[i] = source[i]


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
    rows = (q, k, v, cache)
    if not _are_known(*rows, cos, sin) or any(tensor.stride(-1) != 1 for tensor in rows):
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
    numbers = strides, sizes, np.float32(eps), KINDS[q.dtype]
    elements = tokens * (heads + 2 * kv_heads) * size
    share(lambda first, last: _norm_rotate_store(*addresses, *numbers, first, last), tokens, 1, elements // MIN_SHARED)
    return y
