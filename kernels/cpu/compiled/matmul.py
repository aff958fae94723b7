"""Matrix products, batch invariant by construction and as fast as a weight can be read.

An output is the sum of the products along a row of x and a row of the weight, always in the same order
(`hybrid.kernels.cpu.compiled.vectors`). Neither the number of rows nor a row's place, neighbours or address matters,
nor the number of threads: each takes some of the outputs.

*Few rows of x*: several outputs are computed together, in tiles of up to 6 rows of x and some rows of the weight, so
that what is loaded is used several times. All rows of x are multiplied with some rows of the weight; meanwhile the next
ones are asked for.

*Many rows of x* are copied first, in the order in which they are used. An output is a sum of `LANES` partial sums.
`tiles.tile` keeps all those of an output in one vector, and loads a vector for each row and step. Here a vector holds
the same partial sum of `LANES` outputs: it is multiplied with single numbers of x, so that a step loads less for as
many products, and lanes are never added up within a vector. All products of partial sum 0 come first, then those of
another one: each is added up in the same order, and they are added to each other in the same pairs. So the bits are
those of `tiles.tile`.

What a step takes lies together in a *panel*: the elements of a lane, one after another, of PANEL_ROWS rows of x or of
PANEL_COLUMNS rows of the weight; of bfloat16 numbers pairs, where the CPU multiplies them (`target.HAS_PAIRS`): each is
as wide as a number of fp32. The weight's panels are made by the thread that uses them and stay in the CPU's second
cache, and while one is used the rows of the next one are asked for. The panels of x are made once. (Goto, van de Geijn,
"Anatomy of high-performance matrix multiplication", 2008.)
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import LONG_ROW, is_read_by_rows, tile
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    INT,
    LINE,
    LONG,
    ZERO,
    ZEROS,
    add_product_of,
    allocate,
    are_pairs,
    at,
    first_lanes,
    get,
    load_lanes,
    load_pairs,
    looped,
    numbers,
    prefetch,
    put,
    release,
    repeated,
    rows_of_x,
    store_lanes,
)
from hybrid.kernels.cpu.target import (
    COLUMNS,
    HAS_WIDE_REGISTERS,
    LANES,
    PANEL_COLUMNS,
    PANEL_ROWS,
    PANEL_VECTORS,
)


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
    """Columns `[first, last)`; the kinds are those of the weight and of the output.

    There may be several weights, one behind the other, for rows that follow each other: where the rows of each end is
    in memory, for each weight and again for each.
    """
    a = numbers(args, INDEX)
    x, w, scale, out = rows_of_x(a[0], kinds), numbers(a[1], kinds[0]), numbers(a[2], ZERO), numbers(a[3], kinds[1])
    x_stride, w_stride, out_stride, rows, length = a[4], a[5], a[6], a[7], a[8]
    ends, parts, weights, of_weight = numbers(a[9], INDEX), a[10], a[11], a[12]
    start = 0
    for part in range(parts):
        end = ends[part] if a[9] != 0 else rows
        if start < end:
            own = at(w, part % weights * of_weight)
            y, z = at(x, start * x_stride), at(out, start * out_stride)
            for column in range(first, last, COLUMNS):
                width = min(COLUMNS, last - column)
                b, s, o = at(own, column * w_stride), at(scale, column), at(z, column)
                multiply_rows(y, x_stride, b, w_stride, s, o, out_stride, end - start, width, length)
        start = end


def arrange(args, kind, first, last):
    """Rows `[first, last)` of x as fp32, zeros behind them, in the order in which they are multiplied: where pairs of
    bfloat16 numbers are, of each 2 * LANES those at odd places, then those at even ones."""
    a = numbers(args, INDEX)
    x, y, stride, size, width, is_paired = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3], a[4], a[5] != 0
    for row in range(first, last):
        for start in range(0, width, 2 * LANES):
            own, out = at(x, row * stride + start), at(y, row * width + start)
            if start + 2 * LANES > size:
                for i in range(2 * LANES):
                    place = i if not is_paired else i // 2 + (LANES if i % 2 == 0 else 0)
                    put(out, place, get(own, i) if start + i < size else ZERO)
            elif is_paired:
                for i in range(LANES):
                    put(out, i, get(own, 2 * i + 1))
                    put(out, LANES + i, get(own, 2 * i))
            else:
                for i in range(2 * LANES):
                    put(out, i, get(own, i))


# Many rows of x

_PART = PANEL_ROWS // 3
"""Rows of x in a part of a panel: of the last panel only the parts that have rows are multiplied."""

MAX_NEAR = 1 << 21
"""Elements of x whose panels stay in the CPU's last cache, while all rows of the weight are multiplied with them."""

