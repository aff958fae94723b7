"""Matrix products whose rows do not depend on how many rows there are."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid.kernels.batch_invariant import DECODE_ROWS, RowBlocks, decode_rows_that_agree, linear, rows_that_agree
from support.tensors import same_bits, starts_of

CHUNK = 64
SHAPES = [(96, 64), (64, 96), (50, 33), (512, 192), (4, 64)]
"""(out, in) of weights; 50 x 33 lies nowhere on a round address."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_columns(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A weight that lies in memory as the loader puts it."""
    return torch.randn(inputs, outputs).to(dtype).t()


def blocks_of(prompts: list[int], decoded: int, chunk: int = CHUNK) -> RowBlocks:
    """The cut of a step: prompt parts of these lengths, then tokens that are decoded."""
    starts = starts_of(prompts).tolist()
    return RowBlocks(list(pairwise(starts)), starts[-1], starts[-1] + decoded, chunk)


@given(
    prompts=st.lists(st.integers(1, 1500), max_size=6),
    chunk=st.sampled_from([1, 16, 64, 128]),
    doublings=st.integers(0, 5),
)
@settings(deadline=None)
def test_cuts_take_every_row_of_the_prompt_parts_once_and_only_whole_powers_of_chunks_but_for_rests(
    prompts: list[int], chunk: int, doublings: int
) -> None:
    most = chunk << doublings
    blocks = blocks_of(prompts, 5, chunk)
    cuts = blocks.cuts(most)
    assert [row for start, end in cuts for row in range(start, end)] == list(range(sum(prompts)))
    ends = {end for _, end in blocks.segments}
    for start, end in cuts:
        begin = max(first for first, _ in blocks.segments if first <= start)
        assert (start - begin) % chunk == 0
        rows = end - start
        if rows < chunk:
            assert end in ends  # the rest of a prompt part
        else:
            assert rows <= most
            assert rows % chunk == 0
            assert (rows // chunk).bit_count() == 1


@given(
    prompts=st.lists(st.integers(1, 300), max_size=4), decoded=st.integers(0, 20), most=st.sampled_from([0, 64, 256])
)
@settings(deadline=None, max_examples=50)
def test_a_cut_product_is_the_product(prompts: list[int], decoded: int, most: int) -> None:
    blocks = blocks_of(prompts, decoded)
    x, weight = torch.randn(blocks.num_rows, 33), by_columns(50, 33)
    output = linear(x, weight, blocks, most)
    torch.testing.assert_close(output, torch.nn.functional.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_without_blocks_it_is_the_product_of_torch() -> None:
    x, weight = torch.randn(7, 33), by_columns(50, 33)
    assert same_bits(linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_does_not_depend_on_the_other_rows(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight = by_columns(outputs, inputs, dtype)
    most = rows_that_agree(weight, CHUNK, limit=256)
    prompts, decoded = [1, CHUNK, 2 * CHUNK + 1, 3, 7 * CHUNK + 13], 2 * DECODE_ROWS + 3
    blocks = blocks_of(prompts, decoded)
    x = torch.randn(blocks.num_rows, inputs).to(dtype)
    together = linear(x, weight, blocks, most)
    for start, end in blocks.segments:
        assert same_bits(linear(x[start:end].clone(), weight, blocks_of([end - start], 0), most), together[start:end])
        for cut in range(start + CHUNK, end, CHUNK):
            parts = [
                linear(part.clone(), weight, blocks_of([len(part)], 0), most) for part in (x[start:cut], x[cut:end])
            ]
            assert same_bits(torch.cat(parts), together[start:end])
    for row in range(blocks.decode_start, blocks.num_rows):
        assert same_bits(linear(x[row : row + 1].clone(), weight, blocks_of([], 1), most)[0], together[row])


def test_the_cut_of_single_rows_treats_every_row_as_decoded() -> None:
    weight = by_columns(50, 33)
    x, blocks = torch.randn(11, 33), blocks_of([130], 4)
    single = blocks.of_single_rows(11)
    together = linear(x, weight, single)
    for row in range(11):
        assert same_bits(linear(x[row : row + 1], weight, blocks.of_single_rows(1))[0], together[row])
    assert single.cuts(CHUNK) == []


@pytest.mark.parametrize("decoded", [1, DECODE_ROWS - 1, DECODE_ROWS, DECODE_ROWS + 1, 3 * DECODE_ROWS])
def test_a_block_of_decoded_rows_is_filled_up_with_zeros(decoded: int) -> None:
    """So what lies behind the rows does not come in: here it is NaN."""
    weight, memory = by_columns(50, 33), torch.full((4 * DECODE_ROWS, 33), float("nan"))
    memory[:decoded] = torch.randn(decoded, 33)
    output = linear(memory[:decoded], weight, blocks_of([], decoded))
    full = torch.zeros(-(-decoded // DECODE_ROWS) * DECODE_ROWS, 33)
    full[:decoded] = memory[:decoded]
    expected = torch.cat([torch.mm(block, weight.t()) for block in full.split(DECODE_ROWS)])
    assert same_bits(output, expected[:decoded])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_that_agree_do_agree_for_other_numbers_than_those_tried(
    outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    weight = by_columns(outputs, inputs, dtype)
    most = rows_that_agree(weight, CHUNK, limit=512)
    assert most % CHUNK == 0
    assert (most // CHUNK).bit_count() == 1
    assert most <= 512
    for _ in range(3):
        x, other = (torch.randn(most, inputs) * 3).to(dtype), by_columns(outputs, inputs, dtype)
        for size in (CHUNK << power for power in range((most // CHUNK).bit_length())):
            expected = torch.cat([torch.mm(part, other.t()) for part in x[:size].split(CHUNK)])
            assert same_bits(torch.mm(x[:size], other.t()), expected)


def test_rows_that_agree_never_goes_beyond_its_limit_or_below_a_chunk() -> None:
    weight = by_columns(8, 16)
    assert rows_that_agree(weight, CHUNK, limit=CHUNK) == CHUNK
    assert rows_that_agree(weight, CHUNK, limit=3 * CHUNK) in (CHUNK, 2 * CHUNK)


@pytest.mark.parametrize("last", [CHUNK, 2 * CHUNK, 4 * CHUNK])
def test_rows_that_agree_stops_where_a_product_takes_another_way(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.mm

    def another_way_beyond(x: Tensor, y: Tensor) -> Tensor:
        return multiply(x, y) * (1 + 2**-22 if len(x) > last else 1)

    monkeypatch.setattr(torch, "mm", another_way_beyond)
    assert rows_that_agree(by_columns(50, 33), CHUNK, limit=512) == last


@pytest.mark.parametrize("by_columns", [True, False])
def test_decoded_rows_have_the_same_bits_in_every_size_of_block_that_agrees(by_columns: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(96, 160, generator=generator)
    weight = weight.t().contiguous().t() if by_columns else weight
    sizes = decode_rows_that_agree(weight)
    assert DECODE_ROWS in sizes
    assert list(sizes) == sorted(sizes)
    x = torch.randn(70, 160, generator=generator)
    alone = torch.cat([linear(x[row : row + 1], weight, single_rows(1), decode_rows=sizes) for row in range(70)])
    for count in (2, 3, 5, 8, 9, 17, 33, 70):
        together = linear(x[:count], weight, single_rows(count), decode_rows=sizes)
        assert torch.equal(together, alone[:count])


def single_rows(count: int) -> RowBlocks:
    """A step in which so many requests decode."""
    return RowBlocks((), 0, count, 16)
