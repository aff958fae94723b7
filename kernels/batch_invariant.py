"""Matrix products whose rows do not depend on the rest of the batch.

A BLAS picks its algorithm by the number of rows, and on some CPUs by a row's place among them and by addresses, and a
row's bits change with it. So the rows of a packed batch are multiplied in products that are the same whatever else is
in the batch:

* *Prompts*: whole chunks, and the rest of a prompt by itself. Each product has a fixed shape, and each token a fixed
  place in it.
* *Single rows* (decoded tokens, rows of the head, rows of an expert): products of one row.
* Inputs and outputs of all of them start at multiples of `ALIGNMENT` bytes.

This holds by construction and needs nothing from the BLAS but to repeat itself. To multiply several chunks, or several
single rows, at once is faster: `choose` tries on a weight which larger products give the same bits on this machine,
with its number of threads, at every place and beside other rows. Where operations are compiled, code of ours multiplies
all rows, which is batch invariant by construction and in fast mode the fastest too (`hybrid.kernels.cpu`). On a GPU a
kernel of ours has tiles of fixed shape.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hybrid.kernels import ops

log: logging.Logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Bytes; torch allocates at multiples of it."""

MAX_SINGLE_ROWS = 32
"""The largest block of single rows that is tried."""

MAX_EXPERT_ROWS = 128
"""The largest block of an expert's rows that is tried."""

BLOCK_ROWS = 8
"""The smallest block that may take the place of products of one row (`choose_single_rows`)."""

MAX_CHUNK_ROWS = 512
"""Chunks are tried together up to this many rows."""

COLUMNS = 512
"""Outputs of a weight that several single rows are multiplied with in turn, while the CPU's cache holds them."""

MAX_COLUMN_ROWS = 8
"""Single rows that are multiplied with the same columns in turn."""

MAX_TRIAL_SECONDS = 0.2
"""After this long, products that could only be faster are not tried any more."""

MAX_SYNTHETIC = 1 << 22
"""Elements of a weight up to which it is replaced by one that makes every difference in rounding visible."""


@dataclass
class RowBlocks:
    """The rows of a step.

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
        """`num_rows` rows that are one token each."""
        return RowBlocks((), 0, num_rows, self.chunk)

    def cuts(self, max_rows: int) -> list[tuple[int, int]]:
        """Row ranges of the prompt parts: powers of two of chunks, of up to `max_rows` rows, and rests."""
        if max_rows not in self._cuts:
            cuts = []
            for start, end in self.segments:
                size = max_rows
                while start < end:
                    while size > self.chunk and start + size > end:
                        size //= 2
                    stop = min(start + size, end)
                    cuts.append((start, stop))
                    start = stop
            self._cuts[max_rows] = cuts
        return self._cuts[max_rows]


@dataclass(frozen=True)
class Products:
    """How the rows of a batch are multiplied with weights of one kind. The default relies on no probe.

    Attributes:
        chunk_rows: chunks are multiplied together up to this many rows; 0: one by one.
        sizes: sizes that a block of single rows may have, rising. Where 1 is not among them, blocks are filled up with
            zeros.
        columns: single rows for which no size is large enough are multiplied one by one with this many outputs after
            another; 0: with all outputs at once.
        is_compiled: all rows are multiplied by compiled code, which is batch invariant by construction.
    """

    chunk_rows: int = 0
    sizes: tuple[int, ...] = (1,)
    columns: int = 0
    is_compiled: bool = False

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.sizes))
        text = f"single rows in blocks of {rows}" + (f", else by {self.columns} columns" if self.columns else "")
        if self.is_compiled:
            return "compiled"
        return f"{text}; chunks up to {self.chunk_rows} rows" if self.chunk_rows else text


ONE_BY_ONE = Products()

COMPILED = Products(is_compiled=True)


def linear(
    x: Tensor,
    weight: Tensor,
    blocks: RowBlocks | None = None,
    products: Products = ONE_BY_ONE,
    scale: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T`.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`; with few rows fastest when it lies in memory by columns.
        blocks: the rows; None: one product, whose bits depend on the number of rows.
        products: how to multiply them, from `choose`.
        scale: `[out]` fp32 of the rows of a weight that is int8, whose products are compiled.
    """
    if products.is_compiled:
        return compiled_matmul().multiply(x, weight, scale)
    if blocks is None:
        return torch.nn.functional.linear(x, weight)
    if ops.uses_triton(x.device):
        return ops.batch_invariant_linear(x, weight, blocks.decode_start)
    x, matrix = x.contiguous(), weight.t()
    if blocks.decode_start == 0:
        return multiply_single_rows(x, matrix, products)
    output = x.new_empty(x.shape[0], weight.shape[0])
    for start, end in blocks.cuts(max(products.chunk_rows, blocks.chunk)):
        multiply(x[start:end], matrix, output[start:end])
    if blocks.decode_start < blocks.num_rows:
        output[blocks.decode_start :] = multiply_single_rows(x[blocks.decode_start :], matrix, products)
    return output


