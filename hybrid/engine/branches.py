"""Drafts that form a tree: how a part with one is computed, and what becomes of the path that is accepted.

This is all that the engine does for them: a part whose drafts form a tree is a `TreePart`, and what has no drafts, or
chains, does not look at what is here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from hybrid.cache.cache import HybridCache
from hybrid.engine.step import Part
from hybrid.speculation.drafts import Drafts
from hybrid.units import ceil_div


@dataclass(frozen=True, slots=True)
class Branches:
    """The paths of a tree of drafts, and their pages.

    A tree is computed as the paths that it consists of. Attention finds the keys of a draft where it would find them
    without any tree, in a block table of its path, and so gives the same bits. The first path is in the pages of the
    request; each other path has pages of its own from the one on that holds the first draft, and they come last in the
    request's block table until the pass is over. What paths have in common is computed once and copied.

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
        """Return the paths of drafts.

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
        """Return the number of pages of a path, from that of the first draft on."""
        return ceil_div(self.end + len(self.paths[number]), self.page_size) - self.end // self.page_size

    def table(self, number: int, block_table: array[int]) -> array[int]:
        """Return the page ids of a path in order."""
        first, place = self.places[0], self.places[number]
        return block_table[:first] + block_table[place : place + self.count(number)]

    def slot(self, number: int, position: int, block_table: array[int]) -> int:
        """Return the slot of a position on a path, which is not before the page of the first draft."""
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


@dataclass(slots=True)
class TreePart(Part):
    """A part with drafts that form a tree.

    Attributes:
        branches: the paths of the drafts, and their pages.
    """

    branches: Branches = field(kw_only=True)

    @classmethod
    def of(cls, part: Part, drafts: Drafts, cache: HybridCache) -> TreePart | None:
        """Return a part with a tree of drafts, and the memory for its paths, which must be free: nothing is evicted for
        paths of which only one is kept. None if it is not: nothing was allocated."""
        lease, page_size = part.lease, cache.config.page_size
        num_pages = max(len(lease.block_table), ceil_div(part.end + drafts.depth, page_size))
        branches = Branches.of(drafts, part.end, page_size, num_pages)
        if branches.places[0] < lease.num_shared or not cache.reserve_from_free(lease, branches.num_pages):
            return None
        tree = cls(*[getattr(part, own.name) for own in fields(Part)], branches=branches)
        tree.drafts = drafts
        return tree

    @property
    def paths(self) -> Sequence[Sequence[int]]:
        """The paths that its drafts form, as their indices."""
        return self.branches.paths

    @property
    def draft_positions(self) -> Sequence[int]:
        """The position of each draft."""
        assert self.drafts is not None
        return [self.end - 1 + depth for depth in self.drafts.depths]

    def draft_slots(self, page_size: int) -> list[int]:
        """Return the slot of the K and V of each draft: on the first path that has it."""
        pairs = zip(self.branches.home, self.draft_positions, strict=True)
        return [self.branches.slot(home, at, self.lease.block_table) for home, at in pairs]

    def keep(self, path: Sequence[int], cache: HybridCache) -> None:
        """Move the pages of the accepted drafts to where those of the first path are."""
        if not path:
            return
        end, page_size = self.end + len(path), self.branches.page_size
        first, place = self.branches.places[0], self.branches.places[self.branches.home[path[-1]]]
        for page in range(ceil_div(end, page_size) - first if place != first else 0):
            cache.swap_pages(self.lease, first + page, place + page)


class UnrolledNumbers(NamedTuple):
    """Numbers of the steps of linear layers where drafts form trees.

    Attributes:
        rows, places: as `hybrid.batch.Unrolled` has them.
        copies: as `Batch.copies` has them.
    """

    rows: list[int]
    places: list[int]
    copies: np.ndarray


def unroll(parts: Sequence[Part]) -> UnrolledNumbers:
    """Return the steps of linear layers.

    Args:
        parts: all that decode.
    """
    steps: list[int] = []
    places: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for part in parts:
        row = len(places)
        own = [row, *(row + 1 + at for path in part.paths for at in path)]
        places += [len(steps) + own.index(each) for each in range(row, row + part.num_rows)]
        steps += own
        if isinstance(part, TreePart):
            for source, target in part.branches.copies(part.lease.block_table):
                sources.append(source)
                targets.append(target)
    return UnrolledNumbers(steps, places, np.array((sources, targets), np.int64))


def write_tables(parts: Sequence[Part], table: np.ndarray) -> None:
    """Write the page ids that the drafts of trees see.

    Args:
        parts: all that decode.
        table: the block table, one row for each decoded token.
    """
    row = 0
    for part in parts:
        if isinstance(part, TreePart):
            for at, home in enumerate(part.branches.home, row + 1):
                pages = part.branches.table(home, part.lease.block_table)
                table[at, : len(pages)] = pages
        row += part.num_rows
