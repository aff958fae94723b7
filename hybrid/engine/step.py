"""A step: what one forward pass computes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hybrid.cache.lease import Lease
from hybrid.engine.request import Request
from hybrid.speculation.drafts import Drafts
from hybrid.tree.node import Checkpoint
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


class BrokenOffError(Exception):
    """Scheduling has ended: an exception, its cause, broke it off, and others would follow from it."""


@dataclass(slots=True)
class Part:
    """A request's part in a step: tokens `[start, end)`.

    Attributes:
        lease: the request's lease when the step was scheduled; the step's results belong to it alone.
        is_prefill: the tokens are computed as prompt.
        samples: the token after the part is not known yet, and wanted.
        swaps: the pass reads the front and writes the back, so that the state before it is kept.
        num_unknown: number of its tokens that the host does not know: 1 when the pass before it samples its last token.
        drafts: computed after the tokens, for the case that they are what comes next.
        boundary: a position on the grid among the drafts: if they are accepted beyond it, its state is kept in the
            back. None: there is none.
        num_pages: pages that the lease needs without the drafts.
        branches: the paths of drafts that are a tree; None: they are a chain.
    """

    request: Request
    lease: Lease
    start: int
    end: int
    is_prefill: bool
    samples: bool = False
    swaps: bool = False
    num_unknown: int = 0
    drafts: Drafts | None = None
    boundary: int | None = None
    num_pages: int = 0
    branches: Branches | None = None

    def boundary_before(self, end: int) -> int | None:
        """The boundary, if it is before this position."""
        return self.boundary if self.boundary is not None and self.boundary < end else None

    @property
    def num_drafts(self) -> int:
        """Number of drafts that are computed."""
        return len(self.drafts.tokens) if self.drafts is not None else 0

    @property
    def num_rows(self) -> int:
        """Number of tokens that are computed."""
        return self.end - self.start + self.num_drafts

    @property
    def positions(self) -> Sequence[int]:
        """The position of each token that is computed."""
        if self.drafts is None:
            return range(self.start, self.end)
        if self.branches is None:
            return range(self.start, self.end + len(self.drafts.tokens))
        return [*range(self.start, self.end), *(self.end - 1 + depth for depth in self.drafts.depths)]

    @property
    def paths(self) -> Sequence[Sequence[int]]:
        """The paths of its drafts: their indices."""
        return self.branches.paths if self.branches is not None else (range(self.num_drafts),)

    def table(self, draft: int) -> array[int]:
        """The page ids that a draft sees."""
        table, branches = self.lease.block_table, self.branches
        return table if branches is None else branches.table(branches.home[draft], table)

    @property
    def captured(self) -> list[Checkpoint]:
        """The checkpoints that the pass writes."""
        return [each for each in self.lease.captured if self.start < each.num_tokens <= self.end]

    @property
    def write_slot(self) -> int | None:
        """The slot in which the pass keeps the state after its tokens, without drafts."""
        return self.lease.back if self.swaps else self.lease.front

    @property
    def is_alive(self) -> bool:
        """Tell whether the request still runs on the memory that the part was scheduled for."""
        return self.request.lease is self.lease


@dataclass(slots=True)
class Step:
    """The parts that one forward pass computes: prompt parts first, then single tokens with their drafts."""

    parts: list[Part]

    def alive(self) -> Step:
        """The parts whose requests did not end, and were not retracted, since the step was scheduled."""
        return Step([part for part in self.parts if part.is_alive])
