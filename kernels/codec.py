"""Stored states: state slots packed into less memory than they take while they are used.

A *stored state* is one state slot packed into contiguous bytes, so that one piece of memory holds several of them.
How a tensor is laid out in it depends on the type that the state is stored as:

| stored as  | recurrent tensors                         | other tensors (the window of a convolution)   |
|------------|-------------------------------------------|-----------------------------------------------|
| "float32"  | their bytes                               | their bytes                                   |
| "bfloat16" | bfloat16, or their bytes if those are few | bfloat16, or their bytes if those are few     |
| "int8"     | one byte per value, a scale per row       | as with "bfloat16"                            |

Bytes are few at two per value or less. *Recurrent* is a tensor of floats with at least `RECURRENT_DIMS` dimensions,
`[layers, heads, key, value]`: it has rows of its own for every key channel of every head. A name decides nothing. A
*row* is the last dimension.

Plain torch, on any device. A slot and its stored state are on the same one: between devices, move the stored state,
which is smaller and one piece.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 64
"""Every part of a stored state, and so the next one, starts at a multiple of this many bytes."""

RECURRENT_DIMS = 4
"""A state tensor with at least this number of dimensions is quantised where the state is stored as int8."""

STORED_AS = ("float32", "bfloat16", "int8")
"""Types that a state can be stored as."""

LEVELS = 127
"""The largest code; the smallest is its negative."""

PIECE_BYTES = 8 << 20
"""Layers are quantised together up to this number of bytes of float32, the size of the temporary."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a slot, and its place in a stored state.

    Attributes:
        name: how the slot's tensors are asked for it.
        shape: its shape in the slot, the layers first.
        dtype: its type in the slot.
        stored_dtype: its type in the stored state; `torch.int8`: codes.
        offset: where its values, or codes, start, in bytes.
        scales_offset: where the float32 scales of its rows, `shape[:-1]`, start, in bytes; None: it has none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored_dtype: torch.dtype
    offset: int
    scales_offset: int | None

    def values(self, stored: Tensor) -> Tensor:
        """Its values, or codes, in a stored state: a view, `shape` in `stored_dtype`."""
        return _view(stored, self.offset, self.shape, self.stored_dtype)

    def scales(self, stored: Tensor) -> Tensor | None:
        """The scales of its rows in a stored state: a view, `shape[:-1]` float32; None: it has none."""
        if self.scales_offset is None:
            return None
        return _view(stored, self.scales_offset, self.shape[:-1], torch.float32)


@dataclass(frozen=True)
class StoredLayout:
    """The layout of a state slot in a stored state.

    Attributes:
        tensors: the slot's tensors, in order.
        num_bytes: bytes of a stored state, a multiple of `ALIGNMENT`. Bytes between the parts are
            never read or written.
    """

    tensors: tuple[StoredTensor, ...]
    num_bytes: int


def stored_layout(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], stored_as: str) -> StoredLayout:
    """The layout of a slot of these tensors in a stored state.

    Args:
        tensors: (name, shape, dtype) of each tensor of a slot, the layers first in the shape.
        stored_as: one of `STORED_AS`. With "float32" the stored state is, tensor for tensor, what the slot is.

    Raises:
        ValueError: `stored_as` is none of them.
    """
    if stored_as not in STORED_AS:
        raise ValueError(f"a state is stored as one of {', '.join(map(repr, STORED_AS))}; got {stored_as!r}")
    parts, end = [], 0
    for name, shape, dtype in tensors:
        stored_dtype = _stored_dtype(len(shape), dtype, stored_as)
        offset, scales_offset = end, None
        end = _aligned(end + prod(shape) * stored_dtype.itemsize)
        if stored_dtype != dtype and stored_dtype == torch.int8:
            scales_offset = end
            end = _aligned(end + prod(shape[:-1]) * torch.float32.itemsize)
        parts.append(StoredTensor(name, tuple(shape), dtype, stored_dtype, offset, scales_offset))
    return StoredLayout(tuple(parts), end)


