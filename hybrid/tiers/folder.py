"""A folder of copies that several processes share: segments, and one SQLite file that says which copies are where.

    manifest.sqlite        a row for each segment and each copy (with SQLite's -wal and -shm while it is open)
    <token>.safetensors    a segment: many copies, written once

Files come while their process holds the write transaction of the manifest, which commits their rows, and their rows go
before they do. So the process that holds that transaction knows that a file without a row is abandoned, even after a
kill.

Nothing in the folder is trusted: rows that make no sense are left out when they are read, and contents are compared
with checksums that cover name, note and fingerprint. No decision depends on the time of day.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import sqlite3
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hybrid.checks import MAX_INT
from hybrid.errors import HybridError
from hybrid.tiers.store import DirectoryStore, ForeignError, Store, is_ours
from hybrid.tiers.tier import CHECKPOINT, PAGE, Contents, HeldCopy, Name, Note
from hybrid.tiers.value import MAX_GROUPS, Counts, halved, is_sound
from hybrid.units import format_bytes

MANIFEST = "manifest.sqlite"
BESIDE = ("-wal", "-shm", "-journal")
"""Endings of the names of files that SQLite puts beside the manifest."""

FILE = re.compile(r"\.?[0-9a-f]{16}(-\d+)?\.safetensors(?:\.[0-9a-f]{8}\.part)?")
"""Files of segments, those too that are not whole."""

LEFT = re.compile(r"([0-9a-f]{16}|start)\.lock")
"""Files that earlier versions have left."""

FORMAT = 2
"""Version of the tables."""

BUSY_SECONDS = 5.0
"""Seconds for which a call waits for another process."""

CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)

NETWORK = re.compile(
    r"nfs\d*|cifs|smb\w*|ceph|afs|ncpfs|lustre|gpfs|beegfs\w*|glusterfs|ocfs2|gfs2|davfs|"
    r"fuse\.(sshfs|ceph|glusterfs|s3fs|gcsfuse|rclone|goofys|davfs2|juicefs|mount-s3|blobfuse2?)"
)
"""File systems on which machines do not see each other's shared memory, which SQLite's write-ahead log needs."""

MOUNTS = Path("/proc/self/mountinfo")

KINDS = (PAGE, CHECKPOINT)

TABLES = {
    "fingerprints": "CREATE TABLE fingerprints(id INTEGER PRIMARY KEY, content TEXT NOT NULL UNIQUE)",
    "segments": "CREATE TABLE segments(id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT NOT NULL UNIQUE, "
    "bytes INTEGER NOT NULL, fingerprint INTEGER NOT NULL)",
    "copies": "CREATE TABLE copies(fingerprint INTEGER NOT NULL, kind INTEGER NOT NULL, name BLOB NOT NULL, "
    "segment INTEGER NOT NULL, start INTEGER NOT NULL, bytes INTEGER NOT NULL, checksum BLOB NOT NULL, "
    "note TEXT NOT NULL, above BLOB, namespace TEXT, ids BLOB, PRIMARY KEY(fingerprint, kind, name)) WITHOUT ROWID",
    "by_segment": "CREATE INDEX by_segment ON copies(segment)",
    "reuse": "CREATE TABLE reuse(worth_group TEXT PRIMARY KEY, departed REAL NOT NULL, wanted REAL NOT NULL) "
    "WITHOUT ROWID",
}

COLUMNS = "kind, name, segment, start, bytes, checksum, note, above"

CHECKSUM_BYTES = 16
DATA_ALIGNMENT = 4096
COPY_ALIGNMENT = 64

CHECKED = 8 * 2**20
"""Bytes of a copy that are in memory at a time while it is only checked."""


class DamagedError(HybridError):
    """The manifest is not what was written."""


class WrongCopyError(HybridError):
    """A copy on disk is not what was written."""


class UnusableError(HybridError):
    """A folder is not one for copies, and will not become one: what it is on, or what it holds."""


class FormatVersionError(UnusableError):
    """The manifest is of another version of the format.

    Args:
        found: the version.
    """

    def __init__(self, found: int) -> None:
        super().__init__(f"its manifest has version {found} of the format, and this is version {FORMAT}")
        self.found: int = found


RECOVERABLE = (OSError, EOFError, sqlite3.Error, DamagedError, UnusableError)
"""Exceptions that the use of a folder may raise."""


@dataclass(frozen=True)
class Origin:
    """The circumstances that copies are made under.

    Attributes:
        text: all that must agree.
        differences: why copies made with another text cannot be used; empty if they can.
        num_bytes: of a page and of a checkpoint; None: they are not known.
    """

    text: str
    differences: Callable[[str], list[str]]
    num_bytes: tuple[int, int] | None = None

    @property
    def digest(self) -> str:
        """A digest of the text."""
        return _digest(self.text)

    def refusal(self, text: str) -> str:
        """Why copies made with another text cannot be used; empty: they can."""
        try:
            return "; ".join(self.differences(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return "its fingerprint is damaged"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Copies and segments


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A copy that is to be written, its note, and of a page the name of that before it."""

    copy: HeldCopy
    note: Note | None
    above: bytes | None = None