MAX_PANELS, MAX_NEAREST = 4, 3 << 14
"""Panels of the weight, at most, that are made at once, and their elements, which stay in the second cache with panels
of x: more panels read x less often."""

TILES = 2
"""Panels of x that are multiplied with the same lane of a panel of the weight while it is in the first cache."""

LEVELS = LANES.bit_length()
"""Sums that are kept of an output: a partial sum, and sums of 2, 4, ... partial sums."""

ORDER: tuple[int, ...] = tuple(int(f"{lane:0{LEVELS - 1}b}"[::-1], 2) for lane in range(LANES))
"""Lanes in the order in which they are computed. Lanes i and i + 8 are added, then i and i + 4, and so on: with the
bits of numbers reversed, two that are added follow each other, and so do two such sums."""

_SQUARE = 8
"""Rows and columns of numbers that are turned at once."""

_ROWS_AT_ONCE = 6
"""Rows of x that are turned at once."""

_BYTE = np.int8(0)

_SIZE = PANEL_ROWS * PANEL_COLUMNS
_SPREAD = 16
"""Numbers between the lanes of a panel, so that they do not begin at the same place of pages of memory."""


def _shuffled(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT, len(lanes)), lanes))


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of a square: of blocks of 1, 2 and 4 rows and columns, those beside the diagonal change places."""
    rows, lanes = rows.copy(), range(_SQUARE)
    for size in (1, 2, 4):
        for first in (row for row in range(_SQUARE) if not row & size):
            upper, lower = rows[first], rows[first + size]
            left = [_SQUARE + lane - size if lane & size else lane for lane in lanes]
            right = [_SQUARE + lane if lane & size else lane + size for lane in lanes]
            rows[first] = _shuffled(builder, upper, lower, left)
            rows[first + size] = _shuffled(builder, upper, lower, right)
    return rows


def _copy_turned(builder: Any, rows: list[Any], panel: Any, of_lane: Any) -> None:
    """Write the columns of up to _SQUARE vectors to the lanes of a panel."""
    filled = rows + rows[:1] * (_SQUARE - len(rows))
    for first in range(0, LANES, _SQUARE):
        square = [_shuffled(builder, row, row, [*range(first, first + _SQUARE)]) for row in filled]
        for lane, column in enumerate(_turned(builder, square), start=first):
            to = builder.gep(panel, [builder.mul(of_lane, LONG(ORDER.index(lane)))])
            _store(builder, column, to, len(rows))


def _turning(rows: int, of_step: int) -> Any:
    """An intrinsic that copies LANES numbers, or pairs of bfloat16 numbers, of each of `rows` rows, so that those of a
    lane follow each other: `(x, x_stride, kinds, count, width, panel, of_lane)`.

    There are `count` rows, the last one is repeated, and `width` numbers, zeros follow. x is a pointer to numbers of
    any type, `kinds` are those of the product, which say whether they are taken in pairs; the panel is a pointer to
    fp32, its lanes are in the order `ORDER`, `of_lane` apart, and its steps `of_step`.
    """

    @intrinsic
    def turn(context, x, x_stride, kinds, count, width, panel, of_lane):
        long = types.int64

        def generate(context, builder, signature, args):
            x, x_stride, _, count, width, panel, of_lane = args
            last, is_paired = builder.sub(count, LONG(1)), are_pairs(kinds)
            taken = 2 * LANES if is_paired else LANES

            def load(row: int, mask: Any | None) -> list[Any]:
                at_row = builder.select(builder.icmp_signed("<", LONG(row), count), LONG(row), last)
                place = builder.mul(x_stride, at_row)
                if is_paired:
                    return load_pairs(builder, x, place, mask)
                return [load_lanes(builder, x, place, mask)]

            def copy(mask: Any | None) -> None:
                for step, found in enumerate(zip(*(load(row, mask) for row in range(rows)), strict=True)):
                    own = builder.gep(panel, [LONG(step * of_step)])
                    _copy_turned(builder, [*found], own, of_lane)

            with builder.if_else(builder.icmp_signed(">=", width, LONG(taken))) as (whole, part):
                with whole:
                    copy(None)
                with part:
                    copy(first_lanes(builder, width, taken))
            return context.get_dummy_value()

        return types.void(x, long, kinds, long, long, FLOATS, long), generate

    return turn


def _store(builder: Any, vector: Any, pointer: Any, count: int) -> None:
    """Write the first `count` numbers of a vector, and nothing behind them: another thread may write there."""
    first = 0
    while first < count:
        size = 1 << ((count - first).bit_length() - 1)
        part = _shuffled(builder, vector, vector, [*range(first, first + size)])
        place = builder.bitcast(builder.gep(pointer, [LONG(first)]), part.type.as_pointer())
        builder.store(part, place, align=4)
        first += size


_turn_x, _turn_w = _turning(_ROWS_AT_ONCE, PANEL_ROWS), _turning(_SQUARE, PANEL_COLUMNS)


def _adding(rows: int) -> Any:
    """An intrinsic that computes a lane of the products of the first `rows` rows of a panel of x and one of the weight;
    `kinds` are those of the product: `(x, w, kinds, steps, sums, finished)`.

    `sums`: LEVELS sums of each output. The first `finished` of them are added to the lane, and the next one becomes the
    result.
    """

    @intrinsic
    def add_lane(context, x, w, kinds, steps, sums, finished):
        def generate(context, builder, signature, args):
            x, w, _, steps, sums, finished = args
            places = [LONG(number * LANES) for number in range(rows * PANEL_VECTORS)]

            def multiply(index: Any, before: list[Any]) -> list[Any]:
                own_x = builder.gep(x, [builder.mul(index, LONG(PANEL_ROWS))])
                own_w = builder.mul(index, LONG(PANEL_COLUMNS))
                others = [
                    load_lanes(builder, w, builder.add(own_w, LONG(LANES * vector))) for vector in range(PANEL_VECTORS)
                ]
                found = []
                for row in range(rows):
                    own = repeated(builder, builder.load(builder.gep(own_x, [LONG(row)])))
                    for total, other in zip(
                        before[row * PANEL_VECTORS : (row + 1) * PANEL_VECTORS], others, strict=True
                    ):
                        found.append(add_product_of(builder, own, other, total, are_pairs(kinds)))
                return found

            def add(level: Any, before: list[Any]) -> list[Any]:
                kept = builder.gep(sums, [builder.mul(level, LONG(_SIZE))])
                return [
                    builder.fadd(load_lanes(builder, kept, place), own)
                    for place, own in zip(places, before, strict=True)
                ]

            lane = looped(builder, LONG(0), steps, [ZEROS] * len(places), multiply)
            result = builder.gep(sums, [builder.mul(finished, LONG(_SIZE))])
            for place, total in zip(places, looped(builder, LONG(0), finished, lane, add), strict=True):
                store_lanes(builder, total, result, place)
            return context.get_dummy_value()

        return types.void(FLOATS, FLOATS, kinds, types.int64, FLOATS, types.int64), generate

    return add_lane


_add_lane_1, _add_lane_2, _add_lane = _adding(_PART), _adding(2 * _PART), _adding(PANEL_ROWS)


@intrinsic
def _ask(context, memory, index):
    """Ask for the cache line of a byte."""

    def generate(context, builder, signature, args):
        prefetch(builder, *args)
        return context.get_dummy_value()

    return types.void(memory, types.int64), generate


def make_panels(args, kind, first, last):
    """The panels `[first, last)` of x."""
    a = numbers(args, INDEX)
    x, panels, x_stride, rows, length, steps = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3], a[4], a[5]
    taken, made = a[6], a[7]
    for row in range(first * PANEL_ROWS, min(last * PANEL_ROWS, rows), _ROWS_AT_ONCE):
        own, count = at(x, row * x_stride), min(_ROWS_AT_ONCE, rows - row)
        panel = at(panels, row // PANEL_ROWS * PANEL_ROWS * LANES * steps + row % PANEL_ROWS)
        for step in range(steps // made):
            place = at(panel, step * made * PANEL_ROWS)
            _turn_x(
                at(own, step * taken), x_stride, (kind, kind), count, length - step * taken, place, steps * PANEL_ROWS
            )


@compiled_inline
def _make_panel_of_weight(w, w_stride, kinds, rows, length, steps, panel, of_lane):
    """A panel of up to PANEL_COLUMNS rows of the weight. `steps`: of the panel, numbers taken of a row for some of
    them, and how many are made of these."""
    count_of_steps, taken, made = steps
    for step in range(count_of_steps // made):  # of all rows before the next step: what they write lies side by side
        for row in range(0, rows, _SQUARE):
            own, count = at(w, row * w_stride), min(_SQUARE, rows - row)
            place = at(panel, step * made * PANEL_COLUMNS + row)
            _turn_w(at(own, step * taken), w_stride, kinds, count, length - step * taken, place, of_lane)


@compiled_inline
def _write(out, sums, scale, width, is_scaled):
    """Write the outputs of a row and a panel, times the scale of a weight that has one."""
    if is_scaled:
        for column in range(width):
            put(out, column, get(sums, column) * get(scale, column))
    elif width == PANEL_COLUMNS:
        for column in range(PANEL_COLUMNS):
            put(out, column, get(sums, column))
    else:
        for column in range(width):
            put(out, column, get(sums, column))


@compiled_inline
def _multiply_tiles(x, w, kinds, of_lane, rows, steps, sums, ahead, lines):
    """The products of panels of `rows` rows of x with one of the weight: the last of the LEVELS sums of each output.
    Meanwhile some lines of memory from `ahead` on are asked for."""
    for lane in range(LANES):
        finished = 0
        while lane >> finished & 1:
            finished += 1
        other = at(w, lane * of_lane)
        for part in range((rows + PANEL_ROWS - 1) // PANEL_ROWS):
            own, kept = at(x, (part * LANES + lane) * steps * PANEL_ROWS), at(sums, part * LEVELS * _SIZE)
            left = rows - part * PANEL_ROWS
            if left > 2 * _PART:
                _add_lane(own, other, kinds, steps, kept, finished)
            elif left > _PART:
                _add_lane_2(own, other, kinds, steps, kept, finished)
            else:
                _add_lane_1(own, other, kinds, steps, kept, finished)
        for line in range(lines * lane // LANES, lines * (lane + 1) // LANES):
            _ask(ahead, line * LINE)


def multiply_panels(args, kinds, first, last):
    """Columns `[first, last)`; the kinds are those of the weight and of the output."""
    a = numbers(args, INDEX)
    x, w, scale, out = numbers(a[0], ZERO), numbers(a[1], kinds[0]), numbers(a[2], ZERO), numbers(a[3], kinds[1])
    w_stride, out_stride, rows, length, steps, of_row, is_scaled = a[4], a[5], a[6], a[7], a[8], a[9], a[2] != 0
    steps_of_panel = steps, a[10], a[11]
    of_lane, at_once = steps * PANEL_COLUMNS + _SPREAD, TILES * PANEL_ROWS
    of_panel = LANES * of_lane
    most = max(min(MAX_NEAREST // of_panel, MAX_PANELS), 1) * PANEL_COLUMNS
    near = max(MAX_NEAR // max(length, 1) // at_once, 1) * at_once
    memory = allocate(TILES * LEVELS * _SIZE + most // PANEL_COLUMNS * of_panel)
    sums = numbers(memory, ZERO)
    panels = at(sums, TILES * LEVELS * _SIZE)
    for begin in range(0, rows, near):
        end = min(begin + near, rows)
        for block in range(first, last, most):
            following = min(block + most, last)
            for column in range(block, following, PANEL_COLUMNS):
                own, panel = at(w, column * w_stride), at(panels, (column - block) // PANEL_COLUMNS * of_panel)
                _make_panel_of_weight(
                    own, w_stride, kinds, min(PANEL_COLUMNS, last - column), length, steps_of_panel, panel, of_lane
                )
            ahead, lines = numbers(a[1] + following * of_row, _BYTE), min(most, last - following) * of_row // LINE
            parts = (end - begin + at_once - 1) // at_once * ((following - block + PANEL_COLUMNS - 1) // PANEL_COLUMNS)
            part = 0
            for row in range(begin, end, at_once):
                own, count = at(x, row * LANES * steps), min(at_once, end - row)
                for column in range(block, following, PANEL_COLUMNS):
                    panel, asked = at(panels, (column - block) // PANEL_COLUMNS * of_panel), lines * part // parts
                    part += 1
                    more = lines * part // parts - asked
                    _multiply_tiles(own, panel, kinds, of_lane, count, steps, sums, at(ahead, asked * LINE), more)
                    for i in range(count):
                        place = (i // PANEL_ROWS * LEVELS + LEVELS - 1) * _SIZE + i % PANEL_ROWS * PANEL_COLUMNS
                        o, s = at(out, (row + i) * out_stride + column), at(scale, column)
                        _write(o, at(sums, place), s, min(PANEL_COLUMNS, last - column), is_scaled)
    release(memory)
