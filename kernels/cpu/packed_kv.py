"""Rows of keys and values in a byte per element (`hybrid.kernels.packed_kv`), as operations on pages name them
(`hybrid.kernels.cpu.compiled.packed_kv`)."""

import torch

UNPACKED, INT8, FP8 = 0, 1, 2
"""How rows are kept, as an argument of an operation."""

KEPT: dict[torch.dtype, int] = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
"""How rows are kept in pages of these types; in others as they are."""
