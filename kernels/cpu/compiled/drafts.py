"""The most likely tokens of rows of logits, of equal ones the first."""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import row_max, row_sum
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, allocate, at, exp, get, numbers, put, release
from hybrid.kernels.cpu.target import LANES


@compiled_inline
def _first_largest(own, vocab):
    """The largest number of a row, and its first place."""
    whole, token = vocab // LANES * LANES, 0
    most = row_max(own, whole) if whole else get(own, 0)
    for i in range(whole, vocab):
        most = max(most, get(own, i))
    while token < vocab - 1 and get(own, token) != most:
        token += 1
    return most, token


def most_likely(args, kind, first, last):
    """Tokens `[first, last)`."""
    a = numbers(args, INDEX)
    logits, tokens, vocab, of_row, not_finite = numbers(a[0], kind), numbers(a[1], INDEX), a[2], a[3], a[4]
    whole = vocab // LANES * LANES
    for row in range(first, last):
        own = at(logits, row * of_row)
        total = row_sum(own, whole) if whole else ZERO
        for i in range(whole, vocab):
            total += get(own, i)
        _, token = _first_largest(own, vocab)
        tokens[row] = token if total - total == ZERO else not_finite  # NaN and infinity remain in a sum


def choose_drafts(args, kind, first, last):
    a = numbers(args, INDEX)
    logits, hidden, tokens = numbers(a[0], ZERO), numbers(a[1], kind), numbers(a[2], INDEX)
    before, chances, vocab, size = numbers(a[3], kind), numbers(a[4], ZERO), a[5], a[6]
    whole = vocab // LANES * LANES
    memory = allocate(LANES)
    sums = numbers(memory, ZERO)
    for row in range(first, last):
        own = at(logits, row * vocab)
        most, token = _first_largest(own, vocab)
        for lane in range(LANES):
            put(sums, lane, ZERO)
        for i in range(0, whole, LANES):
            for lane in range(LANES):
                put(sums, lane, get(sums, lane) + exp(get(own, i + lane) - most))
        total = ZERO
        for lane in range(LANES):
            total += get(sums, lane)
        for i in range(whole, vocab):
            total += exp(get(own, i) - most)
        tokens[row] = token
        put(chances, row, np.float32(1) / total)
        source, target = at(hidden, row * size), at(before, row * size)
        for i in range(size):
            target[i] = source[i]
    release(memory)


@compiled_inline
def _slot_of(pages, place, page_size):
    """The slot of the keys and values of the token at a place of a sequence."""
    return pages[place // page_size] * page_size + place % page_size


def continue_chains(args, kind, first, last):
    """All rows, as one element."""
    a = numbers(args, INDEX)
    columns, table = numbers(a[0], INDEX), numbers(a[1], INDEX)
    count, of_column, width, page_size = a[2], a[3], a[4], a[5]
    chances, beliefs, control = numbers(a[6], ZERO), numbers(a[7], ZERO), numbers(a[8], INDEX)
    tokens, found, kinds, passes = numbers(a[9], INDEX), numbers(a[10], ZERO), a[11], a[12]
    done, most = min(control[0], passes - 1), ZERO
    for row in range(count):
        chance, place, slot, rate = get(chances, row), columns[3 * of_column + row], -1, ZERO
        tokens[done * count + row] = columns[row]
        put(found, done * count + row, chance)
        if chance > ZERO:  # it may be NaN
            rate = get(beliefs, 1 + count + row * kinds + min(int(chance * kinds), kinds - 1))
        reached = get(beliefs, 1 + row) * rate
        put(beliefs, 1 + row, reached)
        most = max(most, reached)
        if place < columns[5 * of_column + row]:  # else what is computed is of no use, and must see its pages alone
            slot = _slot_of(at(table, row * width), place, page_size)
            place += 1
        columns[of_column + row] += 1
        columns[2 * of_column + row], columns[3 * of_column + row], columns[4 * of_column + row] = slot, place, -1
    control[0], control[1] = done + 1, int(most < get(beliefs, 0))
