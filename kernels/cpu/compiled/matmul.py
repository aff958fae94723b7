"""Matrix products, batch invariant by construction and as fast as a weight can be read.

An output is the sum of the products along a row of x and a row of the weight, always in the same order
(`hybrid.kernels.cpu.compiled.vectors`). Neither the number of rows nor a row's place, neighbours or address matters,
nor the number of threads: each takes some of the outputs.

Several outputs are computed together, in tiles of up to 6 rows of x and some rows of the weight, so that what is
loaded is used several times. All rows of x are multiplied with some rows of the weight; meanwhile the next ones are
asked for. Many rows of x are left to `hybrid.kernels.cpu.compiled.panels`.
"""

from typing import Any

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import LONG_ROW, is_read_by_rows, tile
from hybrid.kernels.cpu.compiled.vectors import (
    INDEX,
    ZERO,
    at,
    get,
    numbers,
    put,
    rows_of_x,
)
from hybrid.kernels.cpu.sizes import COLUMNS
from hybrid.kernels.cpu.target import HAS_WIDE_REGISTERS, LANES


def _strip(rows: int, width: int) -> Any:
    """The product of `rows` rows of x and up to COLUMNS rows of w, `width` of these at once: `(x, x_stride, w,
    w_stride, scale, out, out_stride, columns, length)`."""
    together, single = tile(rows, width), tile(rows, 1)

    @compiled_inline
    def multiply(x, x_stride, w, w_stride, scale, out, out_stride, columns, length):
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


_of_1, _of_1_by_rows = _strip(1, 6 if HAS_WIDE_REGISTERS else 4), _strip(1, 1)
_of_2, _of_3 = (_strip(2, 6), _strip(3, 4)) if HAS_WIDE_REGISTERS else (_strip(2, 3), _strip(3, 2))
_of_4, _of_5, _of_6 = _strip(4, 4), _strip(5, 4), _strip(6, 4)
"""Their sums, and what is multiplied, are as many as the registers hold; those of 4 rows and more only where they are
wide."""


@compiled_inline
def _rows_of_tile(left, length):
    """How many of 4 rows of x and more are multiplied at once. One row by itself takes nearly as long as two, so tiles
    are nearly the same size, and the fewer of them, the less is loaded. Of short rows a tile of 16 outputs has the
    shortest end."""
    if left <= 6:
        return left
    if length < LONG_ROW:
        return 4
    tiles = (left + 5) // 6
    return (left + tiles - 1) // tiles


@compiled_inline
def multiply_rows(x, x_stride, w, w_stride, scale, out, out_stride, rows, columns, length):
    """The product of any number of rows of x and up to COLUMNS rows of w."""
    row = 0
    while row < rows:
        a, y, left = at(x, row * x_stride), at(out, row * out_stride), rows - row
        if HAS_WIDE_REGISTERS and left >= 4:
            count = _rows_of_tile(left, length)
            if count == 4:
                _of_4(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            elif count == 5:
                _of_5(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            else:
                _of_6(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += count
        elif left >= 3:
            _of_3(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 3
        elif left == 2:
            _of_2(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 2
        else:
            if is_read_by_rows(x, w, length):
                _of_1_by_rows(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            else:
                _of_1(a, x_stride, w, w_stride, scale, y, out_stride, columns, length)
            row += 1


def multiply(args, kinds, first, last):
    """Columns `[first, last)`; the kinds are those of the weight and of the output."""
    a = numbers(args, INDEX)
    x, w, scale, out = rows_of_x(a[0], kinds), numbers(a[1], kinds[0]), numbers(a[2], ZERO), numbers(a[3], kinds[1])
    x_stride, w_stride, out_stride, rows, length = a[4], a[5], a[6], a[7], a[8]
    for column in range(first, last, COLUMNS):
        width = min(COLUMNS, last - column)
        b, s, o = at(w, column * w_stride), at(scale, column), at(out, column)
        multiply_rows(x, x_stride, b, w_stride, s, o, out_stride, rows, width, length)


def widen_pairs(args, kind, first, last):
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


def widen(args, kind, first, last):
    """Rows as fp32."""
    a = numbers(args, INDEX)
    x, y, stride, size = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3]
    for row in range(first, last):
        for i in range(size):
            put(y, row * size + i, get(x, row * stride + i))
