"""Drafts: tokens that may come next, and their check.

A pass computes drafts together with the last known token, and says for each of them which token follows it. Those that
are what would have been sampled anyway are accepted, so that wrong drafts cost time and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from numbers import Real
from operator import mul
from typing import Any, TypeGuard

from hybrid.checks import is_integer
from hybrid.errors import ArgumentError

USUAL = frozenset((tuple, list, range, array))
"""Types of the sequences that drafters usually return."""

INTEGERS = frozenset("bBhHiIlLqQ")
"""Types of arrays of integers."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree of tokens that may come next.

    Attributes:
        tokens: parents before their children.
        parents: index of the token before each; -1: it follows the last known token.
        drafters: names of who proposed each.
        chances: the probability of each after those before it, as its drafter has it; None: it does not say.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drafters: tuple[tuple[str, ...], ...]
    chances: tuple[float, ...] | None = None

    @classmethod
    def chain(cls, tokens: Sequence[int], drafter: str, chances: Sequence[float] | None = None) -> Drafts:
        """Make a chain of one drafter: each token follows the one before."""
        count = len(tokens)
        known = tuple(chances) if chances is not None else None
        return cls(tuple(tokens), _chained(count), ((drafter,),) * count, known)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Tell whether each token follows the one before it."""
        return self.parents == _chained(len(self.tokens))

    @property
    def drafter(self) -> str | None:
        """The drafter that proposed all of them, alone; None: several did, or there is none."""
        found = self.drafters[0] if self.drafters else ()
        return found[0] if len(found) == 1 and self.drafters.count(found) == len(self.drafters) else None

    def path(self, at: int) -> tuple[int, ...]:
        """Return the indices of the tokens from the first one up to `at`, each after the one before; -1: none."""
        path: list[int] = []
        while at >= 0:
            path.append(at)
            at = self.parents[at]
        return tuple(reversed(path))

    @property
    def depths(self) -> tuple[int, ...]:
        """Number of tokens on the path to each token, itself included."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path."""
        return len(self.tokens) if self.is_chain else max(self.depths)

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Return the path to every token that none follows, in the order of their tokens: the first one has the first
        token, the first one after it, and so on."""
        if self.is_chain:
            return (tuple(range(len(self.tokens))),)
        inner = set(self.parents)
        return tuple(sorted(self.path(at) for at in range(len(self.tokens)) if at not in inner))

    def after(self) -> list[tuple[int, ...]]:
        """Return the tokens that the last known one, and then each of these, is followed by up to there: what was
        drafted before the token that comes next."""
        histories: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            histories.append((*histories[parent + 1], token))
        return histories

    def trials(self, drafter: str, path: Sequence[int]) -> tuple[int, int]:
        """Count how often a drafter had a draft for the token that came next, and how often it was that token.

        Args:
            path: the drafts that were accepted.
        """
        if self.is_chain and self.drafter == drafter:  # the usual case
            return len(path) + (len(path) < len(self.drafters)), len(path)
        right, last = 0, -1
        for at in path:
            if drafter not in self.drafters[at]:
                break
            right, last = right + 1, at
        tried = any(parent == last and drafter in own for parent, own in zip(self.parents, self.drafters, strict=True))
        return right + tried, right

    def scaled(self, trust: float) -> Drafts:
        """Return the same with this part of what their drafter says that their probabilities are."""
        if self.chances is None or trust > 0.9:  # one cannot know it better
            return self
        return Drafts(self.tokens, self.parents, self.drafters, tuple([trust * chance for chance in self.chances]))

    def only(self, kept: Sequence[int]) -> Drafts:
        """Return some of them: indices in rising order, parents before their children."""
        place = {at: index for index, at in enumerate(kept)}
        place[-1] = -1
        return Drafts(
            tuple(self.tokens[at] for at in kept),
            tuple(place[self.parents[at]] for at in kept),
            tuple(self.drafters[at] for at in kept),
            tuple(self.chances[at] for at in kept) if self.chances is not None else None,
        )

    def first_path(self) -> Drafts:
        """Return the first token, the first one after it, and so on: a chain."""
        return self if self.is_chain else self.only(self.paths()[0])

    def first(self, count: int) -> Drafts:
        """Return the first `count` tokens."""
        if len(self.tokens) <= count:
            return self
        chances = self.chances[:count] if self.chances is not None else None
        return Drafts(self.tokens[:count], self.parents[:count], self.drafters[:count], chances)


def checked(
    tokens: object, parents: object, drafter: str, limit: int, vocab_size: int, chances: object = None
) -> Drafts:
    """Return what a drafter has returned, as far as it can be computed.

    Tokens beyond `limit` are left out, and those that have a brother with the same token: children of both are its
    children.

    Args:
        tokens, parents, chances: as `Drafter.propose` returns them.
        drafter: its name.
        limit: the most tokens.
        vocab_size: of the model.

    Raises:
        ArgumentError: they are not sequences of the same length, hold something else than integers, a token outside the
            vocabulary, a parent that does not come before its child, or a probability that is none.
    """
    if not (_is_sequence(tokens) and _is_sequence(parents)) or len(tokens) != len(parents):
        raise ArgumentError(
            f"drafter {drafter}: propose must return two sequences of the same length, such as lists; got "
            f"{_described(tokens)} and {_described(parents)}"
        )
    known = _probabilities(chances, len(tokens), drafter) if chances is not None else None
    if parents == range(-1, len(tokens) - 1) and _are_tokens(tokens, vocab_size):  # a chain has no brothers
        count = min(len(tokens), limit)
        return Drafts(tuple(tokens[:count]), _chained(count), ((drafter,),) * count, known and known[:count])
    own: dict[tuple[int, int], int] = {}
    place: list[int] = []  # of each proposed token among those that are kept
    kept: list[int] = []
    for at, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if type(token) is not int or type(parent) is not int:  # the usual case needs no look at abstract types
            if not (is_integer(token) and is_integer(parent)):
                raise ArgumentError(
                    f"drafter {drafter}: tokens and parents must be integers, got {token!r} and {parent!r}"
                )
            token, parent = int(token), int(parent)
        if not 0 <= token < vocab_size:
            raise ArgumentError(f"drafter {drafter}: token {token} is outside the vocabulary of {vocab_size}")
        if not -1 <= parent < at:
            raise ArgumentError(f"drafter {drafter}: token {at} cannot follow token {parent}: parents come first")
        edge = (place[parent] if parent >= 0 else -1, token)
        if edge not in own:
            if len(own) == limit:
                break
            own[edge] = len(own)
            kept.append(at)
        place.append(own[edge])
    return Drafts(
        tuple(token for _, token in own),
        tuple(parent for parent, _ in own),
        ((drafter,),) * len(own),
        tuple([known[at] for at in kept]) if known is not None else None,
    )


@lru_cache(256)
def _chained(count: int) -> tuple[int, ...]:
    """Return the parents of a chain."""
    return tuple(range(-1, count - 1))


def _is_sequence(found: object) -> TypeGuard[Sequence[Any]]:
    """Return whether it is a sequence; for the usual types abstract ones are not looked at."""
    return type(found) in USUAL or isinstance(found, Sequence)


def _are_tokens(tokens: object, vocab_size: int) -> bool:
    """Return whether all are tokens, as far as that is known at once."""
    if not isinstance(tokens, array) or tokens.typecode not in INTEGERS or not tokens:
        return False
    return bool(min(tokens) >= 0 and max(tokens) < vocab_size)


def _described(found: object) -> str:
    """Describe what a drafter has returned, in a message."""
    kind = type(found).__name__
    return f"{kind} of {len(found)}" if _is_sequence(found) else kind


def _probabilities(chances: object, count: int, drafter: str) -> tuple[float, ...]:
    """Return the probabilities of `count` drafts."""
    if not _is_sequence(chances) or len(chances) != count:
        raise ArgumentError(f"drafter {drafter}: propose must return a probability for each token, or none at all")
    floats = isinstance(chances, list) and set(map(type, chances)) == {float}  # as a rule: they need no look at each
    if floats and min(chances) >= 0 and max(chances) <= 1 and sum(chances) >= 0:  # which NaN is not
        return tuple(chances)
    for chance in chances:
        if (type(chance) is not float and not isinstance(chance, Real)) or not 0 <= float(chance) <= 1:
            raise ArgumentError(f"drafter {drafter}: a probability must be from 0 to 1, got {chance!r}")
    return tuple(map(float, chances))


def accepted(drafts: Drafts, sampled: Sequence[int], is_end: Callable[[int], bool]) -> list[int]:
    """Return the drafts that are what the model says, in order.

    Args:
        sampled: the token that follows the last known one, and the one that follows each draft.
        is_end: whether nothing is computed after a token.

    Returns:
        Indices of `drafts`: each is the token sampled after the one before it.
    """
    path: list[int] = []
    if drafts.is_chain:  # the usual case
        for at, token in enumerate(drafts.tokens):
            if token != sampled[at] or is_end(token):
                break
            path.append(at)
        return path
    children = {
        (parent, token): at for at, (parent, token) in enumerate(zip(drafts.parents, drafts.tokens, strict=True))
    }
    last = -1
    while not is_end(sampled[last + 1]):
        found = children.get((last, sampled[last + 1]))
        if found is None:
            break
        path.append(found)
        last = found
    return path


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
        """Add drafts, as `DraftTree.add` does."""
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
        """Return the chance of each draft."""
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
        """Tell whether nothing was proposed."""
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
        """Return the `count` most probable drafts."""
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
        """Return all that was proposed."""
        if self._merged is None:
            self._merged = _Merged()
            if self._first is not None:
                self._merged.add(*self._first)
        return self._merged
