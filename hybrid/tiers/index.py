"""What a directory of copies holds, as this process knows it: the manifest in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hybrid.tiers.manifest import SegmentRow
from hybrid.tiers.ranking import Ranking, Worth
from hybrid.tiers.segment import Span
from hybrid.tiers.tier import CHECKPOINT, Name, Note


@dataclass(slots=True, eq=False)
class Place:
    """Where a copy is.

    Attributes:
        segment: the number of its segment.
        span: its bytes there.
        text: its note as it was written, which its checksum covers.
        worth: what it may save.
        note: of a checkpoint.
    """

    segment: int
    span: Span
    text: str
    worth: Worth
    note: Note | None


@dataclass(slots=True, eq=False)
class Held:
    """A segment.

    Attributes:
        file: its name.
        origin: the digest of its fingerprint.
        names: of its copies that are in use.
        worths: of them.
    """

    file: str
    origin: str
    names: set[Name] = field(default_factory=set)
    worths: list[Worth] = field(default_factory=list)


class Index:
    """The copies of a directory, by name, and the value of its segments, which are dropped as a whole.

    Args:
        num_bytes: of all segments together.

    Attributes:
        ranking: which segment is dropped first.
        places: where the copies are.
        segments: by number.
        foreign: why checkpoints cannot be used, of those of another model or version.
        num_checkpoints: those of `places`.
    """

    def __init__(self, num_bytes: int) -> None:
        self.ranking: Ranking[int] = Ranking(num_bytes)
        self.places: dict[Name, Place] = {}
        self.segments: dict[int, Held] = {}
        self.foreign: dict[Name, str] = {}
        self.num_checkpoints: int = 0

    def add(self, row: SegmentRow, origin: str, copies: Iterable[tuple[Name, Place]]) -> None:
        """A segment is on the disk. Copies that are elsewhere too stay where they were found first."""
        held = self.segments[row.id] = Held(row.file, origin)
        for name, place in copies:
            if name not in self.places:
                self.places[name] = place
                self.num_checkpoints += name[0] == CHECKPOINT
                held.names.add(name)
                held.worths.append(place.worth)
        rank = self.ranking.rank(row.num_bytes, held.worths)
        self.ranking.add(row.id, row.num_bytes, held.worths, rank)

    def remove(self, segment: int) -> str | None:
        """Forget a segment. Returns its file; None: it is not known."""
        held = self.segments.pop(segment, None)
        if held is None:
            return None
        self.ranking.drop(segment)
        for name in held.names:
            del self.places[name]
            self.num_checkpoints -= name[0] == CHECKPOINT
        return held.file

    def forget(self, name: Name) -> Place | None:
        """Forget one copy. Its segment stays, and is worth less. None: it is not known."""
        place = self.places.pop(name, None)
        if place is not None:
            self.num_checkpoints -= name[0] == CHECKPOINT
            held = self.segments[place.segment]
            held.names.remove(name)
            held.worths.remove(place.worth)
            self.ranking.touch(place.segment)
        return place

    def used(self, name: Name) -> Place | None:
        """A copy was used. None: it is not known."""
        place = self.places.get(name)
        if place is not None:
            self.ranking.learn(place.worth.group, 0, 1)
            self.ranking.touch(place.segment)
        return place

    def rank_again(self) -> None:
        """Rank all segments by what was learned of all of them."""
        for segment in self.segments:
            self.ranking.touch(segment)

    def violations(self) -> list[str]:
        """What is wrong with its bookkeeping, for the audit."""
        wrong = self.ranking.violations("the disk")
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
