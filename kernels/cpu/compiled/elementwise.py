"""The operations that take each row by itself: norms, gates, what comes between projection and attention, rotary
angles, and probabilities of rows of logits.

Results are rounded once, from fp32. What an element becomes depends on its row alone; rows are shared among threads.
"""

import math

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.packed_kv import pack
from hybrid.kernels.cpu.compiled.tiles import dot, row_max, row_sum
from hybrid.kernels.cpu.compiled.vectors import (
    INDEX,
    ZERO,
    allocate,
    as_float,
    at,
    exp,
    fma,
    get,
    numbers,
    put,
    release,
    sigmoid,
)
from hybrid.kernels.cpu.kinds import UNPACKED
from hybrid.kernels.cpu.target import LANES

_ONE, _TWO = np.float32(1), np.float32(2)
_CUBE, _TWICE = np.float32(0.044715), np.float32(2 * math.sqrt(2 / math.pi))


@compiled_inline
def _inverse_rms(x, size, eps):
    return _ONE / np.float32(math.sqrt(dot(x, x, size) / np.float32(size) + eps))


@compiled_inline
def _norm(x, scale, y, size, eps):
    factor = _inverse_rms(x, size, eps)
    for i in range(size):
        put(y, i, (get(x, i) * factor) * get(scale, i))


def rms_norm(args, kind, first, last):
    a = numbers(args, INDEX)
    x, scale, y = numbers(a[0], kind), numbers(a[1], ZERO), numbers(a[2], kind)
    stride, size, eps = a[3], a[4], as_float(np.int32(a[5]))
    for row in range(first, last):
        _norm(at(x, row * stride), scale, at(y, row * size), size, eps)


def add_rms_norm(args, kind, first, last):
    a = numbers(args, INDEX)
    x, residual, scale = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], ZERO)
    total, y, size, eps = numbers(a[3], kind), numbers(a[4], kind), a[5], as_float(np.int32(a[6]))
    for i in range(first * size, last * size):
        put(total, i, get(residual, i) + get(x, i))
    for row in range(first, last):
        _norm(at(total, row * size), scale, at(y, row * size), size, eps)


def gated_rms_norm(args, kind, first, last):
    a = numbers(args, INDEX)
    x, gate, weight, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    size, eps = a[4], as_float(np.int32(a[5]))
    for row in range(first, last):
        own, other, out = at(x, row * size), at(gate, row * size), at(y, row * size)
        factor = _inverse_rms(own, size, eps)
        for i in range(size):
            z = get(other, i)
            put(out, i, (get(weight, i) * (get(own, i) * factor)) * (z * sigmoid(z)))


@compiled_inline
def _two_rows(args, kind, row):
    """A row of both inputs and of the output of `_of_two`, and its size."""
    a = numbers(args, INDEX)
    x, y, out = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind)
    return at(x, row * a[3]), at(y, row * a[4]), at(out, row * a[5]), a[5]


def silu_and_mul(args, kind, first, last):
    for row in range(first, last):
        gate, up, out, size = _two_rows(args, kind, row)
        for i in range(size):
            x = get(gate, i)
            put(out, i, (x * sigmoid(x)) * get(up, i))


def gelu_and_mul(args, kind, first, last):
    for row in range(first, last):
        gate, up, out, size = _two_rows(args, kind, row)
        for i in range(size):
            x = get(gate, i)
            twice = fma((x * x) * x, _CUBE, x) * _TWICE
            put(out, i, (x * sigmoid(twice)) * get(up, i))


def sigmoid_and_mul(args, kind, first, last):
    for row in range(first, last):
        x, gate, out, size = _two_rows(args, kind, row)
        for i in range(size):
            put(out, i, get(x, i) * sigmoid(get(gate, i)))


def gate_rows(args, kind, first, last):
    a = numbers(args, INDEX)
    x, gates, out, stride, size = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), a[3], a[4]
    for row in range(first, last):
        own, y, share = at(x, row * stride), at(out, row * size), sigmoid(get(gates, row))
        for i in range(size):
            put(y, i, get(own, i) * share)


def bounded_silu_and_mul(args, kind, first, last):
    a = numbers(args, INDEX)
    x, out, stride, size = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3]
    steepness, limit = as_float(np.int32(a[4])), as_float(np.int32(a[5]))
    for row in range(first, last):
        own, y = at(x, row * stride), at(out, row * size)
        for i in range(size):
            gate, up = get(own, 2 * i), get(own, 2 * i + 1)
            gate, up = limit if gate > limit else gate, limit if up > limit else up
            up = -limit if up < -limit else up
            put(y, i, (up + _ONE) * (gate * sigmoid(gate * steepness)))


def silu(args, kind, first, last):
    a = numbers(args, INDEX)
    x, out, stride, size = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3]
    for row in range(first, last):
        own, y = at(x, row * stride), at(out, row * size)
        for i in range(size):
            value = get(own, i)
            put(y, i, value * sigmoid(value))


