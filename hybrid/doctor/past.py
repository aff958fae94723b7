"""What came before: how much of a prompt was seen, and how much of the rest is the same text at another place.

All of it is of the traffic alone, and holds for every engine.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from hybrid.doctor.formats import Record
from hybrid.doctor.request import UNIT, LoggedRequest
from hybrid.doctor.text import THINK, VOLATILE

STEP = 64
"""Tokens between positions at which prefixes are remembered."""

MIN_SEGMENT = 8
"""Tokens of a piece of text that is looked for at other places, at least: shorter ones are everywhere."""

MAX_TEXTS = 2048
"""Requests whose texts are remembered, to show what differs."""

MAX_HASHES = 1 << 20
"""Prefixes, and pieces of text, that are remembered at least: the latest, of 67 million tokens."""

MAX_NAMESPACES = 64
"""Namespaces that a prompt is looked for in, the latest."""

AROUND = 60
"""Characters that are shown from where two texts differ, and a third of it before."""

TOOL = re.compile(r'^\{.*"name".*\}$', re.MULTILINE)
"""A tool, as templates write it: JSON in a line of its own."""

MAX_TOOLS = 1 << 18
"""Characters behind a difference in which tools are looked for."""

Numbers = np.ndarray[Any, np.dtype[np.uint64]]

ODD, ROOT = np.uint64(0x9E3779B97F4A7C15), 0xD1342543DE82EF95


class Rewrite(StrEnum):
    """Why a text that was seen is not a prefix any more."""

    NONE = "none"
    DATE = "a date, a time or an id changes"
    TOOLS = "tools in another order"
    THINKING = "thinking was dropped from the history"
    BEGINNING = "the same text behind another beginning"
    HISTORY = "the history was edited"


@dataclass(slots=True)
class Fact:
    """What the traffic says of one prompt.

    Attributes:
        seen: tokens of its longest prefix that was seen in its namespace.
        elsewhere: tokens of the longest one in any namespace.
        rewritten: tokens after it that were seen at another place.
        rewrite: why they are there.
        answer_from: where the answer of the request that had this prefix last begins.
        age: requests since then; 0: nothing of it was seen.
    """

    seen: int = 0
    elsewhere: int = 0
    rewritten: int = 0
    rewrite: Rewrite = Rewrite.NONE
    answer_from: int = 0
    age: int = 0


@dataclass
class Example:
    """Two requests that differ where they might have shared.

    Attributes:
        rewrite: why.
        line, before: lines of the later and of the earlier request.
        token, character: where they differ.
        old, new: the two pieces of text there.
    """

    rewrite: Rewrite
    line: int
    before: int
    token: int
    character: int
    old: str
    new: str


class Recent:
    """The last request that had each of many hashes: of the latest `MAX_HASHES` at least, of twice as many at most."""

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def get(self, number: int) -> int | None:
        """The last request that had a hash; None: none that is remembered."""
        found = self._new.get(number)
        return found if found is not None else self._old.get(number)

    def add(self, numbers: list[int], request: int) -> None:
        """Remember who has had them last."""
        self._new.update(dict.fromkeys(numbers, request))
        if len(self._new) >= MAX_HASHES:
            self._old, self._new = self._new, {}


class SeenTraffic:
    """The requests that came so far, as hashes; of the latest their texts too. What it takes is bounded: of very long
    traffic the oldest is forgotten.

    Attributes:
        examples: for each kind of rewriting the first two requests that show it.
    """

    def __init__(self) -> None:
        self.examples: dict[Rewrite, Example] = {}
        self._last = Recent()  # by the hash of a prefix
        self._salts: OrderedDict[int, None] = OrderedDict()
        self._num_prompt = array("I")
        self._segments = Recent()  # by the hash of a piece
        self._records: OrderedDict[int, Record] = OrderedDict()
        self._powers: Numbers = np.ones(1, np.uint64)
        self._inverses: Numbers = np.ones(1, np.uint64)

    def add(self, record: Record, request: LoggedRequest) -> Fact:
        """Compare a request with those before it, and remember it."""
        index = len(self._num_prompt)
        fact = Fact()
        blocks = request.blocks(STEP, request.num_tokens)
        at_most = (request.num_prompt - 1) // STEP
        seen = self._count(blocks, 0, at_most, 0)
        fact.seen = fact.elsewhere = seen * STEP
        last = self._last.get(blocks[seen - 1]) if seen else None
        if last is not None:
            fact.age, fact.answer_from = index - last, self._num_prompt[last]
        salt = request.salt
        for other in self._salts:
            if other != salt:
                found = self._count(blocks, seen, at_most, salt ^ other)
                fact.elsewhere = max(fact.elsewhere, found * STEP)
        self._last.add(blocks, index)
        self._salts[salt] = None
        self._salts.move_to_end(salt)
        if len(self._salts) > MAX_NAMESPACES:
            self._salts.popitem(last=False)
        self._num_prompt.append(request.num_prompt)
        if record.ids:
            self._compare(index, record, request, fact)
        return fact

    def _count(self, blocks: list[int], start: int, end: int, change: int) -> int:
        """Blocks from the beginning on that are known, those before `start` taken as known."""
        for number in range(start, end):
            if self._last.get(blocks[number] ^ change) is None:
                return number
        return max(start, end)

    def _compare(self, index: int, record: Record, request: LoggedRequest, fact: Fact) -> None:
        """Find pieces of a prompt that were seen at another place, and why they are there. Prefixes are known by steps:
        what begins within one after the known prefix may belong to it."""
        starts, hashes = self._pieces(record.ids)
        ends = [*starts[1:], record.num_tokens]
        salt = request.salt
        votes: Counter[int] = Counter()
        for start, end, number in zip(starts, ends, hashes, strict=True):
            if start < fact.elsewhere + STEP or end > record.num_prompt or end - start < MIN_SEGMENT:
                continue
            last = self._segments.get(number ^ salt)
            if last is not None:
                votes[last] += end - start
        self._segments.add([number ^ salt for number in hashes], index)
        fact.rewritten = votes.total()
        if votes:
            other = self._records.get(votes.most_common(1)[0][0])
            fact.rewrite = Rewrite.HISTORY
            if other is not None:
                example = difference(other, record)
                fact.rewrite = example.rewrite
                self.examples.setdefault(example.rewrite, example)
        self._records[index] = record
        if len(self._records) > MAX_TEXTS:
            self._records.popitem(last=False)

    def _pieces(self, ids: array[int]) -> tuple[list[int], list[int]]:
        """Cut tokens where they say so themselves, so that equal texts are cut alike wherever they are.

        Returns:
            Where each piece begins, and its hash.
        """
        tokens = np.frombuffer(ids, np.int32).astype(np.uint64) + np.uint64(1)
        if len(self._powers) <= len(tokens):
            size = 2 * len(tokens) + 1
            self._powers = powers(ROOT, size)
            self._inverses = powers(pow(ROOT, -1, 2**64), size)
        cuts = np.flatnonzero((tokens * ODD) >> np.uint64(60) == 0) + 1
        starts = np.r_[0, cuts[cuts < len(tokens)]]
        sums = np.r_[np.uint64(0), np.cumsum(tokens * self._powers[: len(tokens)])]
        ends = np.r_[starts[1:], len(tokens)]
        hashes = (sums[ends] - sums[starts]) * self._inverses[starts]
        return starts.tolist(), hashes.tolist()


def powers(root: int, count: int) -> Numbers:
    """The first powers of a number, modulo 2**64."""
    factors = np.full(count, root, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def difference(before: Record, record: Record) -> Example:
    """Where two requests differ first, and why."""
    ids = np.frombuffer(record.ids, np.int32)
    others = np.frombuffer(before.ids, np.int32)
    size = min(len(ids), len(others))
    apart = np.flatnonzero(ids[:size] != others[:size])
    token = int(apart[0]) if len(apart) else size
    if record.text is None or before.text is None:
        old, new = (str(list(each.ids[token : token + UNIT])) for each in (before, record))
        kind = Rewrite.BEGINNING if token < STEP else Rewrite.HISTORY
        return Example(kind, record.line, before.line, token, 0, old, new)
    text, other = record.text, before.text
    at = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    start = max(0, at - AROUND // 3)
    old, new = other[start : at + AROUND], text[start : at + AROUND]
    return Example(_reason(other, text, at), record.line, before.line, token, at, old, new)


def _reason(old: str, new: str, at: int) -> Rewrite:
    """Why two texts differ from a character on."""
    if THINK in old[max(0, at - len(THINK)) : at + len(THINK) + 1] or old.rfind(THINK, 0, at) > old.rfind(
        "</think>", 0, at
    ):
        return Rewrite.THINKING
    ours, theirs = ([*TOOL.finditer(text, 0, at + MAX_TOOLS)] for text in (new, old))
    if ours and ours[0].start() <= at < ours[-1].end():
        lines, others = ([found[0] for found in each] for each in (ours, theirs))
        if lines != others and sorted(lines) == sorted(others):
            return Rewrite.TOOLS
    if _is_volatile(old, at) and _is_volatile(new, at):
        return Rewrite.DATE
    first = new.find("<|end|>")
    if at < (first if first >= 0 else STEP * 4):
        return Rewrite.BEGINNING
    return Rewrite.HISTORY


def _is_volatile(text: str, at: int) -> bool:
    """Return whether a character is within a date, a time or an id."""
    start = max(0, at - AROUND)
    return any(
        start + found.start() <= at < start + found.end() + 1 for found in VOLATILE.finditer(text[start : at + AROUND])
    )
