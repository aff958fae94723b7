"""Products of bfloat16 rows by AMX, whose registers are *tiles* of 16 rows of 64 bytes.

An instruction multiplies a tile of the weight, 32 numbers of 16 of its rows, with a tile of x, the same 32 numbers of
16 of its rows, and adds the products to a tile of 16 x 16 sums. The weight's tile is read where it lies; that of x
holds pairs of numbers, turned, so that x is copied first (`make_tiles`).

The order of sums is that of the instruction: of each 32 numbers the products of those at even places are added up from
0, one after another, and so are those at odd places; both are added, and their sum to the output's. An output has a
place of its own in a tile, so that neither the number of rows nor a row's place or neighbours matter. It is not the
order of `compiled.matmul`: bits are others.

*Up to 16 rows of x*: two tiles of the weight at once, step by step; hardware follows their 32 rows, and to ask for what
comes next would be slower. *More rows*: STEPS steps of up to WIDTH rows of the weight are copied, so that they lie
together in the second cache, and each two tiles of them are multiplied with each two of x.

Weights of bytes are copied as bfloat16 numbers, which every byte is.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    INT,
    LONG,
    VECTOR,
    ZERO,
    allocate,
    at,
    first_lanes,
    narrowed,
    numbers,
    release,
    repeated,
    size_of,
)
from hybrid.kernels.cpu.kinds import TILE_NUMBERS, TILE_ROWS

WIDTH, STEPS = 256, 8
"""Rows of the weight, and steps of TILE_NUMBERS of their numbers, that are copied at once: 128 kB."""

_TILE, _ROW = 1024, 64
"""Bytes of a tile and of its rows."""

_FLOATS_OF_TILE = _TILE // 4

_OF_WEIGHT, _OF_X, _COUNT = 4, 6, 8
"""Tiles: sums, then two of the weight, then two of x."""

_BYTES, _VOID = ir.IntType(8).as_pointer(), ir.VoidType()
_HALF = ir.IntType(16)


def _tile(number: int) -> Any:
    return ir.Constant(ir.IntType(8), number)


def _instruct(builder: Any, name: str, *arguments: Any) -> None:
    """One of LLVM's functions for AMX. It does not check the numbers of tiles."""
    kind = ir.FunctionType(_VOID, [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _bytes_at(builder: Any, pointer: Any, offset: Any) -> Any:
    return builder.gep(builder.bitcast(pointer, _BYTES), [offset])


@intrinsic
def _configure(context, memory, columns):
    """Give this thread tiles of 16 rows, `columns` numbers of fp32 wide; those of the weight are 16 wide. 64 bytes of
    memory hold the description."""

    def generate(context, builder, signature, args):
        memory, columns = args
        width = builder.trunc(builder.mul(columns, LONG(4)), _HALF)
        words = ir.VectorType(LONG, 8)
        builder.store(ir.Constant(words, [1] + [0] * 7), builder.bitcast(memory, words.as_pointer()), align=64)
        for number in range(_COUNT):
            is_of_weight = _OF_WEIGHT <= number < _OF_X
            place = builder.bitcast(_bytes_at(builder, memory, LONG(16 + 2 * number)), _HALF.as_pointer())
            builder.store(_HALF(_ROW) if is_of_weight else width, place, align=2)
            builder.store(_tile(TILE_ROWS), _bytes_at(builder, memory, LONG(48 + number)), align=1)
        _instruct(builder, "ldtilecfg", builder.bitcast(memory, _BYTES))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64), generate


@intrinsic
def _free_tiles(context):
    """The thread has no tiles any more: the system need not keep them."""

    def generate(context, builder, signature, args):
        _instruct(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


def _multiplying(tiles_of_w: int, tiles_of_x: int, unrolled: int) -> Any:
    """An intrinsic that multiplies tiles of the weight with tiles of x, and adds to sums: `(w, w_row, w_step, w_tile,
    x, x_tile, steps, sums, is_first)`.

    Addresses and distances are in bytes: `w_row` apart are the rows of a tile, `w_step` what is multiplied next,
    `w_tile` and `x_tile` the tiles. Tiles of x that follow each other lie side by side. The sums are one tile after
    another, those of a tile of the weight together; they begin with 0 where `is_first`.
    """

    @intrinsic
    def multiply(context, w, w_row, w_step, w_tile, x, x_tile, steps, sums, is_first):
        long = types.int64

        def generate(context, builder, signature, args):
            w, w_row, w_step, w_tile, x, x_tile, steps, sums, is_first = args

            def each(do: Callable[[Any, Any], None]) -> None:
                for number in range(tiles_of_w * tiles_of_x):
                    do(_tile(number), _bytes_at(builder, sums, LONG(number * _TILE)))

            with builder.if_else(builder.icmp_signed("!=", is_first, LONG(0))) as (yes, no):
                with yes:
                    each(lambda tile, place: _instruct(builder, "tilezero", tile))
                with no:
                    each(lambda tile, place: _instruct(builder, "tileloadd64", tile, place, LONG(_ROW)))

            def step(index: Any, turn: int) -> None:
                own_w, own_x = builder.mul(index, w_step), builder.mul(index, LONG(_TILE))
                of_x = [_OF_X + (turn + number) % 2 for number in range(tiles_of_x)]
                for number, tile in enumerate(of_x):
                    place = builder.add(own_x, builder.mul(x_tile, LONG(number)))
                    _instruct(builder, "tileloadd64", _tile(tile), _bytes_at(builder, x, place), LONG(_ROW))
                for number in range(tiles_of_w):
                    tile = _tile(_OF_WEIGHT + (turn + number) % 2)
                    place = builder.add(own_w, builder.mul(w_tile, LONG(number)))
                    _instruct(builder, "tileloadd64", tile, _bytes_at(builder, w, place), w_row)
                    for other, own in enumerate(of_x):
                        _instruct(builder, "tdpbf16ps", _tile(number * tiles_of_x + other), tile, _tile(own))

            turns = builder.sdiv(steps, LONG(unrolled))
            with cgutils.for_range(builder, turns) as loop:
                for turn in range(unrolled):
                    step(builder.add(builder.mul(loop.index, LONG(unrolled)), LONG(turn)), turn)
            done = builder.mul(turns, LONG(unrolled))
            with cgutils.for_range(builder, builder.sub(steps, done)) as loop:
                step(builder.add(done, loop.index), 0)
            each(lambda tile, place: _instruct(builder, "tilestored64", tile, place, LONG(_ROW)))
            return context.get_dummy_value()

        return types.void(w, long, long, long, x, long, long, FLOATS, long), generate

    return multiply


_few, _one, _many = _multiplying(2, 1, 4), _multiplying(1, 1, 1), _multiplying(2, 2, 1)


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square of 16 vectors of 16 lanes: of blocks of 1, 2, 4 and 8 rows and columns, those beside the
    diagonal change places."""
    rows, lanes, size = rows.copy(), range(TILE_ROWS), 1
    while size < TILE_ROWS:
        left = [TILE_ROWS + lane - size if lane & size else lane for lane in lanes]
        right = [TILE_ROWS + lane if lane & size else lane + size for lane in lanes]
        for first in (row for row in range(TILE_ROWS) if not row & size):
            upper, lower = rows[first], rows[first + size]
            for place, chosen in ((first, left), (first + size, right)):
                rows[place] = builder.shuffle_vector(upper, lower, ir.Constant(ir.VectorType(INT, TILE_ROWS), chosen))
        size *= 2
    return rows


def _row_of_tile(builder: Any, pointer: Any, count: Any) -> Any:
    """16 pairs of numbers as bfloat16, zeros from the first `count` numbers on."""
    element = pointer.type.pointee
    vector = ir.VectorType(element, TILE_NUMBERS)
    place, size = builder.bitcast(pointer, vector.as_pointer()), size_of(element)
    mask = first_lanes(builder, builder.select(builder.icmp_signed("<", count, LONG(0)), LONG(0), count), TILE_NUMBERS)
    kind = ir.FunctionType(vector, [place.type, INT, mask.type, vector])
    name = f"llvm.masked.load.v{TILE_NUMBERS}i{8 * size}.p0"
    load = cgutils.get_or_insert_function(builder.module, kind, name)
    value = builder.call(load, [place, INT(size), mask, ir.Constant(vector, [0] * TILE_NUMBERS)])
    if size == 1:
        wide = builder.sitofp(value, ir.VectorType(ir.FloatType(), TILE_NUMBERS))
        bits = builder.bitcast(wide, ir.VectorType(INT, TILE_NUMBERS))
        high = builder.lshr(bits, ir.Constant(bits.type, [16] * TILE_NUMBERS))
        value = builder.trunc(high, ir.VectorType(_HALF, TILE_NUMBERS))
    return builder.bitcast(value, ir.VectorType(INT, TILE_ROWS))


def _copying(is_turned: bool) -> Any:
    """An intrinsic that copies up to 32 numbers of up to 16 rows into a tile, zeros follow: `(x, x_stride, rows, count,
    tile)`. `is_turned`: pairs of numbers change places, rows for columns."""

    @intrinsic
    def copy(context, x, x_stride, rows, count, tile):
        long = types.int64

        def generate(context, builder, signature, args):
            x, x_stride, rows, count, tile = args
            found = []
            for row in range(TILE_ROWS):
                is_there = builder.icmp_signed("<", LONG(row), rows)
                place = builder.select(is_there, builder.mul(x_stride, LONG(row)), LONG(0))
                own = builder.select(is_there, count, LONG(0))
                found.append(_row_of_tile(builder, builder.gep(x, [place]), own))
            for row, value in enumerate(_turned(builder, found) if is_turned else found):
                to = builder.bitcast(_bytes_at(builder, tile, LONG(_ROW * row)), value.type.as_pointer())
                builder.store(value, to, align=_ROW)
            return context.get_dummy_value()

        return types.void(x, long, long, long, FLOATS), generate

    return copy


_copy, _copy_turned = _copying(is_turned=False), _copying(is_turned=True)


@intrinsic
def _write(context, sums, scale, is_scaled, out, out_stride, rows, width):
    """Write a tile of sums, rows of the weight by rows of x, as `rows` rows of `width` outputs, times the scale of each
    row of the weight where `is_scaled`."""
    long = types.int64

    def generate(context, builder, signature, args):
        sums, scale, is_scaled, out, out_stride, rows, width = args
        found = []
        for row in range(TILE_ROWS):
            place = builder.bitcast(_bytes_at(builder, sums, LONG(_ROW * row)), VECTOR.as_pointer())
            value = builder.load(place)
            value.align = _ROW
            found.append(value)
        mask = first_lanes(builder, width, TILE_ROWS)
        kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), INT, mask.type, VECTOR])
        load = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{TILE_ROWS}f32.p0")
        ones = ir.Constant(VECTOR, [1.0] * TILE_ROWS)
        scaled = builder.icmp_signed("!=", is_scaled, LONG(0))
        wanted = builder.and_(mask, repeated(builder, scaled, TILE_ROWS))
        factors = builder.call(load, [builder.bitcast(scale, VECTOR.as_pointer()), INT(4), wanted, ones])
        for row, value in enumerate(_turned(builder, found)):
            with builder.if_then(builder.icmp_signed("<", LONG(row), rows)):
                own = narrowed(builder, builder.fmul(value, factors), _HALF)
                place = builder.gep(out, [builder.mul(out_stride, LONG(row))])
                to = builder.bitcast(place, own.type.as_pointer())
                kind = ir.FunctionType(_VOID, [own.type, to.type, INT, mask.type])
                name = f"llvm.masked.store.v{TILE_ROWS}i16.p0"
                store = cgutils.get_or_insert_function(builder.module, kind, name)
                builder.call(store, [own, to, INT(2), mask])
        return context.get_dummy_value()

    return types.void(FLOATS, FLOATS, long, out, long, long, long), generate


def make_tiles(args, kind, first, last):
    """The tiles of 16 rows each, `[first, last)` of x, zeros behind its rows and numbers."""
    a = numbers(args, INDEX)
    x, tiles, stride, rows, length, steps = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3], a[4], a[5]
    for tile in range(first, last):
        own, count = at(x, tile * TILE_ROWS * stride), min(TILE_ROWS, rows - tile * TILE_ROWS)
        for step in range(steps):
            done = step * TILE_NUMBERS
            _copy_turned(
                at(own, done), stride, count, length - done, at(tiles, (tile * steps + step) * _FLOATS_OF_TILE)
            )


@compiled_inline
def _multiply_few(x, w, w_stride, size, scale, is_scaled, out, out_stride, shape, copied, sums):
    """The products of up to 16 rows of x with some rows of the weight. `size`: bytes of its numbers; `shape`: rows of
    x, rows of the weight, length and steps."""
    rows, columns, length, steps = shape
    whole, row, column = (length // TILE_NUMBERS if size == 2 else 0), w_stride * size, 0
    while column < columns:
        own, width = at(w, column * w_stride), min(TILE_ROWS, columns - column)
        if columns - column >= 2 * TILE_ROWS and whole > 0:
            _few(own, row, _ROW, TILE_ROWS * row, x, 0, whole, sums, 1)
            done, tiles = whole, 2
        elif width == TILE_ROWS and whole > 0:
            _one(own, row, _ROW, 0, x, 0, whole, sums, 1)
            done, tiles = whole, 1
        else:
            done, tiles = 0, 1
        for tile in range(tiles):
            total, rest = at(sums, tile * _FLOATS_OF_TILE), at(w, (column + tile * TILE_ROWS) * w_stride)
            for step in range(done, steps):
                place = step * TILE_NUMBERS
                _copy(at(rest, place), w_stride, width, length - place, copied)
                _one(copied, _ROW, 0, 0, at(x, step * _FLOATS_OF_TILE), 0, 1, total, 1 if step == 0 else 0)
            place = column + tile * TILE_ROWS
            _write(total, at(scale, place), is_scaled, at(out, place), out_stride, rows, width)
        column += tiles * TILE_ROWS


@compiled_inline
def _multiply_many(x, w, w_stride, scale, is_scaled, out, out_stride, shape, copied, sums):
    """The products of any number of rows of x with up to WIDTH rows of the weight. `shape`: as of `_multiply_few`."""
    rows, columns, length, steps = shape
    tiles_of_x, tiles_of_w = (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS) * 2, WIDTH // TILE_ROWS
    used = (columns + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS) * 2
    for begin in range(0, steps, STEPS):
        count = min(STEPS, steps - begin)
        for tile in range(used):
            width = max(min(TILE_ROWS, columns - tile * TILE_ROWS), 0)
            own = at(w, tile * TILE_ROWS * w_stride) if width > 0 else w
            for step in range(count):
                place = (begin + step) * TILE_NUMBERS
                to = at(copied, (tile * STEPS + step) * _FLOATS_OF_TILE)
                _copy(at(own, place), w_stride, width, length - place, to)
        for of_x in range(0, tiles_of_x, 2):
            own = at(x, (of_x * steps + begin) * _FLOATS_OF_TILE)
            for tile in range(0, used, 2):
                total = at(sums, (of_x * tiles_of_w + tile * 2) * _FLOATS_OF_TILE)
                panel = at(copied, tile * STEPS * _FLOATS_OF_TILE)
                _many(panel, _ROW, _TILE, STEPS * _TILE, own, steps * _TILE, count, total, 1 if begin == 0 else 0)
    for of_x in range(tiles_of_x):
        for tile in range(used):
            place, row, width = tile * TILE_ROWS, of_x * TILE_ROWS, min(TILE_ROWS, columns - tile * TILE_ROWS)
            if width > 0 and row < rows:
                number = of_x // 2 * 2 * tiles_of_w + tile // 2 * 4 + tile % 2 * 2 + of_x % 2
                o, count = at(out, row * out_stride + place), min(TILE_ROWS, rows - row)
                _write(at(sums, number * _FLOATS_OF_TILE), at(scale, place), is_scaled, o, out_stride, count, width)


def multiply_tiles(args, kinds, first, last):
    """Columns `[first, last)`; the kinds are those of the weight, bfloat16 or bytes, and of the output, bfloat16."""
    a = numbers(args, INDEX)
    x, w, scale, out = numbers(a[0], ZERO), numbers(a[1], kinds[0]), numbers(a[2], ZERO), numbers(a[3], kinds[1])
    w_stride, out_stride, rows, length, steps, size, is_scaled = a[4], a[5], a[6], a[7], a[8], a[9], a[10]
    tiles_of_x = (rows + 2 * TILE_ROWS - 1) // (2 * TILE_ROWS) * 2
    panel = STEPS * WIDTH * TILE_NUMBERS // 2
    memory = allocate(_ROW // 4 + panel + tiles_of_x * TILE_ROWS * WIDTH)
    description = numbers(memory, ZERO)
    copied, sums = at(description, _ROW // 4), at(description, _ROW // 4 + panel)
    _configure(description, min(rows, TILE_ROWS))
    if rows <= TILE_ROWS:
        shape = rows, last - first, length, steps
        own, o = at(w, first * w_stride), at(out, first)
        _multiply_few(x, own, w_stride, size, at(scale, first), is_scaled, o, out_stride, shape, copied, sums)
    else:
        for column in range(first, last, WIDTH):
            shape = rows, min(WIDTH, last - column), length, steps
            own, o = at(w, column * w_stride), at(out, column)
            _multiply_many(x, own, w_stride, at(scale, column), is_scaled, o, out_stride, shape, copied, sums)
    _free_tiles()
    release(memory)