def squared_relu(args, kind, first, last):
    a = numbers(args, INDEX)
    x, out, stride, size = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3]
    for row in range(first, last):
        own, y = at(x, row * stride), at(out, row * size)
        for i in range(size):
            value = get(own, i)
            value = ZERO if value < ZERO else value
            put(y, i, value * value)


def soft_cap(args, kind, first, last):
    a = numbers(args, INDEX)
    x, out, stride, size, cap = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3], as_float(np.int32(a[4]))
    for row in range(first, last):
        own, y = at(x, row * stride), at(out, row * size)
        for i in range(size):
            share = sigmoid(get(own, i) * _TWO / cap)
            put(y, i, cap * (share - (_ONE - share)))


def add(args, kind, first, last):
    for row in range(first, last):
        x, y, out, size = _two_rows(args, kind, row)
        for i in range(size):
            put(out, i, get(x, i) + get(y, i))


def mul(args, kind, first, last):
    for row in range(first, last):
        x, y, out, size = _two_rows(args, kind, row)
        for i in range(size):
            put(out, i, get(x, i) * get(y, i))


def scale(args, kind, first, last):
    a = numbers(args, INDEX)
    x, out, stride, size, factor = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3], as_float(np.int32(a[4]))
    for row in range(first, last):
        own, y = at(x, row * stride), at(out, row * size)
        for i in range(size):
            put(y, i, get(own, i) * factor)


@compiled_inline
def _rotate(x, cos, sin, y, size, rotary):
    """Write a head, rotated, to y."""
    half = rotary // 2
    for i in range(half):
        first_half, second_half = get(x, i), get(x, half + i)
        put(y, i, fma(first_half, get(cos, i), -(second_half * get(sin, i))))
        put(y, half + i, fma(second_half, get(cos, half + i), first_half * get(sin, half + i)))
    for i in range(rotary, size):
        y[i] = x[i]


def rotate(args, kind, first, last):
    a = numbers(args, INDEX)
    x, cosines, sines, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    of_token, of_head, heads, size, rotary = a[4], a[5], a[6], a[7], a[8]
    for token in range(first, last):
        cos, sin = at(cosines, token * rotary), at(sines, token * rotary)
        for head in range(heads):
            own, out = at(x, token * of_token + head * of_head), at(y, (token * heads + head) * size)
            _rotate(own, cos, sin, out, size, rotary)


def rotate_pairs(args, kind, first, last):
    a = numbers(args, INDEX)
    x, cosines, sines, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    of_token, of_head, heads, size = a[4], a[5], a[6], a[7]
    half = size // 2
    for token in range(first, last):
        cos, sin = at(cosines, token * size), at(sines, token * size)
        for head in range(heads):
            own, out = at(x, token * of_token + head * of_head), at(y, (token * heads + head) * size)
            for i in range(half):
                even, odd = get(own, 2 * i), get(own, 2 * i + 1)
                put(out, i, fma(even, get(cos, i), -(odd * get(sin, i))))
                put(out, half + i, fma(odd, get(cos, half + i), even * get(sin, half + i)))


@compiled_inline
def _norm_rotate(x, scale, has_norm, cos, sin, y, size, rotary, eps):
    """Write a head, normalised if it has a norm and rotated, to y."""
    if not has_norm:
        _rotate(x, cos, sin, y, size, rotary)
        return
    factor = _inverse_rms(x, size, eps)
    half = rotary // 2
    for i in range(half):
        a, b = (get(x, i) * factor) * get(scale, i), (get(x, half + i) * factor) * get(scale, half + i)
        put(y, i, fma(a, get(cos, i), -(b * get(sin, i))))
        put(y, half + i, fma(b, get(cos, half + i), a * get(sin, half + i)))
    for i in range(rotary, size):
        put(y, i, (get(x, i) * factor) * get(scale, i))


def norm_rotate_store(args, kind, first, last):
    a = numbers(args, INDEX)
    q, k, v, q_scale, k_scale = (
        numbers(a[0], kind),
        numbers(a[1], kind),
        numbers(a[2], kind),
        numbers(a[3], ZERO),
        numbers(a[4], ZERO),
    )
    cache, y = numbers(a[7], kind), numbers(a[9], kind)
    cos, sin, slots = numbers(a[5], kind), numbers(a[6], kind), numbers(a[8], INDEX)
    q_token, q_head, k_token, k_head, v_token, v_head = a[10], a[11], a[12], a[13], a[14], a[15]
    of_page, of_kind, of_offset, of_head = a[16], a[17], a[18], a[19]
    heads, kv_heads, size, rotary, page_size, eps = a[20], a[21], a[22], a[23], a[24], as_float(np.int32(a[25]))
    kept, row_bytes, has_norm = a[26], a[27], a[3] != 0
    memory = allocate(size)
    rotated = numbers(memory, kind)
    for token in range(first, last):
        c, s = at(cos, token * rotary), at(sin, token * rotary)
        for head in range(heads):
            place = at(y, (token * heads + head) * size)
            _norm_rotate(at(q, token * q_token + head * q_head), q_scale, has_norm, c, s, place, size, rotary, eps)
        slot = slots[token]
        if slot < 0:
            continue
        page = slot // page_size * of_page + slot % page_size * of_offset
        for head in range(kv_heads):
            own, source = at(k, token * k_token + head * k_head), at(v, token * v_token + head * v_head)
            if kept != UNPACKED:
                _norm_rotate(own, k_scale, has_norm, c, s, rotated, size, rotary, eps)
                address = a[7] + page + head * of_head
                pack(rotated, address, size, row_bytes, kept)
                pack(source, address + of_kind, size, row_bytes, kept)
                continue
            place = at(cache, page + head * of_head)
            _norm_rotate(own, k_scale, has_norm, c, s, place, size, rotary, eps)
            for i in range(size):
                place[of_kind + i] = source[i]
    release(memory)