def multiply(x: Tensor, matrix: Tensor, output: Tensor) -> None:
    """Write `x @ matrix` to `output`, through aligned copies where their addresses are not aligned."""
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    if output.data_ptr() % ALIGNMENT:
        output.copy_(torch.mm(x, matrix))
    else:
        torch.mm(x, matrix, out=output)


def multiply_single_rows(x: Tensor, matrix: Tensor, products: Products) -> Tensor:
    """`x @ matrix` for rows of which each may be in any batch.

    Args:
        x: `[rows, in]`, contiguous.
        matrix: `[in, out]`.
    """
    if products.is_compiled:
        return compiled_matmul().multiply(x, matrix.t())
    rows, sizes = x.shape[0], products.sizes
    if rows in sizes:
        return torch.mm(x if x.data_ptr() % ALIGNMENT == 0 else x.clone(), matrix)
    output = x.new_empty(rows, matrix.shape[1])
    if products.columns and rows > sizes[-1]:
        for start in range(0, rows, MAX_COLUMN_ROWS):
            _by_columns(x[start : start + MAX_COLUMN_ROWS], matrix, products.columns, output[start:])
        return output
    start = 0
    while start < rows:
        left = rows - start
        size = next((size for size in sizes if size >= left), sizes[-1])
        stop = min(start + size, rows)
        if stop - start == size:
            multiply(x[start:stop], matrix, output[start:stop])
        else:
            block = x.new_zeros(size, x.shape[1])
            block[: stop - start] = x[start:stop]
            output[start:stop] = torch.mm(block, matrix)[: stop - start]
        start = stop
    return output


