"""Products with weights of four bits (`hybrid.kernels.packed_weights`), and such weights as numbers.

A number is one of sixteen of its group. With wide registers these are made once for a group, and looked up in a
register: one instruction gives sixteen weights. Elsewhere each is computed. They are rounded to the type of the rows,
and multiplied in the order of `compiled.matmul`: the bits are those of a product with these numbers, and a row's do not
depend on other rows.

*Few rows of x*: some rows of the weight are multiplied with some rows of x at once, block by block, and what follows
them is asked for meanwhile. *Many rows*: rows of the weight are written as numbers, and multiplied as any others
(`hybrid.kernels.cpu.packed_weights`).

Columns of a block that a row of the weight does not have are left out by pieces of 32; within a piece x is zero.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import sums_of_lanes, write_outputs
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    INT,
    LONG,
    NEAR,
    VECTOR,
    ZERO,
    ZEROS,
    at,
    fma_of,
    load_lanes,
    looped,
    narrowed,
    numbers,
    phis,
    prefetch,
    repeated,
    size_of,
)
from hybrid.kernels.cpu.target import COLUMNS, HAS_WIDE_REGISTERS, LANES

PIECES, PIECE = 4, 2 * LANES
"""Pieces of a block, and columns of each: what one nibble of the block's 16-bit numbers holds."""

BLOCK_BYTES = 64

_HALF = ir.IntType(16)
_INTS, _HALVES = ir.VectorType(INT, LANES), ir.VectorType(_HALF, LANES)
_BYTE = np.int8(0)
_HIGH = -65536
"""The bits of an fp32 number that it has as bfloat16."""

WIDTHS = {1: 4, 2: 4, 3: 2, 4: 2, 6: 2, 8: 2} if HAS_WIDE_REGISTERS else {1: 2, 2: 2, 4: 1}
"""Rows of x that are multiplied at once, and how many rows of the weight with them: as the registers hold their
sums."""


def _each(number: int) -> Any:
    return ir.Constant(_INTS, [number] * LANES)


class _Group(NamedTuple):
    """What the numbers of a group are made of.

    Attributes:
        vectors: its sixteen numbers; where they are computed its scale and its minimum, in each lane.
    """

    vectors: list[Any]


def _rounded(builder: Any, vector: Any, is_paired: bool) -> Any:
    """fp32 numbers as they are multiplied with pairs: rounded to bfloat16, as fp32."""
    if not is_paired:
        return vector
    bits = builder.zext(narrowed(builder, vector, _HALF), _INTS)
    return builder.bitcast(builder.shl(bits, _each(16)), VECTOR)


def _group(builder: Any, scales: Any, index: Any, is_paired: bool) -> _Group:
    """The group of an index into pairs of scales and minimums."""
    place = builder.gep(scales, [builder.mul(index, LONG(2))])
    if size_of(place.type.pointee) == 2:
        both = builder.load(builder.bitcast(place, INT.as_pointer()))
        both.align = 2
        pair = repeated(builder, both)
        scale = builder.bitcast(builder.shl(pair, _each(16)), VECTOR)
        minimum = builder.bitcast(builder.and_(pair, _each(_HIGH)), VECTOR)
    else:
        scale, minimum = (repeated(builder, builder.load(builder.gep(place, [LONG(part)]))) for part in (0, 1))
    if not HAS_WIDE_REGISTERS:
        return _Group([scale, minimum])
    whole = ir.Constant(VECTOR, [float(number) for number in range(LANES)])
    return _Group([_rounded(builder, fma_of(builder, whole, scale, minimum), is_paired)])


