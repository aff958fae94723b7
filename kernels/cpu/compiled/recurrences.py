"""Rules that are computed token by token, of prompts and of decoded tokens: the delta rule with a decay for each
channel of the keys (Kimi delta attention) or for each head, the selective scan of Mamba-1, and the gated linear
recurrence of Griffin.

A token has the same bits in a prompt and alone. Heads, and channels of the scan and of the recurrence, are independent
of each other.
"""

import math

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import dot
from hybrid.kernels.cpu.compiled.vectors import (
    INDEX,
    ZERO,
    allocate,
    at,
    exp,
    fma,
    get,
    numbers,
    put,
    release,
    sigmoid,
)
from hybrid.kernels.cpu.kinds import LEFT_OUT

_ONE, _EPS = np.float32(1), np.float32(1e-6)


@compiled_inline
def _slots(places, requests, request, token):
    """The slots that a token continues from and that gets the state after it, -1 where there are none. Of prompts
    `requests` says where they begin, and the slots are those of whole prompts."""
    starts, reads, writes = places
    if not requests:
        return reads[token], writes[token]
    read = reads[request] if token == starts[request] else -1
    return read, writes[request] if token == starts[request + 1] - 1 else -1


@compiled_inline
def _request_of(starts, requests, request, token):
    """The prompt that a token belongs to, from the one of the token before on."""
    while requests and token >= starts[request + 1]:
        request += 1
    return request


@compiled_inline
def _keep(state, of_slot, offset, current, columns, width, row, slot):
    """Write rows of a state, `columns` numbers of each, to a slot."""
    for i in range(row):
        own, out = at(current, i * columns), at(state, slot * of_slot + offset + i * width)
        for j in range(columns):
            out[j] = own[j]


@compiled_inline
def _unit(x, y, size, scale):
    """Write a row of unit length, times a number."""
    factor = _ONE / np.float32(math.sqrt(dot(x, x, size) + _EPS)) * scale
    for i in range(size):
        put(y, i, get(x, i) * factor)


@compiled_inline
def _advance(q, k, v, g, beta, of_channel, current, added, y, key_dim, value_dim):
    """Change a state by a token, and write its output."""
    for j in range(value_dim):
        put(added, j, ZERO)
        put(y, j, ZERO)
    for i in range(key_dim):
        row, decay, own = at(current, i * value_dim), exp(get(g, i * of_channel)), get(k, i)
        for j in range(value_dim):
            put(row, j, get(row, j) * decay)
            put(added, j, fma(own, get(row, j), get(added, j)))
    for j in range(value_dim):
        put(added, j, (get(v, j) - get(added, j)) * beta)
    for i in range(key_dim):
        row, own, seen = at(current, i * value_dim), get(k, i), get(q, i)
        for j in range(value_dim):
            put(row, j, fma(own, get(added, j), get(row, j)))
            put(y, j, fma(seen, get(row, j), get(y, j)))


def delta_tokens(args, kind, first, last):
    """Heads `[first, last)` of the values of all tokens. Outputs are fp32, or of the kind of the values."""
    a = numbers(args, INDEX)
    q, k, v, g, beta = (
        numbers(a[0], kind),
        numbers(a[1], kind),
        numbers(a[2], kind),
        numbers(a[3], ZERO),
        numbers(a[4], kind),
    )
    state, starts, captures = numbers(a[5], ZERO), numbers(a[6], INDEX), numbers(a[9], INDEX)
    places = starts, numbers(a[7], INDEX), numbers(a[8], INDEX)
    wide, narrow, is_wide = numbers(a[10], ZERO), numbers(a[10], kind), a[11] != 0
    of_q, of_k, of_v, of_g, of_beta, of_slot = a[12], a[13], a[14], a[15], a[16], a[17]
    tokens, requests, num_captures, heads, group = a[18], a[19], a[20], a[21], a[22]
    key_dim, value_dim, of_channel = a[23], a[24], a[25]
    memory = allocate((key_dim + 2) * value_dim + 2 * key_dim)
    current = numbers(memory, ZERO)
    added, y = at(current, key_dim * value_dim), at(current, (key_dim + 1) * value_dim)
    unit_q, unit_k = at(y, value_dim), at(y, value_dim + key_dim)
    scale, size = _ONE / np.float32(math.sqrt(np.float32(key_dim))), key_dim * value_dim
    for head in range(first, last):
        offset, of_head, request = head * size, head // group * key_dim, 0
        for token in range(tokens):
            request = _request_of(starts, requests, request, token)
            read, write = _slots(places, requests, request, token)
            if read == LEFT_OUT:
                continue
            if read >= 0:
                own = at(state, read * of_slot + offset)
                for i in range(size):
                    current[i] = own[i]
            _unit(at(q, token * of_q + of_head), unit_q, key_dim, scale)
            _unit(at(k, token * of_k + of_head), unit_k, key_dim, _ONE)
            decays = at(g, token * of_g + head * (key_dim if of_channel else 1))
            share, values = get(beta, token * of_beta + head), at(v, token * of_v + head * value_dim)
            _advance(unit_q, unit_k, values, decays, share, of_channel, current, added, y, key_dim, value_dim)
            place = (token * heads + head) * value_dim
            if is_wide:
                for j in range(value_dim):
                    put(wide, place + j, get(y, j))
            else:
                for j in range(value_dim):
                    put(narrow, place + j, get(y, j))
            if write >= 0:
                _keep(state, of_slot, offset, current, size, size, 1, write)
            for i in range(num_captures):
                if captures[3 * i] == request and captures[3 * i + 1] == token + 1 - starts[request]:
                    _keep(state, of_slot, offset, current, size, size, 1, captures[3 * i + 2])
    release(memory)


