"""What memory holds, as compiled code names it: from the kinds of its arguments it is known what to compile; and
constants that compiled code and who calls it have in common. No torch: what compiles does without it."""

Kind = str | tuple[str, str]
"""Numba's name of a type of numbers, or those of two."""

INTEGER, FLOAT = "int64", "float32"

HALF, BYTE = "uint16", "int8"
"""Of bfloat16 numbers, and of int8 ones; arithmetic is fp32."""

_ALL = (FLOAT, HALF, BYTE)

SIGNATURES: tuple[Kind, ...] = (*_ALL, *((first, second) for first in _ALL for second in _ALL))
"""The kinds that operations are compiled for: of one type of numbers, or of a weight and an output."""

UNPACKED, INT8, FP8 = 0, 1, 2
"""How rows of keys and values are kept (`hybrid.kernels.packed_kv`), as an argument of an operation."""

SCALE_BYTES = 4
"""Bytes of the scale of a packed row. Rows are multiples of it, so that every scale is aligned."""

FP8_MAX = 448.0
"""The largest number of e4m3."""

BLOCK_OF_BYTES = 256
"""Numbers of a row of x that share a scale where they are multiplied with bytes: as many as sums of 32 bits hold, 256 *
32767 * 128 < 2^31."""

BYTES_AT_ONCE = 32
"""Rows of a weight of bytes that all rows of x are multiplied with before the next ones; tiles divide it."""

TILE_ROWS, TILE_NUMBERS = 16, 32
"""Rows of a tile of AMX, and bfloat16 numbers in each (`hybrid.kernels.cpu.compiled.amx`)."""

LEFT_OUT = -2
"""In the place of the slot that a token's state continues from, on a CPU: nothing of the token is needed."""
