"""Compiled products with weights of four bits: the bits of products with the numbers that they stand for, whatever rows
are beside a row."""

from collections.abc import Callable

import pytest
import torch

from hybrid.kernels.cpu import experts, matmul, packed_weights
from hybrid.kernels.packed_weights import GROUPS, quantize, unpack
from support.tensors import same_bits

SIZES = [(41, 150), (5, 64), (12, 33), (100, 640)]
"""(out, in)."""

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 33, packed_weights.MANY_ROWS, 257)
NUM_ROWS = max(ROWS) + 43


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_scales", [torch.float32, torch.bfloat16])
def test_a_row_has_the_bits_of_the_numbers_in_its_type_and_none_of_others(
    dtype: torch.dtype, of_scales: torch.dtype, threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(0)
    for number, (outputs, inner) in enumerate(SIZES):
        x = torch.randn(NUM_ROWS, inner, generator=generator).to(dtype)
        weight = torch.randn(outputs, inner, generator=generator) * torch.rand(outputs, 1, generator=generator)
        packed, scales = quantize(weight, GROUPS[number % 3])
        scales = scales.to(of_scales)
        if of_scales == torch.float32:
            scales *= 1 + 2**-12  # as many bits as scales may have
        expected = matmul.multiply(x, unpack(packed, scales, inner).to(dtype))
        for rows in ROWS:
            threads(1 + rows % 2)
            at = int(torch.randint(0, NUM_ROWS - rows, (), generator=generator))
            found = packed_weights.multiply_packed(x[at : at + rows], packed, scales)
            assert same_bits(found, expected[at : at + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 90, 1 + experts.MAX_FEW // 2])
def test_a_pair_of_a_row_and_an_expert_has_the_bits_of_the_experts_numbers(
    rows: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    threads(1 + rows % 2)
    for number, (outputs, inner) in enumerate(SIZES):
        matrices = torch.randn(5, outputs, inner, generator=generator)
        parts = [quantize(matrix, GROUPS[number % 3]) for matrix in matrices]
        packed, scales = (torch.stack(own) for own in zip(*parts, strict=True))
        x = torch.randn(rows, inner, generator=generator).to(dtype)
        chosen = torch.rand(rows, 5, generator=generator).argsort(1)[:, :2]
        order, places, ends = experts.sort_by_expert(chosen, 5, rows // 3)
        found = experts.packed_expert_linear(x, packed, scales, order, ends, 2)
        assert same_bits(found, experts.expert_linear(x, unpack(packed, scales, inner).to(dtype), order, ends, 2, 0))
        row = rows // 2
        alone, own_places, own_ends = experts.sort_by_expert(chosen[row : row + 1], 5, 0)
        single = experts.packed_expert_linear(x[row : row + 1], packed, scales, alone, own_ends, 2)
        assert same_bits(single[own_places[0]], found[places[row]])


def test_what_is_behind_the_last_number_of_a_row_does_not_matter() -> None:
    x, weight = torch.randn(9, 70), torch.randn(20, 70)
    packed, scales = quantize(weight, 32)
    expected = packed_weights.multiply_packed(x, packed, scales)
    scales[:, 0, 3] = float("nan")  # columns 96 to 127
    packed.view(torch.int16)[:, 6:32] ^= 0xF00  # columns 70 to 95
    assert same_bits(packed_weights.multiply_packed(x, packed, scales), expected)


def test_other_types_and_strides_are_refused() -> None:
    packed, scales = quantize(torch.randn(20, 64), 32)
    with pytest.raises(TypeError, match="a product with a weight of four bits is compiled for float32 and bfloat16"):
        packed_weights.multiply_packed(torch.randn(2, 64).half(), packed, scales)
    with pytest.raises(TypeError, match="HYBRID_KERNELS=reference"):
        packed_weights.multiply_packed(torch.randn(2, 64), packed[::2], scales[::2])
