"""Matrix products whose rows do not depend on how many rows there are, on a GPU.

What decides the bits of an output element is the order in which its products are added up. Here that order depends on
the weight and on the row's regime (prompt or decode), never on the rows: rows of a tile, and how many tiles there are,
only say which elements are made together. So:

* prompt rows, bound by arithmetic: one accumulator per element over the whole inner dimension, in tiles for the
  tensor cores' widest instruction;
* decoded rows, bound by reading the weight: each step along the inner dimension is cut into `PIECES`, which the warps
  of a program share and which have accumulators of their own, added up pairwise at the end. Narrow tiles of the weight
  let every multiprocessor read a part of it. Where a weight has few outputs and a long inner dimension, that is cut
  into spans too, and a second kernel adds them up in order.

Nothing is tuned while it runs, and nothing is added up by atomics.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECES = 4
"""Accumulators per element of a decoded row. The kernel adds them up as (0 + 2) + (1 + 3)."""

GROUP = 8
"""Row tiles of a prompt that share the same columns of the weight at about the same time: they find it in L2."""

PROGRAMS = 128
"""About one program per multiprocessor of a large GPU. A constant: results do not depend on the device's size."""

MIN_SPAN = 4096
"""Inner elements that are worth a program of their own: less is read faster than a second kernel is launched."""


