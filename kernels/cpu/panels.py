"""Products of many rows of x: rows are copied first, in the order in which they are used
(`hybrid.kernels.cpu.compiled.panels`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.sizes import PANEL_COLUMNS, PANEL_ROWS
from hybrid.kernels.cpu.target import HAS_PAIRS, LANES
from hybrid.kernels.cpu.tasks import run

MIN_SHARED = 1 << 16
"""Multiplications that are worth a thread."""

MIN_COPIED = 1 << 14
"""Elements of x that are worth a thread where they are copied."""

_make_panels = Compiled(f"{COMPILED}.panels", "make_panels")
_multiply_panels = Compiled(f"{COMPILED}.panels", "multiply_panels")


def multiply_panels(output: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    """`hybrid.kernels.cpu.matmul.multiply_into` for many rows; x is fp32, or bfloat16 where the weight is."""
    (rows, inner), outputs = x.shape, weight.shape[0]
    taken = 2 * LANES if x.dtype == torch.bfloat16 else LANES  # numbers of a row at once, and steps that they make
    made = taken // LANES if not HAS_PAIRS else 1
    steps, tiles = -(-inner // taken) * made, -(-rows // PANEL_ROWS)
    panels = torch.empty(tiles * PANEL_ROWS * steps * LANES)
    args = x.data_ptr(), panels.data_ptr(), x.stride(0), rows, inner, steps, taken, made
    run(_make_panels, KINDS[x.dtype], args, tiles, 1, x.numel() // MIN_COPIED)
    addresses = panels.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    of_row = weight.stride(0) * weight.element_size()
    numbers_of_product = (*addresses, weight.stride(0), output.stride(0), rows, inner, steps, of_row, taken, made)
    kinds, most = (KINDS[weight.dtype], KINDS[output.dtype]), rows * inner * outputs // MIN_SHARED
    run(_multiply_panels, kinds, numbers_of_product, outputs, PANEL_COLUMNS, most)
