"""Products with weights of four bits (`hybrid.kernels.cpu.compiled.packed_weights`). With many rows, and where AMX
multiplies, rows of the weight are written as numbers first, as many as the caches hold."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.matmul import MANY_ROWS, MIN_SHARED, Rows, multiply_into
from hybrid.kernels.cpu.target import COLUMNS, HAS_TILES, LANES, PANEL_COLUMNS
from hybrid.kernels.cpu.tasks import KINDS, NUMBERS, kind_of, run

PIECE = 2 * LANES
"""Columns that one nibble of all 16-bit numbers of a block holds; x is copied where its rows have a part of a piece."""

SLICE = 1 << 19
"""Numbers that are written at once."""

_multiply_packed = Compiled(f"{COMPILED}.packed_weights", "multiply_packed")
_unpack_rows = Compiled(f"{COMPILED}.packed_weights", "unpack_rows")


def multiply_packed(x: Tensor, weight: Tensor, scales: Tensor, rows: Rows | None = None) -> Tensor:
    """`x @ weight.T`, accumulated in fp32 in the order of `hybrid.kernels.cpu.matmul.multiply`: the bits are those of
    a product with the numbers in the type of `x`.

    Args:
        x: `[rows, in]` fp32 or bfloat16.
        weight: `[out, blocks * 64]` uint8 (`hybrid.kernels.packed_weights`).
        scales: `[out, blocks, groups, 2]` fp32 or bfloat16.
        rows: those of x, where they meet other weights, too.

    Returns:
        `[rows, out]` in the type of `x`.
    """
    output = x.new_empty(x.shape[0], weight.shape[0])
    multiply_packed_into(output, rows or Rows(x), weight, scales)
    return output


def multiply_packed_into(output: Tensor, rows: Rows, weight: Tensor, scales: Tensor) -> None:
    """`multiply_packed`, written to `output`, whose rows are contiguous."""
    x = rows.x
    _check(x, weight, scales)
    if len(x) >= MANY_ROWS or (HAS_TILES and x.dtype == torch.bfloat16):
        for first, numbers in _slices(x, weight, scales):
            multiply_into(output[:, first : first + len(numbers)], rows, numbers)
    else:
        _multiply_few(output, rows, weight, scales, (0, 1, 1, 0, 0))


def multiply_packed_parts(output: Tensor, x: Tensor, weights: Tensor, scales: Tensor, ends: Tensor) -> None:
    """`hybrid.kernels.cpu.matmul.multiply_parts` with weights of four bits.

    Args:
        weights, scales: `[N, ...]`, each as of `multiply_packed`.
    """
    _check(x, weights, scales)
    parts = ends.data_ptr(), ends.numel(), len(weights), weights.stride(0), scales.stride(0)
    _multiply_few(output, Rows(x), weights[0], scales[0], parts)


def _check(x: Tensor, weight: Tensor, scales: Tensor) -> None:
    """Refuse what is not compiled."""
    lies_right = x.dim() == 2 and scales.dtype in NUMBERS and weight.is_contiguous() and scales.is_contiguous()
    kind_of("a product with a weight of four bits", x, lies_right=lies_right)


def _multiply_few(
    output: Tensor, x: Rows, weight: Tensor, scales: Tensor, several: tuple[int, int, int, int, int]
) -> None:
    """`several`: the address of the ends of parts, how many they are, weights, and how far apart these and their scales
    are."""
    kinds, (rows, inner), outputs = (KINDS[scales.dtype], KINDS[output.dtype]), x.x.shape, len(weight)
    pieces, groups = -(-inner // PIECE), scales.shape[2]
    own = x.arranged if x.x.dtype != torch.float32 or inner % PIECE else x.x
    addresses = own.data_ptr(), weight.data_ptr(), scales.data_ptr(), output.data_ptr()
    strides = own.stride(0), weight.stride(0), scales.stride(0)
    args = (*addresses, *strides, groups, pieces, output.stride(0), rows, *several)
    run(_multiply_packed, kinds, args, outputs, COLUMNS, rows * inner * outputs // MIN_SHARED)


def _slices(x: Tensor, weight: Tensor, scales: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Rows of the weight as numbers in the type of x, and the first of them; they last until the next ones."""
    kinds, pieces = (KINDS[scales.dtype], KINDS[x.dtype]), -(-x.shape[1] // PIECE)
    step = max(SLICE // x.shape[1] // PANEL_COLUMNS, 1) * PANEL_COLUMNS
    memory = torch.empty(min(step, len(weight)), pieces * PIECE, dtype=x.dtype)
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        count = len(weight[rows])
        addresses = weight[rows].data_ptr(), scales[rows].data_ptr(), memory.data_ptr()
        args = (*addresses, weight.stride(0), scales.stride(0), scales.shape[2], pieces)
        run(_unpack_rows, kinds, args, count, 1, count * x.shape[1] // MIN_SHARED)
        yield first, memory[:count, : x.shape[1]]