class ProductTile(NamedTuple):
    """Rows, columns and inner elements of a program's step, and the options of the compiler."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


def batch_invariant_linear(x: Tensor, weight: Tensor, decode_start: int) -> Tensor:
    """`x @ weight.T`, accumulated in fp32.

    A row's bits depend on the row, the weight and the side of `decode_start` on which it lies: neither on the number
    of rows nor on its place among them.

    Args:
        x: `[T, in]`.
        weight: `[out, in]` in the type of `x`, either dimension contiguous (others work, slowly).
        decode_start: rows from here on are decoded tokens, few and computed in a way of their own.

    Returns:
        `[T, out]` in the type of `x`.

    Raises:
        ValueError: `x` and `weight` do not go together.
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    if weight.shape[1] != inner or weight.dtype != x.dtype:
        raise ValueError(
            f"x and weight must have one type and one inner dimension; got x {list(x.shape)} {x.dtype} and "
            f"weight {list(weight.shape)} {weight.dtype}"
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    output = x.new_empty(rows, columns)
    if decode_start > 0:
        _prompt_rows(x[:decode_start], weight, output[:decode_start])
    if decode_start < rows:
        _decoded_rows(x[decode_start:], weight, output[decode_start:])
    return output


def _prompt_rows(x: Tensor, weight: Tensor, output: Tensor) -> None:
    (rows, inner), columns = x.shape, weight.shape[0]
    tile = prompt_tile(columns, x.element_size())
    _prompt_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        x,
        weight,
        output,
        rows,
        columns,
        inner,
        x.stride(0),
        *weight.stride(),
        output.stride(0),
        TILE_ROWS=tile.rows,
        TILE_COLUMNS=tile.columns,
        STEP=tile.inner,
        WHOLE=inner % tile.inner == 0,
        GROUP=GROUP,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def _decoded_rows(x: Tensor, weight: Tensor, output: Tensor) -> None:
    (rows, inner), columns = x.shape, weight.shape[0]
    tile = decode_tile(rows, columns, x.element_size())
    spans = decode_spans(columns, inner)
    span = triton.cdiv(triton.cdiv(inner, spans), tile.inner) * tile.inner
    target = output if spans == 1 else x.new_empty(spans, rows, columns, dtype=torch.float32)
    _decode_kernel[(triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), spans)](
        x,
        weight,
        target,
        rows,
        columns,
        inner,
        span,
        x.stride(0),
        *weight.stride(),
        target.stride(-2),
        TILE_ROWS=tile.rows,
        TILE_COLUMNS=tile.columns,
        PIECE=tile.inner // PIECES,
        PIECES=PIECES,
        WHOLE=inner % tile.inner == 0 and inner % span == 0,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    if spans > 1:
        _add_spans_kernel[(triton.cdiv(rows * columns, 1024),)](target, output, rows, columns, spans, BLOCK=1024)


@lru_cache(maxsize=256)
def prompt_tile(columns: int, element_size: int) -> ProductTile:
    """The tile of prompt rows for a weight of this number of outputs. A wide one spares L2, narrow ones spread a weight
    with fewer outputs over the device."""
    if element_size == 4:
        return ProductTile(64, 64, 32, 8, 3)
    if columns >= 8192:
        return ProductTile(128, 256, 64, 8, 3)
    return ProductTile(128, 128, 64, 8, 4)


@lru_cache(maxsize=256)
def decode_tile(rows: int, columns: int, element_size: int) -> ProductTile:
    """The tile of this number of decoded rows for a weight of this number of outputs.

    `inner` decides bits and depends on the type alone. More rows go with more columns: what a program reads of `x`
    comes out of L2, whose speed is the limit there.
    """
    if element_size == 4:
        return ProductTile(16, 32, 64, 4, 6)
    inner = 128
    if rows <= 16:
        tile_columns = 32 if columns >= 2048 else 16
        few = triton.cdiv(columns, tile_columns) <= PROGRAMS
        return ProductTile(16, tile_columns, inner, 4, 9 if few else 6)
    tile_columns = 64 if columns >= 2048 else 32
    return ProductTile(32 if rows <= 32 else 64, tile_columns, inner, 4, 4)


def decode_spans(columns: int, inner: int) -> int:
    """Into how many spans the inner dimension is cut for decoded rows: the weight's shape says it alone."""
    return max(1, min(PROGRAMS // triton.cdiv(columns, 32), inner // MIN_SPAN))


@triton.jit
def sum_of_steps(
    x,
    weight,
    row_exists,
    column_exists,
    num_inner,
    weight_inner_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`[TILE_ROWS, TILE_COLUMNS]` fp32: products of rows at `x` `[TILE_ROWS, STEP]` and columns at `weight`
    `[STEP, TILE_COLUMNS]`, step by step along the inner dimension."""
    inner = tl.arange(0, STEP)
    total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    for start in tl.range(0, num_inner, STEP, num_stages=STAGES):
        if WHOLE:
            left = tl.load(x, mask=row_exists, other=0.0)
            right = tl.load(weight, mask=column_exists, other=0.0)
        else:
            inner_exists = start + inner < num_inner
            left = tl.load(x, mask=row_exists & inner_exists[None, :], other=0.0)
            right = tl.load(weight, mask=column_exists & inner_exists[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x += STEP
        weight += STEP * weight_inner_stride
    return total


@triton.jit
def sum_of_pieces(
    x,
    weight,
    row_exists,
    column_exists,
    begin,
    end,
    num_inner,
    weight_inner_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`[TILE_ROWS, TILE_COLUMNS]` fp32: products of rows at `x` `[1, TILE_ROWS, 1]` and columns at `weight`
    `[1, 1, TILE_COLUMNS]`, inner elements `[begin, end)`, in `PIECES` accumulators that are added up pairwise."""
    STEP: tl.constexpr = PIECES * PIECE
    inner = tl.arange(0, PIECES)[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    x += begin + inner[:, None, :]
    weight += (begin + inner.to(tl.int64))[:, :, None] * weight_inner_stride
    totals = tl.zeros((PIECES, TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        if WHOLE:
            left = tl.load(x, mask=row_exists, other=0.0)
            right = tl.load(weight, mask=column_exists, other=0.0)
        else:
            inner_exists = start + inner < num_inner
            left = tl.load(x, mask=row_exists & inner_exists[:, None, :], other=0.0)
            right = tl.load(weight, mask=column_exists & inner_exists[:, :, None], other=0.0)
        totals = tl.dot(left, right, totals, input_precision="ieee")
        x += STEP
        weight += STEP * weight_inner_stride
    # tl.sum may add up in another order for another tile; split and add may not
    tl.static_assert(PIECES == 4)
    halves = tl.reshape(tl.permute(totals, (1, 2, 0)), (TILE_ROWS, TILE_COLUMNS, 2, 2))
    even, odd = tl.split(halves)
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit(do_not_specialize=["num_rows"])
def _prompt_kernel(
    x,
    weight,
    output,
    num_rows,
    num_columns,
    num_inner,
    x_stride,
    weight_column_stride,
    weight_inner_stride,
    output_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    programs_of_group = GROUP * tl.cdiv(num_columns, TILE_COLUMNS)
    first = program // programs_of_group * GROUP
    size = min(row_tiles - first, GROUP)
    within = program % programs_of_group
    row = (first + within % size) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = within // size * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inner = tl.arange(0, STEP)
    row_exists, column_exists = (row < num_rows)[:, None], (column < num_columns)[None, :]
    x += row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight += column.to(tl.int64)[None, :] * weight_column_stride + inner[:, None] * weight_inner_stride
    total = sum_of_steps(
        x,
        weight,
        row_exists,
        column_exists,
        num_inner,
        weight_inner_stride,
        TILE_ROWS,
        TILE_COLUMNS,
        STEP,
        WHOLE,
        STAGES,
    )
    output += row.to(tl.int64)[:, None] * output_stride + column[None, :]
    tl.store(output, total.to(output.dtype.element_ty), mask=row_exists & column_exists)


@triton.jit(do_not_specialize=["num_rows"])
def _decode_kernel(
    x,
    weight,
    output,
    num_rows,
    num_columns,
    num_inner,
    span,
    x_stride,
    weight_column_stride,
    weight_inner_stride,
    output_stride,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    begin = tl.program_id(2) * span
    total = sum_of_pieces(
        x + row.to(tl.int64)[None, :, None] * x_stride,
        weight + column.to(tl.int64)[None, None, :] * weight_column_stride,
        (row < num_rows)[None, :, None],
        (column < num_columns)[None, None, :],
        begin,
        min(begin + span, num_inner),
        num_inner,
        weight_inner_stride,
        TILE_ROWS,
        TILE_COLUMNS,
        PIECE,
        PIECES,
        WHOLE,
        STAGES,
    )
    row, column = row.to(tl.int64)[:, None], column[None, :]
    output += (tl.program_id(2).to(tl.int64) * num_rows + row) * output_stride + column
    tl.store(output, total.to(output.dtype.element_ty), mask=(row < num_rows) & (column < num_columns))


@triton.jit(do_not_specialize=["num_rows"])
def _add_spans_kernel(spans, output, num_rows, num_columns, num_spans, BLOCK: tl.constexpr):
    size = num_rows.to(tl.int64) * num_columns
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(num_spans):
        total += tl.load(spans + at, mask=exists, other=0.0)
        spans += size
    tl.store(output + at, total.to(output.dtype.element_ty), mask=exists)
