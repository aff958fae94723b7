"""A drafter for tests that lies in every way."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

from hybrid.commands.toy_model import TOKENS, VOCAB_SIZE
from hybrid.speculation.drafter import Drafter, History

Proposal = tuple[Sequence[int], Sequence[int]]


def right_in_the_toy_model(history: History, limit: int) -> list[int]:
    """What the toy model answers."""
    state, tokens = zlib.crc32(history.key().ids), []
    for _ in range(limit):
        tokens.append(state % VOCAB_SIZE)
        state = zlib.crc32(TOKENS[tokens[-1]], state)
    return tokens


class Liar(Drafter):
    """Right, wrong and half-right chains and trees, and what no drafter may return: too many tokens, tokens outside the
    vocabulary, brothers that are equal, circles, other types, exceptions.

    Args:
        seed: of its choices.
        vocab_size: of the model.
        right: what comes next, as far as it is known.
    """

    def __init__(self, seed: int, vocab_size: int, right: Callable[[History, int], list[int]]) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._right = right

    def propose(self, history: History, limit: int) -> Proposal:
        """Anything."""
        rng = self._rng
        right = self._right(history, limit)
        wrong = [rng.randrange(self._vocab_size) for _ in range(limit)]
        half = [rng.choice(pair) for pair in zip(right, wrong, strict=False)]
        chosen: list[int] = rng.choice((right, right, wrong, half))
        chain = range(-1, len(chosen) - 1)
        lie = rng.randrange(15)
        if lie == 0:
            raise RuntimeError("the drafter fails")
        return {
            1: ([], []),
            2: (chosen * 9, range(-1, 9 * len(chosen) - 1)),
            3: ([*chosen, self._vocab_size], range(-1, len(chosen))),
            4: ([*chosen, *chosen], [*chain, *chain]),
            5: (chosen, range(len(chosen))),
            6: (chosen, [*chain, 5]),
            7: ([float(token) for token in chosen], chain),
            8: ([*wrong, *chosen], [*range(-1, len(wrong) - 1), *(parent + len(wrong) for parent in chain)]),
            9: self._branched(right[: limit // 2], wrong),
            10: self._branched(right[: limit // 2], wrong),
            11: (wrong, [rng.randrange(-1, at) if at else -1 for at in range(limit)]),
        }.get(lie, (chosen, chain))  # type: ignore[return-value]

    @staticmethod
    def _branched(right: list[int], wrong: list[int]) -> Proposal:
        """A tree in which a wrong token comes before each right one."""
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for good, bad in zip(right, wrong, strict=False):
            tokens += [bad, good]
            parents += [last, last]
            last = len(tokens) - 1
        return tokens, parents
