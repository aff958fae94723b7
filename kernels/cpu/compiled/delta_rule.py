"""The gated delta rule over state slots: of prompts, chunk by chunk and head by head, and of decoded tokens, with the
convolution before it in one pass; and its gates.

*Prompts.* In a chunk, with d the log of the decay since its start and S the state before it, what the tokens add solves
(I + A) n = beta (v - exp(d) k S), where A[i, j] = beta_i exp(d_i - d_j) k_i k_j for j < i; then
o = exp(d) q S + B n with B[i, j] = exp(d_i - d_j) q_i k_j for j <= i, and the state after it is
exp(d_last) S + sum of exp(d_last - d_i) k_i n_i (Yang et al., "Gated Delta Networks", 2024).

*Decoded tokens.* With o = q S' and S' = d S + k u, where u = b (v - k d S): k S and q S are computed together, so that
a state is read once, changed, and written once. Tokens in a row, each of which continues from the one before it, are a
*run*: while a state is written for one of them, k S and q S of the next one are summed up. Columns of a state are
independent: a few of them go through the whole run, and stay in the first cache.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import add_product, dot
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    LINE,
    LONG,
    NEAR,
    ZERO,
    ZEROS,
    allocate,
    at,
    exp,
    first_lanes,
    fma,
    fma_of,
    get,
    load_lanes,
    looped,
    numbers,
    prefetch,
    put,
    release,
    repeated,
    sigmoid,
    size_of,
    softplus,
    store_lanes,
)
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.kernels.cpu.target import LANES

_TOGETHER = 4
"""Tokens to which what the tokens before them add is added at once: as many rows as a tile of `add_product` has."""

_ONE, _EPS = np.float32(1), np.float32(1e-6)


@compiled_inline
def _clear(x, count):
    for i in range(count):
        put(x, i, ZERO)


@compiled_inline
def _unit_rows(x, stride, y, count, size, factor):
    """Rows of unit length, times a factor."""
    for row in range(count):
        own, out = at(x, row * stride), at(y, row * size)
        scale = factor / np.float32(math.sqrt(dot(own, own, size) + _EPS))
        for i in range(size):
            put(out, i, get(own, i) * scale)


@compiled_inline
def _products_before(y, units, turned, count, chunk, key_dim):
    """Products of the rows of a chunk with its keys up to theirs, and up to the end of that one's vector."""
    _clear(y, chunk * chunk)
    for row in range(0, count, LANES):
        rows, width = min(LANES, count - row), min(row + LANES, count)
        add_product(at(y, row * chunk), chunk, at(units, row * key_dim), key_dim, turned, chunk, rows, key_dim, width)


