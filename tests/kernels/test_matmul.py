"""The product whose rows do not depend on each other, in Triton: right, and bit for bit the same for a row wherever it
stands and whatever is beside it.

It runs in Triton's interpreter where there is no GPU; there the bits are those of the order in which a kernel adds up.
On a GPU the sizes are larger too: tensor cores must not care either.
"""

import pytest
import torch
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.triton import matmul
from hybrid.kernels.triton.matmul import batch_invariant_linear
from support.tensors import same_bits

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
LAYOUTS = ["rows", "columns"]
"""How a weight lies in memory: with its inputs, or with its outputs, next to each other."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def operands(
    rows: int, inner: int, columns: int, dtype: torch.dtype, layout: str = "rows", offset: int = 0
) -> tuple[Tensor, Tensor]:
    """(x, weight): both lie inside of wider memory that is full of NaN elsewhere."""
    x = torch.full((rows + 2, inner + 16), float("nan"), dtype=dtype, device=DEVICE)[1:-1, offset : offset + inner]
    x.copy_(torch.randn(rows, inner))
    shape = (columns, inner) if layout == "rows" else (inner, columns)
    weight = torch.full((shape[0] + 2, shape[1] + 16), float("nan"), dtype=dtype, device=DEVICE)
    weight = weight[1:-1, offset : offset + shape[1]]
    weight.copy_(torch.randn(shape) / inner**0.5)
    return x, weight if layout == "rows" else weight.t()


def assert_right(output: Tensor, x: Tensor, weight: Tensor) -> None:
    """The product in fp64, to one rounding of the result and to what fp32 accumulation loses."""
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(output.double(), expected, rtol=torch.finfo(output.dtype).eps, atol=2e-6)


SIZES = [(1, 1, 1), (5, 24, 7), (40, 128, 32), (36, 130, 70)]
"""(rows, inner, columns)."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "inner", "columns"), SIZES)
def test_the_product_is_right_before_and_from_decode_start(
    rows: int, inner: int, columns: int, layout: str, dtype: torch.dtype
) -> None:
    x, weight = operands(rows, inner, columns, dtype, layout)
    for decode_start in sorted({0, rows // 2, rows}):
        output = batch_invariant_linear(x, weight, decode_start)
        assert output.dtype == dtype
        assert output.is_contiguous()
        assert_right(output, x, weight)
    twin = reference.batch_invariant_linear(x, weight, 0)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(batch_invariant_linear(x, weight, 0), twin, rtol=2 * step, atol=max(step, 2e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_of_several_groups_of_tiles_are_right(dtype: torch.dtype) -> None:
    tile = matmul.prompt_tile(130, dtype.itemsize)
    rows = (2 * matmul.GROUP + 1) * tile.rows + 3  # the last group is not full
    x, weight = operands(rows, 16, 130, dtype)
    assert_right(batch_invariant_linear(x, weight, rows), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_long_inner_dimension_is_added_up_in_spans(
    layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "MIN_SPAN", 256)
    inner = 3 * 256 + 70
    assert matmul.decode_spans(20, inner) == 3
    x, weight = operands(3, inner, 20, dtype, layout)
    together = batch_invariant_linear(x, weight, 0)
    assert_right(together, x, weight)
    for row in range(3):
        assert same_bits(batch_invariant_linear(x[row : row + 1], weight, 0), together[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_need_not_be_aligned_nor_contiguous(dtype: torch.dtype) -> None:
    x, weight = operands(20, 50, 30, dtype, offset=3)
    assert_right(batch_invariant_linear(x, weight, 10), x, weight)
    x, weight = operands(50, 20, 30, dtype)[0].t(), operands(1, 100, 30, dtype)[1][:, ::2]
    assert_right(batch_invariant_linear(x, weight, 10), x, weight)


BATCHES = [(0, 1), (16, 17), (69, 70), (1, 17), (3, 20), (2, 34), (1, 65)]
"""Rows [start, end) of 70: alone, in each kind of tile, at other places of it, and across tiles."""


def sizes_of_weights() -> list[tuple[int, int]]:
    """(inner, columns): a tail in both directions; on a GPU what a model has, each kind of tile."""
    return [(150, 40)] + ([(4096, 32), (4096, 1024), (4096, 4096), (4096, 12288), (12288, 256)] if ON_GPU else [])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inner", "columns"), sizes_of_weights())
def test_a_decoded_row_gives_the_same_bits_in_every_batch_and_at_every_place(
    inner: int, columns: int, layout: str, dtype: torch.dtype
) -> None:
    x, weight = operands(70, inner, columns, dtype, layout)
    together = batch_invariant_linear(x, weight, 0)
    for start, end in BATCHES:
        assert same_bits(batch_invariant_linear(x[start:end], weight, 0), together[start:end]), (start, end)
    order = torch.randperm(70, device=DEVICE)
    assert same_bits(batch_invariant_linear(x[order], weight, 0), together[order])
    assert same_bits(batch_invariant_linear(x, weight, 30)[30:], together[30:])  # behind prompts of any length


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("inner", "columns"), sizes_of_weights())
def test_a_prompt_row_gives_the_same_bits_in_every_batch_and_at_every_place(
    inner: int, columns: int, layout: str, dtype: torch.dtype
) -> None:
    rows = 2100 if ON_GPU else 140  # more than a group of row tiles; more than one
    x, weight = operands(rows, inner, columns, dtype, layout)
    together = batch_invariant_linear(x, weight, rows)
    for start, end in [*BATCHES, (rows - 1, rows), (7, rows - 3)]:
        assert same_bits(batch_invariant_linear(x[start:end], weight, end - start), together[start:end]), (start, end)
    order = torch.randperm(rows, device=DEVICE)
    assert same_bits(batch_invariant_linear(x[order], weight, rows), together[order])
    assert same_bits(batch_invariant_linear(x, weight, rows - 20)[:-20], together[:-20])


def test_a_row_of_nan_stays_alone() -> None:
    x, weight = operands(40, 64, 40, torch.float32)
    for decode_start in (0, 40):
        clean = batch_invariant_linear(x, weight, decode_start)
        poisoned = x.clone()
        poisoned[17] = float("nan")
        output = batch_invariant_linear(poisoned, weight, decode_start)
        assert output[17].isnan().all()
        others = torch.arange(40, device=DEVICE) != 17
        assert same_bits(output[others], clean[others])


def test_tiles_never_depend_on_rows_where_they_decide_bits() -> None:
    """Rows choose which elements are made together; how far a step goes along the inner dimension is the weight's."""
    for columns in (1, 32, 1024, 4096, 12288, 248320):
        for element_size in (2, 4):
            assert len({matmul.decode_tile(rows, columns, element_size).inner for rows in range(1, 300)}) == 1


def test_no_rows_give_no_rows() -> None:
    x, weight = operands(4, 32, 20, torch.float32)
    assert batch_invariant_linear(x[:0], weight, 0).shape == (0, 20)


def test_operands_that_do_not_go_together_are_refused() -> None:
    x, weight = operands(4, 32, 20, torch.float32)
    with pytest.raises(ValueError, match=r"one inner dimension; got x \[4, 32\].*weight \[20, 31\]"):
        batch_invariant_linear(x, weight[:, :31], 0)
    with pytest.raises(ValueError, match="one type"):
        batch_invariant_linear(x, weight.half(), 0)