def scan_tokens(args, kind, first, last):
    """Channels `[first, last)` of all tokens."""
    a = numbers(args, INDEX)
    x, dt, b, c, rate = (
        numbers(a[0], kind),
        numbers(a[1], ZERO),
        numbers(a[2], kind),
        numbers(a[3], kind),
        numbers(a[4], ZERO),
    )
    state, starts, captures, out = numbers(a[5], ZERO), numbers(a[6], INDEX), numbers(a[9], INDEX), numbers(a[10], ZERO)
    places = starts, numbers(a[7], INDEX), numbers(a[8], INDEX)
    of_x, of_dt, of_b, of_c, of_slot = a[11], a[12], a[13], a[14], a[15]
    tokens, requests, num_captures, channels, size = a[16], a[17], a[18], a[19], a[20]
    width, request = last - first, 0
    memory = allocate((size + 1) * width)
    current = numbers(memory, ZERO)
    given = at(current, size * width)
    for token in range(tokens):
        request = _request_of(starts, requests, request, token)
        read, write = _slots(places, requests, request, token)
        if read == LEFT_OUT:
            continue
        if read >= 0:
            for i in range(size):
                own, row = at(state, read * of_slot + i * channels + first), at(current, i * width)
                for j in range(width):
                    row[j] = own[j]
        own, time, y = at(x, token * of_x + first), at(dt, token * of_dt + first), at(out, token * channels + first)
        for j in range(width):
            put(given, j, get(own, j) * get(time, j))
            put(y, j, ZERO)
        for i in range(size):
            row, rates = at(current, i * width), at(rate, i * channels + first)
            added, seen = get(b, token * of_b + i), get(c, token * of_c + i)
            for j in range(width):
                decay = exp(get(time, j) * get(rates, j))
                put(row, j, fma(decay, get(row, j), get(given, j) * added))
                put(y, j, fma(get(row, j), seen, get(y, j)))
        if write >= 0:
            _keep(state, of_slot, first, current, width, channels, size, write)
        for i in range(num_captures):
            if captures[3 * i] == request and captures[3 * i + 1] == token + 1 - starts[request]:
                _keep(state, of_slot, first, current, width, channels, size, captures[3 * i + 2])
    release(memory)


def lru_tokens(args, kind, first, last):
    """Channels `[first, last)` of all tokens."""
    a = numbers(args, INDEX)
    x, entry, forget = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind)
    positions, rate, state = numbers(a[3], INDEX), numbers(a[4], ZERO), numbers(a[5], ZERO)
    starts, captures, out = numbers(a[6], INDEX), numbers(a[9], INDEX), numbers(a[10], kind)
    places = starts, numbers(a[7], INDEX), numbers(a[8], INDEX)
    of_x, of_entry, of_forget, of_slot = a[11], a[12], a[13], a[14]
    tokens, requests, num_captures, channels = a[15], a[16], a[17], a[18]
    width, request = last - first, 0
    memory = allocate(width)
    current, rates = numbers(memory, ZERO), at(rate, first)
    for token in range(tokens):
        request = _request_of(starts, requests, request, token)
        read, write = _slots(places, requests, request, token)
        if read == LEFT_OUT:
            continue
        if read >= 0:
            own = at(state, read * of_slot + first)
            for j in range(width):
                current[j] = own[j]
        own, y, is_first = at(x, token * of_x + first), at(out, token * channels + first), positions[token] == 0
        opened, closed = at(entry, token * of_entry + first), at(forget, token * of_forget + first)
        for j in range(width):
            decay = exp(get(rates, j) * sigmoid(get(closed, j)))
            rest = fma(-decay, decay, _ONE)
            rest = ZERO if rest < ZERO else rest
            share = _ONE if is_first else np.float32(math.sqrt(rest))
            put(current, j, fma(decay, get(current, j), get(own, j) * sigmoid(get(opened, j)) * share))
            put(y, j, get(current, j))
        if write >= 0:
            _keep(state, of_slot, first, current, width, channels, 1, write)
        for i in range(num_captures):
            if captures[3 * i] == request and captures[3 * i + 1] == token + 1 - starts[request]:
                _keep(state, of_slot, first, current, width, channels, 1, captures[3 * i + 2])
    release(memory)
