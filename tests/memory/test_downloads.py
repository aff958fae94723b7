"""Contents that leave a memory: who waits for them, and what they are when the memory is written at once."""

import pytest
import torch
from torch import Tensor

from hybrid.memory.copies import Downloads
from support.arriving import POISON, CopyError, LateOutwardCopier


def parts(value: int) -> list[Tensor]:
    return [torch.full((size,), value, dtype=torch.uint8) for size in (3, 5)]


def test_the_memory_may_be_written_at_once() -> None:
    downloads, memory = Downloads(LateOutwardCopier()), parts(7)
    contents = downloads.begin(memory)
    for part in memory:
        part.fill_(8)
    assert bytes(downloads.wait(contents)) == bytes([7] * 8)


def test_the_host_waits_for_what_it_reads_and_for_nothing_else() -> None:
    copier = LateOutwardCopier()
    downloads = Downloads(copier)
    first, second = downloads.begin(parts(1)), downloads.begin(parts(2))
    assert copier.num_host_waits == 0 and bytes(first) == bytes(second) == bytes([POISON] * 8)
    assert bytes(downloads.wait(second)) == bytes([2] * 8)
    assert bytes(first) == bytes([POISON] * 8) and copier.num_host_waits == 1
    assert bytes(downloads.wait(first)) == bytes([1] * 8)
    for contents in (first, second, b"of a file"):
        downloads.wait(contents)
    assert copier.num_host_waits == 2, "what is there is not waited for"


def test_copies_that_cannot_be_begun_are_not_on_their_way() -> None:
    copier = LateOutwardCopier(fails_at=2)
    downloads = Downloads(copier)
    first = downloads.begin(parts(1))
    with pytest.raises(CopyError):
        downloads.begin(parts(2))
    assert not copier.begun, "the device waits for those that were"
    assert bytes(downloads.wait(first)) == bytes([1] * 8)


def test_without_a_copier_nothing_is_on_its_way() -> None:
    contents = b"of a CPU"
    assert Downloads().wait(contents) is contents
