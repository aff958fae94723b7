"""Files of tensors in the safetensors format: what is in one, as far as it can be.

A file is eight bytes with the length of the header, the header as JSON, and the bytes of the tensors. It may come from
anywhere: whatever its header says is compared with the bytes that are there before memory is allocated for it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

LENGTH_BYTES = 8
"""Bytes of the length of the header."""

MAX_DIMENSIONS = 8
"""The maximum number of dimensions of a tensor."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Types of the safetensors format."""


class UnknownTypeError(ValueError):
    """A tensor has a type that is not known."""


class TensorPlace(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype, shape: of the tensor.
        start, end: its bytes in the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds.

    Attributes:
        metadata: texts by name.
        tensors: by name.
        num_bytes: of the file, up to the end of its last tensor.
    """

    metadata: dict[str, str]
    tensors: dict[str, TensorPlace]
    num_bytes: int


def read_header(read: Callable[[int, int], bytes | bytearray], num_bytes: int | None, max_bytes: int) -> Header:
    """Read the header of a file.

    Args:
        read: returns a number of bytes from a start on, or raises where there are fewer.
        num_bytes: of the file; None: it is not known, and the last byte of the header, and of the tensors, is read
            before memory is allocated for what is before it.
        max_bytes: the longest header that is read.

    Raises:
        ValueError: it is damaged, truncated, or longer than that; UnknownTypeError: a type is not known.
    """
    if num_bytes is not None and num_bytes < LENGTH_BYTES:
        raise ValueError(f"it has {num_bytes} bytes")
    length = int.from_bytes(read(0, LENGTH_BYTES), "little")
    if length > max_bytes or (num_bytes is not None and length > num_bytes - LENGTH_BYTES):
        size = f", the file {num_bytes}" if num_bytes is not None else ""
        raise ValueError(f"its header has {length} bytes{size}; at most {max_bytes} are supported")
    if num_bytes is None and length:
        read(LENGTH_BYTES + length - 1, 1)
    try:
        entries = json.loads(read(LENGTH_BYTES, length))
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(entries, dict):
        raise ValueError("its header is not an object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not texts")
    data = LENGTH_BYTES + length
    tensors = {name: _place(name, entry, data, num_bytes) for name, entry in entries.items()}
    end = max((place.end for place in tensors.values()), default=data)
    if num_bytes is None and end > data:
        read(end - 1, 1)
    return Header(metadata, tensors, end)


def _place(name: str, entry: Any, data: int, num_bytes: int | None) -> TensorPlace:
    """The tensor of an entry of a header, of a file whose tensors begin at byte `data`."""
    limit = num_bytes if num_bytes is not None else 2**63 - 1
    try:
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        dtype = DTYPES.get(code) if isinstance(code, str) else None
        if dtype is None:
            raise UnknownTypeError(f"{name[:200]} has dtype {code!r:.100}, which is unknown")
        if len(shape) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n <= limit for n in (*shape, start, end)):
            raise ValueError("its shape or its offsets are out of bounds")
        if end - start != prod(shape) * dtype.itemsize or data + end > limit:
            raise ValueError("its data is not inside the file")
    except UnknownTypeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{name[:100]!r}: {error}") from error
    return TensorPlace(dtype, shape, data + start, data + end)


class FileBytes:
    """The bytes of a file, which are read and never mapped: where a mapped file is cut off, or its disk fails, a signal
    ends the process, and what was checked may be another thing afterwards.

    The file stays open as long as the object lives.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a plain file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # no pipe is waited for
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is a folder, a device or a pipe")
        self.num_bytes: int = status.st_size

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, start: int, count: int) -> bytearray:
        """Read a number of bytes from a start on.

        Raises:
            ValueError: the file ends before.
            OSError: they cannot be read.
        """
        found = bytearray(count)
        self.read_into(start, memoryview(found))
        return found

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from a start on; errors as those of `read`."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], start)
            if not count:
                raise ValueError(f"it was cut off at byte {start}")
            buffer, start = buffer[count:], start + count


class HeldBytes:
    """The bytes of a file in memory, which nothing else changes: a copy. Reads as `FileBytes` does.

    Attributes:
        contents: the bytes.
    """

    def __init__(self, contents: bytes | bytearray) -> None:
        self.contents: bytes | bytearray = contents

    @property
    def num_bytes(self) -> int:
        """How many they are."""
        return len(self.contents)

    def read(self, start: int, count: int) -> bytes | bytearray:
        """See `FileBytes.read`."""
        if start + count > len(self.contents):
            raise ValueError(f"it was cut off at byte {len(self.contents)}")
        return self.contents[start : start + count]

    def read_into(self, start: int, buffer: memoryview) -> None:
        """See `FileBytes.read_into`."""
        buffer[:] = self.read(start, len(buffer))
