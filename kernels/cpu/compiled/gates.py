"""The gates of the gated delta rule, of prompts and of decodes."""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, exp, fma, get, numbers, put, sigmoid

_ONE, _TWO = np.float32(1), np.float32(2)

_C3, _C5, _C7, _C9 = np.float32(1 / 3), np.float32(1 / 5), np.float32(1 / 7), np.float32(1 / 9)
_C11, _C13, _C15 = np.float32(1 / 11), np.float32(1 / 13), np.float32(1 / 15)


@compiled_inline
def softplus(x):
    """log(1 + exp(x)) in fp32, to a few units in the last place; of NaN NaN.

    It is max(x, 0) + log(1 + e) with e = exp(-abs(x)), and log(1 + e) = 2 artanh(s) with s = e / (2 + e), which is at
    most 1/3: the first eight terms of the series are enough.
    """
    e = exp(-abs(x))
    s = e / (_TWO + e)
    square = s * s
    y = fma(_C15, square, _C13)
    y = fma(y, square, _C11)
    y = fma(y, square, _C9)
    y = fma(y, square, _C7)
    y = fma(y, square, _C5)
    y = fma(y, square, _C3)
    y = fma(y, square, _ONE)
    return fma(_TWO * s, y, x if x > ZERO else ZERO)


@compiled_inline
def log_decay(a, rate, dt_bias):
    """The log of the decay of a head: `rate * softplus(a + dt_bias)`."""
    return rate * softplus(a + dt_bias)


@compiled_inline
def beta(b):
    """How much of the old value of a head is replaced."""
    return sigmoid(b)


def delta_gates(args, kind, first, last):
    n = numbers(args, INDEX)
    a, b, rate, dt_bias = numbers(n[0], kind), numbers(n[1], kind), numbers(n[2], ZERO), numbers(n[3], kind)
    g, replaced, of_a, of_b, heads = numbers(n[4], ZERO), numbers(n[5], kind), n[6], n[7], n[8]
    for token in range(first, last):
        for head in range(heads):
            place = token * heads + head
            put(g, place, log_decay(get(a, token * of_a + head), get(rate, head), get(dt_bias, head)))
            put(replaced, place, beta(get(b, token * of_b + head)))