def _by_columns(x: Tensor, matrix: Tensor, width: int, output: Tensor) -> None:
    """Write `x @ matrix` to the first rows of `output`: one row after another, with `width` columns at a time."""
    rows, inner = x.shape
    per_line = ALIGNMENT // x.element_size()
    aligned = x.new_empty(rows, -(-inner // per_line) * per_line)[:, :inner]
    aligned.copy_(x)
    for first in range(0, matrix.shape[1], width):
        part = matrix[:, first : first + width]
        product = torch.bmm(aligned.unsqueeze(1), part.expand(rows, *part.shape))
        output[:rows, first : first + width] = product.squeeze(1)


def choose(weight: Tensor, chunk: int, takes_chunks: bool = True, may_compile: bool = True) -> Products:
    """The fastest products for a weight whose rows have the same bits in every batch.

    Single rows have the bits of a product of one row, which for one sequence costs a fraction of a block. Types of 16
    bits are multiplied in blocks several times as fast as row by row: where blocks do not agree with one row, but are
    independent of a row's place, all single rows are multiplied in blocks.

    Args:
        weight: `[out, in]` as it is in memory.
        chunk: rows of a chunk.
        takes_chunks: whether chunks of prompts are multiplied with it.
        may_compile: use compiled code where that is possible.
    """
    if may_compile and can_compile(weight):
        return COMPILED
    trial = _Trial(weight, max(MAX_CHUNK_ROWS, chunk) if takes_chunks else MAX_SINGLE_ROWS)
    chunk_rows = trial.chunk_rows(chunk) if takes_chunks else 0
    sizes = trial.sizes(MAX_SINGLE_ROWS, prefers_blocks=weight.element_size() < 4)
    columns = COLUMNS if 1 in sizes and sizes[-1] < BLOCK_ROWS and trial.columns_agree(COLUMNS) else 0
    return Products(chunk_rows, sizes, columns)


def compiled_matmul() -> Any:
    """`hybrid.kernels.cpu.matmul`, where products are compiled."""
    return ops.compiled_module("matmul")


def can_compile(weight: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether rows are multiplied with a weight `[..., out, in]` by compiled code.

    Args:
        dtype: of the rows; None: that of the weight.
    """
    if ops.setting() != "auto" or weight.device.type != "cpu":
        return False
    found = compiled_matmul()
    return not isinstance(found, str) and found.can_multiply(weight, dtype or weight.dtype)


def multiplies_pairs() -> bool:
    """Whether compiled products of bfloat16 are faster than those of float32: the CPU multiplies pairs of numbers."""
    target = ops.compiled_module("target")
    return not isinstance(target, str) and target.HAS_PAIRS and can_compile(torch.empty(1, 1, dtype=torch.bfloat16))


def choose_for_experts(weight: Tensor) -> Products:
    """Products for the weights of experts, `[experts, out, in]`, whose rows have the same bits in every batch.

    All rows of an expert are single rows: which of them come together depends on the batch. Prompts have many of them,
    so that blocks are preferred to products of one row.
    """
    if can_compile(weight):
        return COMPILED
    sizes: tuple[int, ...] = ()
    at = {weight[expert].data_ptr() % ALIGNMENT: expert for expert in range(len(weight))}
    for expert in at.values():
        found = _Trial(weight[expert], MAX_EXPERT_ROWS).sizes(MAX_EXPERT_ROWS, prefers_blocks=True)
        sizes = tuple(size for size in sizes if size in found) or (1,) if sizes else found
    return Products(sizes=sizes)


def seconds_of(x: Tensor, weight: Tensor, products: Products, repeats: int = 5) -> tuple[float, float]:
    """What the product of single rows and a weight costs, batch-invariant and as one product of torch, whose weight has
    the type of the rows: the least of some repeats each."""
    matrix, plain = weight.t(), weight.to(x.dtype).t()
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: multiply_single_rows(x, matrix, products),
        lambda: torch.mm(x, plain),
    )
    return _least(ways[0], repeats), _least(ways[1], repeats)


def _least(call: Callable[[], Tensor], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class _Trial:
    """Products with a weight, tried on rows of which every bit is compared.

    What decides the order of additions are shapes, strides and addresses, not values. Values are chosen so that
    products cancel each other, and nothing but their rounding errors is left: another order is then seen in any type.
    (Weights of more than `MAX_SYNTHETIC` elements are not copied: they are tried as they are.)
    """

    def __init__(self, weight: Tensor, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        outputs, inner = weight.shape
        x = torch.randn(num_rows, inner, generator=generator)
        if weight.numel() <= MAX_SYNTHETIC:
            order, half = torch.randperm(inner, generator=generator), inner // 2
            first, second, rest = order[:half], order[half : 2 * half], order[2 * half :]
            values = torch.randn(outputs, inner, generator=generator)
            values[:, second] = values[:, first]
            x[:, second], x[:, rest] = -x[:, first], 0
            weight = _in_memory_like(weight, values)
        self.matrix = weight.t()
        self.rows = x.to(weight)
        self.deadline = time.perf_counter() + MAX_TRIAL_SECONDS

    def sizes(self, max_rows: int, prefers_blocks: bool) -> tuple[int, ...]:
        """Sizes of blocks, rising, in all of which a row has the same bits wherever it is.

        Args:
            max_rows: the largest that is tried.
            prefers_blocks: where blocks of `BLOCK_ROWS` do not agree with a product of one row, but among themselves,
                these are the sizes. Otherwise 1 is among them.
        """
        powers = [1 << power for power in range(max_rows.bit_length())]
        alone, block = self._first_rows(1, max_rows), BLOCK_ROWS
        if self._agrees(self._product, alone, block):
            return self._agreeing(alone, powers, known=(1, block))
        if prefers_blocks:
            expected = self._first_rows(block, max_rows)
            if self._agrees(self._product, expected, block):
                return self._agreeing(expected, powers, known=(block,))
        return self._agreeing(alone, [1, 2, 3, 4], known=(1,))

    def columns_agree(self, width: int) -> bool:
        """Whether rows multiplied one by one with some columns at a time have the bits of products with all columns."""

        def product(rows: Tensor) -> Tensor:
            output = rows.new_empty(len(rows), self.matrix.shape[1])
            _by_columns(rows, self.matrix, width, output)
            return output

        alone = self._first_rows(1, MAX_COLUMN_ROWS)
        counts = range(2, MAX_COLUMN_ROWS + 1)
        return all(time.perf_counter() < self.deadline and self._agrees(product, alone, count) for count in counts)

    def chunk_rows(self, chunk: int) -> int:
        """The largest number of rows, a power of two of `chunk`, up to which a product equals those of its chunks."""
        rows, most = chunk, len(self.rows)
        expected = self._product(self.rows[:chunk].clone())
        while 2 * rows <= most and time.perf_counter() < self.deadline:
            parts = self.rows[rows : 2 * rows].clone().split(chunk)
            expected = torch.cat([expected, *(self._product(part.clone()) for part in parts)])
            if not torch.equal(self._product(self.rows[: 2 * rows]), expected):
                break
            rows *= 2
        return rows

    def _product(self, rows: Tensor) -> Tensor:
        return torch.mm(rows, self.matrix)

    def _first_rows(self, block: int, count: int) -> Tensor:
        """The product of every row with itself around it, `block` times: the first row of each."""
        return torch.cat([self._product(self.rows[[row] * block])[:1] for row in range(count)])

    def _agrees(self, product: Callable[[Tensor], Tensor], expected: Tensor, size: int) -> bool:
        """Whether a product of `size` rows gives every row the bits that are expected of it: at every place of the
        block, beside itself and beside others."""
        places = torch.arange(size)
        arrangements = (places * 0, places % 2, 1 - places % 2, places.flip(0), (places + 3) % len(expected))
        return all(torch.equal(product(self.rows[rows]), expected[rows]) for rows in arrangements)

    def _agreeing(self, expected: Tensor, sizes: Sequence[int], known: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the sizes that agree, as far as there is time to try, and those that are known to."""
        found = set(known)
        for size in sizes:
            if (
                size not in found
                and time.perf_counter() < self.deadline
                and self._agrees(self._product, expected, size)
            ):
                found.add(size)
        return tuple(sorted(found))


def _in_memory_like(weight: Tensor, values: Tensor) -> Tensor:
    """Values with the type, strides and alignment of a weight."""
    offset = weight.data_ptr() % ALIGNMENT // weight.element_size()
    last = sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    memory = torch.zeros(offset + last + 1, dtype=weight.dtype, device=weight.device)
    return memory.as_strided(weight.shape, weight.stride(), offset).copy_(values)
