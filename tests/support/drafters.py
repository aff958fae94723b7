"""Drafters of the tests: right, wrong, half right, and lying."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from hybrid.speculation.drafter import Drafter, History

VOCAB = 1024


class Scripted(Drafter):
    """Drafts of a function of the history and the limit.

    Attributes:
        calls: times that it was asked.
    """

    def __init__(self, script: Callable[[History, int], Any]) -> None:
        self.script = script
        self.calls: int = 0

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        self.calls += 1
        result: tuple[Sequence[int], Sequence[int]] = self.script(history, limit)
        return result


def chain(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens one after the other."""
    return list(tokens), list(range(-1, len(tokens) - 1))


def following(answers: dict[tuple[int, ...], list[int]], right: float = 1.0, seed: int = 0) -> Scripted:
    """Drafts the known answers to prompts; each token is right with this probability."""
    rng = random.Random(seed)

    def script(history: History, limit: int) -> tuple[list[int], list[int]]:
        done = len(history) - history.prompt_len
        known = answers[tuple(history[: history.prompt_len])][done : done + limit]
        return chain([token if rng.random() < right else rng.randrange(VOCAB) for token in known])

    return Scripted(script)
