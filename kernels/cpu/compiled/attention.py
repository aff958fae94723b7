"""Attention over keys and values in pages.

Queries that read the same keys are taken together: a few tokens, and the heads of a group. They pass over the keys
block by block, each with its own maximum and sum (Milakov, Gimelshein, "Online normalizer calculation for softmax",
2018). Blocks end at fixed positions of the sequence, whatever pages they are in, and a query's sums do not depend on
the others: a token's bits depend on its own sequence alone, however prompts are cut, alone or in a batch.
"""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.matmul import multiply_rows
from hybrid.kernels.cpu.compiled.packed_kv import unpack
from hybrid.kernels.cpu.compiled.tiles import add_product, row_max, row_sum
from hybrid.kernels.cpu.compiled.vectors import (
    INDEX,
    ZERO,
    allocate,
    as_float,
    at,
    exp,
    get,
    numbers,
    put,
    release,
)
from hybrid.kernels.cpu.kinds import LEFT_OUT, UNPACKED
from hybrid.kernels.cpu.target import BLOCK, LANES, TOKENS

_LOWEST, _ONE = np.float32(-np.inf), np.float32(1)


@compiled_inline
def _normalise(scores, hidden, count, state, output, size):
    """Make the scores of a row in a block weights, 0 those of the first `hidden` keys. `state` is the row's maximum and
    sum so far; they, and its output so far, are changed to the maximum with this block."""
    for j in range(count, (count + LANES - 1) // LANES * LANES):
        put(scores, j, _LOWEST)
    for j in range(hidden):
        put(scores, j, _LOWEST)
    padded = (count + LANES - 1) // LANES * LANES
    before, most = get(state, 0), row_max(scores, padded)
    most = most if most > before else before
    for j in range(padded):
        put(scores, j, exp(get(scores, j) - most))
    for j in range(hidden):
        put(scores, j, ZERO)
    for j in range(count, padded):
        put(scores, j, ZERO)
    if before != most:
        factor = exp(before - most)
        put(state, 0, most)
        put(state, 1, get(state, 1) * factor)
        for j in range(size):
            put(output, j, get(output, j) * factor)
    put(state, 1, get(state, 1) + row_sum(scores, padded))


@compiled_inline
def _place(pages, position, most):
    """Where the key of a position is, and how many keys, up to `most`, follow each other from there. `pages`: the table
    of the sequence, tokens of a page, and the strides of pages and of tokens."""
    table, page_size, of_page, of_offset = pages
    offset = position % page_size
    return table[position // page_size] * of_page + offset * of_offset, min(page_size - offset, most)


@compiled_inline
def _add_values(outputs, scores, values, of_value, done, sizes):
    """Add the values of the keys of a block from `done` on, as far as tokens see them, times their weights."""
    tokens, group, size, count, seen = sizes
    if seen >= done + count:
        add_product(outputs, size, at(scores, done), BLOCK, values, of_value, tokens * group, count, size)
        return
    for token in range(tokens):
        own, row = min(count, seen + token - done), token * group
        if own > 0:
            y = at(outputs, row * size)
            add_product(y, size, at(scores, row * BLOCK + done), BLOCK, values, of_value, group, own, size)


@compiled_inline
def _add_block(queries, cache, of_values, pages, position, count, memory, sizes):
    """Attend to a block of `count` keys and values, from a position on.

    `memory`: scores, states and outputs. `sizes`: tokens, queries of each, size of a head, how many keys of the block
    the first token sees, from its first one on, and how many of these are before its window: each of the next tokens
    has one more of both.
    """
    scores, states, outputs = memory
    tokens, group, size, seen, hidden = sizes
    rows, done = tokens * group, 0
    while done < count:
        place, part = _place(pages, position + done, count - done)
        multiply_rows(queries, size, at(cache, place), pages[3], states, at(scores, done), BLOCK, rows, part, size)
        done += part
    for row in range(rows):
        own, before = min(count, seen + row // group), max(hidden + row // group, 0)
        if before >= own:
            for j in range(count):
                put(scores, row * BLOCK + j, ZERO)
        else:
            _normalise(at(scores, row * BLOCK), before, own, at(states, 2 * row), at(outputs, row * size), size)
    done = 0
    while done < count:
        place, part = _place(pages, position + done, count - done)
        _add_values(outputs, scores, at(cache, place + of_values), pages[3], done, (tokens, group, size, part, seen))
        done += part


@compiled_inline
def _copy_ring(source, of_source, target, of_target, window, size):
    """Copy the keys and values of a KV head from one ring to another. Of both: how far apart keys and values are, and
    places."""
    for part in range(2):
        for place in range(window):
            own, other = at(source, part * of_source[0] + place * of_source[1]), part * of_target[0]
            out = at(target, other + place * of_target[1])
            for i in range(size):
                out[i] = own[i]


@compiled_inline
def _kept_at(reads, writes, token, tokens):
    """The slot that holds the state after a token, or after one of those that continue from it; -1: none does."""
    while writes[token] < 0:
        token += 1
        if token == tokens or reads[token] != -1:
            return -1
    return writes[token]


def advance_rings(args, kind, first, last):
    """The KV heads `[first, last)` of all tokens, one after another: the ring that a token continues from becomes that
    with its key and value.

    Each token has a ring of its own, where there is memory for these, and a slot gets the one after it. Otherwise
    tokens are written to the slot that is kept after them, where later tokens of a request are, too; the rings of
    others are not computed. What attention needs follows: the ring of each token, where its tokens begin, and how long
    it is, 0 where there is none.
    """
    a = numbers(args, INDEX)
    key, value, rings, own = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[3], kind)
    positions, reads, writes = numbers(a[4], INDEX), numbers(a[5], INDEX), numbers(a[6], INDEX)
    table, has_own, tokens, window, kv_heads, size = numbers(a[7], INDEX), a[3] != 0, a[8], a[9], a[10], a[11]
    of_key, of_value, of_slot, of_head = a[12], a[13], a[14], a[17]
    of_ring, of_own = (a[15], a[16]), (window * kv_heads * size, kv_heads * size)
    starts, lengths = at(table, tokens), at(table, 2 * tokens + 1)
    if first == 0:
        for token in range(tokens):
            table[token], starts[token], lengths[token] = 0, token, 0
        starts[tokens] = tokens
    for head in range(first, last):
        current, of_current, held = rings, of_ring, -1
        for token in range(tokens):
            read, write = reads[token], writes[token]
            place = token if has_own else _kept_at(reads, writes, token, tokens)
            if read == LEFT_OUT or place < 0:
                continue
            if read >= 0:
                current, of_current, held = at(rings, read * of_slot + head * of_head), of_ring, read
            target, of_target = at(rings, place * of_slot + head * of_head), of_ring
            if has_own:
                target, of_target = at(own, 2 * token * of_own[0] + head * size), of_own
            if has_own or held != place:
                _copy_ring(current, of_current, target, of_target, window, size)
            row = positions[token] % window * of_target[1]
            k, v = at(target, row), at(target, of_target[0] + row)
            own_key, own_value = at(key, token * of_key + head * size), at(value, token * of_value + head * size)
            for i in range(size):
                k[i], v[i] = own_key[i], own_value[i]
            if has_own and write >= 0:
                _copy_ring(target, of_target, at(rings, write * of_slot + head * of_head), of_ring, window, size)
            current, of_current, held = target, of_target, place
            if head == 0:
                table[token], lengths[token] = place, min(positions[token] + 1, window)


def attend(args, kind, first, last):
    """The KV heads `[first, last)`, counted through the tiles of up to TOKENS tokens of all requests. There may be
    fewer tiles. A token sees the last `window` keys up to its own, all of them if that is 0; with a window the first
    key is at position 0. Where there are sinks, the one of a head is its first score, and has no value."""
    a = numbers(args, INDEX)
    query, cache, output = numbers(a[0], kind), numbers(a[1], kind), numbers(a[5], kind)
    table, starts, lengths = numbers(a[2], INDEX), numbers(a[3], INDEX), numbers(a[4], INDEX)
    of_page, of_kind, of_offset, of_head, of_query, width = a[6], a[7], a[8], a[9], a[10], a[11]
    requests, heads, kv_heads, size, page_size = a[12], a[13], a[14], a[15], a[16]
    scale, begin, kept, row_bytes, window = as_float(np.int32(a[17])), a[18], a[19], a[20], a[21]
    sinks, has_sinks = numbers(a[22], ZERO), a[22] != 0
    group = heads // kv_heads
    most = TOKENS * group
    own_size = most * (2 * size + BLOCK + 2)
    memory = allocate(own_size + (2 * BLOCK * size if kept else 0))
    queries = numbers(memory, ZERO)
    outputs, scores = at(queries, most * size), at(queries, 2 * most * size)
    states = at(scores, most * BLOCK)
    unpacked = numbers(memory + 4 * own_size, kind)
    request, before = 0, 0
    for each in range(first, last):
        tile, kv_head = each // kv_heads, each % kv_heads
        while request < requests:
            tiles = (starts[request + 1] - starts[request] + TOKENS - 1) // TOKENS
            if tile < before + tiles:
                break
            before += tiles
            request += 1
        if request == requests:
            break
        start, length = starts[request] + (tile - before) * TOKENS, lengths[request]
        tokens = min(TOKENS, starts[request + 1] - start)
        end = length - starts[request + 1] + start + tokens  # what the last token sees
        for token in range(tokens):
            for i in range(group):
                row = token * group + i
                q, own = at(query, (start + token) * of_query + (kv_head * group + i) * size), at(queries, row * size)
                for j in range(size):
                    put(own, j, get(q, j) * scale)
                    put(outputs, row * size + j, ZERO)
                put(states, 2 * row, get(sinks, kv_head * group + i) if has_sinks else _LOWEST)
                put(states, 2 * row + 1, _ONE if has_sinks else ZERO)
        pages = at(table, request * width), page_size, of_page, of_offset
        position = begin
        unseen = end - tokens + 1 - window if window else INDEX  # keys before the window of the first token
        if unseen > position:
            position = unseen // BLOCK * BLOCK
        while position < end:
            count = min(BLOCK - position % BLOCK, end - position)
            own = scores, states, outputs
            hidden = unseen - position if window else -TOKENS
            sizes = tokens, group, size, end - tokens + 1 - position, hidden
            if kept == UNPACKED:
                _add_block(queries, at(cache, kv_head * of_head), of_kind, pages, position, count, own, sizes)
            else:
                for i in range(count):
                    place, _ = _place(pages, position + i, 1)
                    source = a[1] + place + kv_head * of_head
                    unpack(source, row_bytes, at(unpacked, i * size), size, kept)
                    unpack(source + of_kind, row_bytes, at(unpacked, (BLOCK + i) * size), size, kept)
                page = table, BLOCK, 0, size  # they are one page
                _add_block(queries, unpacked, BLOCK * size, page, 0, count, own, sizes)
            position += count
        for token in range(tokens):
            is_blind = end - tokens + token < begin
            for i in range(group):
                row = token * group + i
                y = at(output, ((start + token) * heads + kv_head * group + i) * size)
                for j in range(size):
                    put(y, j, ZERO if is_blind else get(outputs, row * size + j) / get(states, 2 * row + 1))
    release(memory)
