"""Probabilities of rows of logits, and their logarithms.

A row is added up in blocks, in fp32 as everywhere, and the blocks one after another in fp64: what an element becomes
depends on its row alone.
"""

import math

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.tiles import row_max, row_sum
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, at, exp, get, numbers, put
from hybrid.kernels.cpu.target import LANES

_BLOCK = 64 * LANES

_LOWEST, _TINY = np.float32(-87.0), np.float32(1.1754944e-38)


@compiled_inline
def _exp(x):
    """e to the power of x, at most 0; 0 where that would be no normal number."""
    return ZERO if x < _LOWEST else exp(x)


@compiled_inline
def _most(x, size):
    whole = size // LANES * LANES
    most = row_max(x, whole) if whole else get(x, 0)
    for i in range(whole, size):
        most = max(most, get(x, i))
    return most


@compiled_inline
def _total(x, size):
    total = np.float64(0)
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
            put(out, i, _exp((get(x, i) - most) / temperature))
        total = np.float32(_total(out, size))
        for i in range(size):
            put(out, i, get(out, i) / total)


def log_softmax(args, kind, first, last):
    a = numbers(args, INDEX)
    logits, y, of_row, size = numbers(a[0], kind), numbers(a[1], kind), a[2], a[3]
    for row in range(first, last):
        x, out = at(logits, row * of_row), at(y, row * size)
        most = _most(x, size)
        for i in range(size):
            put(out, i, _exp(get(x, i) - most))
        log_total = np.float32(math.log(_total(out, size)))
        for i in range(size):
            put(out, i, (get(x, i) - most) - log_total)
