"""The types of torch, as compiled operations name them."""

import torch

from hybrid.kernels.cpu.kinds import BYTE, FLOAT, HALF
from hybrid.kernels.cpu.sizes import FP8, INT8

KINDS: dict[torch.dtype, str] = {torch.float32: FLOAT, torch.bfloat16: HALF, torch.int8: BYTE}
"""The kind of numbers in memory of a type."""

KEPT: dict[torch.dtype, int] = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
"""How rows of keys and values are kept in pages of these types; in others they are unpacked."""
