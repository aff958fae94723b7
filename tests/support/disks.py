"""What the tests of copies on disk share: a tier with known contents, and a store that fails. Imports no torch."""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from hybrid.tiers.disk import DiskTier
from hybrid.tiers.ranking import Worth
from hybrid.tiers.session import Origin
from hybrid.tiers.store import DirectoryStore, Store
from hybrid.tiers.tier import Contents, Name, Note, Offer, UnavailableError

LIMIT = 200_000


def origin(model: str = "a model") -> Origin:
    """Copies of a model are used by the same model only."""
    return Origin(model, lambda other: [] if other == model else [f"model is {other!r} there and {model!r} here"])


def tier_at(path: Path, num_bytes: int = LIMIT, model: str = "a model", **settings: Any) -> DiskTier:
    return DiskTier(path, num_bytes, origin(model), **settings)


def name_of(number: int) -> Name:
    """Every third copy is a checkpoint."""
    return "checkpoint" if number % 3 == 0 else "page", hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def contents_of(number: int, size: int = 0) -> bytes:
    """The only right contents of a copy."""
    return Random(number).randbytes(size or number * 137 % 2999 + 1)


def note_of(number: int) -> Note | None:
    return Note("branch", number % 5, 0, 64) if number % 3 == 0 else None


def offer(tier: DiskTier, number: int, seconds: float = 1.0, size: int = 0, group: str = "g") -> bool:
    contents = contents_of(number, size)
    return tier.offer(Offer(name_of(number), len(contents), lambda: contents, Worth(group, seconds), note_of(number)))


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
    """How many copies are there. None may have other contents, and its note must be the one that was written."""
    found = 0
    for number in numbers:
        note, contents = tier.note(name_of(number)), fetched(tier, number)
        if contents is not None:
            assert contents == contents_of(number, len(contents)), f"copy {number} has wrong contents"
            assert note == note_of(number)
            found += 1
    return found


class FaultyStore:
    """A directory whose calls fail or take long.

    Attributes:
        errors: what a verb raises.
        seconds: what a verb takes.
        calls: verbs that were called.
    """

    def __init__(self) -> None:
        self.errors: dict[str, OSError] = {}
        self.seconds: dict[str, float] = {}
        self.calls: list[str] = []
        self.store: Store | None = None

    def __call__(self, path: Path) -> "FaultyStore":
        self.store = DirectoryStore(path)
        return self

    def _before(self, verb: str) -> Store:
        self.calls.append(verb)
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
