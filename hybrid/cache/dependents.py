"""Who keeps tokens that a cache has seen, and forgets them when it is cleared."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Dependent(Protocol):
    """It has learned from requests of a cache."""

    def clear(self) -> None:
        """Forget what those have left that have ended."""
        ...


class Dependents:
    """The dependents of one cache, as long as something else refers to them."""

    def __init__(self) -> None:
        self._all: WeakSet[Dependent] = WeakSet()

    def add(self, dependent: Dependent) -> None:
        """It is cleared with the cache from now on."""
        self._all.add(dependent)

    def clear(self) -> None:
        """The cache was cleared."""
        for dependent in [*self._all]:
            dependent.clear()
