"""Matrix products whose rows do not depend on how many rows there are."""

import pytest
import torch
from torch import Tensor

from hybrid.kernels.ops import linear
from hybrid.kernels.packed_weights import GROUPS, quantize
from support.tensors import same_bits

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

SHAPES = [(96, 64), (64, 96), (50, 33), (512, 192), (4, 64), (1, 45), (6, 160), (3, 1), (1, 1)]
"""(out, in) of weights; 50 x 33 lies nowhere on a round address."""

ROWS = 90


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weight_of(outputs: int, inputs: int, dtype: torch.dtype, is_by_columns: bool) -> Tensor:
    if dtype == torch.int8:
        weight = torch.randint(-128, 128, (outputs, inputs), dtype=dtype)
    else:
        weight = torch.randn(outputs, inputs).to(dtype)
    return weight.t().contiguous().t() if is_by_columns else weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("is_by_columns", [True, False])
def test_a_row_does_not_depend_on_the_other_rows(
    outputs: int, inputs: int, stored: torch.dtype, dtype: torch.dtype, is_by_columns: bool
) -> None:
    if stored == torch.float32 and dtype == torch.bfloat16:
        return  # a model has no such weights
    weight = weight_of(outputs, inputs, stored, is_by_columns)
    scale = torch.rand(outputs) if stored == torch.int8 else None
    x = torch.randn(ROWS, inputs).to(dtype)
    together = linear(x, weight, scale=scale)
    expected = torch.nn.functional.linear(x.double(), weight.double()) * (1 if scale is None else scale.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        together.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )
    for count in (1, 2, 3, 5, 7, 8, 9, 17, 33, 64, ROWS):
        order = torch.randperm(ROWS)[:count]
        assert same_bits(linear(x[order], weight, scale=scale), together[order])
        start = ROWS - count
        assert same_bits(linear(x[start:], weight, scale=scale), together[start:])


FOUR_BITS = torch.uint8
"""The type of weights of four bits, two in a byte."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8, FOUR_BITS])
def test_up_to_257_rows_have_the_bits_that_they_have_among_others(stored: torch.dtype, dtype: torch.dtype) -> None:
    if stored == torch.float32 and dtype == torch.bfloat16:
        return  # a model has no such weights
    for _ in range(3):
        outputs, inputs = map(int, torch.randint(1, 300, (2,)))
        x = torch.randn(300, inputs).to(dtype)
        if stored == FOUR_BITS:
            weight, scale = quantize(torch.randn(outputs, inputs), GROUPS[int(torch.randint(3, ()))])
        else:
            weight = weight_of(outputs, inputs, stored, is_by_columns=False)
            scale = torch.rand(outputs) if stored == torch.int8 else None
        together = linear(x, weight, scale=scale)
        for count in range(1, 258):
            places = torch.randperm(300)[:count]
            assert same_bits(linear(x[places], weight, scale=scale), together[places]), (outputs, inputs, count)


@pytest.mark.parametrize("shift", [1, 3, 7])
def test_a_row_does_not_depend_on_its_address(shift: int) -> None:
    weight, x = torch.randn(50, 33), torch.randn(20, 33)
    elsewhere = torch.empty(x.numel() + shift)[shift:].view(x.shape).copy_(x)
    assert same_bits(linear(elsewhere, weight), linear(x, weight))


@pytest.mark.parametrize("rows", [319, 320, 700])
def test_many_rows_have_the_bits_of_few(rows: int) -> None:
    weight, x = torch.randn(50, 33), torch.randn(rows, 33)
    together = linear(x, weight)
    for start in range(0, rows, 37):
        assert same_bits(linear(x[start : start + 37], weight), together[start : start + 37])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twins_are_products_of_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    weight, x = torch.randn(50, 33).to(dtype), torch.randn(7, 33).to(dtype)
    assert same_bits(linear(x, weight), torch.nn.functional.linear(x, weight))
    codes, scale = weight_of(50, 33, torch.int8, False), torch.rand(50)
    expected = torch.nn.functional.linear(x.float(), codes.float() * scale[:, None])
    torch.testing.assert_close(linear(x, codes, scale=scale).float(), expected, rtol=2e-2, atol=2)
