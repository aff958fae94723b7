"""The gated delta rule of prompts over state slots, chunk by chunk and head by head.

In a chunk, with d the log of the decay since its start and S the state before it, what the tokens add solves
(I + A) n = beta (v - exp(d) k S), where A[i, j] = beta_i exp(d_i - d_j) k_i k_j for j < i; then
o = exp(d) q S + B n with B[i, j] = exp(d_i - d_j) q_i k_j for j <= i, and the state after it is
exp(d_last) S + sum of exp(d_last - d_i) k_i n_i (Yang et al., "Gated Delta Networks", 2024).
"""

import math

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import add_product, dot
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, allocate, at, exp, fma, get, numbers, put, release
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