class Span(NamedTuple):
    """The bytes of a copy in its segment.

    Attributes:
        start: of its bytes.
        num_bytes: how many they are.
        checksum: of them, its name and its note.
    """

    start: int
    num_bytes: int
    checksum: bytes


@dataclass(slots=True, eq=False)
class CopyPlace:
    """A copy that is in a segment.

    Attributes:
        segment: the number of its segment.
        span: its bytes there.
        text: its note as it was written, which its checksum covers.
        note: of a checkpoint.
        above: of a page, the name of the page before it; None: there is none, or it is not known.
        is_earlier: it is of another process, or an earlier one, and has not been used in this one.
    """

    segment: int
    span: Span
    text: str
    note: Note | None
    above: bytes | None = None
    is_earlier: bool = False


class SegmentRow(NamedTuple):
    """A segment: its number, file, size, and the number of its fingerprint."""

    id: int
    file: str
    num_bytes: int
    fingerprint: int


class Arrival(NamedTuple):
    """A segment that is on the disk.

    Attributes:
        row: of the manifest.
        origin: the digest of its fingerprint; empty: its copies cannot be used.
        copies: those that can.
        foreign: checkpoints that cannot be used, and why.
    """

    row: SegmentRow
    origin: str
    copies: list[tuple[Name, CopyPlace]]
    foreign: dict[Name, str]


def checksum(origin: str, name: Name, note: str, contents: Contents) -> bytes:
    """The checksum of a copy. It covers all that is known of it: nothing can be taken for something else.

    SHA-256: a processor with instructions for it hashes three times as fast as with blake2b.

    Args:
        origin: the digest of the fingerprint.
    """
    whole = hashlib.sha256(_covered(origin, name, note))
    whole.update(contents)
    return whole.digest()[:CHECKSUM_BYTES]


def _covered(origin: str, name: Name, note: str) -> bytes:
    """What a checksum covers before contents."""
    return json.dumps([origin, name[0], name[1].hex(), note]).encode()


def note_text(note: Note | None) -> str:
    """A note as it is kept outside of memory: without ids and namespace."""
    if note is None:
        return ""
    return json.dumps([note.kind, note.turn, note.priority, note.num_tokens, note.end, note.group])


def note_of(text: str) -> Note | None:
    """The note of a text.

    Raises:
        ValueError: it is none.
    """
    if not text:
        return None
    kind, turn, priority, num_tokens, end, group = json.loads(text)
    texts, numbers = (kind, group), (turn, priority, num_tokens, end)
    if not all(isinstance(one, str) for one in texts) or any(type(number) is not int for number in numbers):
        raise ValueError("the note of a checkpoint has fields of other types")
    if not all(-MAX_INT <= number <= MAX_INT for number in numbers) or min(turn, num_tokens, end) < 0:
        raise ValueError("the note of a checkpoint has numbers that are out of bounds")
    return Note(kind, turn, priority, num_tokens, end, group)


