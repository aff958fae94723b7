"""Products of bfloat16 rows with weights of bytes, in whole numbers.

Of each BLOCK numbers of a row of x the largest is 32767 of their scale, and they are rounded to whole numbers of 16
bits (`round_rows`). Products with bytes are added up in whole numbers of 32 bits, which hold every sum of a block
exactly, in whatever order; then they are numbers of fp32, and blocks are added up one after another, each times its
scale of x, and the scale of the weight's row comes last. So an output depends neither on other rows nor on how a CPU
adds up.

One instruction multiplies and adds twice as many of them as of fp32 numbers, where a CPU has AVX-512 VNNI.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.tiles import sums_of_lanes, write_outputs
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    INT,
    LINE,
    LONG,
    NEAR,
    VECTOR,
    ZERO,
    ZEROS,
    as_float,
    as_int,
    at,
    first_lanes,
    fma_of,
    get,
    looped,
    numbers,
    phis,
    prefetch,
    put,
)
from hybrid.kernels.cpu.kinds import BLOCK_OF_BYTES as BLOCK
from hybrid.kernels.cpu.kinds import BYTES_AT_ONCE
from hybrid.kernels.cpu.target import FEATURES, HAS_WIDE_REGISTERS, LANES

STEP = 2 * LANES
"""Numbers of a row that are multiplied at once."""

WIDTHS = {1: 16, 2: 8, 4: 4, 8: 2} if HAS_WIDE_REGISTERS else {1: 4, 2: 2, 4: 1}
"""Rows of x that are multiplied at once, and how many rows of the weight with them: as the registers hold their
sums."""

_SHORT, _BYTE = np.int16(0), np.int8(0)
_INTS, _SHORTS = ir.VectorType(INT, LANES), ir.VectorType(ir.IntType(16), STEP)
_NO_INTS = ir.Constant(_INTS, [0] * LANES)
_LARGEST, _NAN = np.float32(32767), np.float32(np.nan)
_ROUND = np.float32(12582912.0)
_INFINITE, _SMALLEST = 0x7F80, 0x0D80
"""The bits of infinity as bfloat16, and of 2^-100: blocks whose largest number is smaller are zeros."""


def round_rows(args, kind, first, last):
    """Rows `[first, last)` of x as whole numbers of 16 bits, zeros behind them, and the scales of their blocks. A block
    that is not finite has a scale of NaN."""
    a = numbers(args, INDEX)
    x, y, scales = numbers(a[0], kind), numbers(a[1], _SHORT), numbers(a[2], ZERO)
    stride, size, width, blocks = a[3], a[4], a[5], a[6]
    for row in range(first, last):
        for block in range(blocks):
            start = block * BLOCK
            own, out, count = at(x, row * stride + start), at(y, row * width + start), min(BLOCK, size - start)
            most = 0
            for i in range(count):
                most = max(most, np.int64(own[i] & 0x7FFF))
            scale, inverse = ZERO, ZERO
            if most >= _INFINITE:
                scale = _NAN
            elif most >= _SMALLEST:
                largest = as_float(np.int32(most << 16))
                scale, inverse = largest / _LARGEST, _LARGEST / largest
            put(scales, row * blocks + block, scale)
            for i in range(count):
                shifted = get(own, i) * inverse + _ROUND  # the whole number is in its lowest bits
                out[i] = np.int16(as_int(shifted) & 0xFFFF)
            for i in range(count, min(BLOCK, width - start)):
                out[i] = _SHORT


def _add_products(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """`total`, and to each of its lanes the products of two numbers of 16 bits."""
    if "+avx512vnni" in FEATURES and HAS_WIDE_REGISTERS:
        kind = ir.FunctionType(_INTS, [_INTS, _SHORTS, _SHORTS])
        add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpwssd.512")
        return builder.call(add, [total, x, y])
    wide = ir.VectorType(INT, STEP)
    product = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    halves = [ir.Constant(_INTS, [*range(place, STEP, 2)]) for place in (0, 1)]
    even, odd = (builder.shuffle_vector(product, product, half) for half in halves)
    return builder.add(total, builder.add(even, odd))


def _load(builder: Any, pointer: Any, index: Any, mask: Any | None = None) -> Any:
    """STEP numbers from an index on as numbers of 16 bits; zeros where a mask has no bit."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, STEP)
    place = builder.bitcast(builder.gep(pointer, [index]), vector.as_pointer())
    if mask is None:
        value = builder.load(place)
        value.align = element.width // 8
    else:
        kind = ir.FunctionType(vector, [place.type, INT, mask.type, vector])
        name = f"llvm.masked.load.v{STEP}i{element.width}.p0"
        load = cgutils.get_or_insert_function(builder.module, kind, name)
        value = builder.call(load, [place, INT(element.width // 8), mask, ir.Constant(vector, [0] * STEP)])
    return builder.sext(value, _SHORTS) if element.width == 8 else value


def _spread(builder: Any, pointers: list[Any], lanes: list[int]) -> Any:
    """A vector of which each lane is the fp32 number at one of some pointers."""
    found = ir.Constant(VECTOR, ir.Undefined)
    for number, pointer in enumerate(pointers):
        found = builder.insert_element(found, builder.load(pointer), INT(number))
    return builder.shuffle_vector(found, found, ir.Constant(_INTS, lanes))


def _tile(rows: int, width: int) -> Any:
    """An intrinsic that multiplies up to `rows` rows of x with up to `width` rows of the weight: `(x, x_stride,
    scales_of_x, w, w_stride, scale, out, out_stride, length, row_count, count)`.

    x and the scales of its blocks are those of `round_rows`; `row_count` and `count` are how many rows of x and of the
    weight there are.
    """
    outputs = rows * width
    lanes = [lane % outputs for lane in range(LANES)]

    @intrinsic
    def product(context, x, x_stride, scales_of_x, w, w_stride, scale, out, out_stride, length, row_count, count):
        long = types.int64

        def generate(context, builder, signature, args):
            x, x_stride, scales_of_x, w, w_stride, scale, out, out_stride, length, row_count, count = args
            blocks = builder.sdiv(builder.add(length, LONG(BLOCK - 1)), LONG(BLOCK))

            def places(pointer: Any, stride: Any, most: int, there: Any) -> list[Any]:
                """Where rows begin; the last one takes the place of those that there are not."""
                found, last = [], builder.sub(there, LONG(1))
                for number in range(most):
                    is_there = builder.icmp_signed("<", LONG(number), there)
                    own = builder.select(is_there, LONG(number), last)
                    found.append(builder.gep(pointer, [builder.mul(stride, own)]))
                return found

            xs, ws = places(x, x_stride, rows, row_count), places(w, w_stride, width, count)
            of_rows = places(scales_of_x, blocks, rows, row_count)
            of_columns = places(scale, LONG(1), width, count)
            following = builder.gep(w, [builder.mul(w_stride, LONG(BYTES_AT_ONCE))])

            def multiply(index: Any, sums: list[Any], mask: Any | None = None) -> list[Any]:
                others = [_load(builder, own, index, mask) for own in ws]
                found = []
                for number, own in enumerate(xs):
                    vector = _load(builder, own, index)
                    for column, other in enumerate(others):
                        found.append(_add_products(builder, vector, other, sums[number * width + column]))
                return found

            def add_block(total: Any, sums: list[Any], block: Any) -> Any:
                """Add the sums of a block, times its scales of x."""
                whole = sums_of_lanes(builder, sums, lambda builder, x, y: builder.add(x, y))
                whole = builder.shuffle_vector(whole, whole, ir.Constant(_INTS, lanes))
                scales = [builder.gep(own, [block]) for own in of_rows]
                factors = _spread(builder, scales, [lane // width for lane in lanes])
                return fma_of(builder, builder.sitofp(whole, VECTOR), factors, total)

            def of_step(index: Any, before: list[Any]) -> list[Any]:
                sums = [builder.bitcast(each, _INTS) for each in before]
                return [builder.bitcast(each, VECTOR) for each in multiply(index, sums)]

            whole = builder.and_(length, LONG(-STEP))

            def of_block(block: Any, before: list[Any]) -> list[Any]:
                start = builder.mul(block, LONG(BLOCK))
                ahead = builder.mul(start, LONG(width))
                for line in range(width * BLOCK // LINE):
                    prefetch(builder, following, builder.add(ahead, LONG(line * LINE)), NEAR)
                after = builder.add(start, LONG(BLOCK))
                is_last = builder.icmp_signed(">", after, whole)
                # a loop: unrolled, LLVM takes two instructions for each of those that multiply and add
                sums = looped(builder, start, builder.select(is_last, whole, after), [ZEROS] * outputs, of_step, STEP)
                entry, tail = builder.basic_block, builder.append_basic_block("tail")
                end = builder.append_basic_block("end")
                builder.cbranch(builder.and_(is_last, builder.icmp_signed("<", whole, length)), tail, end)
                builder.position_at_end(tail)
                mask = first_lanes(builder, builder.sub(length, whole), STEP)
                masked = multiply(whole, [builder.bitcast(each, _INTS) for each in sums], mask)
                last = [builder.bitcast(each, VECTOR) for each in masked]
                builder.branch(end)
                builder.position_at_end(end)
                merged = phis(builder, (entry, sums), (tail, last))
                return [add_block(before[0], [builder.bitcast(each, _INTS) for each in merged], block)]

            (total,) = looped(builder, LONG(0), blocks, [ZEROS], of_block)
            values = builder.fmul(total, _spread(builder, of_columns, [lane % width for lane in lanes]))
            write_outputs(builder, values, rows, width, out, out_stride, row_count, count)
            return context.get_dummy_value()

        return types.void(x, long, FLOATS, w, long, FLOATS, out, long, long, long, long), generate

    return product


_product_1, _product_2, _product_4 = _tile(1, WIDTHS[1]), _tile(2, WIDTHS[2]), _tile(4, WIDTHS[4])
_product_8 = _tile(8, WIDTHS[8]) if HAS_WIDE_REGISTERS else _product_4
_WIDTH_1, _WIDTH_2, _WIDTH_4, _WIDTH_8 = (WIDTHS.get(rows, WIDTHS[4]) for rows in (1, 2, 4, 8))


def multiply_bytes(args, kinds, first, last):
    """Columns `[first, last)`; the kinds are those of the weight and of the output."""
    a = numbers(args, INDEX)
    x, scales_of_x, w, scale = numbers(a[0], _SHORT), numbers(a[1], ZERO), numbers(a[2], kinds[0]), numbers(a[3], ZERO)
    out, x_stride, w_stride, out_stride, rows, length = numbers(a[4], kinds[1]), a[5], a[6], a[7], a[8], a[9]
    blocks = (length + BLOCK - 1) // BLOCK
    for begin in range(first, last, BYTES_AT_ONCE):
        end, row = min(begin + BYTES_AT_ONCE, last), 0
        while row < rows:
            left, b, s = rows - row, at(x, row * x_stride), at(scales_of_x, row * blocks)
            column = begin
            while column < end:
                own, own_scale, y = at(w, column * w_stride), at(scale, column), at(out, row * out_stride + column)
                if HAS_WIDE_REGISTERS and left > 4:
                    count = min(_WIDTH_8, end - column)
                    _product_8(b, x_stride, s, own, w_stride, own_scale, y, out_stride, length, min(left, 8), count)
                elif left > 2:
                    count = min(_WIDTH_4, end - column)
                    _product_4(b, x_stride, s, own, w_stride, own_scale, y, out_stride, length, min(left, 4), count)
                elif left == 2:
                    count = min(_WIDTH_2, end - column)
                    _product_2(b, x_stride, s, own, w_stride, own_scale, y, out_stride, length, 2, count)
                else:
                    count = min(_WIDTH_1, end - column)
                    _product_1(b, x_stride, s, own, w_stride, own_scale, y, out_stride, length, 1, count)
                column += count
            row += 8 if HAS_WIDE_REGISTERS and left > 4 else 4 if left > 2 else 2 if left == 2 else 1