def store(layout: StoredLayout, source: Mapping[str, Tensor], stored: Tensor) -> None:
    """Pack a slot into a stored state.

    Args:
        source: the tensors of one slot by name, as the layout has them; any strides.
        stored: `[layout.num_bytes]` uint8, contiguous; written.

    Raises:
        ValueError: the tensors, or the stored state, are not those of the layout. Nothing is written.
    """
    _refuse_mismatch(layout, source, stored)
    for part in layout.tensors:
        tensor, values, scales = source[part.name], part.values(stored), part.scales(stored)
        if scales is None:
            values.copy_(tensor)
            continue
        layers = max(1, PIECE_BYTES // max(1, prod(part.shape[1:]) * torch.float32.itemsize))
        for start in range(0, part.shape[0], layers):
            piece = slice(start, start + layers)
            codes, steps = quantize_rows(tensor[piece])
            values[piece], scales[piece] = codes, steps


def restore(layout: StoredLayout, stored: Tensor, target: Mapping[str, Tensor]) -> None:
    """Unpack a stored state into a slot.

    Args:
        stored: `[layout.num_bytes]` uint8, contiguous, written by `store` with the same layout.
        target: the tensors of one slot by name, as the layout has them; any strides; written.

    Raises:
        ValueError: the tensors, or the stored state, are not those of the layout. Nothing is written.
    """
    _refuse_mismatch(layout, target, stored)
    for part in layout.tensors:
        tensor, values, scales = target[part.name], part.values(stored), part.scales(stored)
        if scales is None:
            tensor.copy_(values)
        else:
            dequantize_rows(values, scales, tensor)


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to multiples of its own step, a 127th of its largest magnitude.

    Steps are cut to 17 significant bits, so that a code times its step is exact in fp32: values that were restored
    once give the same codes and steps again, and nothing exceeds the largest value of its row. A value is off by at
    most half a step (and the rounding of one fp32 division). A step is at least the smallest normal number of fp32, so
    that rows of zeros, or of numbers that are almost that, need no case of their own. A row that holds a NaN or an
    infinity has no finite step: all of it comes back as NaN, other rows as ever.

    Args:
        values: `[..., row]` floats, at most fp32; any strides.

    Returns:
        codes, `[..., row]` int8 in [-127, 127], and scales, `[...]` fp32: the steps.
    """
    values = values.float()
    least, most = values.amin(-1), values.amax(-1)
    scales = torch.maximum(most, least.neg_()).div_(LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
    scales.view(torch.int32).bitwise_and_(-128)  # 17 bits of step and 7 of code make the 24 of fp32
    codes = (values / scales.unsqueeze(-1)).round_()
    return codes.nan_to_num_(nan=0.0).to(torch.int8), scales


def dequantize_rows(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Multiply each row of codes by its step, into `out`.

    Args:
        codes: `[..., row]` int8.
        scales: `[...]` fp32.
        out: `[..., row]` floats, any strides; written. In another type than fp32 it is rounded to that.
    """
    out.copy_(codes)
    out.mul_(scales.unsqueeze(-1))


def _stored_dtype(dims: int, dtype: torch.dtype, stored_as: str) -> torch.dtype:
    """The type of a tensor with `dims` dimensions in a stored state."""
    if stored_as == "float32" or not dtype.is_floating_point or dtype.itemsize == 1:
        return dtype
    if stored_as == "int8" and dims >= RECURRENT_DIMS:
        return torch.int8
    return torch.bfloat16 if dtype.itemsize > torch.bfloat16.itemsize else dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _view(stored: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bytes of a stored state from `offset` on, as a tensor."""
    return stored[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _refuse_mismatch(layout: StoredLayout, slot: Mapping[str, Tensor], stored: Tensor) -> None:
    """Raise where a slot or a stored state is not what the layout says."""
    if stored.dtype != torch.uint8 or stored.shape != (layout.num_bytes,) or not stored.is_contiguous():
        raise ValueError(
            f"a stored state of this layout is [{layout.num_bytes}] torch.uint8, contiguous; got {list(stored.shape)} "
            f"{stored.dtype}, strides {stored.stride()}"
        )
    expected = [part.name for part in layout.tensors]
    if set(slot) != set(expected):
        raise ValueError(f"a slot of this layout has the tensors {sorted(expected)}; got {sorted(slot)}")
    for part in layout.tensors:
        tensor = slot[part.name]
        if tensor.shape != part.shape or tensor.dtype != part.dtype:
            raise ValueError(
                f"{part.name!r} is {list(part.shape)} {part.dtype} in this layout; got {list(tensor.shape)} "
                f"{tensor.dtype}"
            )
