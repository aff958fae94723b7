"""Mamba-2's state space rule over state slots, chunk by chunk and token by token, and what its layers do beside it.

In a chunk, with d the log of the decay since its start, S the state before it and v = dt x,
y = exp(d) C S + M v with M[i, j] = exp(d_i - d_j) C_i B_j for j <= i, and the state after it is
exp(d_last) S + sum of exp(d_last - d_i) B_i v_i (Dao and Gu, "Transformers are SSMs", 2024).
"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import add_product, dot
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    LONG,
    ZERO,
    ZEROS,
    allocate,
    as_float,
    at,
    exp,
    first_lanes,
    fma,
    fma_of,
    get,
    load_lanes,
    looped,
    numbers,
    put,
    release,
    repeated,
    sigmoid,
    softplus,
    store_lanes,
)
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.kernels.cpu.target import HAS_WIDE_REGISTERS, LANES

_TOGETHER = 4
"""Tokens that get at once what the tokens before them give: as many rows as a tile of `add_product` has."""

_VECTORS = 4 if HAS_WIDE_REGISTERS else 2
"""Vectors of a state's columns that one sweep over its rows changes."""

_ONE = np.float32(1)


@compiled_inline
def _clear(x, count):
    for i in range(count):
        put(x, i, ZERO)


@compiled_inline
def _copy(source, target, count):
    for i in range(count):
        put(target, i, get(source, i))


# Prompts


@compiled_inline
def _shared(b, c, of_b, of_c, memory, count, chunk, size):
    """What the heads of a group have in common in a chunk: C as fp32, B turned, and the products of each C with the Bs
    up to its own, and up to the end of that one's vector."""
    rows = memory
    turned = at(rows, chunk * size)
    products = at(turned, size * chunk)
    for i in range(count):
        for m in range(size):
            put(rows, i * size + m, get(c, i * of_c + m))
            put(turned, m * chunk + i, get(b, i * of_b + m))
    _clear(products, chunk * chunk)
    for row in range(0, count, LANES):
        many, width = min(LANES, count - row), min(row + LANES, count)
        add_product(at(products, row * chunk), chunk, at(rows, row * size), size, turned, chunk, many, size, width)


@compiled_inline
def _chunk(x, dt, rate, y, state, shared, memory, strides, count, chunk, size, dim):
    """One chunk of a head; x, dt and y are at its first token, `state` is changed in place."""
    of_x, of_dt, of_y = strides
    rows = shared
    turned = at(rows, chunk * size)
    products = at(turned, size * chunk)
    inner, v = memory, at(memory, chunk * chunk)
    out = at(v, chunk * dim)
    decay = at(out, chunk * dim)
    total = ZERO
    for i in range(count):
        step = get(dt, i * of_dt)
        total += step * rate
        put(decay, i, total)
        for j in range(dim):
            put(v, i * dim + j, get(x, i * of_x + j) * step)
    for i in range(count):
        own = get(decay, i)
        for j in range(i + 1):
            put(inner, i * chunk + j, exp(own - get(decay, j)) * get(products, i * chunk + j))
    _clear(out, chunk * dim)
    add_product(out, dim, rows, size, state, dim, count, size, dim)
    for i in range(count):
        grown = exp(get(decay, i))
        for j in range(dim):
            put(out, i * dim + j, grown * get(out, i * dim + j))
    for first in range(0, count, _TOGETHER):
        many, own = min(_TOGETHER, count - first), at(out, first * dim)
        add_product(own, dim, at(inner, first * chunk), chunk, v, dim, many, first, dim)
        for i in range(many):
            within = at(inner, (first + i) * chunk + first)
            add_product(at(own, i * dim), dim, within, chunk, at(v, first * dim), dim, 1, i + 1, dim)
            _copy(at(own, i * dim), at(y, (first + i) * of_y), dim)
    for i in range(count):
        left = exp(total - get(decay, i))
        for j in range(dim):
            put(v, i * dim + j, left * get(v, i * dim + j))
    grown = exp(total)
    for i in range(size * dim):
        put(state, i, grown * get(state, i))
    add_product(state, dim, turned, chunk, v, dim, size, count, dim)


