"""Drafts: tokens that may come next, and their check.

A pass computes drafts together with the last known token, and says for each of them which token follows it. Those that
are what would have been sampled anyway are accepted, so that wrong drafts cost time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

from hybrid.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Drafts:
    """A tree of tokens that may come next.

    Attributes:
        tokens: parents before their children.
        parents: index of the token before each; -1: it follows the last known token.
        drafter: name of who made them.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drafter: str

    def __len__(self) -> int:
        return len(self.tokens)

    def first_path(self) -> Drafts:
        """The first token, the first one after it, and so on: a chain."""
        path: list[int] = []
        for at, parent in enumerate(self.parents):
            if parent == (path[-1] if path else -1):
                path.append(at)
        return Drafts(tuple(self.tokens[at] for at in path), tuple(range(-1, len(path) - 1)), self.drafter)

    def first(self, count: int) -> Drafts:
        """The first `count` tokens."""
        return Drafts(self.tokens[:count], self.parents[:count], self.drafter)


def checked(tokens: object, parents: object, drafter: str, limit: int, vocab_size: int) -> Drafts:
    """What a drafter has returned, as far as it can be computed.

    Tokens beyond `limit` are left out, and those that have a brother with the same token: children of both are its
    children.

    Args:
        tokens, parents: as `Drafter.propose` returns them.
        drafter: its name.
        limit: the most tokens.
        vocab_size: of the model.

    Raises:
        ArgumentError: they are not sequences of the same length, hold something else than integers, a token outside the
            vocabulary, or a parent that does not come before its child.
    """
    if not isinstance(tokens, Sequence) or not isinstance(parents, Sequence) or len(tokens) != len(parents):
        raise ArgumentError(f"drafter {drafter}: propose must return two sequences of the same length")
    own: dict[tuple[int, int], int] = {}
    place: list[int] = []  # of each proposed token among those that are kept
    for at, pair in enumerate(zip(tokens, parents, strict=True)):
        if not all(isinstance(number, Integral) for number in pair):
            raise ArgumentError(
                f"drafter {drafter}: tokens and parents must be integers, got {pair[0]!r} and {pair[1]!r}"
            )
        token, parent = int(pair[0]), int(pair[1])
        if not 0 <= token < vocab_size:
            raise ArgumentError(f"drafter {drafter}: token {token} is outside the vocabulary of {vocab_size}")
        if not -1 <= parent < at:
            raise ArgumentError(f"drafter {drafter}: token {at} cannot follow token {parent}: parents come first")
        edge = (place[parent] if parent >= 0 else -1, token)
        if edge not in own:
            if len(own) == limit:
                break
            own[edge] = len(own)
        place.append(own[edge])
    return Drafts(tuple(token for _, token in own), tuple(parent for parent, _ in own), drafter)


def accepted(drafts: Drafts, sampled: Sequence[int], is_end: Callable[[int], bool]) -> list[int]:
    """The drafts that are what the model says, in order.

    Args:
        sampled: the token that follows the last known one, and the one that follows each draft.
        is_end: whether nothing is computed after a token.

    Returns:
        Indices of `drafts`: each is the token sampled after the one before it.
    """
    children = {
        (parent, token): at for at, (parent, token) in enumerate(zip(drafts.parents, drafts.tokens, strict=True))
    }
    path: list[int] = []
    last = -1
    while not is_end(sampled[last + 1]):
        found = children.get((last, sampled[last + 1]))
        if found is None:
            break
        path.append(found)
        last = found
    return path
