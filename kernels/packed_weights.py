"""Weights of four bits: how they lie in memory, and what a product with them is.

A row is cut into groups of 32, 64 or 128 numbers. A number is `scale * q + minimum` of its group in fp32, where q is 0
to 15. Scales have at most 20 bits, so that the product is exact, and the number is rounded once.

The q of a row lie in blocks of 128 numbers, of 64 bytes each: 32 little-endian numbers of 16 bits, of which the bits
4 i to 4 i + 3 of number l hold column 32 i + l. So a vector of 16-bit lanes has 32 consecutive columns after one shift,
a vector of 32-bit lanes every second one of 32 columns, and a block holds whole groups whatever their size. What fills
the last block of a row means nothing: it is multiplied by zeros, or left out.

A packed weight is `[out, blocks * 64]` uint8, its scales are `[out, blocks, groups of a block, 2]`: scale and minimum
of each group, bfloat16 where weights are quantized here, fp32 where a file has numbers of its own, which are kept
exactly.

The product is that with the numbers in the type of the rows: in fp32 as they are, in bfloat16 rounded once. So an
output has the bits of the same model with these numbers as its weights.
"""

import torch
from torch import Tensor

BLOCK = 128
"""Numbers of a block."""

GROUPS = (32, 64, 128)
"""Numbers that may share a scale and a minimum."""

LANES = 32
"""Columns that one nibble of all 16-bit numbers of a block holds."""

HIGHEST = 15
"""The largest q."""

SLICE = 1 << 20
"""Numbers that are unpacked at a time."""


def is_packed_weight(weight: Tensor) -> bool:
    """Tell whether a weight has four bits per number."""
    return weight.dtype == torch.uint8


def quantize(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """A weight in four bits. A number changes by at most half of its group's scale, and by what scale and minimum lose
    as bfloat16: up to 1/16 of the scale in groups whose numbers have both signs.

    Args:
        weight: `[out, in]`.
        group: numbers that share a scale and a minimum, one of `GROUPS`.

    Returns:
        packed and scales, as above. A group that is not finite has a scale of NaN: what it gives is refused.
    """
    outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    numbers = weight.float()
    if blocks * BLOCK > inputs:  # repeated: what fills a group does not widen it
        numbers = torch.cat((numbers, numbers[:, -1:].expand(-1, blocks * BLOCK - inputs)), dim=1)
    grouped = numbers.view(outputs, -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = torch.stack(((high - low) / HIGHEST, low), dim=-1)
    scales = torch.where(scales.isfinite(), scales, float("nan")).bfloat16()
    scale, minimum = scales.float().unbind(-1)
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    chosen = ((grouped - minimum.unsqueeze(-1)) / divisor).round_().nan_to_num_(0).clamp_(0, HIGHEST)
    whole = chosen.view(outputs, -1)[:, :inputs].to(torch.uint8)
    return pack(whole), scales.view(outputs, blocks, BLOCK // group, 2)


def from_groups(q: Tensor, scale: Tensor, minimum: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """A weight whose numbers are `scale * q + minimum` of their groups, as a file has them.

    Args:
        q: `[out, in]` uint8, 0 to 15.
        scale, minimum: `[out, groups]`, of which the last group may be cut off by the end of the row.
        group: numbers of a group, one of `GROUPS`.

    Returns:
        packed and scales, as above, scales in the type of `scale`. What fills the last block of a row is 0.
    """
    outputs, inputs = q.shape
    blocks = -(-inputs // BLOCK)
    missing = blocks * (BLOCK // group) - scale.shape[1]
    scales = torch.nn.functional.pad(torch.stack((scale, minimum), dim=-1), (0, 0, 0, missing))
    return pack(q), scales.view(outputs, blocks, BLOCK // group, 2)


def pack(q: Tensor) -> Tensor:
    """Numbers of four bits, `[out, in]` uint8, as rows of blocks."""
    outputs, inputs = q.shape
    blocks = -(-inputs // BLOCK)
    whole = torch.nn.functional.pad(q, (0, blocks * BLOCK - inputs)).view(outputs, blocks, 4, LANES)
    low, high = whole[:, :, 0] | whole[:, :, 1] << 4, whole[:, :, 2] | whole[:, :, 3] << 4
    return torch.stack((low, high), dim=-1).view(outputs, -1)


def unpack(packed: Tensor, scales: Tensor, inputs: int) -> Tensor:
    """The numbers of rows, `[..., out, inputs]` fp32: of one weight or of several."""
    *weights, blocks, groups, _ = scales.shape
    pairs = packed.view(-1, blocks, LANES, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    q = torch.stack((low & HIGHEST, low >> 4, high & HIGHEST, high >> 4), dim=2)
    scale, minimum = scales.float().unsqueeze(-2).unbind(-1)
    numbers = q.view(*weights, blocks, groups, BLOCK // groups).float() * scale + minimum
    return numbers.view(*weights, -1)[..., :inputs]


def steps(scales: Tensor, inputs: int) -> Tensor:
    """The scale of each number of rows, `[..., out, inputs]` fp32."""
    *rows, _, groups, _ = scales.shape
    return scales[..., 0].float().repeat_interleave(BLOCK // groups, -1).reshape(*rows, -1)[..., :inputs]
