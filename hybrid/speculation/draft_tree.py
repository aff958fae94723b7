"""Drafts of several drafters as one tree, the most probable first."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from hybrid.speculation.drafts import Drafts


class _Merged:
    """Drafts of several drafters, parents before their children.

    Attributes:
        tokens, parents, drafters: as `Drafts`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.drafters: list[tuple[str, ...]] = []
        self._given: list[float] = []  # the chance of each if what is before it was accepted
        self._place: dict[tuple[int, int], int] = {}

    def add(self, drafts: Drafts, rate: float) -> None:
        """As `DraftTree.add`."""
        own: list[int] = []
        named: dict[int, int] = {}  # children of each draft that this drafter has named
        taken: dict[int, float] = {}  # chance that a child of each draft is right which others have named
        for at, parent in enumerate(self.parents):
            taken[parent] = taken.get(parent, 0.0) + self._given[at]
        for at, (token, proposed, drafters) in enumerate(
            zip(drafts.tokens, drafts.parents, drafts.drafters, strict=True)
        ):
            parent = own[proposed] if proposed >= 0 else -1
            chance = rate * (1 - rate) ** named.get(parent, 0) if drafts.chances is None else drafts.chances[at]
            named[parent] = named.get(parent, 0) + 1
            place = self._place.get((parent, token))
            if place is None:
                place = self._place[parent, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(parent)
                self.drafters.append(drafters)
                self._given.append(chance * max(0.0, 1 - taken.get(parent, 0.0)))
            else:
                self.drafters[place] += drafters
                self._given[place] = 1 - (1 - self._given[place]) * (1 - chance)
            own.append(place)

    def accepted(self) -> list[float]:
        """The chance of each draft."""
        chances: list[float] = []
        for given, parent in zip(self._given, self.parents, strict=True):
            chances.append(given * (chances[parent] if parent >= 0 else 1.0))
        return chances


class DraftTree:
    """Tokens that may come next, each with the chance that it is accepted.

    A drafter whose drafts are accepted at a rate r is expected to be right with its first token after another one with
    probability r, with the second one it names with (1 - r) r, and so on. Where two drafters name the same token, one
    of them being right is enough; where they differ, the later one is right only if the earlier one is wrong.
    """

    def __init__(self) -> None:
        self._first: tuple[Drafts, float] | None = None
        self._merged: _Merged | None = None  # the usual case needs none: a chain of one drafter
        self._is_single = True

    def __len__(self) -> int:
        if self._is_single:
            return len(self._first[0]) if self._first is not None else 0
        return len(self._all().tokens)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was proposed."""
        return self._first is None

    @property
    def chances(self) -> list[float]:
        """The chance of each draft, falling."""
        if self._is_single and self._first is not None and self._first[0].is_chain:
            drafts, rate = self._first
            return [*accumulate(drafts.chances or (rate,) * len(drafts), mul)]
        return sorted(self._all().accepted(), reverse=True)

    def add(self, drafts: Drafts, rate: float) -> None:
        """Add what a drafter proposes.

        Args:
            rate: how often its drafts are accepted, if it does not say how probable each is.
        """
        if self._first is None:
            self._first = drafts, rate
        else:
            self._all().add(drafts, rate)
            self._is_single = False

    def best(self, count: int) -> Drafts:
        """The `count` most probable drafts."""
        if self._is_single and self._first is not None:
            drafts, _ = self._first
            if drafts.is_chain or len(drafts) <= count:  # as it was proposed
                return drafts.first(count)
        merged = self._all()
        chances = merged.accepted()
        order = sorted(range(len(chances)), key=lambda at: -chances[at])[:count]  # parents come first
        place = {at: index for index, at in enumerate(order)}
        return Drafts(
            tuple(merged.tokens[at] for at in order),
            tuple(place.get(merged.parents[at], -1) for at in order),
            tuple(merged.drafters[at] for at in order),
        )

    def _all(self) -> _Merged:
        """All that was proposed."""
        if self._merged is None:
            self._merged = _Merged()
            if self._first is not None:
                self._merged.add(*self._first)
        return self._merged
