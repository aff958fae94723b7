"""Contents that arrive, and leave, as late as they may, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hybrid.memory.copies import Copy

POISON = 0xFF
"""A byte of which every float consists that is NaN."""


class CopyError(Exception):
    """A copy that cannot be begun."""


@dataclass
class LateMark:
    """The end of the first `end` copies of a copier."""

    copier: LateCopier
    end: int

    has_ended: bool = False

    def wait(self) -> None:
        self.copier.waited.append(self.end)
        self.copier.make(self.end)

    def wait_on_host(self) -> None:
        raise AssertionError("the host waits for nothing that arrives")


@dataclass
class LateCopier:
    """A `Copier` that makes a copy when it is waited for, and not before; until then its target holds NaN. Who forgets
    to wait uses NaN; who frees or overwrites what is on its way finds it overwritten later.

    Attributes:
        min_bytes: as `Copier.min_bytes`; 1: every layer is apart.
        fails_at: this call of `copy` raises, after half of its copies.
        waited: the number of copies that each wait was for.
        num_calls: of `copy`.
        num_partial: waits after which not all had arrived.
        outward: copies from the same memory to the host.
    """

    min_bytes: int = 1
    fails_at: int | None = None
    waited: list[int] = field(default_factory=list)
    num_calls: int = 0
    num_partial: int = 0
    seconds_per_byte: float = 0.0
    begun: list[Copy] = field(default_factory=list)
    num_made: int = 0
    outward: LateOutwardCopier = field(default_factory=lambda: LateOutwardCopier())

    def prepare(self, source: Tensor) -> Tensor:
        return self.outward.as_copied.get(source.data_ptr(), source).clone()

    def allocate(self, num_bytes: int) -> Tensor:
        raise AssertionError("nothing leaves by this copier")

    def begin(self) -> None:
        """All work that was given to a CPU is done."""

    def copy(self, copies: Sequence[Copy]) -> LateMark:
        self.num_calls += 1
        fails = self.num_calls == self.fails_at
        for copy in copies[: len(copies) // 2] if fails else copies:
            assert copy.target.numel() == copy.source.numel()
            copy.target.fill_(POISON)
            self.begun.append(copy)
        if fails:
            raise CopyError("the copy cannot be begun")
        return LateMark(self, len(self.begun))

    def wait(self) -> None:
        self.make(len(self.begun))

    def make(self, end: int) -> None:
        for target, source in self.begun[self.num_made : end]:
            target.copy_(source)
        self.num_made = max(self.num_made, end)
        self.num_partial += self.num_made < len(self.begun)


@dataclass(eq=False)
class LateOutwardMark:
    """The end of copies to the host.

    Attributes:
        copier: has begun them.
        copies: them.
        copied: their bytes, once the device has waited.
        has_ended: the host has waited for them.
    """

    copier: LateOutwardCopier
    copies: Sequence[Copy]
    copied: Tensor | None = None
    has_ended: bool = False

    def wait(self) -> None:
        self.copier.wait()

    def wait_on_host(self) -> None:
        assert self.copied is not None, "the device waits first"
        self.copier.num_host_waits += 1
        sizes = [target.numel() for target, _ in self.copies]
        for (target, _), copied in zip(self.copies, self.copied.split(sizes), strict=True):
            target.copy_(copied)
        self.has_ended = True


@dataclass
class LateOutwardCopier:
    """A `Copier` to the host that makes a copy when the device waits for it, and not before: who writes earlier has its
    own contents copied. The host has NaN until it waits, too.

    Attributes:
        fails_at: this call of `copy` raises, after half of its copies.
        as_copied: what was copied, by its address on the host.
        begun: what the device has not waited for.
        num_calls: of `copy`.
        num_host_waits: waits of the host.
    """

    fails_at: int | None = None
    min_bytes: int = 1
    seconds_per_byte: float = 0.0
    as_copied: dict[int, Tensor] = field(default_factory=dict)
    begun: list[LateOutwardMark] = field(default_factory=list)
    num_calls: int = 0
    num_host_waits: int = 0
    _allocated: list[Tensor] = field(default_factory=list)  # no address is used again

    def prepare(self, source: Tensor) -> Tensor:
        raise AssertionError("nothing arrives by this copier")

    def allocate(self, num_bytes: int) -> Tensor:
        self._allocated.append(torch.full((num_bytes,), POISON, dtype=torch.uint8))
        return self._allocated[-1]

    def begin(self) -> None:
        """All work that was given to a CPU is done."""

    def copy(self, copies: Sequence[Copy]) -> LateOutwardMark:
        self.num_calls += 1
        mark = LateOutwardMark(self, copies)
        self.begun.append(mark)
        if self.num_calls == self.fails_at:
            raise CopyError("the copy cannot be begun")
        return mark

    def wait(self) -> None:
        for mark in self.begun:
            mark.copied = torch.cat([source for _, source in mark.copies])
            self.as_copied[mark.copies[0].target.data_ptr()] = mark.copied
        self.begun.clear()


def late_copiers(monkeypatch: pytest.MonkeyPatch) -> list[LateCopier]:
    """Memories that are made from now on get their contents late, each by a copier of its own, which is appended, and
    have them leave late by its `outward`."""
    copiers: list[LateCopier] = []

    def copier_for(device: torch.device) -> LateCopier:
        copiers.append(LateCopier())
        return copiers[-1]

    monkeypatch.setattr("hybrid.memory.tensors.copier_for", copier_for)
    monkeypatch.setattr("hybrid.memory.tensors.outward_copier_for", lambda device: copiers[-1].outward)
    return copiers
