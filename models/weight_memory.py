"""Memory for the weights of a model on a CPU.

A step that decodes reads all weights once, and with pages of 4 kB the CPU looks up the address of each of them first,
which takes up to a third of the step. Huge pages (2 MB) need a lookup for 512 times as many bytes. They are asked for
where the system has as many free: to make them, it would move other memory, which can take longer than loading.
"""

import mmap
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; weights begin at multiples of it."""

MIN_PAGES = 8
"""Huge pages that weights fill before they are asked for: the CPU remembers where fewer bytes are."""

SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
"""Holds the bytes of a huge page, on Linux."""

FREE = Path("/proc/buddyinfo")
"""Holds for each part of memory the numbers of free blocks of 1, 2, 4, ... small pages, on Linux."""


class WeightMemory:
    """Memory for tensors of a known size in all, in huge pages if they are free.

    Args:
        num_bytes: of all tensors, each rounded up to `ALIGNMENT`. What is more has memory of its own.
        device: of the tensors. Only on a CPU there are huge pages.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._left = huge_pages(num_bytes) if device.type == "cpu" else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, not initialized."""
        if self._left is not None:
            size = torch.Size(shape).numel() * dtype.itemsize
            if size <= len(self._left):
                own, self._left = self._left[:size], self._left[aligned(size) :]
                return own.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self._device)


def aligned(num_bytes: int) -> int:
    """A number of bytes, rounded up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def huge_pages(num_bytes: int) -> Tensor | None:
    """`[num_bytes]` uint8 in huge pages, not initialized. None: they are too few to matter, or the system does not have
    as many free."""
    size = _size_of_huge_page()
    if not size or num_bytes < MIN_PAGES * size or _free_bytes(size) < num_bytes + size:
        return None
    try:
        memory = mmap.mmap(-1, num_bytes + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too much, as torch will say
        return None
    with suppress(OSError):  # the system has none after all: small pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % size
    return found[start : start + num_bytes]


def _size_of_huge_page() -> int:
    """In bytes; 0: there are none."""
    try:
        return int(SIZE.read_text())
    except (OSError, ValueError):
        return 0


def _free_bytes(size: int) -> int:
    """Bytes in free blocks of memory of at least this size; 0 where that is not known."""
    found = 0
    try:
        for line in FREE.read_text().splitlines():
            blocks = enumerate(map(int, line.split()[4:]))  # "Node 0, zone Normal" before
            found += sum(count * (mmap.PAGESIZE << order) for order, count in blocks if mmap.PAGESIZE << order >= size)
    except (OSError, ValueError):
        return 0
    return found