@compiled_inline
def _chunk(q, k, v, g, beta, y, state, memory, strides, count, chunk, key_dim, value_dim):
    """One chunk of a head; q, k and v are at its first token, `state` is changed in place."""
    of_q, of_k, of_v, of_g, of_beta, of_y = strides
    units_q, units_k = memory, at(memory, chunk * key_dim)
    turned = at(units_k, chunk * key_dim)
    from_q = at(turned, chunk * key_dim)
    from_k = at(from_q, chunk * chunk)
    added, from_state = at(from_k, chunk * chunk), at(from_k, chunk * chunk + chunk * value_dim)
    decay = at(from_state, chunk * value_dim)
    _unit_rows(q, of_q, units_q, count, key_dim, _ONE / np.float32(math.sqrt(np.float32(key_dim))))
    _unit_rows(k, of_k, units_k, count, key_dim, _ONE)
    total = ZERO
    for i in range(count):
        total += get(g, i * of_g)
        put(decay, i, total)
        for m in range(key_dim):
            put(turned, m * chunk + i, get(units_k, i * key_dim + m))
    _products_before(from_k, units_k, turned, count, chunk, key_dim)
    _products_before(from_q, units_q, turned, count, chunk, key_dim)
    for i in range(count):
        rate, own = get(beta, i * of_beta), get(decay, i)
        for j in range(i + 1):
            left = exp(own - get(decay, j))
            put(from_k, i * chunk + j, -rate * left * get(from_k, i * chunk + j))
            put(from_q, i * chunk + j, left * get(from_q, i * chunk + j))
    _clear(added, chunk * value_dim)
    add_product(added, value_dim, units_k, key_dim, state, value_dim, count, key_dim, value_dim)
    _clear(from_state, chunk * value_dim)
    add_product(from_state, value_dim, units_q, key_dim, state, value_dim, count, key_dim, value_dim)
    for i in range(count):
        rate, grown, place = get(beta, i * of_beta), exp(get(decay, i)), i * value_dim
        for j in range(value_dim):
            put(added, place + j, rate * fma(-grown, get(added, place + j), get(v, i * of_v + j)))
        for j in range(value_dim):
            put(from_state, place + j, grown * get(from_state, place + j))
    for first in range(0, count, _TOGETHER):
        rows, own = min(_TOGETHER, count - first), at(added, first * value_dim)
        add_product(own, value_dim, at(from_k, first * chunk), chunk, added, value_dim, rows, first, value_dim)
        for i in range(1, rows):
            within = at(from_k, (first + i) * chunk + first)
            add_product(at(own, i * value_dim), value_dim, within, chunk, own, value_dim, 1, i, value_dim)
    for first in range(0, count, _TOGETHER):
        rows, own = min(_TOGETHER, count - first), at(from_state, first * value_dim)
        add_product(own, value_dim, at(from_q, first * chunk), chunk, added, value_dim, rows, first, value_dim)
        for i in range(rows):
            within, values = at(from_q, (first + i) * chunk + first), at(added, first * value_dim)
            add_product(at(own, i * value_dim), value_dim, within, chunk, values, value_dim, 1, i + 1, value_dim)
            for j in range(value_dim):
                put(y, (first + i) * of_y + j, get(own, i * value_dim + j))
    for i in range(count):
        put(decay, i, exp(total - get(decay, i)))
    for m in range(key_dim):
        for i in range(count):
            put(turned, m * chunk + i, get(decay, i) * get(turned, m * chunk + i))
    grown = exp(total)
    for i in range(key_dim * value_dim):
        put(state, i, grown * get(state, i))
    add_product(state, value_dim, turned, chunk, added, value_dim, key_dim, count, value_dim)


def rule(args, kind, first, last):
    """The value heads `[first, last)` of all requests."""
    a = numbers(args, INDEX)
    q, k, v, beta, y = (
        numbers(a[0], kind),
        numbers(a[1], kind),
        numbers(a[2], kind),
        numbers(a[4], kind),
        numbers(a[10], kind),
    )
    g, state = numbers(a[3], ZERO), numbers(a[5], ZERO)
    starts, reads, writes = numbers(a[6], INDEX), numbers(a[7], INDEX), numbers(a[8], INDEX)
    captures = numbers(a[9], INDEX)
    of_q, of_k, of_v, of_g, of_beta, of_y = strides = a[11], a[12], a[13], a[14], a[15], a[16]
    requests, num_captures, group, key_dim, value_dim, chunk = a[17], a[18], a[19], a[20], a[21], a[22]
    of_slot = a[23]
    matrix = key_dim * value_dim
    scratch = allocate(matrix + chunk * (3 * key_dim + 2 * chunk + 2 * value_dim + 1))
    current = numbers(scratch, ZERO)
    memory = at(current, matrix)
    for request in range(requests):
        start, end = starts[request], starts[request + 1]
        for head in range(first, last):
            before, after = at(state, reads[request] * of_slot), at(state, writes[request] * of_slot)
            for i in range(matrix):
                put(current, i, get(before, head * matrix + i))
            for token in range(start, end, chunk):
                count = min(chunk, end - token)
                key_head = head // group
                own_q, own_k = at(q, token * of_q + key_head * key_dim), at(k, token * of_k + key_head * key_dim)
                own_v, out = at(v, token * of_v + head * value_dim), at(y, token * of_y + head * value_dim)
                own_g, own_beta = at(g, token * of_g + head), at(beta, token * of_beta + head)
                _chunk(
                    own_q,
                    own_k,
                    own_v,
                    own_g,
                    own_beta,
                    out,
                    current,
                    memory,
                    strides,
                    count,
                    chunk,
                    key_dim,
                    value_dim,
                )
                for i in range(num_captures):
                    if captures[3 * i] == request and captures[3 * i + 1] == token + chunk - start:
                        target = at(state, captures[3 * i + 2] * of_slot + head * matrix)
                        for j in range(matrix):
                            put(target, j, get(current, j))
            if writes[request] >= 0:
                for i in range(matrix):
                    put(after, head * matrix + i, get(current, i))
    release(scratch)


