"""Compiled rotary angles."""

import pytest
import torch

from hybrid.kernels.cpu.capture import CpuCapture
from hybrid.kernels.cpu.elementwise import angles
from support.tensors import same_bits

FREQUENCIES = (1.0 / (1e4 ** (torch.arange(0, 32, 2) / 32))).repeat(2)


@pytest.mark.parametrize("largest", [4, 100, 10**4, 10**6])
def test_angles_are_those_of_exact_arithmetic(largest: int) -> None:
    positions = torch.randint(0, largest, (300, 1))
    turned = (positions * FREQUENCIES).double()
    for found, expected in zip(
        angles(positions, FREQUENCIES, 1.0, torch.float32), (turned.cos(), turned.sin()), strict=True
    ):
        assert (found.double() - expected).abs().max() < 3.1e-8  # half of the last place below 1


def test_a_position_of_each_frequency_a_scale_and_another_type() -> None:
    positions = torch.randint(0, 5000, (32, 9)).t()
    turned = (positions * FREQUENCIES).double()
    cos, sin = angles(positions, FREQUENCIES, 1.25, torch.bfloat16)
    torch.testing.assert_close(cos.double(), 1.25 * turned.cos(), rtol=0, atol=4e-3)
    torch.testing.assert_close(sin.double(), 1.25 * turned.sin(), rtol=0, atol=4e-3)


def test_a_token_has_its_bits_in_every_batch_and_in_captured_passes() -> None:
    positions = torch.randint(0, 5000, (40, 1))
    cos, sin = angles(positions, FREQUENCIES, 1.0, torch.float32)
    for first, last in ((0, 1), (3, 20), (39, 40)):
        part = angles(positions[first:last], FREQUENCIES, 1.0, torch.float32)
        assert same_bits(part[0], cos[first:last])
        assert same_bits(part[1], sin[first:last])
    again, result = CpuCapture()(lambda: angles(positions, FREQUENCIES, 1.0, torch.float32)[1])
    positions += 1
    again()
    assert same_bits(result, angles(positions, FREQUENCIES, 1.0, torch.float32)[1])
