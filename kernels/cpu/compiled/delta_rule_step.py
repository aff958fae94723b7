"""A linear-attention layer's decode step over state slots: convolution and gated delta rule in one pass.

With o = q S' and S' = d S + k u, where u = b (v - k d S): k S and q S are computed together, so that a state is read
once, changed, and written once.
"""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import dot, outer
from hybrid.kernels.cpu.compiled.vectors import (
    FLOATS,
    INDEX,
    LONG,
    NEAR,
    ZERO,
    allocate,
    at,
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
    store_lanes,
)
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.kernels.cpu.target import HAS_WIDE_REGISTERS, LANES

_VECTORS = 4 if HAS_WIDE_REGISTERS else 2
"""Vectors of a state's columns that are read at once: their sums fill the registers."""

_ONE, _TWENTY, _EPS = np.float32(1), np.float32(20), np.float32(1e-6)


@compiled_inline
def _convolve(x, taps, old, new, sums, y, width, channels, first, last):
    """Channels `[first, last)` of a token: the convolution with silu, and the window after it. `old` may be `new`.

    A tap is added to all channels before the next one: loops over channels become vectors."""
    past = width - 1
    for c in range(first, last):
        put(sums, c, get(x, c) * get(taps, past * channels + c))
    for tap in range(past):
        for c in range(first, last):
            put(sums, c, fma(get(old, tap * channels + c), get(taps, tap * channels + c), get(sums, c)))
    for c in range(first, last):
        total = get(sums, c)
        put(y, c, total * sigmoid(total))
    for tap in range(past - 1):
        for c in range(first, last):
            new[tap * channels + c] = old[(tap + 1) * channels + c]
    for c in range(first, last):
        new[(past - 1) * channels + c] = x[c]


@compiled_inline
def _turn(weight, taps, width, channels, first, last):
    """The weight of channels `[first, last)`, tap by tap: for all tokens numbers that lie side by side."""
    for tap in range(width):
        for c in range(first, last):
            put(taps, tap * channels + c, get(weight, c * width + tap))


@compiled_inline
def _unit(x, y, size, factor):
    """Write x of length 1, times a factor, to y."""
    scale = factor / np.float32(math.sqrt(dot(x, x, size) + _EPS))
    for i in range(size):
        put(y, i, get(x, i) * scale)


def _update(vectors: int, is_narrow: bool = False) -> Any:
    """An intrinsic that writes `decay S + k added` for `vectors` times LANES columns of a state: `(new, old, stride,
    key_dim, k, added, decay, width, ahead, asks)`.

    All but `width` and `ahead` are of one state, or numbers; `new` may be `old`. If it `asks`, as much memory is asked
    for from `ahead` on.

    Args:
        is_narrow: there are `width` columns, less than LANES.
    """

    @intrinsic
    def write(context, new, old, stride, key_dim, k, added, decay, width, ahead, asks):
        def generate(context, builder, signature, args):
            new, old, stride, key_dim, k, added, decay, width, ahead, asks = args
            mask = first_lanes(builder, width) if is_narrow else None
            columns = [LONG(vector * LANES) for vector in range(vectors)]
            others = [load_lanes(builder, added, column, mask) for column in columns]
            factor = repeated(builder, decay)

            def step(index: Any, nothing: list[Any]) -> list[Any]:
                row, own = builder.mul(index, stride), repeated(builder, builder.load(builder.gep(k, [index])))
                places = [builder.add(row, column) for column in columns]
                with builder.if_then(asks):
                    for place in places:
                        prefetch(builder, ahead, place, NEAR)
                for place, other in zip(places, others, strict=True):
                    kept = builder.fmul(factor, load_lanes(builder, old, place, mask))
                    store_lanes(builder, fma_of(builder, own, other, kept), new, place, mask)
                return nothing

            looped(builder, LONG(0), key_dim, [], step)
            return context.get_dummy_value()

        long = types.int64
        kinds = (FLOATS, FLOATS, long, long, FLOATS, FLOATS, types.float32, long, FLOATS, types.boolean)
        return types.void(*kinds), generate

    return write


def _columns(vectors: int, is_narrow: bool = False) -> Any:
    """The rule of one head for `vectors` times LANES columns of its state, `width` where it `is_narrow`: `(keys, v,
    decay, beta, old, new, y, sums, sizes, together, width, ahead, asks)`, as `_rule` has them. `together`: k q."""
    sum_up, update = outer(2, vectors, is_narrow), _update(vectors, is_narrow)

    @compiled_inline
    def change(keys, v, decay, beta, old, new, y, sums, sizes, together, width, ahead, asks):
        key_dim, value_dim = sizes
        from_k, from_q = sums, at(sums, value_dim)
        sum_up(sums, value_dim, keys, key_dim, old, value_dim, key_dim, width)
        for j in range(width):
            added = (get(v, j) - decay * get(from_k, j)) * beta
            put(from_k, j, added)
            put(y, j, fma(together, added, decay * get(from_q, j)))
        update(new, old, value_dim, key_dim, keys, from_k, decay, width, ahead, asks)

    return change