@compiled_inline
def _log_decay(a, rate, dt_bias):
    """The log of the decay of a head: `rate * softplus(a + dt_bias)`."""
    return rate * softplus(a + dt_bias)


def delta_gates(args, kind, first, last):
    n = numbers(args, INDEX)
    a, b, rate, dt_bias = numbers(n[0], kind), numbers(n[1], kind), numbers(n[2], ZERO), numbers(n[3], kind)
    g, replaced, of_a, of_b, heads = numbers(n[4], ZERO), numbers(n[5], kind), n[6], n[7], n[8]
    for token in range(first, last):
        for head in range(heads):
            place = token * heads + head
            put(g, place, _log_decay(get(a, token * of_a + head), get(rate, head), get(dt_bias, head)))
            put(replaced, place, sigmoid(get(b, token * of_b + head)))


_VECTORS = 2
"""Vectors of a state's columns that go through a run together: their sums fill the registers of CPUs with 16 of them,
and those of 128 keys half of the first cache."""

_COLUMNS = _VECTORS * LANES

_MAX_RUN = 8
"""Tokens that are computed together. A longer run continues from the state after them."""

_ONE, _EPS = np.float32(1), np.float32(1e-6)


# A key head's inputs: what comes in for its q, for its k and for the values of its heads, side by side


@compiled_inline
def _parts(key_head, key_dim, keys, values):
    """The channels of a key head, as (first of them, number of them, place among those of the head)."""
    return (
        (key_head * key_dim, key_dim, 0),
        (keys + key_head * key_dim, key_dim, key_dim),
        (2 * keys + key_head * values, values, 2 * key_dim),
    )


@compiled_inline
def _turn(weight, taps, width, parts, stride):
    """The weight of some channels, tap by tap: for all tokens numbers that lie side by side."""
    for start, size, place in parts:
        for tap in range(width):
            for c in range(size):
                put(taps, tap * stride + place + c, get(weight, (start + c) * width + tap))


@intrinsic
def _copy(context, source, target, count):
    """Copy `count` numbers."""

    def generate(context, builder, signature, args):
        source, target, count = args
        size = size_of(source.type.pointee)
        cgutils.raw_memcpy(builder, target, source, count, LONG(size), align=size)
        return context.get_dummy_value()

    return types.void(source, source, types.int64), generate


@compiled_inline
def _gather(x, x_stride, y, count, parts, stride):
    """Copy some channels of `count` rows, side by side."""
    for row in range(count):
        for start, size, place in parts:
            _copy(at(x, row * x_stride + start), at(y, row * stride + place), size)


@compiled_inline
def _scatter(x, y, y_stride, count, parts, stride):
    """Copy them back."""
    for row in range(count):
        for start, size, place in parts:
            _copy(at(x, row * stride + place), at(y, row * y_stride + start), size)


