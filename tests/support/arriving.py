"""Contents that arrive as late as they may, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hybrid.memory.arrivals import Copy

POISON = 0xFF
"""A byte of which every float consists that is NaN."""


class CopyError(Exception):
    """A copy that cannot be begun."""


@dataclass
class LateMark:
    """The end of the first `end` copies of a copier."""

    copier: LateCopier
    end: int

    def wait(self) -> None:
        self.copier.waited.append(self.end)
        self.copier.make(self.end)


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
    """

    min_bytes: int = 1
    fails_at: int | None = None
    waited: list[int] = field(default_factory=list)
    num_calls: int = 0
    num_partial: int = 0
    seconds_per_byte: float = 0.0
    begun: list[Copy] = field(default_factory=list)
    num_made: int = 0

    def prepare(self, source: Tensor) -> Tensor:
        return source.clone()

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


def late_copiers(monkeypatch: pytest.MonkeyPatch) -> list[LateCopier]:
    """Memories that are made from now on get their contents late, each by a copier of its own, which is appended."""
    copiers: list[LateCopier] = []

    def copier_for(device: torch.device) -> LateCopier:
        copiers.append(LateCopier())
        return copiers[-1]

    monkeypatch.setattr("hybrid.memory.tensors.copier_for", copier_for)
    return copiers
