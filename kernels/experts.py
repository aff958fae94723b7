"""Products with the weights of experts: every row with those of the few experts that it is routed to.

Rows are sorted by expert, and each expert that somebody is routed to multiplies its rows in one go; the others' weights
are not touched. How many rows share an expert depends on everything else in the batch, and a BLAS picks its algorithm
by the number of rows. So where results must not depend on the batch an expert's rows are cut into blocks of few sizes,
the last one filled up with rows whose results are not used, and all sizes give a row the same bits wherever in a block
it lies: `block_sizes_that_agree` tries that on the weight itself. On a GPU the kernel of `hybrid.kernels.matmul` has
tiles of fixed shape instead.

The numbers of rows are needed on the host: there is one wait for the device in each call of `group_rows`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.kernels import ops

BLOCK_ROWS = 8
"""Rows of the block that other sizes are compared with."""

MAX_BLOCK_ROWS = 128
"""The largest block that is tried."""

SHIFT = 3
"""How far the rows of the probe are moved, to see whether their place in a block matters."""


@dataclass(frozen=True)
class Grouped:
    """The rows of a batch in the order of their experts.

    Attributes:
        rows: `[P]` the row of the batch at each place; places that fill up a block have row 0.
        places: `[T, k]` where the result of each row with each of its experts will be.
        spans: `(expert, start, end)`: these places are multiplied together.
    """

    rows: Tensor
    places: Tensor
    spans: Sequence[tuple[int, int, int]]


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The experts of each row: those of the highest probability.

    Args:
        logits: `[T, experts]` fp32.
        normalise: whether the weights of a row sum to one; else they are the probabilities.

    Returns:
        `[T, top_k]` fp32 weights, and `[T, top_k]` experts.
    """
    weights, experts = logits.softmax(-1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalise else weights), experts


def group_rows(experts: Tensor, num_experts: int, sizes: Sequence[int] | None) -> Grouped:
    """Sort rows by expert.

    Args:
        experts: `[T, k]` of each row.
        sizes: what an expert's rows are cut into, rising; None: nothing is cut.
    """
    top_k = experts.shape[1]
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    spans: list[tuple[int, int, int]] = []
    shifts = [0] * num_experts  # how far filling up has moved an expert's rows
    before = end = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        shifts[expert] = end - before
        before += count
        while count > 0:
            size = count if sizes is None else next((size for size in sizes if size >= count), sizes[-1])
            spans.append((expert, end, end + size))
            end += size
            count -= size
    if end == before:
        rows, at = order // top_k, torch.arange(end, device=flat.device)
    else:
        shift = torch.tensor(shifts, device=flat.device)
        at = torch.arange(before, device=flat.device) + shift[flat[order]]
        rows = torch.zeros(end, dtype=torch.int64, device=flat.device)
        rows[at] = order // top_k
    places = torch.empty_like(at)
    places[order] = at
    return Grouped(rows, places.view_as(experts), spans)


def expert_linear(x: Tensor, weight: Tensor, grouped: Grouped, batch_invariant: bool) -> Tensor:
    """`x @ weight[expert].T` for every place.

    Args:
        x: `[P, in]`, sorted by expert.
        weight: `[experts, out, in]`, any strides.
        batch_invariant: a row's bits must not depend on the others; `grouped` was cut for that, or a kernel of ours
            does it.

    Returns:
        `[P, out]`.
    """
    output = x.new_empty(x.shape[0], weight.shape[1])
    own = batch_invariant and ops.uses_triton(x.device)
    for expert, start, end in grouped.spans:
        if own:
            output[start:end] = ops.invariant_linear(x[start:end], weight[expert], 0)
        else:
            torch.mm(x[start:end], weight[expert].t(), out=output[start:end])
    return output


def combine(y: Tensor, grouped: Grouped, weights: Tensor) -> Tensor:
    """The weighted sum of a row's results, in fp32 and in the order of its weights.

    Args:
        y: `[P, size]`.
        weights: `[T, k]` fp32.

    Returns:
        `[T, size]`.
    """
    total = y[grouped.places[:, 0]].float() * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total.addcmul_(y[grouped.places[:, rank]].float(), weights[:, rank : rank + 1])
    return total.to(y.dtype)


def block_sizes_that_agree(weight: Tensor) -> tuple[int, ...]:
    """Sizes of blocks, powers of two, rising, that give a row the same bits wherever in a block it lies; 1 alone where
    the place matters.

    Args:
        weight: `[out, in]`.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * MAX_BLOCK_ROWS, weight.shape[1], generator=generator).to(weight)

    def in_blocks_of(size: int, shift: int) -> Tensor:
        parts = x.roll(shift, 0).split(size)
        return torch.cat([torch.mm(part, weight.t()) for part in parts]).roll(-shift, 0)

    expected = in_blocks_of(BLOCK_ROWS, 0)
    powers = [2**power for power in range(MAX_BLOCK_ROWS.bit_length())]
    agree = [size for size in powers if all(torch.equal(in_blocks_of(size, shift), expected) for shift in (0, SHIFT))]
    return tuple(agree) if BLOCK_ROWS in agree else (1,)
