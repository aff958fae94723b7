"""What a speculator knows of a request, and the drafts of a request in one pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.speculation.cached import CachedDrafter
from hybrid.speculation.draft_tree import DraftTree
from hybrid.speculation.drafter import ChainDrafter, Drafter, History
from hybrid.speculation.pace import Acceptance

FRUITLESS, ASKED_EVERY = 16, 4
"""After this many passes in which no draft of a request was computed, drafters are asked in every fourth pass."""


@dataclass(eq=False, slots=True)
class Known:
    """What is known of one request.

    Attributes:
        measured: of each drafter.
        position: where the tokens of `watched` would be.
        watched: by drafter a token that it proposed, and how probable it said that it is (None: it does not say).
        passes: number of the latest pass.
        asked, found: of the latest one in which drafters were asked, and in which drafts of theirs were computed.
    """

    measured: dict[str, Acceptance]
    position: int = 0
    watched: dict[str, tuple[int, float | None]] = field(default_factory=dict)
    passes: int = 0
    asked: int = 0
    found: int = 0

    def is_left_out(self, now: int) -> bool:
        """Whether no drafter is asked in this pass: of those in which no draft would be computed, most are left out."""
        return now - self.found > FRUITLESS and now - self.asked < ASKED_EVERY


@dataclass(frozen=True, slots=True)
class Asked:
    """A drafter, and what follows from its type.

    Attributes:
        computes: it has something to compute for several requests together.
        chain, cached: the same, where it is of this type; None: it is not. To look at abstract types takes a while.
    """

    drafter: Drafter
    name: str
    computes: bool
    chain: ChainDrafter | None
    cached: CachedDrafter | None

    @classmethod
    def of(cls, drafter: Drafter) -> Asked:
        """For a drafter."""
        computes = type(drafter).prepare is not Drafter.prepare
        chain = drafter if isinstance(drafter, ChainDrafter) else None
        cached = drafter if isinstance(drafter, CachedDrafter) else None
        return cls(drafter, drafter.name, computes, chain, cached)


@dataclass(eq=False, slots=True)
class Joined:
    """The drafts of one request in one pass.

    Attributes:
        limit: the most.
        known: of the request.
        tree: what was proposed.
        left: the chance that none of the drafters asked is right.
        count: drafts that are expected to be computed.
        asked: of drafters that have drafts in the tree, whether they compute them; without those that say how probable
            their drafts are and compute nothing, which cost nothing.
        firsts: of each drafter that does not learn itself how probable its drafts are: the first one, and what it says.
    """

    history: History
    limit: int
    known: Known
    tree: DraftTree = field(default_factory=DraftTree)
    left: float = 1.0
    count: int = 0
    asked: dict[str, bool] = field(default_factory=dict)
    firsts: dict[str, tuple[int, float | None]] = field(default_factory=dict)
