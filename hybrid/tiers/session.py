"""What a process reads from a directory of copies and writes to it. Used by one thread, that may wait."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybrid.tiers.directory import CacheDirectory
from hybrid.tiers.index import Index, Place, mean
from hybrid.tiers.manifest import CopyRow, SegmentRow
from hybrid.tiers.reuse import Counts
from hybrid.tiers.savings import WORTHLESS
from hybrid.tiers.segment import Record, Span, layout, note_of, note_text
from hybrid.tiers.store import Store
from hybrid.tiers.tier import CHECKPOINT, Contents, Name, Note


@dataclass(frozen=True)
class Origin:
    """What copies are made with.

    Attributes:
        text: all that must agree.
        differences: why copies made with another text cannot be used; empty if they can.
    """

    text: str
    differences: Callable[[str], list[str]]

    @property
    def digest(self) -> str:
        """A digest of the text."""
        return _digest(self.text)

    def refusal(self, text: str) -> str:
        """Why copies made with another text cannot be used; empty: they can."""
        try:
            return "; ".join(self.differences(text))
        except (ValueError, TypeError, KeyError, AttributeError):
            return "its fingerprint is damaged"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class Pending:
    """A copy that is to be written: its contents, note, value per byte, and of a page the name of that before it."""

    contents: Contents
    note: Note | None
    value: float
    above: bytes | None = None


class Arrival(NamedTuple):
    """A segment that is on the disk.

    Attributes:
        row: of the manifest.
        origin: the digest of its fingerprint; empty: its copies cannot be used.
        copies: those that can.
        value: per byte; None: it is not known.
        foreign: checkpoints that cannot be used, and why.
    """

    row: SegmentRow
    origin: str
    copies: list[tuple[Name, Place]]
    value: float | None
    foreign: dict[Name, str]

    def enter(self, index: Index) -> None:
        """Add it to an index."""
        index.add(self.row, self.origin, self.copies, self.value)
        index.foreign.update(self.foreign)


class Session:
    """A directory that is open.

    Args:
        path: the directory.
        origin: what this process's copies are made with.
        open_store: makes the store of its files.

    Raises:
        OSError, sqlite3.Error, VersionError: it cannot be used.

    Attributes:
        report: what was found in it, and what of it was dropped.
    """

    def __init__(self, path: Path, origin: Origin, open_store: Callable[[Path], Store]) -> None:
        self._directory = CacheDirectory(path, open_store)
        self._origin = origin
        self._origins: dict[int, str] = {}  # digests of the fingerprints whose copies can be used
        self._refusals: dict[int, str] = {}
        self._number = 0
        self.report: list[str] = self._directory.report
        try:
            if not self.read_only:
                self._number = self._directory.manifest.number_of(origin.text)
            self._version = self._directory.manifest.version
        except BaseException:
            self._directory.close()
            raise

    @property
    def store(self) -> Store:
        """Its files."""
        return self._directory.store

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written."""
        return self._directory.read_only

    @property
    def is_current(self) -> bool:
        """Whether the directory is still the one that was opened."""
        return self._directory.is_current

    def load(self, index: Index) -> None:
        """Enter all that is in the directory."""
        self._learn_fingerprints()
        for row in self._directory.manifest.segments():
            self._arrival(row).enter(index)
        if index.foreign:
            self.report.append(
                f"{len(index.foreign)} checkpoints of another model or version: they are not used, and dropped first"
            )

    def news(self, known: Collection[int]) -> tuple[list[Arrival], list[int]]:
        """What other processes have changed: segments that came, and the numbers of those that went.

        Args:
            known: numbers of the segments that this process knows.
        """
        version = self._directory.manifest.version
        if version == self._version:
            return [], []
        self._learn_fingerprints()
        rows = self._directory.manifest.segments()
        there = {row.id for row in rows}
        came = [self._arrival(row) for row in rows if row.id not in known]
        self._version = version
        return came, [number for number in known if number not in there]

    def put(self, pending: Sequence[tuple[Name, Pending]], make_free: Callable[[int, float], bool]) -> Arrival | None:
        """Write copies as a segment, and then its rows.

        Args:
            make_free: called with the bytes that are needed and their value; False: they cannot be had.

        Returns:
            What is on the disk now; None: nothing of it, since it was not worth it, or other processes have written all
            of it meanwhile.
        """
        if self.read_only:
            raise OSError(errno.EROFS, "the directory cannot be written")
        records = [Record(name, copy.contents, note_text(copy.note)) for name, copy in pending]
        segment = layout(records, self._origin.digest)
        value = mean([(copy.value, len(copy.contents)) for _, copy in pending], segment.num_bytes)
        if not make_free(segment.num_bytes, value):
            return None
        file = self._directory.next_file()
        try:
            self.store.put_from(file, segment.parts)
            rows = [
                _row(record, span, copy)
                for record, span, (_, copy) in zip(records, segment.spans, pending, strict=True)
            ]
            number, kept = self._directory.manifest.add(file, segment.num_bytes, self._number, rows)
        except BaseException:
            self._directory.unlink(file)
            raise
        if not kept:
            self.remove([(number, file)])
            return None
        copies = [
            (name, Place(number, span, record.note, copy.note, copy.above))
            for record, span, (name, copy) in zip(records, segment.spans, pending, strict=True)
            if name in kept
        ]
        row = SegmentRow(number, file, segment.num_bytes, self._number)
        return Arrival(row, self._origin.digest, copies, value, {})

    def remove(self, segments: Iterable[tuple[int, str]]) -> None:
        """Forget segments, and remove their files.

        Args:
            segments: number and file of each.
        """
        pairs = [*segments]
        self._directory.manifest.remove(number for number, _ in pairs)
        self.unlink(file for _, file in pairs)

    def unlink(self, files: Iterable[str]) -> None:
        """Remove files that the manifest does not name any more."""
        for file in files:
            self._directory.unlink(file)

    def remove_copies(self, copies: Iterable[tuple[int, Name]]) -> None:
        """Forget copies, by segment and name."""
        self._directory.manifest.remove_copies(copies)

    def reuse(self) -> list[Counts]:
        """What was learned of the reuse of groups of checkpoints: see `Reuse.learn`."""
        return self._directory.manifest.reuse()

    def add_reuse(self, counts: Iterable[Counts]) -> None:
        """More was learned: see `Reuse.take_news`."""
        self._directory.manifest.add_reuse(counts)

    def close(self) -> None:
        """Close the directory."""
        self._directory.close()

    def _learn_fingerprints(self) -> None:
        """Decide which copies can be used, of those fingerprints that are not known yet."""
        for number, text in self._directory.manifest.fingerprints().items():
            if number not in self._origins and number not in self._refusals:
                refusal = self._origin.refusal(text)
                if refusal:
                    self._refusals[number] = refusal
                else:
                    self._origins[number] = _digest(text)

    def _arrival(self, row: SegmentRow) -> Arrival:
        """A segment of the manifest."""
        copies = self._directory.manifest.copies(row.id)
        origin = self._origins.get(row.fingerprint)
        if origin is None:
            why = self._refusals.get(row.fingerprint, "its fingerprint is damaged")
            foreign = {(CHECKPOINT, copy.name): why for copy in copies if copy.kind == CHECKPOINT}
            return Arrival(row, "", [], WORTHLESS, foreign)
        placed: list[tuple[Name, Place]] = []
        for copy in copies:
            with suppress(ValueError, TypeError):  # of a damaged row
                if copy.is_sound and copy.start + copy.num_bytes <= row.num_bytes:
                    span = Span(copy.start, copy.num_bytes, copy.checksum)
                    place = Place(row.id, span, copy.note, note_of(copy.note), copy.above, True)
                    placed.append(((copy.kind, copy.name), place))
        return Arrival(row, origin, placed, None, {})


def _row(record: Record, span: Span, copy: Pending) -> CopyRow:
    kind, name = record.name
    note = copy.note
    return CopyRow(
        kind=kind,
        name=name,
        segment=0,
        start=span.start,
        num_bytes=span.num_bytes,
        checksum=span.checksum,
        note=record.note,
        above=copy.above,
        namespace=note.namespace if note is not None and note.ids else None,
        ids=note.ids if note is not None and note.ids else None,
    )
