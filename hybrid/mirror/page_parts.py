"""Values of pages of another engine's pools, as a tree keeps them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any


class PageParts:
    """Values of consecutive pages, in parts as they were handed over.

    A part is any object with a length in pages and slices. Parts are not looked into, and `exchange` alone writes them.

    Args:
        parts: none of them empty.

    Attributes:
        parts: the parts in order.
    """

    __slots__ = ("_ends", "parts")

    def __init__(self, parts: Iterable[Any] = ()) -> None:
        self.parts: list[Any] = []
        self._ends: list[int] = []
        self._append(parts)

    @classmethod
    def of(cls, values: Any = ()) -> PageParts:
        """Hold the pages of one part, or a copy of pages in parts."""
        parts = cls()
        parts.extend(values)
        return parts

    def __len__(self) -> int:
        """Return the number of pages."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, where: slice) -> PageParts:
        start, end, step = where.indices(len(self))
        assert step == 1
        if start >= end:
            return PageParts()
        ends = self._ends
        first = bisect_right(ends, start)
        last = bisect_right(ends, end - 1, first)
        found = self.parts[first : last + 1]
        if end < ends[last]:
            found[-1] = found[-1][: end - ends[last]]
        if first:
            start -= ends[first - 1]
        if start:
            found[0] = found[0][start:]
        return PageParts(found)

    def overlaps(self, start: int, end: int) -> Iterator[tuple[Any, int, int]]:
        """List the parts that pages `[start, end)` are in, each with the range of its own pages that is meant."""
        ends = self._ends
        at = bisect_right(ends, start)
        first = ends[at - 1] if at else 0
        while first < end:
            yield self.parts[at], max(0, start - first), min(end, ends[at]) - first
            first, at = ends[at], at + 1

    def exchange(self, start: int, values: list[Any]) -> list[Any]:
        """Put other values in place of those of the pages from `start` on. Parts must be lists, and are written.

        Returns:
            The values that were there.
        """
        before: list[Any] = []
        for part, first, end in [*self.overlaps(start, start + len(values))]:
            before += part[first:end]
            part[first:end] = values[len(before) - (end - first) : len(before)]
        return before

    def __delitem__(self, where: slice) -> None:
        start, end, _ = where.indices(len(self))
        if start >= end:
            return
        assert end == len(self), "pages are only ever removed from the end"
        at = bisect_right(self._ends, start)
        before = self._ends[at - 1] if at else 0
        if start > before:
            self.parts[at], self._ends[at] = self.parts[at][: start - before], start
            at += 1
        del self.parts[at:], self._ends[at:]

    def extend(self, values: Any) -> None:
        """Add one part at the end, or pages in parts."""
        self._append(values.parts if isinstance(values, PageParts) else [values] if len(values) else ())

    def move_end(self, start: int, into: PageParts) -> None:
        """Move the pages from `start` on, which are some, to the end of others."""
        at = bisect_right(self._ends, start)
        start_in_part = start - self._ends[at - 1] if at else start
        moved = self.parts[at:]
        if start_in_part:
            kept = moved[0][:start_in_part]
            into.take(moved, start_in_part)
            self.parts[at], self._ends[at] = kept, start
            at += 1
        else:
            into.take(moved, 0)
        del self.parts[at:], self._ends[at:]

    def take(self, parts: list[Any], start: int) -> None:
        """Add parts at the end, the first without its first `start` pages: all of them, or none when it raises."""
        self._append([parts[0][start:], *parts[1:]] if start else parts)

    def _append(self, parts: Iterable[Any]) -> None:
        end, ends, parts = len(self), [], [*parts]
        for part in parts:
            end += len(part)
            ends.append(end)
        self.parts += parts
        self._ends += ends
