"""The manifest of a directory of copies: which copies are where, in one SQLite file that several processes share.

A row is written after the bytes that it speaks of are on the disk. Nothing in it is trusted: rows that cannot be are
left out when they are read, and contents are compared with checksums that cover name and note.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hybrid.errors import HybridError
from hybrid.tiers.reuse import MAX_GROUPS, Counts, halved, is_sound
from hybrid.tiers.segment import CHECKSUM_BYTES
from hybrid.tiers.tier import CHECKPOINT, PAGE, Name

FORMAT = 2
"""Version of the tables."""

BUSY_SECONDS = 5.0
"""How long a call waits for another process."""

KINDS = (PAGE, CHECKPOINT)

TABLES = (
    "CREATE TABLE fingerprints(id INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE)",
    "CREATE TABLE segments(id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL UNIQUE, "
    "bytes INTEGER NOT NULL, fingerprint INTEGER NOT NULL)",
    "CREATE TABLE copies(fingerprint INTEGER NOT NULL, kind INTEGER NOT NULL, name BLOB NOT NULL, "
    "segment INTEGER NOT NULL, start INTEGER NOT NULL, bytes INTEGER NOT NULL, checksum BLOB NOT NULL, "
    "note TEXT NOT NULL, above BLOB, namespace TEXT, ids BLOB, PRIMARY KEY(fingerprint, kind, name)) WITHOUT ROWID",
    "CREATE INDEX by_segment ON copies(segment)",
    "CREATE TABLE reuse(worth_group TEXT PRIMARY KEY, departed REAL NOT NULL, wanted REAL NOT NULL) WITHOUT ROWID",
)


class DamagedError(HybridError):
    """The manifest is not what was written."""


class VersionError(HybridError):
    """The manifest is of another version of the format.

    Args:
        found: the version.
    """

    def __init__(self, found: int) -> None:
        super().__init__(f"its manifest has version {found} of the format, and this is version {FORMAT}")
        self.found: int = found


class SegmentRow(NamedTuple):
    """A segment: its number, file, size, and the number of its fingerprint."""

    id: int
    file: str
    num_bytes: int
    fingerprint: int


class CopyRow(NamedTuple):
    """A copy: where it is, and what it must hold; of a page, also the name of the page before it."""

    kind: str
    name: bytes
    segment: int
    start: int
    num_bytes: int
    checksum: bytes
    note: str
    above: bytes | None = None
    namespace: str | None = None
    ids: bytes | None = None

    @property
    def is_sound(self) -> bool:
        """Whether its fields are of the types and in the ranges of what is written."""
        numbers = (self.segment, self.start, self.num_bytes)
        return (
            isinstance(self.name, bytes)
            and all(type(number) is int and number >= 0 for number in numbers)
            and isinstance(self.checksum, bytes)
            and len(self.checksum) == CHECKSUM_BYTES
            and isinstance(self.note, str)
            and (self.above is None or isinstance(self.above, bytes))
        )


COLUMNS = "kind, name, segment, start, bytes, checksum, note, above, namespace, ids"


class Manifest:
    """The manifest of a directory. One thread uses it at a time.

    Args:
        path: its file, which is made if it is not there.
        read_only: nothing can be written.

    Raises:
        DamagedError: it is not what was written.
        VersionError: it is of another version.
        sqlite3.Error: it cannot be read.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path = path
        mode = "ro" if read_only else "rw"
        if not read_only and not path.exists():
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._inode = path.stat().st_ino
        uri = f"{path.absolute().as_uri()}?mode={mode}"
        self._db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._db.execute("PRAGMA trusted_schema = OFF")
            self._check(read_only)
        except BaseException:
            self._db.close()
            raise

    def _check(self, read_only: bool) -> None:
        try:
            tables = self._tables()
            if not tables and not read_only:
                with self._transaction():
                    if not self._tables():  # another process may have made them meanwhile
                        for table in TABLES:
                            self._db.execute(table)
                        self._db.execute(f"PRAGMA user_version = {FORMAT}")
                tables = self._tables()
            version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version != FORMAT:
                raise VersionError(version)
            if tables != set(TABLES):
                raise DamagedError("its manifest has other tables")
            found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise DamagedError(f"its manifest is damaged: {found:.200}")
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            raise DamagedError(f"its manifest is damaged: {error}") from error

    def _tables(self) -> set[str]:
        rows = self._db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'")
        return {row[0] for row in rows}

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @property
    def is_current(self) -> bool:
        """Whether the file is still the one that was opened: it may have been removed."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    @property
    def version(self) -> int:
        """Changes when another process has changed something."""
        number: int = self._db.execute("PRAGMA data_version").fetchone()[0]
        return number

    def fingerprints(self) -> dict[int, str]:
        """What copies were made with, by number."""
        rows = self._db.execute("SELECT id, content FROM fingerprints")
        return {number: content for number, content in rows if isinstance(content, str)}

    def number_of(self, fingerprint: str) -> int:
        """The number of a fingerprint, which is added if it is not there."""
        with self._transaction():
            self._db.execute("INSERT OR IGNORE INTO fingerprints(content) VALUES (?)", (fingerprint,))
            row = self._db.execute("SELECT id FROM fingerprints WHERE content = ?", (fingerprint,)).fetchone()
        return int(row[0])

    def segments(self) -> list[SegmentRow]:
        """All segments, oldest first."""
        rows = self._db.execute("SELECT id, file, bytes, fingerprint FROM segments ORDER BY id")
        return [SegmentRow(*row) for row in rows]

    def segments_of_copies(self) -> set[int]:
        """Numbers of the segments that have copies."""
        return {row[0] for row in self._db.execute("SELECT DISTINCT segment FROM copies")}

    def copies(self, segment: int) -> list[CopyRow]:
        """The copies of a segment, those that are not sound too."""
        rows = self._db.execute(f"SELECT {COLUMNS} FROM copies WHERE segment = ?", (segment,))
        return [CopyRow(_kind(row[0]), *row[1:]) for row in rows]

    def add(self, file: str, num_bytes: int, fingerprint: int, copies: Sequence[CopyRow]) -> tuple[int, set[Name]]:
        """A segment is on the disk. A copy that another process has written meanwhile stays where that is.

        Args:
            copies: their `segment` is not known yet, and does not count.

        Returns:
            The number of the segment, and the names of those of its copies that count.
        """
        with self._transaction():
            cursor = self._db.execute(
                "INSERT INTO segments(file, bytes, fingerprint) VALUES (?, ?, ?)", (file, num_bytes, fingerprint)
            )
            number = cursor.lastrowid
            assert number is not None
            self._db.executemany(
                f"INSERT OR IGNORE INTO copies(fingerprint, {COLUMNS}) VALUES (?{', ?' * 10})",
                [(fingerprint, KINDS.index(copy.kind), copy.name, number, *copy[3:]) for copy in copies],
            )
            rows = self._db.execute("SELECT kind, name FROM copies WHERE segment = ?", (number,)).fetchall()
        return number, {(_kind(kind), name) for kind, name in rows}

    def remove(self, segments: Iterable[int]) -> None:
        """Forget segments and their copies."""
        numbers = [(number,) for number in segments]
        if not numbers:
            return
        with self._transaction():
            self._db.executemany("DELETE FROM copies WHERE segment = ?", numbers)
            self._db.executemany("DELETE FROM segments WHERE id = ?", numbers)

    def remove_copies(self, copies: Iterable[tuple[int, Name]]) -> None:
        """Forget copies, by segment and name. Their segments stay."""
        keys = [(segment, KINDS.index(kind), name) for segment, (kind, name) in copies]
        with self._transaction():
            self._db.executemany("DELETE FROM copies WHERE segment = ? AND kind = ? AND name = ?", keys)

    def reuse(self) -> list[Counts]:
        """What was learned of the reuse of groups of checkpoints, the part too that is not sound."""
        return self._db.execute("SELECT worth_group, departed, wanted FROM reuse LIMIT ?", (MAX_GROUPS,)).fetchall()

    def add_reuse(self, counts: Iterable[Counts]) -> None:
        """More was learned. What cannot be right is replaced."""
        with self._transaction():
            there = {group: (left, wanted) for group, left, wanted in self.reuse() if is_sound(group, left, wanted)}
            for group, left, wanted in counts:
                former = there.get(group, (0.0, 0.0))
                there[group] = halved(former[0] + left, former[1] + wanted)
            self._db.execute("DELETE FROM reuse")
            rows = [(group, *own) for group, own in there.items()]
            self._db.executemany("INSERT INTO reuse VALUES (?, ?, ?)", rows[:MAX_GROUPS])

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _kind(number: object) -> str:
    return KINDS[number] if type(number) is int and 0 <= number < len(KINDS) else "unknown"
