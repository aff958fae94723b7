"""Matrix products whose rows do not depend on how many rows there are.

A BLAS picks another algorithm for another number of rows, and a row's bits change with it. Here a product over a packed
batch is cut into products of fixed shape: whole chunks, the rest of a prompt by itself, and decoded rows in blocks of
one size. A row then meets the same algorithm whatever else is in the batch. Several chunks go together, and blocks of
decoded rows have other sizes, where a probe on the weight itself has shown that this BLAS, on this machine, gives the
same bits (`rows_that_agree`, `decode_rows_that_agree`). On a GPU a kernel of ours has tiles of fixed shape instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid.kernels import ops

DECODE_ROWS = 8
"""Rows of a block of decoded tokens; a block is filled up with zeros."""

MAX_DECODE_ROWS = 32
"""The largest block of decoded tokens that is tried."""

BLOCK_ROWS = 8
"""Rows of the block that other sizes are compared with."""

MAX_BLOCK_ROWS = 128
"""The largest block that is tried."""

SHIFT = 3
"""How far the rows of the probe are moved, to see whether their place in a block matters."""


@dataclass
class RowBlocks:
    """How the rows of a step are cut.

    Attributes:
        segments: `[start, end)` of the rows of each prompt part; each begins at a multiple of `chunk` of its prompt.
        decode_start: rows from here on are one token each.
        num_rows: all rows.
        chunk: rows of a chunk.
    """

    segments: Sequence[tuple[int, int]]
    decode_start: int
    num_rows: int
    chunk: int
    _cuts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def of_single_rows(self, num_rows: int) -> "RowBlocks":
        """The cut of `num_rows` rows that are one token each."""
        return RowBlocks((), 0, num_rows, self.chunk)

    def cuts(self, most: int) -> list[tuple[int, int]]:
        """Row ranges of the prompt parts: powers of two of chunks, of at most `most` rows, and rests."""
        if most not in self._cuts:
            cuts = []
            for start, end in self.segments:
                size = most
                while start < end:
                    while size > self.chunk and start + size > end:
                        size //= 2
                    stop = min(start + size, end)
                    cuts.append((start, stop))
                    start = stop
            self._cuts[most] = cuts
        return self._cuts[most]


def linear(
    x: Tensor,
    weight: Tensor,
    blocks: RowBlocks | None = None,
    most_rows: int = 0,
    decode_rows: Sequence[int] = (DECODE_ROWS,),
) -> Tensor:
    """`x @ weight.T`.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`; fastest with few rows when it lies in memory by columns.
        blocks: how to cut the rows; None: one product, whose bits depend on the number of rows.
        most_rows: chunks go together up to this many rows (from `rows_that_agree`); 0: they do not.
        decode_rows: sizes that a block of decoded tokens may have, rising (from `decode_rows_that_agree`).
    """
    if blocks is None:
        return torch.nn.functional.linear(x, weight)
    if ops.uses_triton(x.device):
        return ops.batch_invariant_linear(x, weight, blocks.decode_start)
    output = x.new_empty(x.shape[0], weight.shape[0])
    for start, end in blocks.cuts(max(most_rows, blocks.chunk)):
        torch.mm(x[start:end], weight.t(), out=output[start:end])
    start = blocks.decode_start
    while start < blocks.num_rows:
        left = blocks.num_rows - start
        size = next((size for size in decode_rows if size >= left), decode_rows[-1])
        end = min(start + size, blocks.num_rows)
        if end - start == size:
            torch.mm(x[start:end], weight.t(), out=output[start:end])
        else:
            block = x.new_zeros(size, x.shape[1])
            block[: end - start] = x[start:end]
            output[start:end] = torch.mm(block, weight.t())[: end - start]
        start = end
    return output


def rows_that_agree(weight: Tensor, chunk: int, limit: int = 512) -> int:
    """The largest number of rows, a power of two of `chunk`, up to which a product equals that of its chunks bit by
    bit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(limit, weight.shape[1], generator=generator).to(weight)
    expected = torch.cat([torch.mm(part, weight.t()) for part in x.split(chunk)])
    most = chunk
    while 2 * most <= limit and torch.equal(torch.mm(x[: 2 * most], weight.t()), expected[: 2 * most]):
        most *= 2
    return most


def decode_rows_that_agree(weight: Tensor) -> tuple[int, ...]:
    """The sizes of blocks, powers of two, whose rows equal those of blocks of `DECODE_ROWS` bit by bit, rising.

    The rows of the probe lie at every place of a block, among other rows: the bits depend on neither.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * MAX_DECODE_ROWS, weight.shape[1], generator=generator).to(weight)

    def in_blocks_of(size: int) -> Tensor:
        return torch.cat([torch.mm(part, weight.t()) for part in x.split(size)])

    expected = in_blocks_of(DECODE_ROWS)
    sizes = [2**power for power in range(1, MAX_DECODE_ROWS.bit_length())]
    return tuple(size for size in sizes if torch.equal(in_blocks_of(size), expected))


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
