"""Matrix products, batch invariant by construction and as fast as a weight can be read
(`hybrid.kernels.cpu.compiled.matmul`). Many rows of x are left to `hybrid.kernels.cpu.panels`."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.panels import MIN_SHARED, multiply_panels
from hybrid.kernels.cpu.sizes import COLUMNS
from hybrid.kernels.cpu.target import HAS_PAIRS, HAS_WIDE_REGISTERS, LANES
from hybrid.kernels.cpu.tasks import run

MANY_ROWS = 320 if HAS_WIDE_REGISTERS else 40
"""Rows of x from which on it is worth to copy them and the weight first (`hybrid.kernels.cpu.panels`): with wide
registers not before they are more than the second cache holds."""

_multiply = Compiled(f"{COMPILED}.matmul", "multiply")
_widen_pairs = Compiled(f"{COMPILED}.matmul", "widen_pairs")
_widen = Compiled(f"{COMPILED}.matmul", "widen")


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """`x @ weight.T`, accumulated in fp32, with torch's number of threads. With fp32 rows a bfloat16 weight gives the
    bits of its numbers as fp32.

    Args:
        x: `[rows, in]` fp32 or bfloat16.
        weight: `[out, in]` fp32, bfloat16 or int8; copied where it is not stored by rows.
        scale: `[out]` fp32, of the rows of an int8 weight.

    Returns:
        `[rows, out]` in the type of `x`.
    """
    output = x.new_empty(x.shape[0], weight.shape[0])
    multiply_into(output, x, weight, scale)
    return output


def multiply_into(output: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> None:
    """`multiply`, written to `output`, whose rows are contiguous."""
    (rows, inner), outputs = x.shape, weight.shape[0]
    kinds = KINDS[weight.dtype], KINDS[x.dtype]
    if x.stride(1) != 1:
        x = x.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    if x.dtype not in (weight.dtype, torch.float32):
        x = _widened(x, _widen, inner)
    if rows >= MANY_ROWS:
        multiply_panels(output, x, weight, scale)
        return
    if x.dtype != torch.float32 and not HAS_PAIRS:
        x = _widened(x, _widen_pairs, -(-inner // (2 * LANES)) * 2 * LANES)
    addresses = x.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    args = (*addresses, x.stride(0), weight.stride(0), output.stride(0), rows, inner)
    run(_multiply, kinds, args, outputs, COLUMNS, rows * inner * outputs // MIN_SHARED)


def _widened(x: Tensor, widen: Compiled, width: int) -> Tensor:
    """Rows of x as fp32, `[rows, width]`, by one of the functions above."""
    wide = torch.empty(len(x), width)
    args = x.data_ptr(), wide.data_ptr(), x.stride(0), x.shape[1], width
    run(widen, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return wide
