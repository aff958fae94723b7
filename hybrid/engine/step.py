"""A step: what one forward pass computes."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.cache.lease import Lease
from hybrid.engine.request import Request
from hybrid.speculation.drafts import Drafts


@dataclass(slots=True)
class Part:
    """A request's part in a step: tokens `[start, end)`.

    Attributes:
        lease: the request's lease when the step was scheduled; the step's results belong to it alone.
        is_prefill: the tokens are computed as prompt.
        swaps: the pass reads the front and writes the back, so that the state before it is kept.
        drafts: computed after the tokens, for the case that they are what comes next.
        boundary: a position on the grid among the drafts: if they are accepted beyond it, its state is kept in the
            back. None: there is none.
        num_pages: pages that the lease needs without the drafts.
    """

    request: Request
    lease: Lease
    start: int
    end: int
    is_prefill: bool
    swaps: bool = False
    drafts: Drafts | None = None
    boundary: int | None = None
    num_pages: int = 0

    def boundary_before(self, end: int) -> int | None:
        """The boundary, if it is before this position."""
        return self.boundary if self.boundary is not None and self.boundary < end else None

    @property
    def num_rows(self) -> int:
        """Number of tokens that are computed."""
        return self.end - self.start + (len(self.drafts) if self.drafts is not None else 0)

    @property
    def is_alive(self) -> bool:
        """Whether the request still runs on the memory that the part was scheduled for."""
        return self.request.lease is self.lease

    @property
    def samples(self) -> bool:
        """Whether the token after the part is not known yet, and wanted."""
        return not self.request.is_replay and self.end == len(self.request.ids)


@dataclass(slots=True)
class Step:
    """What one forward pass computes: prompt parts first, then single tokens with their drafts."""

    parts: list[Part]

    @property
    def has_drafts(self) -> bool:
        """Whether the number of tokens that the step yields is not known before it has run."""
        return any(part.drafts is not None for part in self.parts)

    def alive(self) -> Step:
        """The parts whose requests did not end, and were not retracted, since the step was scheduled."""
        return Step([part for part in self.parts if part.is_alive])