def scan(args, kind, first, last):
    """The heads `[first, last)` of all requests, chunk by chunk: those of a group share the products of a chunk."""
    a = numbers(args, INDEX)
    x, dt, b, c = numbers(a[0], kind), numbers(a[1], ZERO), numbers(a[2], kind), numbers(a[3], kind)
    rate, state, y = numbers(a[4], ZERO), numbers(a[5], ZERO), numbers(a[10], ZERO)
    starts, reads, writes = numbers(a[6], INDEX), numbers(a[7], INDEX), numbers(a[8], INDEX)
    captures = numbers(a[9], INDEX)
    of_x, of_dt, of_b, of_c, of_y, of_slot = a[11], a[12], a[13], a[14], a[15], a[16]
    requests, num_captures, group, size, dim, chunk = a[17], a[18], a[19], a[20], a[21], a[22]
    matrix, strides = size * dim, (of_x, of_dt, of_y)
    place, many = first * matrix, (last - first) * matrix
    scratch = allocate(many + chunk * (2 * size + 2 * chunk + 2 * dim + 1))
    current = numbers(scratch, ZERO)
    shared = at(current, many)
    memory = at(shared, chunk * (2 * size + chunk))
    for request in range(requests):
        start, end = starts[request], starts[request + 1]
        _copy(at(state, reads[request] * of_slot + place), current, many)
        for token in range(start, end, chunk):
            count = min(chunk, end - token)
            for head in range(first, last):
                if head == first or head % group == 0:
                    of_group = head // group * size
                    own_b, own_c = at(b, token * of_b + of_group), at(c, token * of_c + of_group)
                    _shared(own_b, own_c, of_b, of_c, shared, count, chunk, size)
                own, out = at(x, token * of_x + head * dim), at(y, token * of_y + head * dim)
                steps, before = at(dt, token * of_dt + head), at(current, (head - first) * matrix)
                _chunk(own, steps, get(rate, head), out, before, shared, memory, strides, count, chunk, size, dim)
            for i in range(num_captures):
                if captures[3 * i] == request and captures[3 * i + 1] == token + chunk - start:
                    _copy(current, at(state, captures[3 * i + 2] * of_slot + place), many)
        if writes[request] >= 0:
            _copy(current, at(state, writes[request] * of_slot + place), many)
    release(scratch)


# Decoded tokens


def _sweep(vectors: int, is_narrow: bool = False) -> Any:
    """An intrinsic that goes once over `vectors` times LANES columns of a state, or `width` where it `is_narrow`:
    `(old, new, stride, size, decay, b, c, v, out, width)`. `new`, which may be `old`, becomes `decay old + b v`, and
    `out` the product of c with it, added up in the order of rows."""

    @intrinsic
    def sweep(context, old, new, stride, size, decay, b, c, v, out, width):
        def generate(context, builder, signature, args):
            old, new, stride, size, decay, b, c, v, out, width = args
            mask = first_lanes(builder, width) if is_narrow else None
            columns = [LONG(vector * LANES) for vector in range(vectors)]
            values = [load_lanes(builder, v, column, mask) for column in columns]
            factor = repeated(builder, decay)

            def step(index: Any, totals: list[Any]) -> list[Any]:
                row = builder.mul(index, stride)
                written, read = (repeated(builder, builder.load(builder.gep(each, [index]))) for each in (b, c))
                found = []
                for column, value, total in zip(columns, values, totals, strict=True):
                    place = builder.add(row, column)
                    kept = builder.fmul(factor, load_lanes(builder, old, place, mask))
                    changed = fma_of(builder, written, value, kept)
                    store_lanes(builder, changed, new, place, mask)
                    found.append(fma_of(builder, read, changed, total))
                return found

            totals = looped(builder, LONG(0), size, [ZEROS] * vectors, step)
            for column, total in zip(columns, totals, strict=True):
                store_lanes(builder, total, out, column, mask)
            return context.get_dummy_value()

        long = types.int64
        return types.void(FLOATS, FLOATS, long, long, types.float32, FLOATS, FLOATS, FLOATS, FLOATS, long), generate

    return sweep


_sweep_wide, _sweep_narrow = _sweep(_VECTORS), _sweep(1, True)