_change_wide, _change_1, _change_narrow = _columns(_VECTORS), _columns(1), _columns(1, True)


@compiled_inline
def _rule(keys, v, decay, beta, old, new, y, sums, sizes, ahead, asks):
    """The rule of one head. `old` may be `new`.

    `keys`: k, then q; `sums`: place for k S and q S; `sizes`: of keys and of values. While the state is written, memory
    from `ahead` on is asked for, if it `asks`.
    """
    key_dim, value_dim = sizes
    for j in range(2 * value_dim):
        put(sums, j, ZERO)
    together = dot(at(keys, key_dim), keys, key_dim)
    c = 0
    while c < value_dim:
        own, s, t, o, place, far = at(v, c), at(old, c), at(new, c), at(y, c), at(sums, c), at(ahead, c)
        width = _VECTORS * LANES if value_dim - c >= _VECTORS * LANES else min(LANES, value_dim - c)
        if width == _VECTORS * LANES:
            _change_wide(keys, own, decay, beta, s, t, o, place, sizes, together, width, far, asks)
        elif width == LANES:
            _change_1(keys, own, decay, beta, s, t, o, place, sizes, together, width, far, asks)
        else:
            _change_narrow(keys, own, decay, beta, s, t, o, place, sizes, together, width, far, asks)
        c += width


def step(args, kind, first, last):
    """The key heads `[first, last)`, each with the channels and value heads that belong to it, for all tokens."""
    n = numbers(args, INDEX)
    mixed, a, b, weight = numbers(n[0], kind), numbers(n[1], kind), numbers(n[2], kind), numbers(n[3], kind)
    rate, dt_bias, conv = numbers(n[4], ZERO), numbers(n[5], kind), numbers(n[6], kind)
    recurrent, output = numbers(n[7], ZERO), numbers(n[10], kind)
    reads, writes = numbers(n[8], INDEX), numbers(n[9], INDEX)
    of_mixed, of_a, of_b, of_window, of_state = n[11], n[12], n[13], n[14], n[15]
    tokens, key_heads, heads, key_dim, value_dim, width = n[16], n[17], n[18], n[19], n[20], n[21]
    keys, group = key_heads * key_dim, heads // key_heads
    channels, matrix = 2 * keys + heads * value_dim, key_dim * value_dim
    spare_window, spare_state = allocate((width - 1) * channels), allocate(group * matrix)
    own_window, own_state = numbers(spare_window, kind), numbers(spare_state, ZERO)
    scratch = allocate(channels + 2 * key_dim + 2 * value_dim)
    x = numbers(scratch, ZERO)
    turned = allocate(width * channels)
    taps = numbers(turned, ZERO)
    rounded = allocate(channels)
    z = numbers(rounded, kind)
    k, q, sums = at(x, channels), at(x, channels + key_dim), at(x, channels + 2 * key_dim)
    scale = _ONE / np.float32(math.sqrt(np.float32(key_dim)))
    for key_head in range(first, last):  # the states of its value heads stay in the first cache for all tokens
        window, state = own_window, own_state
        parts = (0, key_dim), (keys, key_dim), (2 * keys, group * value_dim)
        for start, size in parts:
            _turn(weight, taps, width, channels, start + key_head * size, start + (key_head + 1) * size)
        for token in range(tokens):
            read, write = reads[token], writes[token]
            if read == LEFT_OUT:
                continue
            old, before = window, state
            if read >= 0:
                old, before = at(conv, read * of_window), at(recurrent, read * of_state + key_head * group * matrix)
            window, state = own_window, own_state
            if write >= 0:
                window = at(conv, write * of_window)
                state = at(recurrent, write * of_state + key_head * group * matrix)
            inputs = at(mixed, token * of_mixed)
            for start, size in parts:
                begin, end = start + key_head * size, start + (key_head + 1) * size
                _convolve(inputs, taps, old, window, x, z, width, channels, begin, end)
                for c in range(begin, end):
                    put(x, c, get(z, c))  # rounded to the type of the model, as the twin has it
            _unit(at(x, key_head * key_dim), q, key_dim, scale)
            _unit(at(x, keys + key_head * key_dim), k, key_dim, _ONE)
            for head in range(key_head * group, (key_head + 1) * group):
                dt = get(a, token * of_a + head) + get(dt_bias, head)
                soft = dt if dt > _TWENTY else np.float32(math.log1p(np.float32(math.exp(dt))))
                decay = np.float32(math.exp(get(rate, head) * soft))
                beta = sigmoid(get(b, token * of_b + head))
                v, y = at(x, 2 * keys + head * value_dim), at(output, (token * heads + head) * value_dim)
                place = (head - key_head * group) * matrix
                s, t = at(before, place), at(state, place)
                following, next_head = (token + 1, head) if tokens > 1 else (token, head + 1)
                asks = following < tokens and next_head < heads and reads[following] >= 0
                ahead = at(recurrent, reads[following] * of_state + next_head * matrix) if asks else s
                _rule(k, v, decay, beta, s, t, y, sums, (key_dim, value_dim), ahead, asks)
    release(spare_window)
    release(spare_state)
    release(scratch)
    release(turned)
    release(rounded)
