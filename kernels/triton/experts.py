"""Mixtures of experts on a GPU: routing, sorting, one product for all experts, the weighted sum. The host learns
nothing of who is routed where, so that a CUDA graph can record it.

A product's programs each make one tile of one expert's pairs. How many tiles an expert has is known on the device
alone: as many programs are launched as could be needed, each counts the tiles of the experts before it, and those that
are left over end. Results do not depend on the batch: a pair's products are added up as `hybrid.kernels.triton.matmul`
does it for rows, whatever tile the pair lies in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.triton.matmul import PIECES, ProductTile, decode_tile, sum_of_pieces, sum_of_steps

PAIRS = 1024
"""Pairs that a program of the sorting kernel looks at at once."""

COLUMNS = 1024
"""Columns that a program of the weighted sum adds up."""


def route_experts(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The kernel of `reference.route_experts`. Of equal probabilities the lower expert comes first."""
    rows, num_experts = logits.shape
    weights = logits.new_empty(rows, top_k)
    experts = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    if rows:
        _route_kernel[(rows,)](
            logits,
            weights,
            experts,
            num_experts,
            logits.stride(0),
            TOP_K=top_k,
            RANKS=triton.next_power_of_2(top_k),
            BLOCK=triton.next_power_of_2(num_experts),
            NORMALISE=normalise,
            num_warps=4,
        )
    return weights, experts


def sort_by_expert(experts: Tensor, num_experts: int, decode_start: int) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel of `reference.sort_by_expert`: a program per expert finds its pairs, and counts those before them."""
    experts = experts.contiguous()
    order, places = experts.new_empty(experts.numel()), torch.empty_like(experts)
    ends = experts.new_empty(2, num_experts)
    _sort_kernel[(num_experts,)](
        experts,
        order,
        places,
        ends,
        decode_start * experts.shape[1],
        experts.numel(),
        num_experts,
        BLOCK=PAIRS,
        num_warps=4,
    )
    return order, places, ends


def expert_linear(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int) -> Tensor:
    """The kernel of `reference.expert_linear`. A pair's bits depend on its row, its expert's weight and whether it is
    of a prompt."""
    if x.stride(1) != 1:
        x = x.contiguous()
    output = x.new_empty(len(order), weight.shape[1])
    if num_prompt:
        _prompt_pairs(x, weight, output, order, ends[0], top_k, num_prompt)
    if num_prompt < len(order):
        _decoded_pairs(x, weight, output, order, ends[1], top_k, num_prompt)
    return output


def _prompt_pairs(
    x: Tensor, weight: Tensor, output: Tensor, order: Tensor, ends: Tensor, top_k: int, num_pairs: int
) -> None:
    num_experts, columns, inner = weight.shape
    tile = prompt_tile(x.element_size())
    _prompt_kernel_of_experts[(_most_tiles(num_pairs, num_experts, tile), triton.cdiv(columns, tile.columns))](
        x,
        weight,
        output,
        order,
        ends,
        0,
        num_experts,
        columns,
        inner,
        x.stride(0),
        *weight.stride(),
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(num_experts),
        TILE_ROWS=tile.rows,
        TILE_COLUMNS=tile.columns,
        STEP=tile.inner,
        WHOLE=inner % tile.inner == 0,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def _decoded_pairs(
    x: Tensor, weight: Tensor, output: Tensor, order: Tensor, ends: Tensor, top_k: int, first: int
) -> None:
    num_experts, columns, inner = weight.shape
    num_pairs = len(order) - first
    share = 2 * triton.cdiv(num_pairs, num_experts)  # few experts have more pairs than this
    tile = decode_tile(share, columns, x.element_size())
    _decode_kernel_of_experts[(_most_tiles(num_pairs, num_experts, tile), triton.cdiv(columns, tile.columns))](
        x,
        weight,
        output,
        order,
        ends,
        first,
        num_experts,
        columns,
        inner,
        x.stride(0),
        *weight.stride(),
        TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(num_experts),
        TILE_ROWS=tile.rows,
        TILE_COLUMNS=tile.columns,
        PIECE=tile.inner // PIECES,
        PIECES=PIECES,
        WHOLE=inner % tile.inner == 0,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def _most_tiles(num_pairs: int, num_experts: int, tile: ProductTile) -> int:
    """Return the largest possible number of tiles, however pairs are dealt out to experts."""
    return num_pairs // tile.rows + min(num_pairs, num_experts)


def combine_experts(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The kernel of `reference.combine_experts`."""
    rows, top_k = places.shape
    columns = y.shape[1]
    output = y.new_empty(rows, columns)
    if rows:
        _combine_kernel[(rows, triton.cdiv(columns, COLUMNS))](
            y, places, weights, output, columns, y.stride(0), TOP_K=top_k, BLOCK=COLUMNS, num_warps=4
        )
    return output


def prompt_tile(element_size: int) -> ProductTile:
    """The tile of prompt rows: one for all weights, low, since an expert has few rows of most prompts."""
    return ProductTile(64, 64, 32, 4, 3) if element_size == 4 else ProductTile(64, 128, 64, 4, 4)