def layout(copies: Sequence[tuple[Name, Contents]], origin: str) -> tuple[list[Contents], list[int]]:
    """Put copies into a segment: a safetensors file in which each is a tensor of bytes named by its kind and digest.

    The data begin at a multiple of 4096 bytes, and each copy at one of 64 (what is in between are tensors too), so that
    any tool can map and read the file.

    Args:
        origin: the digest of the fingerprint.

    Returns:
        The parts of the file in order, and where each copy starts.
    """
    tensors: dict[str, object] = {}
    body: list[Contents] = []
    starts: list[int] = []
    end = 0
    for number, ((kind, digest), contents) in enumerate(copies):
        gap = -end % COPY_ALIGNMENT
        if gap:
            tensors[f"gap.{number}"] = _tensor(end, gap)
            body.append(bytes(gap))
            end += gap
        tensors[f"{kind}.{digest.hex()}"] = _tensor(end, len(contents))
        body.append(contents)
        starts.append(end)
        end += len(contents)
    head = json.dumps({"__metadata__": {"hybrid": "segment", "fingerprint": origin}, **tensors}).encode()
    head += b" " * (-(8 + len(head)) % DATA_ALIGNMENT)
    return [len(head).to_bytes(8, "little"), head, *body], [8 + len(head) + start for start in starts]


def _tensor(start: int, num_bytes: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [num_bytes], "data_offsets": [start, start + num_bytes]}


# The folder


