"""Products and sums of rows that are added up in registers, in one fixed order each.

The tile of a product is an intrinsic: what is loaded is used for all of its outputs, and a row's bits do not depend on
the size of the tile.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INT,
    LINE,
    LONG,
    NEAR,
    ZEROS,
    add_product_of,
    at,
    first_lanes,
    fma_of,
    load_lanes,
    load_pairs,
    looped,
    narrowed,
    phis,
    prefetch,
    repeated,
    size_of,
    store_lanes,
)
from hybrid.kernels.cpu.target import COLUMNS, HAS_WIDE_REGISTERS, LANES

SHORT = 3072
"""Bytes of a row of a weight below which hardware reads it from memory late."""

LONG_ROW = 600
"""Numbers of a row of x from which on the end of a tile is a small part of it."""


def _folded(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """One number from a vector's lanes: halves are combined until it is left."""
    while vector.type.count > 1:
        half = vector.type.count // 2
        nothing = ir.Constant(vector.type, ir.Undefined)
        parts = (ir.Constant(ir.VectorType(INT, half), [*range(at, at + half)]) for at in (0, half))
        vector = combine(builder, *(builder.shuffle_vector(vector, nothing, part) for part in parts))
    return builder.extract_element(vector, INT(0))


def _added(builder: Any, x: Any, y: Any) -> Any:
    return builder.fadd(x, y)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_unordered("ugt", x, y), x, y)


def _sum(builder: Any, vector: Any) -> Any:
    return _folded(builder, vector, _added)


def sums_of_lanes(builder: Any, vectors: list[Any], add: Callable[[Any, Any, Any], Any] = _added) -> Any:
    """A vector of the sums of the lanes of up to LANES vectors, added up as in `_sum`; halves of two vectors are added
    at once. Where the number of vectors is not a power of two, other numbers follow."""
    lanes = LANES
    while lanes > 1:
        half, is_paired = lanes // 2, len(vectors) > 1
        pairs = list(zip(vectors[::2], vectors[1::2] + vectors[-1:], strict=False))
        starts = range(0, vectors[0].type.count * (2 if is_paired else 1), lanes)
        lower = [start + lane for start in starts for lane in range(half)]
        kind = ir.VectorType(INT, len(lower))
        parts = ir.Constant(kind, lower), ir.Constant(kind, [lane + half for lane in lower])
        vectors = [add(builder, *(builder.shuffle_vector(x, y, part) for part in parts)) for x, y in pairs]
        lanes = half
    return vectors[0]


def _is_paired(x: Any) -> bool:
    """Whether rows of x are multiplied in pairs."""
    return not isinstance(x.type.pointee, ir.FloatType)


def _taken(x: Any) -> int:
    """Numbers of a row of x in a step."""
    return 2 * LANES if _is_paired(x) else LANES


def _sums_of_products(
    builder: Any, xs: list[Any], ws: list[Any], length: Any, fetch: Callable[[Any], None] | None = None
) -> list[Any]:
    """For every x and every w the partial sums of their products along rows: one loop over the rows that keeps all of
    them in registers.

    Args:
        xs, ws: pointers to rows of `length` numbers, which are multiplied in pairs where x is not fp32.
        fetch: is called with the index of each step of the loop, to ask for what is read later; None: nothing is asked
            for.
    """

    is_paired, taken = _is_paired(xs[0]), _taken(xs[0])

    def load(pointer: Any, index: Any, mask: Any) -> list[Any]:
        if not is_paired:
            return [load_lanes(builder, pointer, index, mask)]
        if pointer.type.pointee == ir.IntType(16):
            return load_pairs(builder, pointer, index, mask)
        own = builder.bitcast(pointer, ir.FloatType().as_pointer())
        return [load_lanes(builder, own, builder.add(index, LONG(place))) for place in (0, LANES)]

    def step(index: Any, sums: list[Any], mask: Any | None = None) -> list[Any]:
        if fetch is not None and mask is None:
            fetch(index)
        others, found = [load(w, index, mask) for w in ws], []
        for number, x in enumerate(xs):
            own = load(x, index, mask)
            for i, parts in enumerate(others):
                total = sums[number * len(ws) + i]
                for a, b in zip(own, parts, strict=True):
                    total = add_product_of(builder, a, b, total, is_paired)
                found.append(total)
        return found

    whole, start = builder.and_(length, LONG(-taken)), [ZEROS] * (len(xs) * len(ws))
    sums = looped(builder, LONG(0), whole, start, step, taken)
    rest, tail, end = builder.basic_block, builder.append_basic_block("tail"), builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed("<", whole, length), tail, end)
    builder.position_at_end(tail)
    last = step(whole, sums, first_lanes(builder, builder.sub(length, whole), taken))
    builder.branch(end)
    builder.position_at_end(end)
    return phis(builder, (rest, sums), (tail, last))


