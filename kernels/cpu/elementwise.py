"""The operations that take each row by itself: norms, gates, and what comes between projection and attention
(`hybrid.kernels.cpu.compiled.elementwise`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KEPT, KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.sizes import UNPACKED
from hybrid.kernels.cpu.tasks import bits, run
from hybrid.kernels.reference import elementwise as twins

MIN_SHARED = 1 << 12
"""Elements that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_rms_norm = Compiled(f"{COMPILED}.elementwise", "rms_norm")
_add_rms_norm = Compiled(f"{COMPILED}.elementwise", "add_rms_norm")
_gated_rms_norm = Compiled(f"{COMPILED}.elementwise", "gated_rms_norm")
_silu_and_mul = Compiled(f"{COMPILED}.elementwise", "silu_and_mul")
_gelu_and_mul = Compiled(f"{COMPILED}.elementwise", "gelu_and_mul")
_rotate = Compiled(f"{COMPILED}.elementwise", "rotate")
_sigmoid_and_mul = Compiled(f"{COMPILED}.elementwise", "sigmoid_and_mul")
_norm_rotate_store = Compiled(f"{COMPILED}.elementwise", "norm_rotate_store")


def _are_known(*tensors: Tensor) -> bool:
    """Whether tensors have one type that is compiled."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(tensor.dtype == dtype for tensor in tensors)


def _rows(x: Tensor) -> Tensor:
    """`[rows, size]`, each row contiguous."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`."""
    if x.dtype not in DTYPES or scale.dtype != torch.float32:
        return twins.rms_norm(x, scale, eps)
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype)
    count, size = rows.shape
    args = rows.data_ptr(), scale.data_ptr(), y.data_ptr(), rows.stride(0), size, bits(eps)
    run(_rms_norm, KINDS[x.dtype], args, count, 1, count * size // MIN_SHARED)
    return y


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


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.gated_rms_norm`."""
    if not _are_known(x, gate, weight):
        return twins.gated_rms_norm(x, gate, weight, eps)
    x, gate, y = x.contiguous(), gate.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    size, count = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr()
    run(_gated_rms_norm, KINDS[x.dtype], (*addresses, size, bits(eps)), count, 1, count * size // MIN_SHARED)
    return y


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.silu_and_mul`."""
    if not _are_known(gate, up) or gate.shape != up.shape:
        return twins.silu_and_mul(gate, up)
    return _of_two(_silu_and_mul, gate, up)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.elementwise.gelu_and_mul`."""
    if not _are_known(gate, up) or gate.shape != up.shape:
        return twins.gelu_and_mul(gate, up)
    return _of_two(_gelu_and_mul, gate, up)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`reference.rotate`."""
    if not _are_known(x, cos, sin):
        return twins.rotate(x, cos, sin)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin, y = cos.contiguous(), sin.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    tokens, heads, size = x.shape
    addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    args = (*addresses, x.stride(0), x.stride(1), heads, size, cos.shape[-1])
    run(_rotate, KINDS[x.dtype], args, tokens, 1, x.numel() // MIN_SHARED)
    return y


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`reference.sigmoid_and_mul`."""
    if not _are_known(x, gate) or x.shape != gate.shape:
        return twins.sigmoid_and_mul(x, gate)
    return _of_two(_sigmoid_and_mul, x, gate)


def _of_two(function: Compiled, first: Tensor, second: Tensor) -> Tensor:
    y = torch.empty(first.shape, dtype=first.dtype)
    a, b = _rows(first), _rows(second)
    count, size = a.shape
    args = a.data_ptr(), b.data_ptr(), y.data_ptr(), a.stride(0), b.stride(0), size
    run(function, KINDS[y.dtype], args, count, 1, count * size // MIN_SHARED)
    return y


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