class CacheFolder:
    """A folder of copies that is open. One thread uses it, which may wait.

    Args:
        path: the folder, which is made if it is not there.
        origin: what this process's copies are made with.
        open_store: makes the store of its files.
        read_only: change nothing, whether it can be written or not.

    Raises:
        OSError: it cannot be used; ForeignError: it belongs to another user.
        UnusableError: it is on a network, or of a newer version, or of another program.
        sqlite3.Error: its manifest cannot be read now.

    Attributes:
        store: its files.
        read_only: nothing can be written.
        report: what was found at the start, and what was dropped, a sentence each.
    """

    def __init__(
        self, path: Path, origin: Origin, open_store: Callable[[Path], Store], read_only: bool = False
    ) -> None:
        self._path = path
        self._manifest = path / MANIFEST
        self._origin = origin
        self._origins: dict[int, str] = {}  # digests of the fingerprints whose copies can be used
        self._refusals: dict[int, str] = {}
        self._number: int | None = None  # of its own fingerprint
        self.report: list[str] = []
        self.read_only: bool = read_only
        if not read_only:
            _prepare(path)
            self.read_only = not os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
            if self.read_only:
                self.report.append("it cannot be written: what is there is used, and nothing is added")
        self.store: Store = open_store(path)
        self._db = self._open()
        try:
            self._version = self._data_version()
            if not self.read_only:
                with suppress(TimeoutError):  # another process writes there: the next one that starts will do it
                    self._collect()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> sqlite3.Connection:
        for name in (MANIFEST, *(MANIFEST + end for end in BESIDE)):
            _refuse_foreign(self._path / name)
        try:
            return self._connect()
        except (DamagedError, FormatVersionError) as error:
            if self.read_only or (isinstance(error, FormatVersionError) and error.found > FORMAT):
                raise
            self.report.append(f"{error}: all of it is dropped")
            for end in ("", *BESIDE):
                Path(f"{self._manifest}{end}").unlink(missing_ok=True)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Open the manifest, and make it where there is none."""
        if not self.read_only and not self._manifest.exists():
            os.close(os.open(self._manifest, os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        self._inode = self._manifest.stat().st_ino
        modes = ["mode=rw"]
        if self.read_only:  # without a log no process has it open; SQLite would make one, or could not
            is_open = Path(f"{self._manifest}-wal").exists()
            modes = ["mode=ro", "immutable=1"] if is_open else ["immutable=1"]
        for mode in modes:
            uri = f"{self._manifest.absolute().as_uri()}?{mode}"
            db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                self._check(db)
                return db
            except sqlite3.OperationalError:
                db.close()
                if mode == modes[-1]:
                    raise
            except BaseException:
                db.close()
                raise
        raise AssertionError("there is a last mode")

    def _check(self, db: sqlite3.Connection) -> None:
        """See that the manifest is whole, and of this version."""
        try:
            db.execute("PRAGMA trusted_schema = OFF")
            tables = _tables(db)
            if not tables and not self.read_only:
                with transaction(db):
                    if not _tables(db):  # another process may have made them meanwhile
                        for table in TABLES.values():
                            db.execute(table)
                        db.execute(f"PRAGMA user_version = {FORMAT}")
                tables = _tables(db)
            version: int = db.execute("PRAGMA user_version").fetchone()[0]
            if tables and not tables.keys() & TABLES.keys():
                raise UnusableError(f"its {MANIFEST} is of another program")
            if version != FORMAT:
                raise FormatVersionError(version)
            if tables != TABLES:
                raise DamagedError("its manifest has other tables")
            found = db.execute("PRAGMA integrity_check(1)").fetchone()[0]
            if found != "ok":
                raise DamagedError(f"its manifest is damaged: {found:.200}")
            if not self.read_only:
                mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                if mode != "wal":
                    raise UnusableError(f"SQLite has no write-ahead log there, and uses {mode!r:.20} instead")
                db.execute("PRAGMA synchronous = NORMAL")  # what power failures undo is a copy less
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as error:
            raise DamagedError(f"its manifest is damaged: {error}") from error

    def _collect(self) -> None:
        """Drop what no process will use."""
        with transaction(self._db):
            rows, files = self.leftovers()
            self._delete(row.id for row in rows)
            num_bytes = sum(status.st_size for status in files.values())
            for name in files:
                (self._path / name).unlink(missing_ok=True)
            self.unlink(str(row.file) for row in rows)
        for entry in self._path.glob("*.lock"):
            if LEFT.fullmatch(entry.name):
                entry.unlink(missing_ok=True)
        if rows:
            self.report.append(
                f"{len(rows)} files that are missing, cut off, of another user, or without a copy that is known: what "
                "the manifest says of them is dropped"
            )
        if files:
            self.report.append(
                f"{len(files)} files ({format_bytes(num_bytes)}) of processes that ended before they were done: removed"
            )

    def leftovers(self) -> tuple[list[SegmentRow], dict[str, os.stat_result]]:
        """Find what is of no use: rows without a file or without copies, and our files without a row, which are those
        of a killed process if this one holds the transaction."""
        rows = self._segments()
        known = {row[0] for row in self._db.execute("SELECT DISTINCT segment FROM copies")}
        named, files = {row.file for row in rows}, {}
        for entry in os.scandir(self._path):
            if FILE.fullmatch(entry.name) and entry.name not in named:
                status = entry.stat(follow_symlinks=False)
                if is_ours(status):
                    files[entry.name] = status
        return [row for row in rows if row.id not in known or not self._is_whole(row)], files

    def _is_whole(self, row: SegmentRow) -> bool:
        """Tell whether the file of a row is there, ours, and as long as it was."""
        if not isinstance(row.file, str) or not FILE.fullmatch(row.file) or type(row.num_bytes) is not int:
            return False
        try:
            status = os.lstat(self._path / row.file)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and is_ours(status) and status.st_size == row.num_bytes

    # What is there

    @property
    def is_current(self) -> bool:
        """Tell whether its manifest is still the one that was opened: it may have been removed."""
        try:
            return self._manifest.stat().st_ino == self._inode
        except OSError:
            return False

    def load(self) -> list[Arrival]:
        """Read all segments, oldest first."""
        self._learn_fingerprints()
        arrivals = [self._arrival(row) for row in self._segments()]
        num_foreign = len({name for arrival in arrivals for name in arrival.foreign})
        if num_foreign:
            self.report.append(
                f"{num_foreign} checkpoints of another model or version: they are not used, and dropped first"
            )
        return arrivals

    def news(self, known: Collection[int]) -> tuple[list[Arrival], list[int]]:
        """Read what other processes have changed: segments that came, and the numbers of those that went.

        Args:
            known: numbers of the segments that this process knows.
        """
        version = self._data_version()
        if version == self._version:
            return [], []
        self._learn_fingerprints()
        rows = self._segments()
        there = {row.id for row in rows}
        came = [self._arrival(row) for row in rows if row.id not in known]
        self._version = version
        return came, [number for number in known if number not in there]

    def _data_version(self) -> int:
        """A number that changes when another process has changed something."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _segments(self) -> list[SegmentRow]:
        rows = self._db.execute("SELECT id, file, bytes, fingerprint FROM segments ORDER BY id")
        return [SegmentRow(*row) for row in rows]

    def _learn_fingerprints(self) -> None:
        """Decide which copies can be used, of those fingerprints that are not known yet."""
        for number, text in self._db.execute("SELECT id, content FROM fingerprints").fetchall():
            if number not in self._origins and number not in self._refusals and isinstance(text, str):
                refusal = self._origin.refusal(text)
                if refusal:
                    self._refusals[number] = refusal
                else:
                    self._origins[number] = _digest(text)

    def _arrival(self, row: SegmentRow) -> Arrival:
        copies = self._db.execute(f"SELECT {COLUMNS} FROM copies WHERE segment = ?", (row.id,)).fetchall()
        origin = self._origins.get(row.fingerprint)
        placed = [found for copy in copies if (found := _placed(row, copy)) is not None]
        if origin is not None:
            return Arrival(row, origin, [one for one in placed if self._has_size(*one)], {})
        why = self._refusals.get(row.fingerprint, "its fingerprint is damaged")
        return Arrival(row, "", [], {name: why for name, _ in placed if name[0] == CHECKPOINT})

    def _has_size(self, name: Name, place: CopyPlace) -> bool:
        """Tell whether a copy is as large as what it is to be used for: no more memory is allocated to read it."""
        known = self._origin.num_bytes
        return known is None or place.span.num_bytes == known[KINDS.index(name[0])]

    def reuse(self) -> list[Counts]:
        """Return the counts of the reuse of groups of checkpoints, sound or not."""
        return self._db.execute("SELECT worth_group, departed, wanted FROM reuse LIMIT ?", (MAX_GROUPS,)).fetchall()

    def parts(self) -> Iterator[FolderPart]:
        """List its copies by their fingerprints, of whatever model."""
        for number, text in self._db.execute("SELECT id, content FROM fingerprints ORDER BY id").fetchall():
            count = "SELECT count(*), total(bytes) FROM segments WHERE fingerprint = ?"
            files, num_bytes = self._db.execute(count, (number,)).fetchone()
            kinds = "SELECT kind, count(*) FROM copies WHERE fingerprint = ? GROUP BY kind"
            counts = dict(self._db.execute(kinds, (number,)).fetchall())
            known = "SELECT namespace, ids FROM copies WHERE fingerprint = ? AND ids IS NOT NULL"
            prefixes = self._db.execute(known, (number,)).fetchall()
            pages, checkpoints = (counts.get(kind, 0) for kind in range(len(KINDS)))
            yield FolderPart(text, checkpoints, pages, files, int(num_bytes), prefixes)

    # What changes it

    def put(self, pending: Sequence[tuple[Name, PendingCopy]], make_free: Callable[[int], bool]) -> Arrival | None:
        """Write copies as a segment, and then their rows. Those that another process has written stay where they are.

        Args:
            make_free: called with the bytes that are needed; False: they cannot be had.

        Returns:
            What is on the disk now; None: nothing of it, since there is no room, or others have written all of it.
        """
        if self.read_only:
            raise OSError(errno.EROFS, "the folder cannot be written")
        parts, starts = layout([(name, one.copy.contents) for name, one in pending], self._origin.digest)
        num_bytes = sum(map(len, parts))
        if not make_free(num_bytes):
            return None
        file = f"{secrets.token_hex(8)}.safetensors"
        try:
            with transaction(self._db):
                self._number = self._number_of(self._origin.text)
                missing = [one for one in zip(pending, starts, strict=True) if not self._has(one[0][0])]
                if not missing:
                    return None
                self.store.put_from(file, parts)
                row = self._insert(file, num_bytes)
                placed = [(name, self._place(row.id, name, one, start)) for (name, one), start in missing]
                self._db.executemany(
                    f"INSERT INTO copies(fingerprint, {COLUMNS}, namespace, ids) VALUES (?{', ?' * 10})",
                    [self._values(name, place) for name, place in placed],
                )
        except BaseException:
            self.unlink([file])
            raise
        return Arrival(row, self._origin.digest, placed, {})

    def _number_of(self, fingerprint: str) -> int:
        """The number of a fingerprint, which is added if it is not there."""
        self._db.execute("INSERT OR IGNORE INTO fingerprints(content) VALUES (?)", (fingerprint,))
        row = self._db.execute("SELECT id FROM fingerprints WHERE content = ?", (fingerprint,)).fetchone()
        return int(row[0])

    def _has(self, name: Name) -> bool:
        key = self._number, KINDS.index(name[0]), name[1]
        query = "SELECT 1 FROM copies WHERE fingerprint = ? AND kind = ? AND name = ?"
        return self._db.execute(query, key).fetchone() is not None

    def _insert(self, file: str, num_bytes: int) -> SegmentRow:
        insert = "INSERT INTO segments(file, bytes, fingerprint) VALUES (?, ?, ?)"
        number = self._db.execute(insert, (file, num_bytes, self._number)).lastrowid
        assert number is not None and self._number is not None
        return SegmentRow(number, file, num_bytes, self._number)

    def _place(self, segment: int, name: Name, pending: PendingCopy, start: int) -> CopyPlace:
        text, contents = note_text(pending.note), pending.copy.contents
        span = Span(start, len(contents), checksum(self._origin.digest, name, text, contents))
        return CopyPlace(segment, span, text, pending.note, pending.above)

    def _values(self, name: Name, place: CopyPlace) -> tuple[object, ...]:
        note = place.note
        ids = (note.namespace, note.ids) if note is not None and note.ids else (None, None)
        return (self._number, KINDS.index(name[0]), name[1], place.segment, *place.span, place.text, place.above, *ids)

    def remove(self, segments: Iterable[tuple[int, str]]) -> None:
        """Forget segments, and remove their files.

        Args:
            segments: number and file of each.
        """
        pairs = [*segments]
        with transaction(self._db):
            self._delete(number for number, _ in pairs)
        self.unlink(file for _, file in pairs)

    def _delete(self, segments: Iterable[int]) -> None:
        numbers = [(number,) for number in segments]
        self._db.executemany("DELETE FROM copies WHERE segment = ?", numbers)
        self._db.executemany("DELETE FROM segments WHERE id = ?", numbers)

    def unlink(self, files: Iterable[str]) -> None:
        """Remove files that the manifest does not name any more. One that cannot be removed now is removed by a later
        process."""
        for file in files:
            try:
                if FILE.fullmatch(file) and is_ours(os.lstat(self._path / file)):
                    self.store.delete(file)
            except OSError:
                pass

    def remove_copies(self, copies: Iterable[tuple[int, Name]]) -> None:
        """Forget copies, by segment and name. Their segments stay."""
        keys = [(segment, KINDS.index(kind), name) for segment, (kind, name) in copies]
        with transaction(self._db):
            self._db.executemany("DELETE FROM copies WHERE segment = ? AND kind = ? AND name = ?", keys)

    def add_reuse(self, counts: Iterable[Counts]) -> None:
        """Add what was learned (`Reuse.take_news`). What cannot be right is replaced."""
        with transaction(self._db):
            there = {group: (left, wanted) for group, left, wanted in self.reuse() if is_sound(group, left, wanted)}
            for group, left, wanted in counts:
                former = there.get(group, (0.0, 0.0))
                there[group] = halved(former[0] + left, former[1] + wanted)
            self._db.execute("DELETE FROM reuse")
            rows = [(group, *own) for group, own in there.items()]
            self._db.executemany("INSERT INTO reuse VALUES (?, ?, ?)", rows[:MAX_GROUPS])

    def close(self) -> None:
        """Close the manifest."""
        self._db.close()


