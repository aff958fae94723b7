"""Matrix products whose rows do not depend on how many rows there are."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid.kernels import ops
from hybrid.kernels.batch_invariant import (
    ALIGNMENT,
    BLOCK_ROWS,
    COMPILED,
    Products,
    RowBlocks,
    choose,
    choose_for_experts,
    linear,
    multiply_single_rows,
    seconds_of,
)
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
    prompts=st.lists(st.integers(1, 300), max_size=4),
    decoded=st.integers(0, 40),
    chunk_rows=st.sampled_from([0, 64, 256]),
    sizes=st.sampled_from([(1,), (1, 2, 3), (8,), (4, 8, 16)]),
    columns=st.sampled_from([0, 7, 64]),
)
@settings(max_examples=50)
def test_a_cut_product_is_the_product(
    prompts: list[int], decoded: int, chunk_rows: int, sizes: tuple[int, ...], columns: int
) -> None:
    blocks = blocks_of(prompts, decoded)
    x, weight = torch.randn(blocks.num_rows, 33), by_columns(50, 33)
    output = linear(x, weight, blocks, Products(chunk_rows, sizes, columns))
    torch.testing.assert_close(output, torch.nn.functional.linear(x, weight), rtol=1e-5, atol=1e-5)


def test_without_blocks_it_is_the_product_of_torch() -> None:
    x, weight = torch.randn(7, 33), by_columns(50, 33)
    assert same_bits(linear(x, weight), torch.nn.functional.linear(x, weight))


KINDS = pytest.mark.parametrize("products", ["chosen", "chosen of torch", "one by one"])


def products_of(weight: Tensor, products: str) -> Products:
    """What is chosen on this machine, or what needs no choice."""
    if products == "one by one":
        return Products()
    return choose(weight, CHUNK, may_compile=products == "chosen")


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("is_by_columns", [True, False])
def test_a_row_does_not_depend_on_the_other_rows(
    outputs: int, inputs: int, dtype: torch.dtype, is_by_columns: bool, products: str
) -> None:
    weight = by_columns(outputs, inputs, dtype)
    weight = weight if is_by_columns else weight.contiguous()
    chosen = products_of(weight, products)
    prompts, decoded = [1, CHUNK, 2 * CHUNK + 1, 3, 7 * CHUNK + 13], 45
    blocks = blocks_of(prompts, decoded)
    x = torch.randn(blocks.num_rows, inputs).to(dtype)
    together = linear(x, weight, blocks, chosen)
    for start, end in blocks.segments:
        alone = linear(x[start:end].clone(), weight, blocks_of([end - start], 0), chosen)
        assert same_bits(alone, together[start:end])
        for cut in range(start + CHUNK, end, CHUNK):
            parts = [
                linear(part.clone(), weight, blocks_of([len(part)], 0), chosen) for part in (x[start:cut], x[cut:end])
            ]
            assert same_bits(torch.cat(parts), together[start:end])
    rows = x[blocks.decode_start :]
    for row in range(len(rows)):
        alone = linear(rows[row : row + 1].clone(), weight, blocks_of([], 1), chosen)
        assert same_bits(alone[0], together[blocks.decode_start + row])
    for count in (2, 3, 5, 7, 8, 9, 17, 33):  # others at other places
        order = torch.randperm(len(rows))[:count]
        assert same_bits(
            linear(rows[order], weight, blocks_of([], count), chosen), together[blocks.decode_start :][order]
        )


@KINDS
@pytest.mark.parametrize("shift", [1, 3, 7])
def test_a_row_does_not_depend_on_its_address(shift: int, products: str) -> None:
    weight = by_columns(50, 33)
    chosen, blocks = products_of(weight, products), blocks_of([CHUNK, 5], 11)
    x = torch.randn(blocks.num_rows, 33)
    elsewhere = torch.empty(x.numel() + shift)[shift:].view(x.shape).copy_(x)
    assert elsewhere.data_ptr() % ALIGNMENT
    assert same_bits(linear(elsewhere, weight, blocks, chosen), linear(x, weight, blocks, chosen))


def test_the_cut_of_single_rows_treats_every_row_as_decoded() -> None:
    weight = by_columns(50, 33)
    x, blocks = torch.randn(11, 33), blocks_of([130], 4)
    together = linear(x, weight, blocks.of_single_rows(11))
    for row in range(11):
        assert same_bits(linear(x[row : row + 1], weight, blocks.of_single_rows(1))[0], together[row])
    assert blocks.of_single_rows(11).cuts(CHUNK) == []


@pytest.mark.parametrize("decoded", [1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS])
def test_a_block_of_single_rows_is_filled_up_with_zeros(decoded: int) -> None:
    """What is in memory after the rows does not come in: here it is NaN."""
    weight, memory = by_columns(50, 33), torch.full((4 * BLOCK_ROWS, 33), float("nan"))
    memory[:decoded] = torch.randn(decoded, 33)
    output = linear(memory[:decoded], weight, blocks_of([], decoded), Products(sizes=(BLOCK_ROWS,)))
    full = torch.zeros(-(-decoded // BLOCK_ROWS) * BLOCK_ROWS, 33)
    full[:decoded] = memory[:decoded]
    expected = torch.cat([torch.mm(block.clone(), weight.t()) for block in full.split(BLOCK_ROWS)])
    assert same_bits(output, expected[:decoded])


# What is tried, with products that depend on something


def let_products_be(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let a product of rows `x` be changed where its place or its number of rows says so."""
    multiply = torch.mm

    def mm(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
        result = change(x, multiply(x, y))
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.parametrize("last", [CHUNK, 2 * CHUNK, 4 * CHUNK])
def test_chunks_go_together_up_to_where_a_product_takes_another_way(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_products_be(monkeypatch, lambda x, y: y * (1 + 2**-22 if len(x) > last else 1))
    assert choose(by_columns(50, 33), CHUNK).chunk_rows <= last


def test_chunks_never_go_together_beyond_the_limit_or_below_a_chunk() -> None:
    weight = by_columns(8, 16)
    for chunk in (1, CHUNK, 1000):
        assert chunk <= choose(weight, chunk).chunk_rows <= max(512, chunk)
    assert choose(weight, CHUNK, takes_chunks=False).chunk_rows == 0


def odd_rows_differ(x: Tensor, y: Tensor) -> Tensor:
    """As a narrow product does it on some CPUs: in blocks of all even sizes, so that these agree with each other."""
    return y * (1 + 2**-20 * (torch.arange(len(x)) % 2)).unsqueeze(1)


def test_a_product_that_depends_on_the_place_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    let_products_be(monkeypatch, odd_rows_differ)
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    for weight in (by_columns(6, 160), by_columns(50, 33).contiguous()):
        assert choose(weight, CHUNK).sizes == (1,)
        assert choose_for_experts(weight.unsqueeze(0)).sizes == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_one_row_takes_another_way_than_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 a single row stays one; in 16 bits, where blocks are faster by far, it is filled up to one."""
    let_products_be(monkeypatch, lambda x, y: y * (2 if len(x) < 4 else 1))
    weight = by_columns(96, 64, dtype)
    sizes = choose(weight, CHUNK).sizes
    assert (1 in sizes) == (dtype == torch.float32)
    if dtype == torch.float32:
        assert max(sizes) < 4
    assert 1 not in choose_for_experts(weight.unsqueeze(0)).sizes


def test_experts_whose_weights_are_aligned_otherwise_are_all_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    weight = torch.randn(5, 7, 33)
    chosen = choose_for_experts(weight)
    x = torch.randn(40, 33)
    for expert in weight:
        together = multiply_single_rows(x, expert.t(), chosen)
        for count in (1, 3, 9):
            rows = torch.randperm(40)[:count]
            assert same_bits(multiply_single_rows(x[rows], expert.t(), chosen), together[rows])


def test_what_was_chosen_can_be_read_and_its_cost_measured() -> None:
    products = Products(256, (1, 2), 512)
    assert str(products) == "single rows in blocks of 1, 2, else by 512 columns; chunks up to 256 rows"
    ours, plain = seconds_of(torch.ones(8, 33), by_columns(50, 33), products)
    assert ours > 0
    assert plain > 0


# Compiled products


def test_where_products_are_compiled_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **more: object) -> None:
        raise AssertionError("a product was tried")

    monkeypatch.setattr(torch, "mm", refuse)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(50, 33).to(dtype)
        assert choose(weight, CHUNK) == choose_for_experts(weight.unsqueeze(0)) == COMPILED
    assert str(COMPILED) == "compiled"


def test_weights_that_cannot_be_compiled_for_are_multiplied_by_torch() -> None:
    for weight in (by_columns(50, 33, torch.bfloat16), by_columns(50, 33), torch.randn(50, 33).half()):
        assert not choose(weight, CHUNK).is_compiled
        assert not choose_for_experts(weight.unsqueeze(0)).is_compiled


@pytest.mark.parametrize("missing", ["Numba", "the setting"])
def test_without_compiled_products_they_are_those_of_torch(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "Numba":
        monkeypatch.setattr(ops, "compiled_module", lambda file: "ModuleNotFoundError: No module named 'numba'")
    else:
        monkeypatch.setenv("HYBRID_KERNELS", "reference")
    weight = torch.randn(50, 33)
    assert not choose(weight, CHUNK).is_compiled
    assert not choose_for_experts(weight.unsqueeze(0)).is_compiled
    assert ops.OPS["rms_norm"].compiled_function() is None
