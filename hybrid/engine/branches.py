"""The pages of a tree of drafts: every path has its own, in which its keys and values are in order.

A tree is computed as the paths that it consists of. Attention finds the keys of a draft where it would find them
without any tree, in a block table of its path, and so gives the same bits. The first path is in the pages of the
request; each other path has pages of its own from the one on that holds the first draft, and they come last in the
request's block table until the pass is over. What paths have in common is computed once and copied.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from hybrid.speculation.drafts import Drafts
from hybrid.units import ceil_div


@dataclass(frozen=True, slots=True)
class Branches:
    """The paths of a tree of drafts.

    Attributes:
        end: position of the first draft.
        page_size: tokens of a page.
        paths: the drafts of each path.
        home: for each draft the first path that has it.
        places: where the pages of each path begin in the block table: those from the page of the first draft on.
    """

    end: int
    page_size: int
    paths: tuple[tuple[int, ...], ...]
    home: tuple[int, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, drafts: Drafts, end: int, page_size: int, num_pages: int) -> Branches:
        """The paths of drafts.

        Args:
            end: position of the first one.
            page_size: tokens of a page.
            num_pages: pages of the request without those of the paths after the first.
        """
        paths = drafts.paths()
        home = [len(paths)] * len(drafts)
        places, place = [end // page_size], num_pages
        for number, path in enumerate(paths):
            for at in path:
                home[at] = min(home[at], number)
            if number:
                places.append(place)
                place += ceil_div(end + len(path), page_size) - end // page_size
        return cls(end, page_size, paths, tuple(home), tuple(places))

    @property
    def num_pages(self) -> int:
        """Pages of the request with those of all paths."""
        return self.places[-1] + self.count(len(self.paths) - 1)

    def count(self, number: int) -> int:
        """Number of pages of a path, from that of the first draft on."""
        return ceil_div(self.end + len(self.paths[number]), self.page_size) - self.end // self.page_size

    def table(self, number: int, block_table: array[int]) -> array[int]:
        """The page ids of a path in order."""
        first, place = self.places[0], self.places[number]
        return block_table[:first] + block_table[place : place + self.count(number)]

    def slot(self, number: int, position: int, block_table: array[int]) -> int:
        """The slot of a position on a path, which is not before the page of the first draft."""
        page = self.places[number] + position // self.page_size - self.places[0]
        return block_table[page] * self.page_size + position % self.page_size

    def copies(self, block_table: array[int]) -> Iterator[tuple[int, int]]:
        """(from, to) slots of what the paths after the first have in common with one before them: the tokens before the
        first draft that are in its page, and drafts."""
        for number, path in enumerate(self.paths[1:], 1):
            for position in range(self.places[0] * self.page_size, self.end):
                yield self.slot(0, position, block_table), self.slot(number, position, block_table)
            for position, at in enumerate(path, self.end):
                if self.home[at] != number:
                    yield self.slot(self.home[at], position, block_table), self.slot(number, position, block_table)