# Rotary angles

_QUARTERS, _ROUND = 2 / np.pi, 1.5 * 2.0**52
_QUARTER_HIGH = 1.5707963267341256
"""A quarter turn in 33 bits: its multiples are exact."""

_QUARTER_LOW = 6.077100506506192e-11
_S3, _S5, _S7, _S9, _S11 = -1 / 6, 1 / 120, -1 / 5040, 1 / 362880, -1 / 39916800
_C2, _C4, _C6, _C8, _C10, _C12 = -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800, 1 / 479001600


@compiled_inline
def _cos_and_sin(angle):
    """Of an fp64 angle up to a million quarter turns, to a billionth: Taylor series of what is left of the nearest
    quarter turn. Products and sums are rounded one by one, so that all CPUs compute the same."""
    turns = (angle * _QUARTERS + _ROUND) - _ROUND
    rest = (angle - turns * _QUARTER_HIGH) - turns * _QUARTER_LOW
    square = rest * rest
    sin = rest + rest * square * (_S3 + square * (_S5 + square * (_S7 + square * (_S9 + square * _S11))))
    cos = 1.0 + square * (_C2 + square * (_C4 + square * (_C6 + square * (_C8 + square * (_C10 + square * _C12)))))
    quarter = np.int64(turns) & 3
    if quarter & 1:
        cos, sin = sin, cos
    return -cos if quarter == 1 or quarter == 2 else cos, -sin if quarter >= 2 else sin


def rotary(args, kind, first, last):
    """Tokens `[first, last)`."""
    a = numbers(args, INDEX)
    positions, frequencies = numbers(a[0], INDEX), numbers(a[1], ZERO)
    cosines, sines = numbers(a[2], kind), numbers(a[3], kind)
    of_token, of_frequency, size, scale = a[4], a[5], a[6], as_float(np.int32(a[7]))
    for token in range(first, last):
        own = at(positions, token * of_token)
        for i in range(size):
            angle = np.float32(own[i * of_frequency]) * get(frequencies, i)
            cos, sin = _cos_and_sin(np.float64(angle))
            put(cosines, token * size + i, np.float32(cos) * scale)
            put(sines, token * size + i, np.float32(sin) * scale)


# Probabilities: a row is added up in blocks, in fp32 as everywhere, and the blocks one after another in fp64

_BLOCK = 64 * LANES

_TINY = np.float32(1.1754944e-38)


@compiled_inline
def _most(x, size):
    whole = size // LANES * LANES
    most = row_max(x, whole) if whole else get(x, 0)
    for i in range(whole, size):
        most = max(most, get(x, i))
    return most


@compiled_inline
def _total(x, size, total):
    """The sum of a row and of what comes before it."""
    for start in range(0, size // LANES * LANES, _BLOCK):
        total += np.float64(row_sum(at(x, start), min(_BLOCK, size // LANES * LANES - start)))
    for i in range(size // LANES * LANES, size):
        total += np.float64(get(x, i))
    return total


def softmax(args, kind, first, last):
    a = numbers(args, INDEX)
    logits, temperatures, y = numbers(a[0], kind), numbers(a[1], np.float64(0)), numbers(a[2], kind)
    of_row, size = a[3], a[4]
    for row in range(first, last):
        x, out = at(logits, row * of_row), at(y, row * size)
        most, temperature = _most(x, size), np.float32(temperatures[row])
        temperature = _TINY if temperature < _TINY else temperature  # a smaller number would be 0 here
        for i in range(size):
            put(out, i, exp((get(x, i) - most) / temperature))
        total = np.float32(_total(out, size, np.float64(0)))
        for i in range(size):
            put(out, i, get(out, i) / total)


def log_softmax(args, kind, first, last):
    a = numbers(args, INDEX)
    logits, y, of_row, size = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3]
    for row in range(first, last):
        x, out = at(logits, row * of_row), at(y, row * size)
        most, total = _most(x, size), np.float64(0)
        for start in range(0, size, _BLOCK):  # all in the place of the first block, which stays in the first cache
            count = min(_BLOCK, size - start)
            for i in range(count):
                put(out, i, exp(get(x, start + i) - most))
            total = _total(out, count, total)
        log_total = np.float32(math.log(total))
        for i in range(size):
            put(out, i, (get(x, i) - most) - log_total)
