"""The numbers of a plan: pieces of one tensor, each with a name and a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hybrid.errors import AuditError

ALIGNMENT = 2
"""Every view starts at a multiple of this many numbers, 16 bytes: kernels are compiled for that alignment only."""

Layout = tuple[tuple[str, tuple[int, tuple[int, ...]]], ...]
"""(name, (start, shape)) of every piece."""


@dataclass
class Pieces:
    """Numbers that become one tensor, and where each piece of them starts.

    Most pieces have a few numbers: they are collected in a list, of which one array is made, instead of one for each.
    """

    layout: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    _arrays: list[np.ndarray] = field(default_factory=list)
    _list: list[int | None] = field(default_factory=list)  # what follows the arrays
    _end: int = 0

    def add(self, name: str, values: Sequence[int | None], expected: int | None = None) -> None:
        """A piece of few numbers, whose count is checked where it is expected."""
        count = len(values)
        if expected is not None and count != expected:
            raise AuditError(f"plan: {name} has {count} numbers, expected {expected}")
        self.add_rows(name, values, (count,))

    def add_rows(self, name: str, values: Sequence[int | None], shape: tuple[int, ...]) -> None:
        """A piece of few rows of numbers, one after another."""
        count = len(values)
        self.layout[name] = (self._end, shape)
        self._list += values
        if count % ALIGNMENT:
            self._list += [0] * (-count % ALIGNMENT)
            count += -count % ALIGNMENT
        self._end += count

    def add_array(self, name: str, values: np.ndarray) -> None:
        """A piece that is an array of int64 or float64."""
        flat = values.ravel().view(np.int64)
        count = len(flat)
        self.layout[name] = (self._end, values.shape)
        self._arrays += [np.array(self._list, np.int64), flat]
        self._list = [0] * (-count % ALIGNMENT)
        self._end += count + -count % ALIGNMENT

    def numbers(self) -> Tensor:
        """All of them."""
        return torch.from_numpy(np.concatenate((*self._arrays, np.array(self._list, np.int64))))