@compiled_inline
def _step(old, new, decay, b, c, v, out, size, dim):
    """One step of a head."""
    column = 0
    while column < dim:
        left = dim - column
        before, after, value, target = at(old, column), at(new, column), at(v, column), at(out, column)
        if left >= _VECTORS * LANES:
            _sweep_wide(before, after, dim, size, decay, b, c, value, target, left)
            column += _VECTORS * LANES
        else:
            _sweep_narrow(before, after, dim, size, decay, b, c, value, target, min(left, LANES))
            column += LANES


def advance(args, kind, first, last):
    """The heads `[first, last)` of tokens one after another, each of which continues from a slot, or from the token
    before it. One that reads `LEFT_OUT` is not computed."""
    a = numbers(args, INDEX)
    x, dt, b, c = numbers(a[0], kind), numbers(a[1], ZERO), numbers(a[2], kind), numbers(a[3], kind)
    rate, state, y = numbers(a[4], ZERO), numbers(a[5], ZERO), numbers(a[8], ZERO)
    reads, writes = numbers(a[6], INDEX), numbers(a[7], INDEX)
    of_x, of_dt, of_b, of_c, of_y, of_slot = a[9], a[10], a[11], a[12], a[13], a[14]
    tokens, group, size, dim = a[15], a[16], a[17], a[18]
    matrix = size * dim
    place, many = first * matrix, (last - first) * matrix
    scratch = allocate(many + 2 * size + dim)
    spare = numbers(scratch, ZERO)
    own_b = at(spare, many)
    own_c = at(own_b, size)
    v = at(own_c, size)
    old = spare
    for token in range(tokens):
        read, write = reads[token], writes[token]
        if read == LEFT_OUT:
            continue
        if read >= 0:
            old = at(state, read * of_slot + place)
        new = at(state, write * of_slot + place) if write >= 0 else spare
        for head in range(first, last):
            if head == first or head % group == 0:
                of_group = head // group * size
                _copy(at(b, token * of_b + of_group), own_b, size)
                _copy(at(c, token * of_c + of_group), own_c, size)
            step, own = get(dt, token * of_dt + head), at(x, token * of_x + head * dim)
            for j in range(dim):
                put(v, j, get(own, j) * step)
            decay, offset = np.float32(math.exp(np.float64(step * get(rate, head)))), (head - first) * matrix
            out = at(y, token * of_y + head * dim)
            _step(at(old, offset), at(new, offset), decay, own_b, own_c, v, out, size, dim)
        old = new
    release(scratch)


# Rows


def time_steps(args, kind, first, last):
    """Rows `[first, last)`: softplus of dt with its bias, within limits."""
    a = numbers(args, INDEX)
    dt, bias, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], ZERO)
    stride, size, low, high = a[3], a[4], as_float(np.int32(a[5])), as_float(np.int32(a[6]))
    for row in range(first, last):
        for i in range(size):
            soft = softplus(get(dt, row * stride + i) + get(bias, i))
            soft = low if soft < low else soft
            put(y, row * size + i, high if soft > high else soft)


def add_skip(args, kind, first, last):
    """Rows `[first, last)`: `y + d x`, where each head has a d."""
    a = numbers(args, INDEX)
    y, x, d, out = numbers(a[0], ZERO), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], ZERO)
    of_x, heads, dim = a[4], a[5], a[6]
    for row in range(first, last):
        for head in range(heads):
            factor, place = get(d, head), (row * heads + head) * dim
            own = at(x, row * of_x + head * dim)
            for j in range(dim):
                put(out, place + j, fma(factor, get(own, j), get(y, place + j)))


def grouped_gated_norm(args, kind, first, last):
    """Rows `[first, last)`: each group of `x silu(gate)` over its root mean square, times the weight."""
    a = numbers(args, INDEX)
    x, gate, weight, y = numbers(a[0], ZERO), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    of_gate, groups, size, eps = a[4], a[5], a[6], as_float(np.int32(a[7]))
    memory = allocate(size)
    gated = numbers(memory, ZERO)
    for row in range(first, last):
        for group in range(groups):
            place = row * groups * size + group * size
            own, other, factors = at(x, place), at(gate, row * of_gate + group * size), at(weight, group * size)
            for i in range(size):
                z = get(other, i)
                put(gated, i, get(own, i) * (z * sigmoid(z)))
            scale = _ONE / np.float32(math.sqrt(dot(gated, gated, size) / np.float32(size) + eps))
            for i in range(size):
                put(y, place + i, (get(gated, i) * scale) * get(factors, i))
    release(memory)
