"""Matrix products, batch invariant by construction and as fast as a weight can be read.

An output is the sum of the products along a row of x and a row of the weight, always in the same order
(`hybrid.kernels.cpu.vectors`). Neither the number of rows nor a row's place, neighbours or address matters, nor the
number of threads: each takes some of the outputs.

Several outputs are computed together, in tiles of up to 4 rows of x and some rows of the weight, so that what is
loaded is used several times. All rows of x are multiplied with some rows of the weight; meanwhile the next ones are
asked for. Many rows of x are left to `hybrid.kernels.cpu.panels`.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.panels import MIN_SHARED, multiply_panels
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.cpu.tiles import COLUMNS, is_read_by_rows, tile
from hybrid.kernels.cpu.vectors import (
    HAS_FMA,
    HAS_PAIRS,
    HAS_WIDE_REGISTERS,
    INDEX,
    KINDS,
    LANES,
    ZERO,
    at,
    get,
    numbers,
    put,
    rows_of_x,
)

MANY_ROWS = 96 if HAS_WIDE_REGISTERS else 40
"""Rows of x from which on it is worth to copy them and the weight first (`hybrid.kernels.cpu.panels`)."""


def _strip(rows: int, width: int) -> Any:
    """The product of `rows` rows of x and up to COLUMNS rows of w, `width` of these at once: `(x, x_stride, w,
    w_stride, scale, out, out_stride, columns, length)`."""
    together, single = tile(rows, width), tile(rows, 1)

    @compiled_inline
    def multiply(x, x_stride, w, w_stride, scale, out, out_stride, columns, length):  # type: ignore[no-untyped-def]
        column = 0
        while column + width <= columns:
            b, s, o = at(w, column * w_stride), at(scale, column), at(out, column)
            together(x, x_stride, b, w_stride, s, o, out_stride, length)
            column += width
        while column < columns:
            b, s, o = at(w, column * w_stride), at(scale, column), at(out, column)
            single(x, x_stride, b, w_stride, s, o, out_stride, length)
            column += 1

    return multiply


_of_1, _of_1_by_rows = _strip(1, 4), _strip(1, 1)
_of_2, _of_3 = (_strip(2, 4), _strip(3, 4)) if HAS_WIDE_REGISTERS else (_strip(2, 3), _strip(3, 2))
_of_4 = _strip(4, 4)
"""Their sums, and what is multiplied, are as many as the registers hold; those of 4 rows only where they are wide."""


@compiled_inline
def multiply_rows(x, x_stride, w, w_stride, scale, out, out_stride, rows, columns, length):  # type: ignore[no-untyped-def]
    """The product of any number of rows of x and up to COLUMNS rows of w."""
    row = 0
    while row < rows:
        a, y, left = at(x, row * x_stride), at(out, row * out_stride), rows - row
        if HAS_WIDE_REGISTERS and left >= 4:
            _of_4(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 4
        elif left >= 3:
            _of_3(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 3
        elif left == 2:
            _of_2(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 2
        else:
            if is_read_by_rows(w):
                _of_1_by_rows(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            else:
                _of_1(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 1


@compiled
def _multiply(args, kinds, first, last):  # type: ignore[no-untyped-def]
    """Columns `[first, last)`; the kinds are those of the weight and of the output."""
    a = numbers(args, INDEX)
    x, w, scale, out = rows_of_x(a[0], kinds), numbers(a[1], kinds[0]), numbers(a[2], ZERO), numbers(a[3], kinds[1])
    x_stride, w_stride, out_stride, rows, length = a[4], a[5], a[6], a[7], a[8]
    for column in range(first, last, COLUMNS):
        width = min(COLUMNS, last - column)
        b, s, o = at(w, column * w_stride), at(scale, column), at(out, column)
        multiply_rows(x, x_stride, b, w_stride, s, o, out_stride, rows, width, length)


@compiled
def _widen_pairs(args, kind, first, last):  # type: ignore[no-untyped-def]
    """Rows as fp32: of each 2 * LANES numbers those at odd places, then those at even ones; zeros follow."""
    a = numbers(args, INDEX)
    x, y, stride, size, width = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3], a[4]
    for row in range(first, last):
        for start in range(0, width, 2 * LANES):
            own, out = at(x, row * stride + start), at(y, row * width + start)
            if start + 2 * LANES <= size:
                for i in range(LANES):
                    put(out, i, get(own, 2 * i + 1))
                    put(out, LANES + i, get(own, 2 * i))
            else:
                for i in range(LANES):
                    put(out, i, get(own, 2 * i + 1) if start + 2 * i + 1 < size else ZERO)
                    put(out, LANES + i, get(own, 2 * i) if start + 2 * i < size else ZERO)


@compiled
def _widen(args, kind, first, last):  # type: ignore[no-untyped-def]
    """Rows as fp32."""
    a = numbers(args, INDEX)
    x, y, stride, size = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3]
    for row in range(first, last):
        for i in range(size):
            put(y, row * size + i, get(x, row * stride + i))


PAIRS = {(torch.float32, torch.float32)} | {
    (weight, x) for weight in (torch.bfloat16, torch.int8) for x in (torch.float32, torch.bfloat16)
}
"""Types of a weight and of x that can be multiplied. The first product of each is compiled."""


def can_multiply(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows of a type can be multiplied with a weight `[out, in]`: types that are known, the weight on a CPU and
    stored by rows, and the CPU adds products with one rounding."""
    is_known = HAS_FMA and (weight.dtype, dtype) in PAIRS
    return is_known and weight.device.type == "cpu" and weight.stride(-1) == 1


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """`x @ weight.T`, accumulated in fp32, with torch's number of threads. With fp32 rows a bfloat16 weight gives the
    bits of its numbers as fp32.

    Args:
        x: `[rows, in]` fp32 or bfloat16.
        weight: `[out, in]` fp32, bfloat16 or int8, stored by rows.
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


def _widened(x: Tensor, widen: Any, width: int) -> Tensor:
    """Rows of x as fp32, `[rows, width]`, by one of the functions above."""
    wide = torch.empty(len(x), width)
    args = x.data_ptr(), wide.data_ptr(), x.stride(0), x.shape[1], width
    run(widen, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return wide