def read_copy(store: Store, file: str, origin: str, name: Name, place: CopyPlace) -> Contents:
    """Read a copy, and check it.

    Raises:
        WrongCopyError: it is not what was written.
        OSError, EOFError: it cannot be read.
    """
    contents = bytearray(place.span.num_bytes)
    store.get_into(file, place.span.start, memoryview(contents))
    if checksum(origin, name, place.text, contents) != place.span.checksum:
        raise WrongCopyError("a copy on disk is damaged")
    return contents


def check_copy(store: Store, file: str, origin: str, name: Name, place: CopyPlace) -> None:
    """Check a copy as `read_copy` does, of whatever size: a part of it is in memory at a time."""
    whole, buffer = hashlib.sha256(_covered(origin, name, place.text)), bytearray(min(place.span.num_bytes, CHECKED))
    for start in range(0, place.span.num_bytes, CHECKED):
        part = memoryview(buffer)[: place.span.num_bytes - start]
        store.get_into(file, place.span.start + start, part)
        whole.update(part)
    if whole.digest()[:CHECKSUM_BYTES] != place.span.checksum:
        raise WrongCopyError("a copy on disk is damaged")


@dataclass(frozen=True, slots=True)
class FolderPart:
    """The copies in a folder that were made under the same circumstances.

    Attributes:
        fingerprint: see `Origin.text`.
        checkpoints, pages, files, num_bytes: how many they are.
        prefixes: namespace and token ids of those that were written with them.
    """

    fingerprint: str
    checkpoints: int
    pages: int
    files: int
    num_bytes: int
    prefixes: list[tuple[str, bytes]]