@intrinsic
def dot(context, x, y, length):
    """The sum of the products of two rows, fp32."""

    def generate(context, builder, signature, args):
        x, y, length = args
        return _sum(builder, _sums_of_products(builder, [x], [y], length)[0])

    return types.float32(x, y, types.int64), generate


def _of_row(combine: Callable[[Any, Any, Any], Any]) -> Any:
    """An intrinsic `(x, length)` that combines the fp32 numbers of a row, whose length is a multiple of LANES and more
    than 0."""

    @intrinsic
    def reduce(context, x, length):
        def generate(context, builder, signature, args):
            x, length = args

            def step(index: Any, totals: list[Any]) -> list[Any]:
                return [combine(builder, load_lanes(builder, x, index), totals[0])]

            start = [load_lanes(builder, x, LONG(0))]
            return _folded(builder, looped(builder, LONG(LANES), length, start, step, LANES)[0], combine)

        return types.float32(x, types.int64), generate

    return reduce


row_sum, row_max = _of_row(_added), _of_row(_larger)


def _of_next_tile(builder: Any, w: Any, stride: Any, columns: int, taken: int, length: Any) -> Callable[[Any], None]:
    """Asks, for one row of x, for the tile of narrow numbers after the one that begins at w, as fast as this one is
    read: `taken` numbers of each row in a step.

    Where rows are long, it asks for what will be read in the same step: hardware follows each of them too. A short row
    ends before hardware has found it: all of them in the order of memory, as one long row.
    """
    is_short = builder.icmp_signed("<", length, LONG(8 * SHORT // w.type.pointee.width))
    of_index = builder.select(is_short, LONG(columns), LONG(1))
    of_column = builder.select(is_short, LONG(taken), stride)
    following = builder.gep(w, [builder.mul(stride, LONG(columns))])

    def fetch(index: Any) -> None:
        start = builder.mul(index, of_index)
        for column in range(columns):
            prefetch(builder, following, builder.add(start, builder.mul(of_column, LONG(column))))

    return fetch


def _of_next_rows(builder: Any, w: Any, stride: Any, columns: int, taken: int) -> Callable[[Any], None]:
    """Asks for the tile at the same place of the next COLUMNS rows, which are multiplied after all rows of x were with
    these: the next tile would come too late, and the second cache is near enough. Each line once, in the order of
    memory: a short row ends before hardware has found it."""
    following = builder.gep(w, [builder.mul(stride, LONG(COLUMNS))])
    of_line = LINE // size_of(w.type.pointee)

    def fetch(index: Any) -> None:
        start = builder.mul(index, LONG(columns))
        for first in range(0, columns * taken, of_line):
            prefetch(builder, following, builder.add(start, LONG(first)), NEAR)

    return fetch


@intrinsic
def is_read_by_rows(context, x, w, length):
    """Whether one row of x is multiplied with one row of w at a time: a single stream, which CPUs with wide registers
    read from memory faster than several. Not where numbers are made fp32 first and rows are short: their products wait
    for each other for longer than short rows, of a small model, are read from the caches."""

    def generate(context, builder, signature, args):
        x, w, length = args
        if not HAS_WIDE_REGISTERS or w.type.pointee == ir.IntType(8):
            return ir.Constant(ir.IntType(1), False)
        if w.type.pointee == x.type.pointee:
            return ir.Constant(ir.IntType(1), True)
        return builder.icmp_signed(">=", length, LONG(LONG_ROW))

    return types.boolean(x, w, types.int64), generate


def _write(builder: Any, values: Any, scale: Any | None, columns: int, outs: list[Any]) -> None:
    """Write a vector of outputs, `columns` of them to each place, times the scales of a weight that has them."""
    element = outs[0].type.pointee

    def of(lanes: list[int]) -> Any:
        return ir.Constant(ir.VectorType(INT, len(lanes)), lanes)

    if scale is not None:
        factors = builder.load(builder.bitcast(scale, ir.VectorType(ir.FloatType(), columns).as_pointer()))
        factors.align = 4
        each = of([lane % columns for lane in range(values.type.count)])
        values = builder.fmul(values, builder.shuffle_vector(factors, factors, each))
    if HAS_WIDE_REGISTERS:
        values = narrowed(builder, values, element)
    for row, out in enumerate(outs):
        own = builder.shuffle_vector(values, values, of([*range(row * columns, (row + 1) * columns)]))
        if own.type.element == element:
            builder.store(own, builder.bitcast(out, own.type.as_pointer()), align=size_of(element))
            continue
        for column in range(columns):
            value = narrowed(builder, builder.extract_element(own, INT(column)), element)
            builder.store(value, builder.gep(out, [LONG(column)]))


def write_outputs(
    builder: Any, values: Any, rows: int, width: int, out: Any, out_stride: Any, row_count: Any, count: Any
) -> None:
    """Write a vector of outputs: of `width` rows of the weight for each of `rows` rows of x, as many as there are of
    both."""
    element = out.type.pointee
    values = narrowed(builder, values, element)
    is_whole = builder.icmp_signed("==", count, LONG(width))
    for row in range(rows):
        with builder.if_then(builder.icmp_signed("<", LONG(row), row_count)):
            place = builder.gep(out, [builder.mul(out_stride, LONG(row))])
            with builder.if_else(is_whole) as (whole, part):
                with whole:
                    lanes = ir.Constant(ir.VectorType(INT, width), [*range(row * width, (row + 1) * width)])
                    own = builder.shuffle_vector(values, values, lanes)
                    builder.store(own, builder.bitcast(place, own.type.as_pointer()), align=size_of(element))
                with part:
                    for column in range(width - 1):
                        with builder.if_then(builder.icmp_signed("<", LONG(column), count)):
                            value = builder.extract_element(values, INT(row * width + column))
                            builder.store(value, builder.gep(place, [LONG(column)]))


def tile(rows: int, columns: int) -> Any:
    """An intrinsic that multiplies `rows` rows of x with `columns` rows of w: `(x, x_stride, w, w_stride, scale, out,
    out_stride, length)`.

    x is what `vectors.rows_of_x` returns; w and out are pointers of any
    types, strides are in elements. Where w is int8, results are multiplied by the scale of w's row.
    """

    @intrinsic
    def product(context, x, x_stride, w, w_stride, scale, out, out_stride, length):
        long = types.int64

        def generate(context, builder, signature, args):
            x, x_stride, w, w_stride, scale, out, out_stride, length = args
            xs = [builder.gep(x, [builder.mul(x_stride, LONG(row))]) for row in range(rows)]
            ws = [builder.gep(w, [builder.mul(w_stride, LONG(column))]) for column in range(columns)]
            fetch = None
            if columns > 1 and (rows > 1 or HAS_WIDE_REGISTERS):
                fetch = _of_next_rows(builder, w, w_stride, columns, _taken(x))
            elif columns > 1 and not isinstance(w.type.pointee, ir.FloatType):
                fetch = _of_next_tile(builder, w, w_stride, columns, _taken(x), length)
            sums = _sums_of_products(builder, xs, ws, length, fetch)
            of_column = scale if w.type.pointee == ir.IntType(8) else None
            # more at once where there are registers for the constants of that beside those of the loop
            most = LANES // columns * columns if HAS_WIDE_REGISTERS else next(n for n in (4, 2, 1) if columns % n == 0)
            for first in range(0, len(sums), most):
                own = sums[first : first + most]
                row, column = divmod(first, columns)
                width = min(most, columns)
                places = range(row, row + len(own) // width)
                outs = [builder.gep(out, [builder.add(builder.mul(out_stride, LONG(i)), LONG(column))]) for i in places]
                factors = None if of_column is None else builder.gep(of_column, [LONG(column)])
                _write(builder, sums_of_lanes(builder, own), factors, width, outs)
            return context.get_dummy_value()

        return types.void(x, long, w, long, FLOATS, out, long, long), generate

    return product


def outer(rows: int, vectors: int, is_narrow: bool = False) -> Any:
    """An intrinsic that adds the product of `rows` rows of a with a matrix b, `vectors` times LANES columns wide, to y:
    `(y, y_stride, a, a_stride, b, b_stride, length, width)`.

    y and a are pointers to fp32, b to numbers of any type; strides are in elements. An output is added up in the order
    of `length`: its bits depend neither on other rows nor on its column.

    Args:
        is_narrow: there are `width` columns, less than LANES.
    """

    @intrinsic
    def add(context, y, y_stride, a, a_stride, b, b_stride, length, width):
        long = types.int64

        def generate(context, builder, signature, args):
            y, y_stride, a, a_stride, b, b_stride, length, width = args
            mask = first_lanes(builder, width) if is_narrow else None
            factors = [builder.gep(a, [builder.mul(a_stride, LONG(row))]) for row in range(rows)]
            columns = [LONG(vector * LANES) for vector in range(vectors)]
            offsets = [builder.mul(y_stride, LONG(row)) for row in range(rows)]
            places = [builder.add(offset, column) for offset in offsets for column in columns]
            start = [load_lanes(builder, y, place, mask) for place in places]

            def step(index: Any, sums: list[Any]) -> list[Any]:
                row = builder.mul(index, b_stride)
                others = [load_lanes(builder, b, builder.add(row, column), mask) for column in columns]
                added = []
                for number, factor in enumerate(factors):
                    own = repeated(builder, builder.load(builder.gep(factor, [index])))
                    added += [fma_of(builder, own, other, sums[number * vectors + i]) for i, other in enumerate(others)]
                return added

            for place, total in zip(places, looped(builder, LONG(0), length, start, step), strict=True):
                store_lanes(builder, total, y, place, mask)
            return context.get_dummy_value()

        return types.void(y, long, a, long, b, long, long, long), generate

    return add


_VECTORS_OF_4 = 4 if HAS_WIDE_REGISTERS else 1
"""Vectors of columns that 4 rows are multiplied with at once: as many as the registers hold."""

_outer_4, _outer_4_wide, _outer_wide, _outer_1 = outer(4, 1), outer(4, _VECTORS_OF_4), outer(1, 4), outer(1, 1)
_outer_narrow_4, _outer_narrow_1 = outer(4, 1, True), outer(1, 1, True)


@compiled_inline
def add_product(y, y_stride, a, a_stride, b, b_stride, rows, inner, width):
    """`y += a @ b`, y and a fp32, b of any type; an output is added up in the order of `inner`."""
    row = 0
    while row < rows:
        count = 4 if rows - row >= 4 else 1
        own, column = at(a, row * a_stride), 0
        while column < width:
            out, other, left = at(y, row * y_stride + column), at(b, column), width - column
            if left < LANES:
                if count == 4:
                    _outer_narrow_4(out, y_stride, own, a_stride, other, b_stride, inner, left)
                else:
                    _outer_narrow_1(out, y_stride, own, a_stride, other, b_stride, inner, left)
                column = width
            elif count == 4 and left >= _VECTORS_OF_4 * LANES:
                _outer_4_wide(out, y_stride, own, a_stride, other, b_stride, inner, left)
                column += _VECTORS_OF_4 * LANES
            elif count == 4:
                _outer_4(out, y_stride, own, a_stride, other, b_stride, inner, left)
                column += LANES
            elif left >= 4 * LANES:
                _outer_wide(out, y_stride, own, a_stride, other, b_stride, inner, left)
                column += 4 * LANES
            else:
                _outer_1(out, y_stride, own, a_stride, other, b_stride, inner, left)
                column += LANES
        row += count
