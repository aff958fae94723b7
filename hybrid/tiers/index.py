"""What a directory of copies holds, as this process knows it: the manifest in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hybrid.tiers.manifest import SegmentRow
from hybrid.tiers.needs import Needs
from hybrid.tiers.ranking import Ranking
from hybrid.tiers.segment import Span
from hybrid.tiers.tier import CHECKPOINT, PAGE, Name, Note, Offer

Value = Callable[[Note, int], float]
"""Of a checkpoint by its note, per byte; how many pages only it needs."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a copy is.

    Attributes:
        segment: the number of its segment.
        span: its bytes there.
        text: its note as it was written, which its checksum covers.
        note: of a checkpoint.
        above: of a page, the name of the page before it; None: there is none, or it is not known.
    """

    segment: int
    span: Span
    text: str
    note: Note | None
    above: bytes | None = None


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


class Index:
    """The copies of a directory, by name, and the value of its segments, which are dropped as a whole.

    A checkpoint is worth what it alone saves, a page as much per byte as the checkpoint that needs it, and a segment
    what its copies are worth.

    Args:
        num_bytes: of all segments together.
        value: of a checkpoint.

    Attributes:
        ranking: which segment is dropped first.
        needs: the pages that checkpoints need, those too that wait for the writer.
        places: where the copies are.
        segments: by number.
        foreign: why checkpoints cannot be used, of those of another model or version.
        waiting: notes of checkpoints that wait for the writer.
        num_checkpoints: those of `places`.
    """

    def __init__(self, num_bytes: int, value: Value) -> None:
        self.ranking: Ranking[int] = Ranking(num_bytes, self._value_of_segment)
        self.needs: Needs = Needs()
        self.places: dict[Name, Place] = {}
        self.segments: dict[int, Held] = {}
        self.foreign: dict[Name, str] = {}
        self.waiting: dict[bytes, Note] = {}
        self.num_checkpoints: int = 0
        self._value = value

    def add(self, row: SegmentRow, origin: str, copies: Iterable[tuple[Name, Place]]) -> None:
        """A segment is on the disk. Copies that are elsewhere too stay where they were found first."""
        held = self.segments[row.id] = Held(row.file, origin, row.num_bytes)
        for name, place in copies:
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
        self.ranking.add(row.id, row.num_bytes)

    def _upward(self, name: bytes | None) -> Iterator[bytes]:
        """The names of a page and of those before it, as far as they are known."""
        while name is not None:
            yield name
            place = self.places.get((PAGE, name))
            name = place.above if place is not None else None

    def appraise(self, offer: Offer) -> tuple[list[bytes], float]:
        """What a copy would be worth that is not there: 0 for a page that no checkpoint needs.

        Returns:
            The names of the pages before its end as far as they matter: of a checkpoint, up to one that is needed
            already, of a page, of the one before it. And its value per byte.
        """
        if offer.note is None:
            return [*islice(offer.path, 1)], self.value(offer.name, None, {})
        path = self.needs.missing(offer.path)
        return path, self._value(offer.note, sum(name not in self.needs for name in path))

    def expect(self, name: Name, note: Note | None, path: Sequence[bytes]) -> None:
        """A copy waits for the writer, until `settle`.

        Args:
            note: of a checkpoint.
            path: as `appraise` returns it.
        """
        if note is None:
            self.needs.extend(name[1], path)
        else:
            self.waiting[name[1]] = note
            self.needs.add(path)

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

    def used(self, name: Name) -> Place | None:
        """A copy was used. None: it is not known."""
        place = self.places.get(name)
        if place is not None:
            self.ranking.touch(place.segment)
        return place

    # Values

    def value(self, name: Name, note: Note | None, known: dict[bytes, bytes]) -> float:
        """What a copy is worth per byte: 0 for a page that no checkpoint needs.

        Args:
            note: of a checkpoint.
            known: see `Needs.nearest`.
        """
        nearest = name[1] if note is not None else self.needs.nearest(name[1], known)
        if nearest is None:
            return 0.0
        if note is None:
            place = self.places.get((CHECKPOINT, nearest))
            note = place.note if place is not None else self.waiting[nearest]
        return self._value(note, self.needs.num_alone(nearest)) if note is not None else 0.0

    def _value_of_segment(self, segment: int) -> float:
        held, known = self.segments[segment], dict[bytes, bytes]()
        places = ((name, self.places[name]) for name in held.names)
        total = sum(self.value(name, place.note, known) * place.span.num_bytes for name, place in places)
        return total / max(1, held.num_bytes)

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