def folder_parts(path: Path) -> list[FolderPart]:
    """List what a folder of copies holds. Changes nothing.

    Raises:
        OSError, sqlite3.Error, DamagedError, UnusableError: it is not a folder of copies that can be read.
    """
    folder = CacheFolder(path, Origin("", lambda text: []), DirectoryStore, read_only=True)
    try:
        return [*folder.parts()]
    finally:
        folder.close()


def check_folder(path: Path, fix: bool = False) -> tuple[int, list[str]]:
    """Read every copy of a folder, of whatever model, and compare it with its checksum.

    Args:
        fix: drop what is wrong. Processes that use the folder may continue.

    Returns:
        How many copies are right, and what is wrong, a sentence each.

    Raises:
        OSError, sqlite3.Error, DamagedError, UnusableError: it is not a folder of copies that can be read.
    """
    folder = CacheFolder(path, Origin("", lambda text: []), DirectoryStore, read_only=not fix)
    try:
        wrong, num_right = [*folder.report], 0
        if not fix:
            rows, files = folder.leftovers()
            wrong += [f"{row.file}: it is missing, cut off, or without a copy that is known" for row in rows]
            wrong += [f"{name}: no copy in it is known, or it is being written" for name in files]
        for arrival in folder.load():
            damaged: list[tuple[int, Name]] = []
            for name, place in arrival.copies:
                try:
                    check_copy(folder.store, arrival.row.file, arrival.origin, name, place)
                    num_right += 1
                except (OSError, EOFError, WrongCopyError) as error:
                    damaged.append((arrival.row.id, name))
                    wrong.append(f"{arrival.row.file}: the {name[0]} {name[1].hex()}: {error}")
            if fix and damaged:
                folder.remove_copies(damaged)
        return num_right, wrong
    finally:
        folder.close()


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Change a manifest, whole or not at all. One process at a time does so.

    Raises:
        TimeoutError: another process does for long: its disk hangs, or it was stopped.
    """
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        why = f"another process that writes there has not ended that for {BUSY_SECONDS:.0f} s"
        raise TimeoutError(errno.ETIMEDOUT, why) from error
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _tables(db: sqlite3.Connection) -> dict[str, str]:
    return dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"))


def _placed(row: SegmentRow, copy: tuple[object, ...]) -> tuple[Name, CopyPlace] | None:
    """A copy by its columns; None: they are not of the types and in the ranges of what is written."""
    kind, name, segment, start, num_bytes, check, text, above = copy
    if not (type(start) is type(num_bytes) is type(segment) is int and isinstance(name, bytes)):
        return None
    if not (isinstance(check, bytes) and len(check) == CHECKSUM_BYTES and isinstance(text, str)):
        return None
    if start < 0 or num_bytes < 0 or type(row.num_bytes) is not int or start + num_bytes > row.num_bytes:
        return None
    if type(kind) is not int or not 0 <= kind < len(KINDS) or not isinstance(above, bytes | None):
        return None
    try:
        return (KINDS[kind], name), CopyPlace(row.id, Span(start, num_bytes, check), text, note_of(text), above, True)
    except (ValueError, TypeError, RecursionError):
        return None


def _prepare(path: Path) -> None:
    """Make a folder that only its owner may use.

    Raises:
        ForeignError: it belongs to another user.
        UnusableError: it is on a network.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if not is_ours(status):
        raise ForeignError(f"{path} (uid {status.st_uid})")
    kind = file_system(path)
    if NETWORK.fullmatch(kind):
        raise UnusableError(f"it is on a network ({kind}), where SQLite's write-ahead log does not work: choose a disk")
    if status.st_mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise


def file_system(path: Path) -> str:
    """The kind of file system that a path is on, as the kernel names it; empty: it is not known."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, whole = "", path.resolve()
    longest = -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 5 or not after:
            continue
        mount = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4]))
        if whole.is_relative_to(mount) and len(mount.parts) >= longest:  # of two at one place the later one is seen
            found, longest = after.split(" ")[0], len(mount.parts)
    return found


def _refuse_foreign(path: Path) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not is_ours(status) or not stat.S_ISREG(status.st_mode):
        raise ForeignError(str(path))
