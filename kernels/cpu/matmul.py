"""Matrix products, batch invariant by construction and as fast as a weight can be read.

An output is the sum of the products along a row of x and a row of the weight, always in the same order
(`hybrid.kernels.cpu.vectors`). Neither the number of rows nor a row's place, neighbours or address matters, nor the
number of threads: each takes some of the outputs.

Several outputs are computed together, in tiles of up to 3 rows of x and some rows of the weight, so that what is
loaded is used several times. Short rows of the weight end before the hardware has found them: while some are
multiplied the next ones are asked for. Many rows of x are left to `hybrid.kernels.cpu.panels`.
"""

from typing import Any

import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.panels import BYTE, LINE, MIN_SHARED, multiply_panels
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.cpu.tiles import SHORT, is_read_by_rows, tile
from hybrid.kernels.cpu.vectors import (
    HAS_FMA,
    HAS_PAIRS,
    HAS_WIDE_REGISTERS,
    INDEX,
    KINDS,
    LANES,
    NEAR,
    ZERO,
    at,
    get,
    numbers,
    prefetch,
    put,
    rows_of_x,
)

COLUMNS = 12
"""Rows of the weight that few rows of x are multiplied with before the next ones; tiles divide it."""

MANY_ROWS = 40
"""Rows of x from which on it is worth to copy them and the weight first (`hybrid.kernels.cpu.panels`)."""

_COLUMNS_OF_2, _COLUMNS_OF_3 = (4, 4) if HAS_WIDE_REGISTERS else (3, 2)
"""Columns of tiles of 2 and of 3 rows: as many as the registers hold."""

_ASKED = 4 if HAS_WIDE_REGISTERS else 6
"""Columns that 3 rows are multiplied with before more memory is asked for; tiles of 2 and of 3 rows divide it."""


_tile_1_1, _tile_1_4 = tile(1, 1), tile(1, 4)
_tile_2_1, _tile_2 = tile(2, 1), tile(2, _COLUMNS_OF_2)
_tile_3_1, _tile_3 = tile(3, 1), tile(3, _COLUMNS_OF_3)


@compiled_inline
def multiply_rows(x, x_stride, w, w_stride, scale, out, out_stride, rows, columns, length):  # type: ignore[no-untyped-def]
    """The product of any number of rows of x and up to COLUMNS rows of w."""
    row = 0
    while row < rows:
        a, y = at(x, row * x_stride), at(out, row * out_stride)
        left, column = rows - row, 0
        if left >= 3:
            while column + _COLUMNS_OF_3 <= columns:
                b, s, o = at(w, column * w_stride), at(scale, column), at(y, column)
                _tile_3(a, x_stride, b, w_stride, s, o, out_stride, length)
                column += _COLUMNS_OF_3
            while column < columns:
                b, s, o = at(w, column * w_stride), at(scale, column), at(y, column)
                _tile_3_1(a, x_stride, b, w_stride, s, o, out_stride, length)
                column += 1
            row += 3
        elif left == 2:
            while column + _COLUMNS_OF_2 <= columns:
                b, s, o = at(w, column * w_stride), at(scale, column), at(y, column)
                _tile_2(a, x_stride, b, w_stride, s, o, out_stride, length)
                column += _COLUMNS_OF_2
            while column < columns:
                b, s, o = at(w, column * w_stride), at(scale, column), at(y, column)
                _tile_2_1(a, x_stride, b, w_stride, s, o, out_stride, length)
                column += 1
            row += 2
        else:
            while column + 4 <= columns and not is_read_by_rows(w):
                b, s, o = at(w, column * w_stride), at(scale, column), at(y, column)
                _tile_1_4(a, x_stride, b, w_stride, s, o, out_stride, length)
                column += 4
            while column < columns:
                b, s, o = at(w, column * w_stride), at(scale, column), at(y, column)
                _tile_1_1(a, x_stride, b, w_stride, s, o, out_stride, length)
                column += 1
            row += 1


@intrinsic
def _ask(context, memory, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of a byte in the second cache: the first one is full of what is multiplied."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        prefetch(builder, args[0], args[1], NEAR)
        return context.get_dummy_value()

    return types.void(memory, types.int64), generate


@compiled_inline
def _multiply_and_ask(x, x_stride, w, w_stride, scale, out, out_stride, sizes, ahead, lines):  # type: ignore[no-untyped-def]
    """`multiply_rows`, of which `sizes` are the last arguments. Between its tiles some lines of memory from `ahead` on
    are asked for."""
    rows, columns, length = sizes
    parts, part = (rows + 2) // 3 * ((columns + _ASKED - 1) // _ASKED), 0
    for row in range(0, rows, 3):
        for column in range(0, columns, _ASKED):
            for line in range(lines * part // parts, lines * (part + 1) // parts):
                _ask(ahead, line * LINE)
            part += 1
            a, b, s = at(x, row * x_stride), at(w, column * w_stride), at(scale, column)
            o, count, width = at(out, row * out_stride + column), min(3, rows - row), min(_ASKED, columns - column)
            multiply_rows(a, x_stride, b, w_stride, s, o, out_stride, count, width, length)


@compiled
def _multiply(args, kinds, first, last):  # type: ignore[no-untyped-def]
    """Columns `[first, last)`; the kinds are those of the weight and of the output."""
    a = numbers(args, INDEX)
    x, w, scale, out = rows_of_x(a[0], kinds), numbers(a[1], kinds[0]), numbers(a[2], ZERO), numbers(a[3], kinds[1])
    x_stride, w_stride, out_stride, rows, length, of_row = a[4], a[5], a[6], a[7], a[8], a[9]
    for column in range(first, last, COLUMNS):
        width = min(COLUMNS, last - column)
        b, s, o = at(w, column * w_stride), at(scale, column), at(out, column)
        if rows > 1 and of_row:  # while all rows are multiplied the next columns arrive
            following, sizes = column + width, (rows, width, length)
            ahead, lines = numbers(a[1] + following * of_row, BYTE), min(COLUMNS, last - following) * of_row // LINE
            _multiply_and_ask(x, x_stride, b, w_stride, s, o, out_stride, sizes, ahead, lines)
        else:
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
    strides, of_row = (x.stride(0), weight.stride(0), output.stride(0)), weight.stride(0) * weight.element_size()
    asks = of_row < SHORT and x.dtype == torch.float32  # tiles of pairs of bfloat16 numbers ask by themselves
    args = (*addresses, *strides, rows, inner, of_row if asks else 0)
    run(_multiply, kinds, args, outputs, COLUMNS, rows * inner * outputs // MIN_SHARED)


def _widened(x: Tensor, widen: Any, width: int) -> Tensor:
    """Rows of x as fp32, `[rows, width]`, by one of the functions above."""
    wide = torch.empty(len(x), width)
    args = x.data_ptr(), wide.data_ptr(), x.stride(0), x.shape[1], width
    run(widen, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return wide
