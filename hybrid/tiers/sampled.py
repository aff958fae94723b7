"""A collection from which a random sample is drawn, in a time that does not depend on its size."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from random import Random
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT", bound=Hashable)


class Sampled(Generic[ItemT]):
    """Different items, in no particular order.

    Args:
        rng: draws the samples.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._items: list[ItemT] = []
        self._places: dict[ItemT, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ItemT]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def add(self, item: ItemT) -> None:
        """Add an item, if it is not there."""
        if item not in self._places:
            self._places[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: ItemT) -> None:
        """Remove an item, if it is there. The last one takes its place."""
        place = self._places.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if last is not item:
            self._items[place] = last
            self._places[last] = place

    def sample(self, size: int) -> list[ItemT]:
        """Different items, `size` of them at random; all, if there are not more."""
        return [*self._items] if len(self._items) <= size else self._rng.sample(self._items, size)

    def clear(self) -> None:
        """Remove all items."""
        self._items.clear()
        self._places.clear()

    def violations(self, name: str) -> list[str]:
        """What is wrong with its bookkeeping, for the audit.

        Args:
            name: of the collection.
        """
        right = {item: place for place, item in enumerate(self._items)}
        return [] if right == self._places else [f"an item of {name} is in another place than it says"]
