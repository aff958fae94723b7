"""What a directory of copies holds, as this process knows it: the manifest in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hybrid.tiers.folder import Arrival, Place
from hybrid.tiers.needs import Needs
from hybrid.tiers.ranking import Ranking
from hybrid.tiers.rate import Cost
from hybrid.tiers.savings import WORTHLESS, Savings
from hybrid.tiers.tier import CHECKPOINT, PAGE, Name, Note, Offer

REFRESHED = 16
"""Segments whose values are asked for again at a time: of those that were used, and a sample of as many."""


@dataclass(slots=True, eq=False)
class Held:
    """A segment.

    Attributes:
        file: its name.
        origin: the digest of its fingerprint.
        num_bytes: its size.
        names: of its copies that are in use.
    """

    file: str
    origin: str
    num_bytes: int
    names: set[Name] = field(default_factory=set)


def mean(copies: Iterable[tuple[float, int]], num_bytes: int) -> float:
    """The value per byte of a segment.

    Args:
        copies: the value per byte of each copy, and its bytes.
        num_bytes: of the segment.
    """
    worth = [value * size for value, size in copies if value > WORTHLESS]
    return sum(worth) / max(1, num_bytes) if worth else WORTHLESS


class Index:
    """The copies of a directory, by name, and the value of its segments, which are dropped as a whole.

    A checkpoint is worth what it alone saves, a page as much per byte as the best checkpoint that needs it, and a
    segment what its copies are worth.

    Args:
        num_bytes: of all segments together.
        savings: what checkpoints are worth. Asked by the thread of the cache alone, in `appraise` and `refresh`.
        cost: of a restore.

    Attributes:
        ranking: which segment is dropped first.
        needs: the pages that checkpoints need, those too that wait for the writer.
        places: where the copies are.
        segments: by number.
        foreign: why checkpoints cannot be used, of those of another model or version.
        waiting: notes of checkpoints that wait for the writer.
        num_checkpoints: those of `places`.
    """

    def __init__(self, num_bytes: int, savings: Savings, cost: Cost) -> None:
        self.ranking: Ranking[int] = Ranking(num_bytes)
        self.needs: Needs = Needs()
        self.places: dict[Name, Place] = {}
        self.segments: dict[int, Held] = {}
        self.foreign: dict[Name, str] = {}
        self.waiting: dict[bytes, Note] = {}
        self.num_checkpoints: int = 0
        self._savings = savings
        self._cost = cost

    def add(self, arrival: Arrival, value: float | None) -> None:
        """A segment is on the disk. Copies that are elsewhere too stay where they were found first.

        Args:
            value: per byte; None: it is not known yet.
        """
        row = arrival.row
        held = self.segments[row.id] = Held(row.file, arrival.origin, row.num_bytes)
        self.foreign.update(arrival.foreign)
        for name, place in arrival.copies:
            if name not in self.places:
                self.places[name] = place
                held.names.add(name)
        for kind, digest in held.names:
            if kind == PAGE:
                self.needs.extend(digest, self._upward(self.places[PAGE, digest].above))
            else:
                self.num_checkpoints += 1
                if not self.needs.has_checkpoint(digest):
                    self.needs.add(self._upward(digest))
        self.ranking.add(row.id, row.num_bytes, value if arrival.origin else WORTHLESS)

    def _upward(self, name: bytes | None) -> Iterator[bytes]:
        """The names of a page and of those before it, as far as they are known."""
        while name is not None:
            yield name
            place = self.places.get((PAGE, name))
            name = place.above if place is not None else None

    def appraise(self, offer: Offer) -> tuple[list[bytes], float]:
        """What a copy would be worth that is not there.

        Returns:
            The names of the pages before its end as far as they matter: of a checkpoint, up to one that is needed
            already, of a page, of the one before it. And its value per byte.
        """
        if offer.note is None:
            return [*islice(offer.path, 1)], self.value(offer.name, {})
        self.refresh(1)  # also where segments are seldom full
        path = self.needs.missing(offer.path)
        num_alone = sum(name not in self.needs for name in path)
        return path, self._savings.value(offer.note, self._cost, num_alone) if offer.is_worth_it else WORTHLESS

    def expect(self, name: Name, note: Note | None, path: Sequence[bytes]) -> bytes | None:
        """A copy waits for the writer, until `settle`.

        Args:
            note: of a checkpoint.
            path: as `appraise` returns it.

        Returns:
            Of a page, the name of the page before it.
        """
        if note is None:
            self.needs.extend(name[1], path)
            return path[0] if path else None
        self.waiting[name[1]] = note
        self.needs.add(path)
        return None

    def take_waiting(self, former: Index) -> None:
        """What waits for the writer is in another index, whose place this one takes."""
        for name, note in former.waiting.items():
            self.waiting[name] = note
            if not self.needs.has_checkpoint(name):
                self.needs.add(former.needs.upward(name))

    def settle(self, name: Name) -> None:
        """A copy does not wait any more: it was written, or is not kept."""
        if name[0] == CHECKPOINT and self.waiting.pop(name[1], None) is not None and name not in self.places:
            self.needs.remove(name[1])

    def remove(self, segment: int) -> str | None:
        """Forget a segment. Returns its file; None: it is not known."""
        held = self.segments.pop(segment, None)
        if held is None:
            return None
        self.ranking.drop(segment)
        for name in held.names:
            del self.places[name]
            self._lost(name)
        return held.file

    def forget(self, name: Name) -> Place | None:
        """Forget one copy. Its segment stays, and is worth less. None: it is not known."""
        place = self.places.pop(name, None)
        if place is not None:
            self.segments[place.segment].names.remove(name)
            self._lost(name)
        return place

    def _lost(self, name: Name) -> None:
        if name[0] == CHECKPOINT:
            self.num_checkpoints -= 1
            if name[1] not in self.waiting:
                self.needs.remove(name[1])

    def used(self, name: Name) -> Note | None:
        """A copy was used. Returns the note of a checkpoint that is of another process, the first time."""
        place = self.places.get(name)
        if place is None:
            return None
        self.ranking.changed(place.segment)
        is_first, place.is_earlier = place.is_earlier, False
        return place.note if is_first else None

    # Values

    def value(self, name: Name, known: dict[bytes, float]) -> float:
        """What a copy is worth per byte: a page as much as the best checkpoint that needs it.

        Args:
            known: see `Needs.best`.
        """
        kind, digest = name
        return self.needs.best(digest, self._value_of, known) if kind == PAGE else self._value_of(digest)

    def _value_of(self, checkpoint: bytes) -> float:
        place = self.places.get((CHECKPOINT, checkpoint))
        note = place.note if place is not None else self.waiting[checkpoint]
        if note is None:
            return WORTHLESS
        if note.usage is None:
            note = self._savings.known(note)
            if place is not None:
                place.note = note
        return self._savings.value(note, self._cost, self.needs.num_alone(checkpoint))

    def refresh(self, number: int = REFRESHED) -> None:
        """Ask for the values of some segments again: see `Ranking.refresh`."""
        self.ranking.refresh(number, self._value_of_segment)

    def _value_of_segment(self, segment: int) -> float:
        held, known = self.segments[segment], dict[bytes, float]()
        copies = [(self.value(name, known), self.places[name].span.num_bytes) for name in held.names]
        return mean(copies, held.num_bytes)

    def violations(self) -> list[str]:
        """What is wrong with its bookkeeping, for the audit."""
        wrong = self.ranking.violations("the disk")
        checkpoints = {name for kind, name in self.places if kind == CHECKPOINT}
        wrong += self.needs.violations(checkpoints | set(self.waiting))
        if set(self.ranking.keys()) != set(self.segments):
            wrong.append("segments on disk are not those that are ranked")
        named = [name for held in self.segments.values() for name in held.names]
        if len(named) != len(self.places) or set(named) != set(self.places):
            wrong.append("copies on disk are not those of its segments")
        if any(name not in self.segments[place.segment].names for name, place in self.places.items()):
            wrong.append("a copy on disk is in another segment than it says")
        if sum(kind == CHECKPOINT for kind, _ in self.places) != self.num_checkpoints:
            wrong.append(f"the disk counts {self.num_checkpoints} checkpoints, which is wrong")
        return wrong
