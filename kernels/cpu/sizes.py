"""Numbers that compiled code and who calls it have in common. No torch: what compiles does without it."""

from hybrid.kernels.cpu.target import HAS_WIDE_REGISTERS, LANES

TOKENS = 16
"""Tokens whose queries attention takes together."""

BLOCK = 64
"""Keys that attention takes at once, a multiple of LANES."""

COLUMNS = 12
"""Rows of a weight that few rows of x are multiplied with before the next ones; tiles divide it."""

PANEL_ROWS, PANEL_VECTORS = (12, 2) if HAS_WIDE_REGISTERS else (6, 1)
"""Rows of x, and vectors of rows of the weight, that are multiplied at once where there are many: their sums fill the
registers."""

PANEL_COLUMNS = PANEL_VECTORS * LANES
"""Rows of the weight in a panel."""

UNPACKED, INT8, FP8 = 0, 1, 2
"""How rows of keys and values are kept (`hybrid.kernels.packed_kv`), as an argument of an operation."""