@triton.jit
def _route_kernel(
    logits,
    weights,
    experts,
    num_experts,
    stride,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert, ranks = tl.arange(0, BLOCK), tl.arange(0, RANKS)
    exists = expert < num_experts
    x = tl.load(logits + row * stride + expert, mask=exists, other=float("-inf"))
    x = tl.where(exists, tl.exp(x - tl.max(x)), 0.0)
    left = tl.where(exists, x / tl.sum(x), -1.0)
    best = tl.zeros((RANKS,), dtype=tl.float32)
    found = tl.zeros((RANKS,), dtype=tl.int64)
    for rank in tl.static_range(TOP_K):
        highest = tl.max(left)
        at = tl.min(tl.where(left == highest, expert, num_experts - 1))  # where nothing compares (NaN): any that exists
        best = tl.where(ranks == rank, highest, best)
        found = tl.where(ranks == rank, at.to(tl.int64), found)
        left = tl.where(expert == at, -1.0, left)
    if NORMALISE:
        best = best / tl.sum(best)
    tl.store(weights + row * TOP_K + ranks, best, mask=ranks < TOP_K)
    tl.store(experts + row * TOP_K + ranks, found, mask=ranks < TOP_K)


@triton.jit(do_not_specialize=["num_prompt", "num_pairs"])
def _sort_kernel(experts, order, places, ends, num_prompt, num_pairs, num_experts, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    begin, stop = num_prompt * 0, num_prompt
    for part in tl.static_range(2):
        before = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(begin, stop, BLOCK):
            pair = start + lane
            theirs = tl.load(experts + pair, mask=pair < stop, other=num_experts)
            before += (theirs < expert).to(tl.int32)
        at = begin + tl.sum(before)
        for start in range(begin, stop, BLOCK):
            pair = start + lane
            ours = (tl.load(experts + pair, mask=pair < stop, other=num_experts) == expert).to(tl.int32)
            place = (at + tl.cumsum(ours) - 1).to(tl.int64)
            tl.store(order + place, pair.to(tl.int64), mask=ours > 0)
            tl.store(places + pair, place, mask=ours > 0)
            at += tl.sum(ours)
        tl.store(ends + part * num_experts + expert, at.to(tl.int64))
        begin, stop = num_prompt, num_pairs


@triton.jit
def _tile_of_expert(ends, first, num_experts, EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Return the expert that a program's tile belongs to (`num_experts`: none), its first place, and where the expert's
    end."""
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < num_experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < num_experts), other=0)
    start = tl.where(expert == 0, first, start)
    tiles = tl.where(expert < num_experts, (end - start + TILE_ROWS - 1) // TILE_ROWS, 0)
    upto = tl.cumsum(tiles)
    mine = tl.sum((upto <= program).to(tl.int32))
    mine = tl.minimum(mine, num_experts)
    is_mine = expert == mine
    before = tl.sum(tl.where(is_mine, upto - tiles, 0))
    place = tl.sum(tl.where(is_mine, start, 0)) + (program - before) * TILE_ROWS
    return mine, place, tl.sum(tl.where(is_mine, end, 0))


@triton.jit(do_not_specialize=["first"])
def _prompt_kernel_of_experts(
    x,
    weight,
    output,
    order,
    ends,
    first,
    num_experts,
    num_columns,
    num_inner,
    x_stride,
    weight_expert_stride,
    weight_column_stride,
    weight_inner_stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    STEP: tl.constexpr,
):
    expert, place, end = _tile_of_expert(ends, first, num_experts, EXPERTS, TILE_ROWS)
    if expert == num_experts:
        return
    place += tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inner = tl.arange(0, STEP)
    row = place
    if TOP_K > 0:
        row = tl.load(order + place, mask=place < end, other=0) // TOP_K
    row_exists, column_exists = (place < end)[:, None], (column < num_columns)[None, :]
    x += row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight += expert.to(tl.int64) * weight_expert_stride
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
    output += place.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(output, total.to(output.dtype.element_ty), mask=row_exists & column_exists)


@triton.jit(do_not_specialize=["first"])
def _decode_kernel_of_experts(
    x,
    weight,
    output,
    order,
    ends,
    first,
    num_experts,
    num_columns,
    num_inner,
    x_stride,
    weight_expert_stride,
    weight_column_stride,
    weight_inner_stride,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
):
    expert, place, end = _tile_of_expert(ends, first, num_experts, EXPERTS, TILE_ROWS)
    if expert == num_experts:
        return
    place += tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    row = place
    if TOP_K > 0:
        row = tl.load(order + place, mask=place < end, other=0) // TOP_K
    row_exists, column_exists = place < end, column < num_columns
    x += row.to(tl.int64)[None, :, None] * x_stride
    weight += expert.to(tl.int64) * weight_expert_stride
    weight += column.to(tl.int64)[None, None, :] * weight_column_stride
    total = sum_of_pieces(
        x,
        weight,
        row_exists[None, :, None],
        column_exists[None, None, :],
        0,
        num_inner,
        num_inner,
        weight_inner_stride,
        TILE_ROWS,
        TILE_COLUMNS,
        PIECE,
        PIECES,
        WHOLE,
        STAGES,
    )
    output += place.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(output, total.to(output.dtype.element_ty), mask=row_exists[:, None] & column_exists[None, :])


@triton.jit
def _combine_kernel(y, places, weights, output, num_columns, stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < num_columns
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        place = tl.load(places + row * TOP_K + rank)
        weight = tl.load(weights + row * TOP_K + rank)
        total += tl.load(y + place * stride + column, mask=exists, other=0.0).to(tl.float32) * weight
    tl.store(output + row * num_columns + column, total.to(output.dtype.element_ty), mask=exists)
