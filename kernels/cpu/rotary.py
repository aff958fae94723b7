"""Rotary angles: the cosines and sines of positions times frequencies.

Torch has operations for that, of which each takes as long to call as several compiled ones take to run: these are a
part of the program of a captured pass (`hybrid.kernels.cpu.capture`).
"""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import bits, run

MIN_SHARED = 1 << 12
"""Elements that are worth a thread."""

_rotary = Compiled(f"{COMPILED}.rotary", "rotary")


def angles(positions: Tensor, inverse_frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosines and sines of `positions * inverse_frequencies`, a product in fp32, times `scale`.

    Args:
        positions: `[T, 1]`, or `[T, frequencies]` int64.
        inverse_frequencies: `[frequencies]` fp32, contiguous.
        scale: of fp32.
        dtype: of the results, fp32 or bfloat16.

    Returns:
        `[T, frequencies]` each.
    """
    count, size = len(positions), len(inverse_frequencies)
    cos, sin = torch.empty(count, size, dtype=dtype), torch.empty(count, size, dtype=dtype)
    of_frequency = positions.stride(1) if positions.shape[1] > 1 else 0
    addresses = positions.data_ptr(), inverse_frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr()
    args = (*addresses, positions.stride(0), of_frequency, size, bits(scale))
    run(_rotary, KINDS[dtype], args, count, 1, count * size // MIN_SHARED)
    return cos, sin
