"""Rows of keys and values in a byte per element (`hybrid.kernels.packed_kv`), packed and unpacked in other operations.

Both give the bits of `hybrid.kernels.packed_kv`; which NaN stands for a row that is not finite is left open.
"""

import numpy as np

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import ZERO, as_float, as_int, get, numbers, put
from hybrid.kernels.cpu.kinds import FP8, FP8_MAX, INT8, SCALE_BYTES

_BYTE = np.int8(0)
_TINY, _NAN = np.float32(2.0**-126), np.float32(np.nan)
_MOST_INT8, _MOST_FP8 = np.float32(127), np.float32(FP8_MAX)

_ROUND = np.float32(1.5 * 2**23)
"""Added to a small number and subtracted again, it rounds it to an integer, ties to even."""

_ROUND_FP8, _LEAST_NORMAL, _STEPS = np.float32(1.5 * 2**14), np.float32(2.0**-6), np.float32(2**9)
"""The same for multiples of 2**-9, which e4m3 has below its smallest normal number; how many of them are 1."""

_EXPONENT, _NORMAL = np.int32(120 << 23), np.int32(8)
"""Added to the bits of a normal e4m3 number they are those of fp32; the code of the smallest one."""

_SCALE_BYTES = SCALE_BYTES


@compiled_inline
def _fp8_code(x):
    """The code of a number of at most 448, rounded to the nearest, ties to even."""
    pattern = as_int(x) & np.int32(0x7FFFFFFF)
    magnitude = as_float(pattern)
    if magnitude < _LEAST_NORMAL:
        code = np.int32(((magnitude + _ROUND_FP8) - _ROUND_FP8) * _STEPS)
    elif magnitude <= _MOST_FP8 + _MOST_FP8:
        odd = (pattern >> np.int32(20)) & np.int32(1)
        code = ((pattern + np.int32(0x7FFFF) + odd) >> np.int32(20)) - np.int32(120 * 8)
    else:
        code = np.int32(0x7F)  # NaN
    return code - np.int32(128) if as_int(x) < 0 else code


@compiled_inline
def pack(source, address, size, row, kept):
    """Pack `size` elements to the row of `row` bytes at an address."""
    codes, scale = numbers(address, _BYTE), numbers(address + row - _SCALE_BYTES, ZERO)
    most, is_nan = ZERO, False
    for i in range(size):
        x = abs(get(source, i))
        most = x if x > most else most
        is_nan = is_nan or x != x
    step = most / (_MOST_INT8 if kept == INT8 else _MOST_FP8)
    step = _NAN if is_nan else step if step > _TINY else _TINY
    step = as_float(as_int(step) & np.int32(-128))
    put(scale, 0, step)
    for i in range(size):
        x = get(source, i) / step
        if kept == FP8:
            codes[i] = np.int8(_fp8_code(x))
        else:
            codes[i] = np.int8(np.int32((x + _ROUND) - _ROUND)) if x == x else np.int8(0)
    for i in range(size, row - _SCALE_BYTES):
        codes[i] = np.int8(0)


@compiled_inline
def unpack(address, row, target, size, kept):
    """Write the `size` elements of the row of `row` bytes at an address to memory of any type."""
    codes, scale = numbers(address, _BYTE), get(numbers(address + row - _SCALE_BYTES, ZERO), 0)
    if kept == INT8:
        for i in range(size):
            put(target, i, get(codes, i) * scale)
    else:
        for i in range(size):
            code = np.int32(codes[i])
            magnitude = code & np.int32(0x7F)
            value = as_float((magnitude << np.int32(20)) + _EXPONENT)
            value = np.float32(magnitude) / _STEPS if magnitude < _NORMAL else value
            value = _NAN if magnitude == np.int32(0x7F) else value
            put(target, i, (-value if code < 0 else value) * scale)