def _numbers_of(builder: Any, group: _Group, bits: Any, is_paired: bool, piece: int = 0) -> Any:
    """The numbers of a group that the four bits of a piece stand for, in each lane.

    Where they are computed these bits stay where they are, and a power of two less of the scale makes up for it: the
    product is exact, as before.
    """
    if HAS_WIDE_REGISTERS:
        bits = builder.lshr(bits, _each(4 * piece)) if piece else bits
        kind = ir.FunctionType(VECTOR, [VECTOR, _INTS])
        look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.permvar.sf.512")
        return builder.call(look_up, [*group.vectors, bits])
    scale, minimum = group.vectors
    if piece:
        scale = builder.fmul(scale, ir.Constant(VECTOR, [0.0625**piece] * LANES))
    whole = builder.sitofp(builder.and_(bits, _each(15 << 4 * piece)), VECTOR)
    return _rounded(builder, fma_of(builder, whole, scale, minimum), is_paired)


def _halves(builder: Any, w: Any, block: Any, is_paired: bool) -> list[Any]:
    """The 16-bit numbers of a block as two vectors, in the order in which x is multiplied: those at odd places and
    those at even ones for pairs, else the first and the second half of them."""
    start = builder.gep(w, [builder.mul(block, LONG(BLOCK_BYTES))])
    if is_paired:
        both = builder.load(builder.bitcast(start, _INTS.as_pointer()))
        both.align = 1
        return [builder.lshr(both, _each(16)), both]
    found = []
    for half in range(2):
        place = builder.gep(start, [LONG(half * BLOCK_BYTES // 2)])
        narrow = builder.load(builder.bitcast(place, _HALVES.as_pointer()))
        narrow.align = 1
        found.append(builder.zext(narrow, _INTS))
    return found


def _tile(rows: int, width: int) -> Any:
    """An intrinsic that multiplies `rows` rows of x with up to `width` rows of the weight: `(x, x_stride, w, w_stride,
    scales, s_stride, groups, pieces, out, out_stride, count)`.

    x is fp32, in pairs where the output is bfloat16; strides are in numbers, of the weight in bytes; `groups` are those
    of a block, `pieces` those of a row. There are `count` rows of the weight.
    """

    @intrinsic
    def product(context, x, x_stride, w, w_stride, scales, s_stride, groups, pieces, out, out_stride, count):
        long = types.int64
        is_paired = out == types.CPointer(types.uint16)

        def generate(context, builder, signature, args):
            x, x_stride, w, w_stride, scales, s_stride, groups, pieces, out, out_stride, count = args
            last = builder.sub(count, LONG(1))
            xs = [builder.gep(x, [builder.mul(x_stride, LONG(row))]) for row in range(rows)]
            ws, own_scales = [], []
            for column in range(width):  # the last row takes the place of those that there are not
                is_there = builder.icmp_signed("<", LONG(column), count)
                place = builder.select(is_there, LONG(column), last)
                ws.append(builder.gep(w, [builder.mul(w_stride, place)]))
                own_scales.append(builder.gep(scales, [builder.mul(s_stride, place)]))
            following = builder.gep(w, [builder.mul(w_stride, LONG(COLUMNS))])

            def of_groups(index: Any) -> list[_Group]:
                return [_group(builder, own, index, is_paired) for own in own_scales]

            def multiply(
                sums: list[Any], found: list[_Group], halves: list[list[Any]], column: Any, piece: int = 0
            ) -> list[Any]:
                """Add the products of a piece of the halves, from a column on."""
                for part in range(2):
                    place = builder.add(column, LONG(part * LANES))
                    both = zip(found, halves, strict=True)
                    own = [_numbers_of(builder, group, bits[part], is_paired, piece) for group, bits in both]
                    for row, other in enumerate(xs):
                        vector = load_lanes(builder, other, place)
                        for number in range(width):
                            at_sum = row * width + number
                            sums[at_sum] = fma_of(builder, vector, own[number], sums[at_sum])
                return sums

            def of_block(block: Any, before: list[Any]) -> list[Any]:
                sums, halves = [*before], [_halves(builder, own, block, is_paired) for own in ws]
                line = builder.mul(block, LONG(width * BLOCK_BYTES))
                for number in range(width):
                    prefetch(builder, following, builder.add(line, LONG(number * BLOCK_BYTES)), NEAR)
                first, start = builder.mul(block, groups), builder.mul(block, LONG(PIECES * PIECE))
                for half in range(2):
                    index = builder.add(first, builder.ashr(builder.mul(groups, LONG(half)), LONG(1)))
                    found = of_groups(index)
                    for piece in (2 * half, 2 * half + 1):
                        if piece % 2:
                            found = _again(builder, groups, found, partial(of_groups, builder.add(index, LONG(1))))
                        sums = multiply(sums, found, halves, builder.add(start, LONG(piece * PIECE)), piece)
                return sums

            def of_piece(piece: Any, before: list[Any]) -> list[Any]:
                block, at_piece = builder.ashr(piece, LONG(2)), builder.and_(piece, LONG(3))
                shift = repeated(builder, builder.trunc(builder.mul(at_piece, LONG(4)), INT))
                halves = [[builder.lshr(bits, shift) for bits in _halves(builder, own, block, is_paired)] for own in ws]
                within = builder.ashr(builder.mul(at_piece, groups), LONG(2))
                found = of_groups(builder.add(builder.mul(block, groups), within))
                return multiply([*before], found, halves, builder.mul(piece, LONG(PIECE)))

            whole = builder.ashr(pieces, LONG(2))
            sums = looped(builder, LONG(0), whole, [ZEROS] * (rows * width), of_block)
            sums = looped(builder, builder.mul(whole, LONG(PIECES)), pieces, sums, of_piece)
            values = sums_of_lanes(builder, sums)
            write_outputs(builder, values, rows, width, out, out_stride, LONG(rows), count)
            return context.get_dummy_value()

        return types.void(FLOATS, long, w, long, scales, long, long, long, out, long, long), generate

    return product


def _again(builder: Any, groups: Any, found: list[_Group], make: Any) -> list[_Group]:
    """Other groups where there is one for each piece of a block, else those that were found."""
    entry, one, end = builder.basic_block, builder.append_basic_block("one"), builder.append_basic_block("end")
    before = [vector for group in found for vector in group.vectors]
    builder.cbranch(builder.icmp_signed("==", groups, LONG(PIECES)), one, end)
    builder.position_at_end(one)
    made = [vector for group in make() for vector in group.vectors]
    builder.branch(end)
    builder.position_at_end(end)
    merged = phis(builder, (entry, before), (one, made))
    each = len(merged) // len(found)
    return [_Group(merged[start : start + each]) for start in range(0, len(merged), each)]


def _strip(rows: int) -> Any:
    """The product of `rows` rows of x and up to COLUMNS rows of the weight."""
    width = WIDTHS[rows]
    product = _tile(rows, width)

    @compiled_inline
    def multiply(x, x_stride, w, w_stride, scales, s_stride, groups, pieces, out, out_stride, columns):
        for column in range(0, columns, width):
            own, s, y = at(w, column * w_stride), at(scales, column * s_stride), at(out, column)
            count = min(width, columns - column)
            product(x, x_stride, own, w_stride, s, s_stride, groups, pieces, y, out_stride, count)

    return multiply


_of_1, _of_2, _of_4 = _strip(1), _strip(2), _strip(4)
_of_3, _of_6, _of_8 = (_strip(3), _strip(6), _strip(8)) if HAS_WIDE_REGISTERS else (_of_1, _of_1, _of_1)


@compiled_inline
def _multiply_rows(x, x_stride, w, w_stride, scales, s_stride, groups, pieces, out, out_stride, rows, columns):
    """The product of any number of rows of x and up to COLUMNS rows of the weight."""
    row = 0
    while row < rows:
        left, b, y = rows - row, at(x, row * x_stride), at(out, row * out_stride)
        if HAS_WIDE_REGISTERS and left >= 8:
            _of_8(b, x_stride, w, w_stride, scales, s_stride, groups, pieces, y, out_stride, columns)
            row += 8
        elif HAS_WIDE_REGISTERS and left >= 6:
            _of_6(b, x_stride, w, w_stride, scales, s_stride, groups, pieces, y, out_stride, columns)
            row += 6
        elif left >= 4:
            _of_4(b, x_stride, w, w_stride, scales, s_stride, groups, pieces, y, out_stride, columns)
            row += 4
        elif HAS_WIDE_REGISTERS and left == 3:
            _of_3(b, x_stride, w, w_stride, scales, s_stride, groups, pieces, y, out_stride, columns)
            row += 3
        elif left >= 2:
            _of_2(b, x_stride, w, w_stride, scales, s_stride, groups, pieces, y, out_stride, columns)
            row += 2
        else:
            _of_1(b, x_stride, w, w_stride, scales, s_stride, groups, pieces, y, out_stride, columns)
            row += 1


def multiply_packed(args, kinds, first, last):
    """Columns `[first, last)`; the kinds are those of the scales and of the output.

    There may be several weights, as of `matmul.multiply`.
    """
    a = numbers(args, INDEX)
    x, w, scales, out = numbers(a[0], ZERO), numbers(a[1], _BYTE), numbers(a[2], kinds[0]), numbers(a[3], kinds[1])
    x_stride, w_stride, s_stride, groups, pieces, out_stride, rows = a[4], a[5], a[6], a[7], a[8], a[9], a[10]
    ends, parts, weights, of_weight, of_scales = numbers(a[11], INDEX), a[12], a[13], a[14], a[15]
    start = 0
    for part in range(parts):
        end = ends[part] if a[11] != 0 else rows
        if start < end:
            own, own_scales = at(w, part % weights * of_weight), at(scales, part % weights * of_scales)
            b, y = at(x, start * x_stride), at(out, start * out_stride)
            for column in range(first, last, COLUMNS):
                u, s, z = at(own, column * w_stride), at(own_scales, column * s_stride), at(y, column)
                count, width = end - start, min(COLUMNS, last - column)
                _multiply_rows(b, x_stride, u, w_stride, s, s_stride, groups, pieces, z, out_stride, count, width)
        start = end


@intrinsic
def _write_piece(context, w, scales, groups, piece, out):
    """Write the numbers of a piece of a row of the weight."""

    def generate(context, builder, signature, args):
        w, scales, groups, piece, out = args
        element = out.type.pointee
        is_rounded = size_of(element) == 2
        block, at_piece = builder.ashr(piece, LONG(2)), builder.and_(piece, LONG(3))
        shift = repeated(builder, builder.trunc(builder.mul(at_piece, LONG(4)), INT))
        within = builder.ashr(builder.mul(at_piece, groups), LONG(2))
        group = _group(builder, scales, builder.add(builder.mul(block, groups), within), is_rounded)
        for part, bits in enumerate(_halves(builder, w, block, is_paired=False)):
            value = _numbers_of(builder, group, builder.lshr(bits, shift), is_rounded)
            if is_rounded:
                high = builder.lshr(builder.bitcast(value, _INTS), _each(16))
                value = builder.trunc(high, _HALVES)
            place = builder.gep(out, [LONG(part * LANES)])
            builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=size_of(element))
        return context.get_dummy_value()

    return types.void(w, scales, types.int64, types.int64, out), generate


def unpack_rows(args, kinds, first, last):
    """Rows `[first, last)` of the weight as numbers; the kinds are those of the scales and of the numbers."""
    a = numbers(args, INDEX)
    w, scales, out = numbers(a[0], _BYTE), numbers(a[1], kinds[0]), numbers(a[2], kinds[1])
    w_stride, s_stride, groups, pieces = a[3], a[4], a[5], a[6]
    for row in range(first, last):
        own, s, y = at(w, row * w_stride), at(scales, row * s_stride), at(out, row * pieces * PIECE)
        for piece in range(pieces):
            _write_piece(own, s, groups, piece, at(y, piece * PIECE))
