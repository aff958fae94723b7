"""The shared parts of tests of copies on disk: a tier with known contents, and a store that fails. Imports no torch."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hybrid.tiers.cost import MeasuredTime
from hybrid.tiers.disk import DiskTier
from hybrid.tiers.folder import Origin
from hybrid.tiers.store import DirectoryStore, Store
from hybrid.tiers.tier import Contents, Name, Note, Offer, UnavailableError
from hybrid.tiers.value import Reuse, Savings

LIMIT = 200_000


def origin(model: str = "a model") -> Origin:
    """Copies of a model are used by the same model only."""
    return Origin(model, lambda other: [] if other == model else [f"model is {other!r} there and {model!r} here"])


def savings(reuse: Reuse | None = None) -> Savings:
    """A token takes a second."""
    return Savings(MeasuredTime(1.0), reuse or Reuse(), page_bytes=1500, checkpoint_bytes=1500, page_size=1)


def tier_at(path: Path, num_bytes: int = LIMIT, model: str = "a model", **settings: Any) -> DiskTier:
    return DiskTier(path, num_bytes, origin(model), settings.pop("savings", None) or savings(), **settings)


def digest(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def name_of(number: int) -> Name:
    """Every third copy is a checkpoint. It needs the two pages that follow, the last first, and one of its own name."""
    return "checkpoint" if number % 3 == 0 else "page", digest(number)


def contents_of(number: int, size: int = 0) -> bytes:
    """The only right contents of a copy."""
    return Random(number).randbytes(size or number * 137 % 2999 + 1)


def note_of(number: int, seconds: float = 100.0, group: str = "branch last 0") -> Note | None:
    return Note("branch", number % 5, 0, int(seconds), 64, group) if number % 3 == 0 else None


def offer(tier: DiskTier, number: int, seconds: float = 100.0, size: int = 0, group: str = "branch last 0") -> bool:
    """Offer a copy; a checkpoint saves so many seconds."""
    contents, above = contents_of(number, size), number // 3 * 3 + 3
    path = iter([digest(one) for one in range(number + (number % 3 > 0), above)])
    note = note_of(number, seconds, group)
    return tier.offer(Offer(name_of(number), len(contents), lambda: contents, note, path=path))


def fill(tier: DiskTier, numbers: Sequence[int]) -> None:
    """Have copies on the disk."""
    tier.be_patient(10.0)
    for number in numbers:
        assert offer(tier, number)
    assert tier.flush()
    assert tier.failure is None
    tier.be_patient(0.0)


def fetch(tier: DiskTier, *numbers: int, seconds: float = 10.0) -> Sequence[Contents]:
    """The contents of copies.

    Raises:
        UnavailableError: they cannot be had, or not in time.
    """
    reading = tier.begin([name_of(number) for number in numbers])
    try:
        reading.wait(seconds)
        return reading.take()
    finally:
        reading.drop()


def fetched(tier: DiskTier, number: int) -> bytes | None:
    """The contents of a copy; None: it cannot be had."""
    if name_of(number) not in tier:
        return None
    try:
        return bytes(fetch(tier, number)[0])
    except UnavailableError:
        return None


def count_right(tier: DiskTier, numbers: Sequence[int]) -> int:
    """Count the copies that are there. None may have other contents, and its note must be the one that was written."""
    found = 0
    for number in numbers:
        note, contents = tier.note(name_of(number)), fetched(tier, number)
        if contents is not None:
            assert contents == contents_of(number, len(contents)), f"copy {number} has wrong contents"
            assert note is None if number % 3 else note is not None and note.turn == number % 5
            found += 1
    return found


def works(tier: DiskTier) -> None:
    """It keeps what is new, and its bookkeeping is right."""
    assert offer(tier, 999, seconds=1e6)
    assert tier.flush()
    assert fetched(tier, 999) == contents_of(999)
    assert tier.violations() == []
    tier.close()


class FaultyStore:
    """A directory whose calls fail or take long.

    Attributes:
        errors: what a verb raises.
        seconds: what a verb takes.
        gates: what a verb waits for.
        first: what is done once before a verb.
        calls: verbs that were called.
    """

    def __init__(self) -> None:
        self.errors: dict[str, OSError] = {}
        self.seconds: dict[str, float] = {}
        self.gates: dict[str, threading.Event] = {}
        self.first: dict[str, Callable[[], object]] = {}
        self.calls: list[str] = []
        self.store: Store | None = None

    def __call__(self, path: Path) -> "FaultyStore":
        self.store = DirectoryStore(path)
        return self

    def _before(self, verb: str) -> Store:
        self.calls.append(verb)
        if verb in self.first:
            self.first.pop(verb)()
        assert verb not in self.gates or self.gates[verb].wait(60)
        time.sleep(self.seconds.get(verb, 0.0))
        if verb in self.errors:
            raise self.errors[verb]
        assert self.store is not None
        return self.store

    def contains(self, name: str) -> bool:
        return self._before("contains").contains(name)

    def put_from(self, name: str, parts: Sequence[Contents]) -> None:
        self._before("put_from").put_from(name, parts)

    def get_into(self, name: str, start: int, buffer: memoryview) -> None:
        self._before("get_into").get_into(name, start, buffer)

    def delete(self, name: str) -> None:
        self._before("delete").delete(name)
