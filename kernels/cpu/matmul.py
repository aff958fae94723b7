"""Matrix products, batch invariant by construction and as fast as a weight can be read
(`hybrid.kernels.cpu.compiled.matmul`). Many rows of x are copied first, in the order in which they are used."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED, PRODUCTS, TILE_PRODUCTS, WHOLE_PRODUCTS
from hybrid.kernels.cpu.kinds import BLOCK_OF_BYTES, BYTES_AT_ONCE, TILE_NUMBERS, TILE_ROWS
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
_arrange = Compiled(f"{COMPILED}.matmul", "arrange")
_make_panels = Compiled(f"{COMPILED}.matmul", "make_panels")
_multiply_panels = Compiled(f"{COMPILED}.matmul", "multiply_panels")
_round_rows = Compiled(f"{COMPILED}.byte_weights", "round_rows")
_multiply_bytes = Compiled(f"{COMPILED}.byte_weights", "multiply_bytes")
_make_tiles = Compiled(f"{COMPILED}.amx", "make_tiles")
_multiply_tiles = Compiled(f"{COMPILED}.amx", "multiply_tiles")


class Panels(NamedTuple):
    """Many rows of x, as they are multiplied.

    Attributes:
        memory: of their numbers.
        shape: of x.
        steps: of a panel.
        taken, made: numbers of a row that are taken at once, and steps that they make.
    """

    memory: Tensor
    shape: tuple[int, int]
    steps: int
    taken: int
    made: int


class Rows:
    """Rows of x, and what is made of them before they are multiplied: once, whatever number of weights they meet.

    Args:
        x: `[rows, in]` fp32 or bfloat16.
    """

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor = by_rows(x)

    @cached_property
    def wide(self) -> Rows:
        """Those as fp32."""
        return Rows(widen(self.x, torch.empty(self.x.shape, dtype=torch.float32)))

    @cached_property
    def arranged(self) -> Tensor:
        """Those as fp32, zeros behind them, in the order in which they are multiplied where bfloat16 numbers are taken
        in pairs."""
        x = self.x
        width = -(-x.shape[1] // (2 * LANES)) * 2 * LANES
        found = torch.empty(len(x), width, dtype=torch.float32)
        args = x.data_ptr(), found.data_ptr(), x.stride(0), x.shape[1], width, int(x.dtype != torch.float32)
        run(_arrange, KINDS[x.dtype], args, len(x), 1, x.numel() // MIN_SHARED)
        return found

    @cached_property
    def panels(self) -> Panels:
        """Those as panels."""
        x, (rows, inner) = self.x, self.x.shape
        taken = 2 * LANES if x.dtype == torch.bfloat16 else LANES
        made = taken // LANES if not HAS_PAIRS else 1
        steps, tiles = -(-inner // taken) * made, -(-rows // PANEL_ROWS)
        memory = torch.empty(tiles * PANEL_ROWS * steps * LANES, dtype=torch.float32)
        args = x.data_ptr(), memory.data_ptr(), x.stride(0), rows, inner, steps, taken, made
        run(_make_panels, KINDS[x.dtype], args, tiles, 1, x.numel() // MIN_COPIED)
        return Panels(memory, (rows, inner), steps, taken, made)

    @cached_property
    def rounded(self) -> tuple[Tensor, Tensor]:
        """Those in bfloat16 as whole numbers of 16 bits, zeros behind them, and the scales of their blocks."""
        x, (rows, inner) = self.x, self.x.shape
        width, blocks = -(-inner // (2 * LANES)) * 2 * LANES, -(-inner // BLOCK_OF_BYTES)
        whole, scales = torch.empty(rows, width, dtype=torch.int16), torch.empty(rows, blocks, dtype=torch.float32)
        addresses = x.data_ptr(), whole.data_ptr(), scales.data_ptr()
        run(
            _round_rows,
            KINDS[x.dtype],
            (*addresses, x.stride(0), inner, width, blocks),
            rows,
            1,
            x.numel() // MIN_COPIED,
        )
        return whole, scales

    @cached_property
    def tiles(self) -> Tensor:
        """Those as tiles of AMX."""
        x, (rows, inner) = self.x, self.x.shape
        steps, used = -(-inner // TILE_NUMBERS), -(-rows // TILE_ROWS)
        found = torch.empty((used + used % 2) * TILE_ROWS, steps * TILE_NUMBERS, dtype=x.dtype)
        args = x.data_ptr(), found.data_ptr(), x.stride(0), rows, inner, steps
        run(_make_tiles, KINDS[x.dtype], args, used, 1, x.numel() // MIN_COPIED)
        return found


def multiply(x: Tensor, weight: Tensor, scale: Tensor | None = None, rows: Rows | None = None) -> Tensor:
    """`x @ weight.T`, accumulated in fp32, with torch's number of threads. With fp32 rows a bfloat16 weight gives the
    bits of its numbers as fp32.

    Args:
        x: `[rows, in]` fp32 or bfloat16.
        weight: `[out, in]` fp32, bfloat16 or int8; copied where it is not stored by rows.
        scale: `[out]` fp32, of the rows of an int8 weight.
        rows: those of x, where they meet other weights, too.

    Returns:
        `[rows, out]` in the type of `x`.
    """
    output = x.new_empty(x.shape[0], weight.shape[0])
    multiply_into(output, rows or Rows(x), weight, scale)
    return output


def multiply_into(output: Tensor, rows: Rows, weight: Tensor, scale: Tensor | None = None) -> None:
    """`multiply`, written to `output`, whose rows are contiguous."""
    x = rows.x
    kinds = KINDS.get(weight.dtype, ""), KINDS.get(x.dtype, "")
    if kinds not in PRODUCTS:
        kind_of("multiply", x, weight, lies_right=False)
    weight = by_rows(weight)
    if kinds in TILE_PRODUCTS:
        _multiply_by_tiles(output, rows, weight, scale)
        return
    if kinds in WHOLE_PRODUCTS:
        _multiply_in_whole_numbers(output, rows, weight, scale)
        return
    if x.dtype not in (weight.dtype, torch.float32):
        rows = rows.wide
    if len(x) >= MANY_ROWS:
        _multiply_many(output, rows.panels, weight, scale)
    else:
        _multiply_few(output, rows, weight, scale, (0, 1, 1, 0))


def multiply_parts(output: Tensor, x: Tensor, weights: Tensor, ends: Tensor) -> None:
    """The products of rows of x that follow each other with several weights. Which rows these are is not read on the
    host. Not with AMX, whose order of sums is another one.

    Args:
        output: `[rows, out]`; written.
        x: `[rows, in]`, as of `multiply`.
        weights: `[N, out, in]`.
        ends: `[M]` int64 where the rows of each weight end, M a multiple of N: all weights come again and again.
    """
    if weights.stride(2) != 1 or (KINDS.get(weights.dtype, ""), KINDS.get(x.dtype, "")) not in PRODUCTS:
        kind_of("multiply_parts", x, weights, lies_right=False)
    rows = Rows(x) if x.dtype in (weights.dtype, torch.float32) else Rows(x).wide
    _multiply_few(output, rows, weights[0], None, (ends.data_ptr(), ends.numel(), len(weights), weights.stride(0)))


def _multiply_few(
    output: Tensor, rows: Rows, weight: Tensor, scale: Tensor | None, parts: tuple[int, int, int, int]
) -> None:
    """`parts`: the address of their ends, how many they are, weights, and how far apart these are."""
    x, (count, inner), outputs = rows.x, rows.x.shape, weight.shape[0]
    kinds = KINDS[weight.dtype], KINDS[output.dtype]
    if x.dtype != torch.float32 and not HAS_PAIRS:
        x = rows.arranged
    addresses = x.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    args = (*addresses, x.stride(0), weight.stride(0), output.stride(0), count, inner, *parts)
    run(_multiply, kinds, args, outputs, COLUMNS, count * inner * outputs // MIN_SHARED)


def _multiply_many(output: Tensor, x: Panels, weight: Tensor, scale: Tensor | None) -> None:
    (rows, inner), outputs = x.shape, weight.shape[0]
    addresses = x.memory.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    of_row = weight.stride(0) * weight.element_size()
    sizes = rows, inner, x.steps, of_row, x.taken, x.made
    kinds, most = (KINDS[weight.dtype], KINDS[output.dtype]), rows * inner * outputs // MIN_SHARED
    args = (*addresses, weight.stride(0), output.stride(0), *sizes)
    run(_multiply_panels, kinds, args, outputs, PANEL_COLUMNS, most)


def _multiply_in_whole_numbers(output: Tensor, rows: Rows, weight: Tensor, scale: Tensor | None) -> None:
    """The product of bfloat16 rows with a weight of bytes."""
    assert scale is not None
    (whole, scales), (count, inner), outputs = rows.rounded, rows.x.shape, weight.shape[0]
    addresses = whole.data_ptr(), scales.data_ptr(), weight.data_ptr(), scale.data_ptr(), output.data_ptr()
    args = (*addresses, whole.stride(0), weight.stride(0), output.stride(0), count, inner)
    kinds, most = (KINDS[weight.dtype], KINDS[output.dtype]), count * inner * outputs // MIN_SHARED
    run(_multiply_bytes, kinds, args, outputs, BYTES_AT_ONCE, most)


def _multiply_by_tiles(output: Tensor, x: Rows, weight: Tensor, scale: Tensor | None) -> None:
    """The product of bfloat16 rows with a weight of bfloat16 or bytes by AMX."""
    tiles, (rows, inner), outputs = x.tiles, x.x.shape, weight.shape[0]
    addresses = tiles.data_ptr(), weight.data_ptr(), 0 if scale is None else scale.data_ptr(), output.data_ptr()
    size, is_scaled, steps = weight.element_size(), int(scale is not None), tiles.shape[1] // TILE_NUMBERS
    sizes = weight.stride(0), output.stride(0), rows, inner, steps, size, is_scaled
    kinds, most = (KINDS[weight.dtype], KINDS[output.dtype]), rows * inner * outputs // MIN_SHARED
    run(_multiply_tiles, kinds, (*addresses, *sizes), outputs, 2 * TILE_ROWS, most)
