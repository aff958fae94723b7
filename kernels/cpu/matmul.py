"""Matrix products, batch invariant by construction and as fast as a weight can be read
(`hybrid.kernels.cpu.compiled.matmul`). Many rows of x are copied first, in the order in which they are used."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED, PRODUCTS, TILE_PRODUCTS
from hybrid.kernels.cpu.kinds import TILE_NUMBERS, TILE_ROWS
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.memory import widen
from hybrid.kernels.cpu.target import COLUMNS, HAS_PAIRS, HAS_WIDE_REGISTERS, LANES, PANEL_COLUMNS, PANEL_ROWS
from hybrid.kernels.cpu.tasks import KINDS, by_rows, kind_of, run

MIN_SHARED = 1 << 16
"""Multiplications that are worth a thread."""

MIN_COPIED = 1 << 14
"""Elements of x that are worth a thread where they are copied."""

MANY_ROWS = 320 if HAS_PAIRS else 128 if HAS_WIDE_REGISTERS else 40
"""Rows of x from which on it is worth to copy them and the weight first: with wide registers not before they are more
than the second cache holds."""

_multiply = Compiled(f"{COMPILED}.matmul", "multiply")
_widen_pairs = Compiled(f"{COMPILED}.matmul", "widen_pairs")
_make_panels = Compiled(f"{COMPILED}.matmul", "make_panels")
_multiply_panels = Compiled(f"{COMPILED}.matmul", "multiply_panels")
_make_tiles = Compiled(f"{COMPILED}.amx", "make_tiles")
_multiply_tiles = Compiled(f"{COMPILED}.amx", "multiply_tiles")


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """`x @ weight.T`, accumulated in fp32, with torch's number of threads. With fp32 rows a bfloat16 weight gives the
    bits of its numbers as fp32.

    Args:
        x: `[rows, in]` fp32 or bfloat16.
        weight: `[out, in]` fp32, bfloat16 or int8; copied where it is not stored by rows.
        scale: `[out]` fp32, of the rows of an int8 weight.

    Returns:
        `[rows, out]` in the type of `x`.
    """
    output = x.new_empty(x.shape[0], weight.shape[0])
    multiply_into(output, x, weight, scale)
    return output


def multiply_into(output: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None = None) -> None:
    """`multiply`, written to `output`, whose rows are contiguous."""
    kinds = KINDS.get(weight.dtype, ""), KINDS.get(x.dtype, "")
    if kinds not in PRODUCTS:
        kind_of("multiply", x, weight, lies_right=False)
    (rows, inner), outputs = x.shape, weight.shape[0]
    x, weight = by_rows(x), by_rows(weight)
    if kinds in TILE_PRODUCTS:
        _multiply_by_tiles(output, x, weight, scale)
        return
    if x.dtype not in (weight.dtype, torch.float32):
        x = widen(x, torch.empty(x.shape))
    if rows >= MANY_ROWS:
        _multiply_many(output, x, weight, scale)
        return
    if x.dtype != torch.float32 and not HAS_PAIRS:
        x = _in_pairs(x)
    addresses = x.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    args = (*addresses, x.stride(0), weight.stride(0), output.stride(0), rows, inner)
    run(_multiply, kinds, args, outputs, COLUMNS, rows * inner * outputs // MIN_SHARED)


def _in_pairs(x: Tensor) -> Tensor:
    """Rows of x as fp32, in the order in which pairs are multiplied, zeros behind them."""
    width = -(-x.shape[1] // (2 * LANES)) * 2 * LANES
    wide = torch.empty(len(x), width)
    args = x.data_ptr(), wide.data_ptr(), x.stride(0), x.shape[1], width
    run(_widen_pairs, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
    return wide


def _multiply_many(output: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    """The product for many rows; x is fp32, or bfloat16 where the weight is."""
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


def _multiply_by_tiles(output: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None) -> None:
    """The product of bfloat16 rows with a weight of bfloat16 or bytes by AMX."""
    (rows, inner), outputs = x.shape, weight.shape[0]
    steps, used = -(-inner // TILE_NUMBERS), -(-rows // TILE_ROWS)
    tiles = torch.empty((used + used % 2) * TILE_ROWS, steps * TILE_NUMBERS, dtype=x.dtype)
    args = x.data_ptr(), tiles.data_ptr(), x.stride(0), rows, inner, steps
    run(_make_tiles, KINDS[x.dtype], args, used, 1, x.numel() // MIN_COPIED)
    addresses = tiles.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    size, is_scaled = weight.element_size(), int(scale is not None)
    sizes = weight.stride(0), output.stride(0), rows, inner, steps, size, is_scaled
    kinds, most = (KINDS[weight.dtype], KINDS[output.dtype]), rows * inner * outputs // MIN_SHARED
    run(_multiply_tiles, kinds, (*addresses, *sizes), outputs, 2 * TILE_ROWS, most)
