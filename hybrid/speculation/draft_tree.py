"""Drafts of several drafters as one tree, the most probable first."""

from __future__ import annotations

from hybrid.speculation.drafts import Drafts


class DraftTree:
    """Tokens that may come next, each with the chance that it is accepted.

    A drafter whose drafts are accepted at a rate r is expected to be right with its first token after another one with
    probability r, with the second one it names with (1 - r) r, and so on. Where two drafters name the same token, one
    of them being right is enough; where they differ, the later one is right only if the earlier one is wrong.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._drafters: list[tuple[str, ...]] = []
        self._given: list[float] = []  # the chance of each if what is before it was accepted
        self._place: dict[tuple[int, int], int] = {}
        self._single: Drafts | None = None
        self._chances: list[float] | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def chances(self) -> list[float]:
        """The chance of each draft, falling."""
        if self._chances is None:
            self._chances = sorted(self._accepted(), reverse=True)
        return self._chances

    def add(self, drafts: Drafts, rate: float) -> None:
        """Add what a drafter proposes.

        Args:
            rate: how often its drafts are accepted, if it does not say how probable each is.
        """
        self._single = drafts if not self._tokens else None
        self._chances = None
        own: list[int] = []
        named: dict[int, int] = {}  # children of each draft that this drafter has named
        taken: dict[int, float] = {}  # chance that a child of each draft is right which others have named
        for at, parent in enumerate(self._parents):
            taken[parent] = taken.get(parent, 0.0) + self._given[at]
        for at, (token, proposed, drafters) in enumerate(
            zip(drafts.tokens, drafts.parents, drafts.drafters, strict=True)
        ):
            parent = own[proposed] if proposed >= 0 else -1
            chance = rate * (1 - rate) ** named.get(parent, 0) if drafts.chances is None else drafts.chances[at]
            named[parent] = named.get(parent, 0) + 1
            place = self._place.get((parent, token))
            if place is None:
                place = self._place[parent, token] = len(self._tokens)
                self._tokens.append(token)
                self._parents.append(parent)
                self._drafters.append(drafters)
                self._given.append(chance * max(0.0, 1 - taken.get(parent, 0.0)))
            else:
                self._drafters[place] += drafters
                self._given[place] = 1 - (1 - self._given[place]) * (1 - chance)
            own.append(place)

    def best(self, count: int) -> Drafts:
        """The `count` most probable drafts."""
        if self._single is not None and (self._single.is_chain or len(self._single) <= count):  # as it was proposed
            return self._single.first(count)
        chances = self._accepted()
        order = sorted(range(len(self._tokens)), key=lambda at: -chances[at])[:count]  # parents come first
        place = {at: index for index, at in enumerate(order)}
        return Drafts(
            tuple(self._tokens[at] for at in order),
            tuple(place.get(self._parents[at], -1) for at in order),
            tuple(self._drafters[at] for at in order),
        )

    def _accepted(self) -> list[float]:
        """The chance of each draft, in the order in which they were added: parents come first."""
        chances: list[float] = []
        for given, parent in zip(self._given, self._parents, strict=True):
            chances.append(given * (chances[parent] if parent >= 0 else 1.0))
        return chances
