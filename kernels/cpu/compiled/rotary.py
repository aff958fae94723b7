"""The cosines and sines of positions times frequencies."""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, as_float, at, get, numbers, put

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
