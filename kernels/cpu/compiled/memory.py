"""Rows that are copied, numbers of bfloat16 as fp32 and of fp32 as bfloat16, and those that a pass begins with."""

from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, at, get, numbers, put
from hybrid.kernels.cpu.kinds import LEFT_OUT


def shift(args, kind, first, last):
    """Columns `[first, last)` of all tokens."""
    a = numbers(args, INDEX)
    x, state, output = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind)
    reads, writes = numbers(a[3], INDEX), numbers(a[4], INDEX)
    of_row, of_slot, tokens, size = a[5], a[6], a[7], a[8]
    for token in range(tokens):
        row, read, write = at(x, token * of_row), reads[token], writes[token]
        if read == LEFT_OUT:
            continue
        before, target = at(x, (token - 1) * of_row), at(output, token * size)
        if read >= 0:
            before = at(state, read * of_slot)
        for column in range(first, last):
            target[column] = before[column]
        if write >= 0:
            slot = at(state, write * of_slot)
            for column in range(first, last):
                slot[column] = row[column]


def take(args, kind, first, last):
    """Rows `[first, last)` of the output."""
    a = numbers(args, INDEX)
    x, output, rows, of_row, size = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], INDEX), a[3], a[4]
    for row in range(first, last):
        if rows[row] < 0:
            continue
        source, target = at(x, rows[row] * of_row), at(output, row * size)
        for column in range(size):
            target[column] = source[column]


def copy(args, kind, first, last):
    """Rows `[first, last)`."""
    a = numbers(args, INDEX)
    x, output, of_row, of_output, size = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3], a[4]
    for row in range(first, last):
        source, target = at(x, row * of_row), at(output, row * of_output)
        for column in range(size):
            target[column] = source[column]


def widen(args, kind, first, last):
    """Rows `[first, last)` as fp32."""
    a = numbers(args, INDEX)
    x, output, stride, size = numbers(a[0], kind), numbers(a[1], ZERO), a[2], a[3]
    for row in range(first, last):
        for i in range(size):
            put(output, row * size + i, get(x, row * stride + i))


def narrow(args, kind, first, last):
    """Rows `[first, last)` of fp32 as bfloat16."""
    a = numbers(args, INDEX)
    x, output, stride, size = numbers(a[0], ZERO), numbers(a[1], kind), a[2], a[3]
    for row in range(first, last):
        for i in range(size):
            put(output, row * size + i, get(x, row * stride + i))


def fill(args, kind, first, last):
    """All numbers of a pass, and the tokens that it continues from (`reference.fill_in_tokens`)."""
    a = numbers(args, INDEX)
    source, target, count = numbers(a[0], INDEX), numbers(a[1], INDEX), a[2]
    tokens, links, num_links = numbers(a[3], INDEX), numbers(a[4], INDEX), a[5]
    for place in range(count):
        target[place] = source[place]
    for index in range(num_links):
        link = at(links, index * 5)
        token = tokens[link[0]]
        target[link[1]] = max(token, 0)
        if token < 0:
            target[link[2]], target[link[3]], target[link[4]] = -1, 0, -1
