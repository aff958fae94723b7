"""What of prompts was evicted: what it was, how long ago it was used, and what took its place."""

from __future__ import annotations

from array import array
from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from hybrid.doctor.past import STEP, Fact
from hybrid.doctor.request import LoggedRequest

AGES = (10, 100, 1000)
"""Bounds of ages, in requests since the last use."""


class EvictedKind(StrEnum):
    """What the evicted part of a prompt was, when it was used last."""

    CONVERSATION = "the history of a conversation"
    PROMPT = "a prompt that came again"
    BEGINNING = "a beginning that prompts share"


class Replacement(StrEnum):
    """What was computed since then, and took its place."""

    USED = "prompts that were asked for again"
    UNUSED = "prompts that never were"
    ANSWERS = "answers"


NAMES = {Replacement.USED: "used again", Replacement.UNUSED: "never used again", Replacement.ANSWERS: "answers"}
"""What took its place, in a word or two."""


class EvictedPart(NamedTuple):
    """Tokens that were evicted and asked for again, of one kind and age.

    Attributes:
        part: what they were.
        age: requests since their last use, as "11 to 100".
        num_tokens: how many.
        places: what took their place, in percent of what was computed meanwhile; all 0: nothing was but what they came
            with.
    """

    part: EvictedKind
    age: str
    num_tokens: int
    places: dict[Replacement, float]


def part_of(request: LoggedRequest, fact: Fact) -> EvictedKind:
    """What the evicted part of a prompt was."""
    if fact.seen < fact.answer_from // STEP * STEP:
        return EvictedKind.BEGINNING
    return EvictedKind.CONVERSATION if request.num_prompt > fact.answer_from else EvictedKind.PROMPT


def age_of(requests: int) -> str:
    """The ages that a number of requests since the last use is among."""
    low = 1
    for high in AGES:
        if requests <= high:
            return f"{low} to {high:,}"
        low = high + 1
    return f"more than {AGES[-1]:,}"


class EvictedTokens:
    """Counts tokens that were evicted, and what was computed between their last use and now.

    Requests are added in order of their numbers, or nearly.
    """

    def __init__(self) -> None:
        self._hits, self._prompts, self._answers = array("I"), array("I"), array("I")
        self._used = array("I")  # tokens of each that a later request has
        self._evicted: list[tuple[int, int, int, EvictedKind]] = []

    def add(self, number: int, request: LoggedRequest, fact: Fact, num_hit: int, num_evicted: int) -> None:
        """Count a request.

        Args:
            number: of the request in the traffic.
            num_hit: tokens of its prompt that were a hit.
            num_evicted: tokens of it that were evicted.
        """
        for counts in (self._hits, self._prompts, self._answers, self._used):
            counts.extend([0] * (number + 1 - len(counts)))
        self._hits[number], self._prompts[number] = num_hit, request.num_prompt
        self._answers[number] = request.num_tokens - request.num_prompt
        if fact.age:
            before = number - fact.age
            self._used[before] = max(self._used[before], fact.seen)
        if num_evicted:
            self._evicted.append((number, fact.age, num_evicted, part_of(request, fact)))

    def parts(self) -> list[EvictedPart]:
        """What was evicted, by kind and age, the most first."""
        hits, prompts, answers, used = (
            np.frombuffer(each, np.uint32).astype(np.int64)
            for each in (self._hits, self._prompts, self._answers, self._used)
        )
        computed_and_used = np.maximum(0, np.minimum(used, prompts) - hits)
        sums = {
            Replacement.USED: np.cumsum(computed_and_used),
            Replacement.UNUSED: np.cumsum(prompts - hits - computed_and_used),
            Replacement.ANSWERS: np.cumsum(answers),
        }
        tokens: Counter[tuple[EvictedKind, str]] = Counter()
        places: dict[tuple[EvictedKind, str], dict[Replacement, float]] = {}
        for number, age, count, part in self._evicted:
            key = part, age_of(age)
            tokens[key] += count
            shares = places.setdefault(key, dict.fromkeys(Replacement, 0.0))
            meanwhile = {place: int(sums[place][number - 1] - sums[place][number - age]) for place in Replacement}
            for place, size in meanwhile.items():
                shares[place] += count * size / max(1, sum(meanwhile.values()))
        return [EvictedPart(*key, count, _percent(places[key])) for key, count in tokens.most_common()]


def _percent(shares: dict[Replacement, float]) -> dict[Replacement, float]:
    total = sum(shares.values()) or 1.0
    return {place: round(100 * share / total, 1) for place, share in shares.items()}