@intrinsic
def _ask(context, x, count):
    """Ask for `count` numbers to be in the second cache."""

    def generate(context, builder, signature, args):
        x, count = args

        def line(index: Any, nothing: list[Any]) -> list[Any]:
            prefetch(builder, x, index, NEAR)
            return nothing

        looped(builder, LONG(0), count, [], line, LINE // size_of(x.type.pointee))
        return context.get_dummy_value()

    return types.void(x, types.int64), generate


@compiled_inline
def _ask_for(x, x_stride, count, parts):
    """Ask for some channels of `count` rows."""
    for row in range(count):
        for start, size, _ in parts:
            _ask(at(x, row * x_stride + start), size)


@intrinsic
def _convolve(context, x, taps, y, width, stride):
    """The convolution of `width` rows of `stride` numbers, a multiple of LANES, with as many taps; the newest first."""

    def generate(context, builder, signature, args):
        x, taps, y, width, stride = args
        past = builder.sub(width, LONG(1))
        newest = builder.mul(past, stride)

        def channels(place: Any, nothing: list[Any]) -> list[Any]:
            def tap(index: Any, totals: list[Any]) -> list[Any]:
                at = builder.add(builder.mul(index, stride), place)
                return [fma_of(builder, load_lanes(builder, x, at), load_lanes(builder, taps, at), totals[0])]

            at = builder.add(newest, place)
            first = builder.fmul(load_lanes(builder, x, at), load_lanes(builder, taps, at))
            store_lanes(builder, looped(builder, LONG(0), past, [first], tap)[0], y, place)
            return nothing

        looped(builder, LONG(0), stride, [], channels, LANES)
        return context.get_dummy_value()

    long = types.int64
    return types.void(x, FLOATS, FLOATS, long, long), generate


@compiled_inline
def _convolve_run(inputs, taps, rounded, x, count, width, stride):
    """The convolution with silu of the tokens of a run, after the `width - 1` rows before them."""
    for i in range(count):
        _convolve(at(inputs, i * stride), taps, at(x, i * stride), width, stride)
    for c in range(count * stride):
        put(rounded, c, get(x, c) * sigmoid(get(x, c)))
    for c in range(count * stride):
        put(x, c, get(rounded, c))  # rounded to the type of the model, as the twin has it


@compiled_inline
def _unit(x, y, size, factor):
    """Write x of length 1, times a factor, to y."""
    scale = factor / np.float32(math.sqrt(dot(x, x, size) + _EPS))
    for i in range(size):
        put(y, i, get(x, i) * scale)


# The rule


def _sweep(vectors: int, changes: bool, sums: bool, is_narrow: bool = False) -> Any:
    """An intrinsic that goes once over `vectors` times LANES columns of a state: `(old, old_stride, new, new_stride,
    key_dim, k, added, decay, keys, out, width, ahead, ahead_stride)`.

    Args:
        changes: `new`, which may be `old`, becomes `decay old + k added`, and as much memory is asked for from `ahead`
            on.
        sums: the products of both `keys`, k and q, with what is read or written go to `out`, _COLUMNS apart.
        is_narrow: there are `width` columns, up to LANES.
    """

    @intrinsic
    def sweep(
        context, old, old_stride, new, new_stride, key_dim, k, added, decay, keys, out, width, ahead, ahead_stride
    ):
        def generate(context, builder, signature, args):
            old, old_stride, new, new_stride, key_dim, k, added, decay, keys, out, width, ahead, ahead_stride = args
            mask = first_lanes(builder, width) if is_narrow else None
            columns = [LONG(vector * LANES) for vector in range(vectors)]
            multiplied = [keys, builder.gep(keys, [key_dim])] if sums else []
            others = [load_lanes(builder, added, column) for column in columns] if changes else []
            factor = repeated(builder, decay)

            def number(pointer: Any, index: Any) -> Any:
                return repeated(builder, builder.load(builder.gep(pointer, [index])))

            def change(index: Any, parts: list[Any]) -> Iterator[Any]:
                own, row, far = number(k, index), builder.mul(index, new_stride), builder.mul(index, ahead_stride)
                for column, other, part in zip(columns, others, parts, strict=True):
                    prefetch(builder, ahead, builder.add(far, column), NEAR)
                    value = fma_of(builder, own, other, builder.fmul(factor, part))
                    store_lanes(builder, value, new, builder.add(row, column), mask)
                    yield value

            def step(index: Any, totals: list[Any]) -> list[Any]:
                row = builder.mul(index, old_stride)
                parts = [load_lanes(builder, old, builder.add(row, column), mask) for column in columns]
                if changes:
                    parts = list(change(index, parts))
                rows = [number(pointer, index) for pointer in multiplied]
                products = [(own, part) for own in rows for part in parts]
                return [fma_of(builder, *pair, total) for pair, total in zip(products, totals, strict=True)]

            totals = looped(builder, LONG(0), key_dim, [ZEROS] * (len(multiplied) * vectors), step)
            for i, total in enumerate(totals):
                row, vector = divmod(i, vectors)
                store_lanes(builder, total, out, LONG(row * _COLUMNS + vector * LANES))
            return context.get_dummy_value()

        long, of_state = types.int64, (FLOATS, types.int64)
        numbers_and_place = (FLOATS, FLOATS, types.float32, FLOATS, FLOATS)
        return types.void(*of_state, *of_state, long, *numbers_and_place, long, *of_state), generate

    return sweep


def _columns(vectors: int, is_narrow: bool = False) -> Any:
    """The rule of one head for `vectors` times LANES columns of its state, or `width` where it `is_narrow`, and a run:
    `(count, width, key_dim, tokens, states, spare, sums, ahead)`.

    All pointers are to the first of the columns. `tokens`: k and q of each token, one after the other; its gates, and
    where k q is beyond them; v; the output; each with its stride but for the first. `states`: all slots and their
    stride, where the tokens write, where the run starts and the stride of a row there, that of a row of a slot, and
    whether the last state is kept in `spare` where it goes to no slot. `sums`: place for k S, q S and u. As much memory
    as these columns take is asked for from `ahead` on.
    """
    read = _sweep(vectors, False, True, is_narrow)
    step = _sweep(vectors, True, True, is_narrow)
    change = _sweep(vectors, True, False, is_narrow)

    @compiled_inline
    def rule(count, width, key_dim, tokens, states, spare, sums, ahead):
        units, gates, of_gates, place_of_both, v, of_v, y, of_y = tokens
        recurrent, of_state, writes, old, of_old, of_row, keeps = states
        added = at(sums, 2 * _COLUMNS)
        read(old, of_old, old, of_old, key_dim, units, added, ZERO, units, sums, width, old, of_old)
        for token in range(count):
            own, value, out = at(gates, token * of_gates), at(v, token * of_v), at(y, token * of_y)
            decay, beta, both = get(own, 0), get(own, 1), get(own, place_of_both)
            for j in range(width):
                put(added, j, (get(value, j) - decay * get(sums, j)) * beta)
                put(out, j, fma(both, get(added, j), decay * get(sums, _COLUMNS + j)))
            new, of_new = spare, width
            if writes[token] >= 0:
                new, of_new = at(recurrent, writes[token] * of_state), of_row
            if token > 0:
                ahead = new  # was asked for
            k = at(units, token * 2 * key_dim)
            following = at(k, 2 * key_dim)
            if token + 1 < count:
                step(old, of_old, new, of_new, key_dim, k, added, decay, following, sums, width, ahead, of_row)
            elif keeps or writes[token] >= 0:
                change(old, of_old, new, of_new, key_dim, k, added, decay, k, sums, width, ahead, of_row)
            old, of_old = new, of_new

    return rule


_rule_wide, _rule_narrow = _columns(_VECTORS), _columns(1, True)


@compiled_inline
def _keys_and_gates(x, of_token, inputs, key_dim, head, group):
    """Of one token k and q of length 1, q times the scale, and decay and beta of the value heads `[head, head +
    group)`, with k q after them."""
    (units, gates), (a, b, rate, dt_bias) = of_token, inputs
    k, q = units, at(units, key_dim)
    _unit(x, q, key_dim, _ONE / np.float32(math.sqrt(np.float32(key_dim))))
    _unit(at(x, key_dim), k, key_dim, _ONE)
    for i in range(group):
        put(gates, 2 * i, exp(_log_decay(get(a, head + i), get(rate, head + i), get(dt_bias, head + i))))
        put(gates, 2 * i + 1, sigmoid(get(b, head + i)))
    put(gates, 2 * group, dot(q, k, key_dim))


@compiled_inline
def _continues(reads, token):
    """Whether a token continues from the one before it."""
    return reads[token] < 0 and reads[token] != LEFT_OUT


@compiled_inline
def _first_computed(reads, token, tokens):
    """The first token from one on that is not left out, or the number of tokens."""
    while token < tokens and reads[token] == LEFT_OUT:
        token += 1
    return token


@compiled_inline
def _run_of(reads, token, tokens):
    """The number of tokens from one on that are computed together."""
    count = 1
    while count < _MAX_RUN and token + count < tokens and _continues(reads, token + count):
        count += 1
    return count


def step(args, kind, first, last):
    """The key heads `[first, last)`, each with the channels and value heads that belong to it, for all tokens."""
    n = numbers(args, INDEX)
    mixed, a, b, weight = numbers(n[0], kind), numbers(n[1], kind), numbers(n[2], kind), numbers(n[3], kind)
    rate, dt_bias, conv = numbers(n[4], ZERO), numbers(n[5], kind), numbers(n[6], kind)
    recurrent, output = numbers(n[7], ZERO), numbers(n[10], kind)
    reads, writes = numbers(n[8], INDEX), numbers(n[9], INDEX)
    of_mixed, of_a, of_b, of_window, of_state = n[11], n[12], n[13], n[14], n[15]
    tokens, key_heads, heads, key_dim, value_dim, width = n[16], n[17], n[18], n[19], n[20], n[21]
    group, past, most = heads // key_heads, width - 1, min(tokens, _MAX_RUN)
    keys, values, matrix, of_gates = key_heads * key_dim, group * value_dim, key_dim * value_dim, 2 * group + 1
    channels, own = 2 * keys + heads * value_dim, (2 * key_dim + values + LANES - 1) // LANES * LANES
    scratch = allocate((width + most) * own + 3 * _COLUMNS + group * matrix + most * (2 * key_dim + of_gates))
    taps = numbers(scratch, ZERO)
    x = at(taps, width * own)
    sums = at(x, most * own)
    spare = at(sums, 3 * _COLUMNS)
    units = at(spare, group * matrix)
    gates = at(units, most * 2 * key_dim)
    copied = allocate((past + 2 * most) * own)
    inputs = numbers(copied, kind)
    rounded = at(inputs, (past + most) * own)
    for key_head in range(first, last):
        parts = _parts(key_head, key_dim, keys, values)
        _turn(weight, taps, width, parts, own)
        earliest, slot = _first_computed(reads, 0, tokens), -1
        token = earliest
        while token < tokens:
            count = _run_of(reads, token, tokens)
            if reads[token] >= 0:
                slot = reads[token]
                _gather(at(conv, slot * of_window), channels, inputs, past, parts, own)
            _gather(at(mixed, token * of_mixed), of_mixed, at(inputs, past * own), count, parts, own)
            _convolve_run(inputs, taps, rounded, x, count, width, own)
            for i in range(count):
                gated = at(a, (token + i) * of_a), at(b, (token + i) * of_b), rate, dt_bias
                of_token = at(units, i * 2 * key_dim), at(gates, i * of_gates)
                _keys_and_gates(at(x, i * own), of_token, gated, key_dim, key_head * group, group)
                if writes[token + i] >= 0:
                    window = at(conv, writes[token + i] * of_window)
                    _scatter(at(inputs, (i + 1) * own), window, channels, past, parts, own)
            keeps = token + count < tokens and _continues(reads, token + count)
            next_token = _first_computed(reads, token + count, tokens)
            following, next_head = (next_token, key_head) if next_token < tokens else (earliest, key_head + 1)
            asks = reads[following] >= 0 and next_head < last
            if asks:
                next_parts = _parts(next_head, key_dim, keys, values)
                _ask_for(at(conv, reads[following] * of_window), channels, past, next_parts)
                _ask_for(at(mixed, following * of_mixed), of_mixed, min(count, tokens - following), next_parts)
            for i in range(group):
                head, c = key_head * group + i, 0
                place_of_next = reads[following] * of_state + (next_head * group + i) * matrix
                while c < value_dim:
                    columns = _COLUMNS if value_dim - c >= _COLUMNS else min(LANES, value_dim - c)
                    kept, slots = at(spare, i * matrix + c * key_dim), at(recurrent, head * matrix + c)
                    old, of_old = kept, columns
                    if slot >= 0:
                        old, of_old = at(slots, slot * of_state), value_dim
                    v, y = at(x, 2 * key_dim + i * value_dim + c), at(output, (token * heads + head) * value_dim + c)
                    of_run = units, at(gates, 2 * i), of_gates, 2 * (group - i), v, own, y, heads * value_dim
                    states = slots, of_state, at(writes, token), old, of_old, value_dim, keeps
                    ahead = at(recurrent, place_of_next + c) if asks else old
                    if columns == _COLUMNS:
                        _rule_wide(count, columns, key_dim, of_run, states, kept, sums, ahead)
                    else:
                        _rule_narrow(count, columns, key_dim, of_run, states, kept, sums, ahead)
                    c += columns
            for i in range(past):
                _copy(at(inputs, (count + i) * own), at(inputs, i * own), own)
            slot = writes[token + count - 1]
            token = next_token
    release(scratch)
    release(copied)
