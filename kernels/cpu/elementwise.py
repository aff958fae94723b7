"""The operations that take each row by itself: norms, gates, rotary angles, what comes between projection and
attention, and probabilities (`hybrid.kernels.cpu.compiled.elementwise`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import FLOAT, UNPACKED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import KEPT, KINDS, NUMBERS, bits, by_rows, kind_of, run

MIN_SHARED = 1 << 12
"""Elements that are worth a thread."""

MIN_SHARED_LOGITS = 1 << 14
"""Logits that are worth a thread."""

_rms_norm = Compiled(f"{COMPILED}.elementwise", "rms_norm")
_add_rms_norm = Compiled(f"{COMPILED}.elementwise", "add_rms_norm")
_gated_rms_norm = Compiled(f"{COMPILED}.elementwise", "gated_rms_norm")
_silu_and_mul = Compiled(f"{COMPILED}.elementwise", "silu_and_mul")
_gelu_and_mul = Compiled(f"{COMPILED}.elementwise", "gelu_and_mul")
_sigmoid_and_mul = Compiled(f"{COMPILED}.elementwise", "sigmoid_and_mul")
_gate_rows = Compiled(f"{COMPILED}.elementwise", "gate_rows")
_bounded_silu_and_mul = Compiled(f"{COMPILED}.elementwise", "bounded_silu_and_mul")
_silu = Compiled(f"{COMPILED}.elementwise", "silu")
_squared_relu = Compiled(f"{COMPILED}.elementwise", "squared_relu")
_add = Compiled(f"{COMPILED}.elementwise", "add")
_mul = Compiled(f"{COMPILED}.elementwise", "mul")
_scale = Compiled(f"{COMPILED}.elementwise", "scale")
_rotary = Compiled(f"{COMPILED}.elementwise", "rotary")
_rotate = Compiled(f"{COMPILED}.elementwise", "rotate")
_rotate_pairs = Compiled(f"{COMPILED}.elementwise", "rotate_pairs")
_norm_rotate_store = Compiled(f"{COMPILED}.elementwise", "norm_rotate_store")
_soft_cap = Compiled(f"{COMPILED}.elementwise", "soft_cap")
_softmax = Compiled(f"{COMPILED}.elementwise", "softmax")
_log_softmax = Compiled(f"{COMPILED}.elementwise", "log_softmax")


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """`reference.rms_norm`."""
    kind = kind_of("rms_norm", x, exact=(scale,))
    rows, y = _rows(x), torch.empty(x.shape, dtype=x.dtype)
    count, size = rows.shape
    args = rows.data_ptr(), scale.data_ptr(), y.data_ptr(), rows.stride(0), size, bits(eps)
    run(_rms_norm, kind, args, count, 1, count * size // MIN_SHARED)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`."""
    kind = kind_of("add_rms_norm", x, residual, exact=(scale,), lies_right=x.shape == residual.shape)
    x, residual = x.contiguous(), residual.contiguous()
    total, y = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    size, count = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    addresses = x.data_ptr(), residual.data_ptr(), scale.data_ptr(), total.data_ptr(), y.data_ptr()
    run(_add_rms_norm, kind, (*addresses, size, bits(eps)), count, 1, count * size // MIN_SHARED)
    return total, y


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`reference.gated_rms_norm`."""
    kind = kind_of("gated_rms_norm", x, gate, weight)
    x, gate, y = x.contiguous(), gate.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    size, count = x.shape[-1], x.numel() // max(x.shape[-1], 1)
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr()
    run(_gated_rms_norm, kind, (*addresses, size, bits(eps)), count, 1, count * size // MIN_SHARED)
    return y


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.silu_and_mul`."""
    return _of_two(_silu_and_mul, gate, up)


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`reference.elementwise.gelu_and_mul`."""
    return _of_two(_gelu_and_mul, gate, up)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`reference.sigmoid_and_mul`."""
    return _of_two(_sigmoid_and_mul, x, gate)


def _of_two(function: Compiled, first: Tensor, second: Tensor) -> Tensor:
    kind = kind_of(function.__name__, first, second, lies_right=first.shape == second.shape)
    y = torch.empty(first.shape, dtype=first.dtype)
    a, b = _rows(first), _rows(second)
    count, size = a.shape
    args = a.data_ptr(), b.data_ptr(), y.data_ptr(), a.stride(0), b.stride(0), size
    run(function, kind, args, count, 1, count * size // MIN_SHARED)
    return y


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Each row times the logistic function of its gate.

    Args:
        x: `[rows, size]`.
        gate: `[rows]`, of the same type.
    """
    kind = kind_of("gate_rows", x, gate, lies_right=x.dim() == 2 and gate.shape == x.shape[:1])
    x, gate, y = by_rows(x), gate.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    args = x.data_ptr(), gate.data_ptr(), y.data_ptr(), x.stride(0), x.shape[1]
    run(_gate_rows, kind, args, len(x), 1, x.numel() // MIN_SHARED)
    return y


def bounded_silu_and_mul(x: Tensor, steepness: float, limit: float) -> Tensor:
    """`(up + 1) * gate * sigmoid(steepness * gate)` of rows in which gates and what they are multiplied with come by
    turns: gates at most `limit`, the others within it.

    Args:
        x: `[rows, 2 * size]`.

    Returns:
        `[rows, size]`.
    """
    kind = kind_of("bounded_silu_and_mul", x, lies_right=x.dim() == 2 and x.shape[1] % 2 == 0)
    x, size = by_rows(x), x.shape[1] // 2
    y = torch.empty(len(x), size, dtype=x.dtype)
    args = x.data_ptr(), y.data_ptr(), x.stride(0), size, bits(steepness), bits(limit)
    run(_bounded_silu_and_mul, kind, args, len(x), 1, y.numel() // MIN_SHARED)
    return y


def silu(x: Tensor) -> Tensor:
    """`reference.elementwise.silu`."""
    return _of_one(_silu, x)


def squared_relu(x: Tensor) -> Tensor:
    """`reference.elementwise.squared_relu`."""
    return _of_one(_squared_relu, x)


def _of_one(function: Compiled, x: Tensor) -> Tensor:
    kind, rows = kind_of(function.__name__, x), _rows(x)
    y, (count, size) = torch.empty(x.shape, dtype=x.dtype), rows.shape
    args = rows.data_ptr(), y.data_ptr(), rows.stride(0), size
    run(function, kind, args, count, 1, count * size // MIN_SHARED)
    return y


def can_combine(x: Tensor, other: Tensor) -> bool:
    """Tell whether `add` and `mul` know the types and shapes of their arguments: rows of one type, or rows and one
    row for all of them."""
    is_like = other.shape in (x.shape, x.shape[1:])
    return x.dtype in NUMBERS and other.dtype == x.dtype and x.dim() == 2 and is_like


def add(x: Tensor, other: Tensor, output: Tensor) -> Tensor:
    """Write `x + other` to `output`, and return it; `can_combine` has the shapes."""
    return _combined(_add, x, other, output)


def mul(x: Tensor, other: Tensor, output: Tensor) -> Tensor:
    """Write `x * other` to `output`, and return it; `can_combine` has the shapes."""
    return _combined(_mul, x, other, output)


def _combined(function: Compiled, x: Tensor, other: Tensor, output: Tensor) -> Tensor:
    x, other = by_rows(x), by_rows(other)
    of_row = other.stride(0) if other.dim() == 2 else 0
    args = x.data_ptr(), other.data_ptr(), output.data_ptr(), x.stride(0), of_row, x.shape[1]
    run(function, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return output


def can_scale(x: Tensor) -> bool:
    """Tell whether `scale` knows the type and shape of its argument."""
    return x.dtype in NUMBERS and x.dim() == 2 and x.stride(1) == 1


def scale(x: Tensor, factor: float, output: Tensor) -> Tensor:
    """Write `x * factor`, a product in fp32, to `output`, and return it; `can_scale` has the shapes."""
    args = x.data_ptr(), output.data_ptr(), x.stride(0), x.shape[1], bits(factor)
    run(_scale, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return output


def angles(positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of `positions * inverse_frequencies`, a product in fp32, times `scale`.

    Torch has operations for that, of which each takes as long to call as several compiled ones take to run: these are a
    part of the program of a captured pass (`hybrid.kernels.cpu.capture`).

    Args:
        positions: `[T, 1]`, or `[T, frequencies]` int64.
        inverse_frequencies: `[frequencies]` fp32, contiguous.
        scale: of fp32.
        dtype: of the results, fp32 or bfloat16.

    Returns:
        `[T, frequencies]` each.
    """
    count, size = len(positions), len(inverse_frequencies)
    cos, sin = torch.empty(count, size, dtype=dtype), torch.empty(count, size, dtype=dtype)
    of_frequency = positions.stride(1) if positions.shape[1] > 1 else 0
    addresses = positions.data_ptr(), inverse_frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr()
    args = (*addresses, positions.stride(0), of_frequency, size, bits(scale))
    run(_rotary, KINDS[dtype], args, count, 1, count * size // MIN_SHARED)
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`reference.rotate`."""
    kind, x = kind_of("rotate", x, cos, sin), by_rows(x)
    cos, sin, y = cos.contiguous(), sin.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    tokens, heads, size = x.shape
    addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    args = (*addresses, x.stride(0), x.stride(1), heads, size, cos.shape[-1])
    run(_rotate, kind, args, tokens, 1, x.numel() // MIN_SHARED)
    return y


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads whose pairs of numbers are rotated; then the first ones of all pairs come before the second ones.

    Args:
        x: `[T, heads, size]`.
        cos, sin: `[T, size]`.
    """
    kind = kind_of("rotate_pairs", x, cos, sin, lies_right=x.shape[2] == cos.shape[1])
    x, cos, sin, y = by_rows(x), cos.contiguous(), sin.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    tokens, heads, size = x.shape
    addresses = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    run(_rotate_pairs, kind, (*addresses, *x.stride()[:2], heads, size), tokens, 1, x.numel() // MIN_SHARED)
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
    return _rotate_store(q, k, v, (q_scale, k_scale), eps, cos, sin, cache, slot_mapping)


def rotate_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slot_mapping: Tensor
) -> Tensor:
    """`norm_rotate_store` without norms; angles of no numbers turn nothing."""
    return _rotate_store(q, k, v, (), 0.0, cos, sin, cache, slot_mapping)


def _rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: tuple[Tensor, ...],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    kept, lies_right = KEPT.get(cache.dtype, UNPACKED), all(tensor.stride(-1) == 1 for tensor in (q, k, v, cache))
    of_one_type = (k, v, cos, sin) if kept else (k, v, cache, cos, sin)
    kind = kind_of("norm_rotate_store", q, *of_one_type, exact=scales, lies_right=lies_right)
    y, cos, sin = torch.empty(q.shape, dtype=q.dtype), cos.contiguous(), sin.contiguous()
    slot_mapping = slot_mapping.contiguous()
    of_scales = tuple(scale.data_ptr() for scale in scales) or (0, 0)
    places = tuple(tensor.data_ptr() for tensor in (cos, sin, cache, slot_mapping, y))
    addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), *of_scales, *places)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *cache.stride()[:4])
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    sizes = heads, kv_heads, size, cos.shape[-1], cache.shape[2]
    elements = tokens * (heads + 2 * kv_heads) * size
    args = (*addresses, *strides, *sizes, bits(eps), kept, cache.shape[4])
    run(_norm_rotate_store, kind, args, tokens, 1, elements // MIN_SHARED)
    return y


def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """The probabilities of each row at its temperature. A row with NaN or infinity, or with nothing but minus infinity,
    gives NaN.

    Args:
        logits: `[S, size]` fp32.
        temperature: `[S]` fp64. One below the smallest normal fp32 number is that number.
    """
    logits, temperature = by_rows(logits), temperature.contiguous()
    rows, size = logits.shape
    y = torch.empty(rows, size, dtype=torch.float32)
    args = logits.data_ptr(), temperature.data_ptr(), y.data_ptr(), logits.stride(0), size
    run(_softmax, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED_LOGITS)
    return y


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """`reference.elementwise.soft_cap`."""
    logits = by_rows(logits)
    rows, size = logits.shape
    y = torch.empty(rows, size, dtype=torch.float32)
    args = logits.data_ptr(), y.data_ptr(), logits.stride(0), size, bits(cap)
    run(_soft_cap, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED_LOGITS)
    return y


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithms of the probabilities of each row.

    Args:
        logits: `[S, size]` fp32.
    """
    logits = by_rows(logits)
    rows, size = logits.shape
    y = torch.empty(rows, size, dtype=torch.float32)
    args = logits.data_ptr(), y.data_ptr(), logits.stride(0), size
    run(_log_softmax, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED_LOGITS)
    return y


def _rows(x: Tensor) -> Tensor:
    """`[rows, size]`, each row contiguous."""
    x = by_rows(x)
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
