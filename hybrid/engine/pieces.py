"""The numbers of a plan: pieces of one tensor, each with a name and a shape."""

from __future__ import annotations

import math
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

    def add(self, name: str, values: Sequence[int | None], shape: tuple[int, ...]) -> None:
        """A piece of few numbers."""
        self._place(name, len(values), shape)
        self._list += values
        self._list += [0] * (-len(values) % ALIGNMENT)

    def add_array(self, name: str, values: np.ndarray) -> None:
        """A piece that is an array of int64 or float64."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.int64)
        self._place(name, len(flat), values.shape)
        self._arrays += [np.array(self._list, np.int64), flat, np.zeros(-len(flat) % ALIGNMENT, np.int64)]
        self._list = []

    def _place(self, name: str, count: int, shape: tuple[int, ...]) -> None:
        if count != math.prod(shape):
            raise AuditError(f"plan: {name} has {count} numbers for the shape {shape}")
        self.layout[name] = (self._end, shape)
        self._end += count + -count % ALIGNMENT

    def numbers(self) -> Tensor:
        """All of them."""
        return torch.from_numpy(np.concatenate([*self._arrays, np.array(self._list, np.int64)]))
