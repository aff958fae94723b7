"""Copies of pages and checkpoints in a directory on disk, which other processes may share, and later ones find.

The thread of the cache knows what is there (`Index`), reads no file and waits for no other process. A writer thread
puts what was offered into segments, and a reader thread (`Reader`) reads and checks what is wanted. Whatever fails is a
copy less, never an error.
"""

from __future__ import annotations

import errno
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from hybrid.tiers.cost import Cost
from hybrid.tiers.folder import (
    DATA_ALIGNMENT,
    RECOVERABLE,
    Arrival,
    CacheFolder,
    CopyPlace,
    DamagedError,
    FormatVersionError,
    Origin,
    PendingCopy,
    UnusableError,
    WrongCopyError,
)
from hybrid.tiers.reader import Begin, Buffer, BufferedReading, Reader, Wanted
from hybrid.tiers.store import DirectoryStore, Store
from hybrid.tiers.tier import (
    CHECKPOINT,
    DAMAGED,
    PAGE,
    Contents,
    HeldCopy,
    Name,
    Note,
    Offer,
    OnChange,
    Reading,
    ReadyReading,
    UnavailableError,
    checksum_of,
)
from hybrid.tiers.value import WORTHLESS, EvictionOrder, PageRefCounts, Savings
from hybrid.tiers.worker import FORKED, ProcessLock, Worker, ended_within

READ_LATENCY, READ = 5e-4, 1e-9
"""Seconds per restore, and per byte restored, that are assumed until they are measured."""

MAX_SEGMENT_BYTES = 8 * 2**20
"""A segment is written when its copies are as large, or a sixteenth of the disk. Of a larger one more goes at once."""

MAX_PENDING_BYTES = 256 * 2**20
"""Maximum bytes that wait for the writer, or a quarter of the disk if that is less; what comes then is not kept: it is
too slow."""

WRITTEN_AFTER = 2.0
"""Seconds after which copies are written that do not fill a segment."""

START_SECONDS = 10.0
"""Seconds for which a cache that is made waits for the directory. One that hangs longer is used when it answers."""

GROWN_AFTER = 60.0  # seconds
"""A disk that was full is tried with more again after this."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that has no more room."""

FIRST_PAUSE, MAX_PAUSE = 1.0, 60.0
"""Seconds without an attempt after a failure, and after many."""

logger = logging.getLogger("hybrid.tiers")


@dataclass
class DiskCounts:
    """The counts of a disk.

    Attributes:
        num_failures: writes and reads that failed.
        num_damaged: copies that were not what was written.
        num_late: reads that took longer than computing.
        bytes_refused: bytes that were worth keeping, and came while the disk failed or was behind.
        bytes_dropped: of segments that were dropped because others are worth more.
    """

    num_failures: int = 0
    num_damaged: int = 0
    num_late: int = 0
    bytes_refused: int = 0
    bytes_dropped: int = 0


class Health:
    """The health of the directory: after a failure it is left alone for a while, longer each time.

    Attributes:
        failure: what failed last; None: it works.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._resumes_at = 0.0
        self._pause = FIRST_PAUSE

    def failed(self, error: BaseException) -> None:
        """Something failed."""
        self.failure = f"{type(error).__name__}: {error!s:.200}"
        self._resumes_at = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def ends(self) -> None:
        """It will never work: it is not tried again."""
        self._resumes_at = math.inf

    def works(self) -> None:
        """Something did not fail."""
        self.failure, self._pause = None, FIRST_PAUSE

    @property
    def is_paused(self) -> bool:
        """Tell whether it is too early for another attempt."""
        return self.failure is not None and time.monotonic() < self._resumes_at


@dataclass(slots=True, eq=False)
class Held:
    """A segment that is on the disk.

    Attributes:
        file: its name.
        origin: the digest of its fingerprint; empty: its copies cannot be used.
        num_bytes: its size.
        value: the mean of its copies.
        names: of its copies that are in use.
    """

    file: str
    origin: str
    num_bytes: int
    value: float = WORTHLESS
    names: set[Name] = field(default_factory=set)


class Holdings:
    """The copies of a folder by name, as this process knows them, and the order of segments, which are dropped as a
    whole. The value of a segment is the mean of its copies', by bytes; that of a page is that of the checkpoint that it
    was written for.

    Args:
        savings: the rule by which copies are worth something.
        cost: of a restore.

    Attributes:
        bytes_used: bytes of the segments.
        num_checkpoints: those of `places`.
        places: where the copies are.
        segments: by number.
        order: of the segments.
        foreign: why checkpoints cannot be used, of those of another model or version.
        waiting: copies that wait for the writer.
        refs: the pages that checkpoints need, those too that wait.
        on_change: see `DiskTier.on_change`.
    """

    def __init__(self, savings: Savings, cost: Cost) -> None:
        self.bytes_used: int = 0
        self.num_checkpoints: int = 0
        self.places: dict[Name, CopyPlace] = {}
        self.segments: dict[int, Held] = {}
        self.order: EvictionOrder[int] = EvictionOrder()
        self.foreign: dict[Name, str] = {}
        self.waiting: dict[Name, PendingCopy] = {}
        self.refs = PageRefCounts()
        self.on_change: OnChange | None = None
        self._values: dict[Name, float] = {}
        self._savings = savings
        self._cost = cost

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self.waiting

    def checkpoints(self) -> Iterator[tuple[bytes, Note | None, int]]:
        """The names of checkpoints, their notes, and the bytes of their contents."""
        for (kind, name), place in self.places.items():
            if kind == CHECKPOINT:
                yield name, place.note, place.span.num_bytes
        for (kind, name), pending in self.waiting.items():
            if kind == CHECKPOINT and (kind, name) not in self.places:
                yield name, pending.note, len(pending.copy)

    def _tell(self, born: bool, name: Name, note: Note | None, num_bytes: int) -> None:
        if self.on_change is not None and name[0] == CHECKPOINT:
            self.on_change(born, name[1], note, num_bytes)

    def wait(self, name: Name, pending: PendingCopy) -> None:
        """A copy waits for the writer."""
        if name not in self:
            self._tell(True, name, pending.note, len(pending.copy))
        self.waiting[name] = pending

    def value(self, name: Name) -> float:
        """The value of a copy: see `Savings.value`."""
        return self._values.get(name, WORTHLESS) if name[0] == CHECKPOINT or name[1] in self.refs else WORTHLESS

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Learn of segments, oldest first. Copies that are elsewhere too stay where they were found first."""
        new: list[tuple[int, Held]] = []
        for row, origin, copies, foreign in arrivals:
            held = self.segments[row.id] = Held(row.file, origin, row.num_bytes)
            new.append((row.id, held))
            self.bytes_used += row.num_bytes
            self.foreign.update(foreign)
            for name, place in copies:
                if name not in self.places:
                    if name not in self.waiting:
                        self._tell(True, name, place.note, place.span.num_bytes)
                    self.places[name] = place
                    self.num_checkpoints += name[0] == CHECKPOINT
                    held.names.add(name)
        for _, held in new:  # with the pages of all
            for name in held.names:
                place = self.places[name]
                if name[0] == PAGE:
                    self.extend(name[1], self._upward(place.above))
                elif place.note is not None and not self.refs.has_checkpoint(name[1]):
                    self.count(name[1], place.note, self._upward(name[1]))
        for number, held in new:
            worth = [value * self.places[name].span.num_bytes for name in held.names if (value := self.value(name)) > 0]
            held.value = sum(worth) / max(1, held.num_bytes) if worth else WORTHLESS
            self.order.use(number, held.value)

    def count(self, name: bytes, note: Note, path: Iterable[bytes]) -> None:
        """Count the pages that a checkpoint needs.

        Args:
            path: their names, the last first.
        """
        added = self.refs.add(path)
        value = self._values[CHECKPOINT, name] = self._savings.value(note, self._cost, len(added))
        self._values.update({(PAGE, page): value for page in added})

    def extend(self, name: bytes, path: Iterable[bytes]) -> None:
        """Count the pages before one that is needed, if they were not known.

        Args:
            path: their names, the last first.
        """
        value = self.value((PAGE, name))
        self._values.update({(PAGE, page): value for page in self.refs.extend(name, path)})

    def _upward(self, name: bytes | None) -> Iterable[bytes]:
        """The names of a page and of those before it, as far as they are known."""
        while name is not None:
            yield name
            place = self.places.get((PAGE, name))
            name = place.above if place is not None else None

    def settle(self, name: Name, pending: PendingCopy) -> None:
        """A copy does not wait any more: it was written, or is not kept."""
        if self.waiting.get(name) is pending:
            del self.waiting[name]
            self._lost(name, pending.note)

    def remove(self, segment: int) -> str | None:
        """Forget a segment. Returns its file; None: it is not known."""
        held = self.segments.pop(segment, None)
        if held is None:
            return None
        self.order.discard(segment)
        self.bytes_used -= held.num_bytes
        for name in held.names:
            place = self.places.pop(name)
            self.num_checkpoints -= name[0] == CHECKPOINT
            self._lost(name, place.note)
        return held.file

    def forget(self, name: Name) -> None:
        """Forget one copy. Its segment stays."""
        place = self.places.pop(name)
        self.segments[place.segment].names.remove(name)
        self.num_checkpoints -= name[0] == CHECKPOINT
        self._lost(name, place.note)

    def _lost(self, name: Name, note: Note | None) -> None:
        if name in self:
            return
        self._tell(False, name, note, 0)
        if name[0] == CHECKPOINT and self.refs.has_checkpoint(name[1]):
            self._values.pop(name, None)
            for page, _ in self.refs.remove(name[1]):
                self._values.pop((PAGE, page), None)

    def replace(self, former: Holdings) -> None:
        """Take the place of another, and what waits for the writer there."""
        for name, pending in former.waiting.items():
            self.waiting[name] = pending
            if pending.note is not None and not self.refs.has_checkpoint(name[1]):
                self.count(name[1], pending.note, former.refs.upward(name[1]))
        if former.on_change is not None:
            for own, note, _ in former.checkpoints():
                if (CHECKPOINT, own) not in self:
                    former.on_change(False, own, note, 0)
            for own, note, num_bytes in self.checkpoints():
                if (CHECKPOINT, own) not in former:
                    former.on_change(True, own, note, num_bytes)
        self.on_change, former.on_change = former.on_change, None

    def violations(self) -> list[str]:
        """Return what is wrong with its bookkeeping, for the audit."""
        noted = {name for (kind, name), place in self.places.items() if kind == CHECKPOINT and place.note is not None}
        wrong = self.refs.violations(noted | {name for kind, name in self.waiting if kind == CHECKPOINT})
        if set(self.order) != set(self.segments):
            wrong.append("a segment on disk would never be dropped")
        if sum(held.num_bytes for held in self.segments.values()) != self.bytes_used:
            wrong.append(f"the disk counts {self.bytes_used} bytes, which is wrong")
        named = [name for held in self.segments.values() for name in held.names]
        if len(named) != len(self.places) or set(named) != set(self.places):
            wrong.append("copies on disk are not those of its segments")
        if any(name not in self.segments[place.segment].names for name, place in self.places.items()):
            wrong.append("a copy on disk is in another segment than it says")
        if sum(kind == CHECKPOINT for kind, _ in self.places) != self.num_checkpoints:
            wrong.append(f"the disk counts {self.num_checkpoints} checkpoints, which is wrong")
        return wrong


class DiskTier:
    """Copies in a directory, up to a number of bytes: a `Tier`.

    Args:
        path: the directory. Where it cannot be used, nothing is kept, and `failure` says why.
        num_bytes: of all files together, those of other processes and models too.
        origin: what the copies are made with.
        savings: what copies are likely to save. What the directory knows of their reuse is added to it.
        wants_ids: write the token ids of prefixes into the manifest.
        open_store: makes the store of the files.

    Attributes:
        label, where, cost, wants_ids, bytes_offered, bytes_written: see `Tier`.
        counts: what it did.
        report: what was found in the directory, and what of it was dropped.
        reader: reads copies.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int,
        origin: Origin,
        savings: Savings,
        *,
        wants_ids: bool = False,
        open_store: Callable[[Path], Store] = DirectoryStore,
    ) -> None:
        self.label: str = "disk"
        self.where: str = "on disk"
        self.cost = Cost(READ_LATENCY, READ)
        self.wants_ids: bool = wants_ids
        self.bytes_offered: int = 0
        self.bytes_written: int = 0
        self.counts = DiskCounts()
        self.report: list[str] = []
        self._path = path
        self._origin = origin
        self._savings = savings
        self._open_store = open_store
        self._segment_bytes = max(1, min(MAX_SEGMENT_BYTES, num_bytes // 16))
        self._max_pending_bytes = max(4, min(MAX_PENDING_BYTES, num_bytes // 4))
        self._lock = ProcessLock()  # of all that follows
        self._holdings = Holdings(savings, self.cost)
        self._pending_bytes = 0
        self._batch: list[Name] = []
        self._batch_bytes = 0
        self._epoch = 0
        self._health = Health()
        self._patient_until = 0.0
        self.num_bytes: int = num_bytes
        self._max_bytes = num_bytes
        self._grows_at = 0.0
        self._is_closed = False
        self._late: Buffer | None = None
        self._folder: CacheFolder | None = None  # used by the writer's thread, once it runs
        self._writer = Worker("hybrid disk writer", self._idle, WRITTEN_AFTER)
        self.reader = Reader()
        opening = self._writer.submit(partial(self._change, lambda folder: None))
        if not ended_within(START_SECONDS, opening):
            with self._lock:
                if self._folder is None:  # else it has answered just now
                    self._health.failed(TimeoutError(f"no answer within {START_SECONDS:.0f} seconds"))

    # What it holds

    def __contains__(self, name: object) -> bool:
        return name in self._holdings

    @property
    def bytes_used(self) -> int:
        """Bytes of its files, those of other processes and models too."""
        return self._holdings.bytes_used

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that it holds, those too that wait for the writer."""
        with self._lock:
            return self._holdings.num_checkpoints + sum(kind == CHECKPOINT for kind, _ in self._holdings.waiting)

    @property
    def num_pages(self) -> int:
        """Pages that it holds, likewise."""
        with self._lock:
            waiting = sum(kind != CHECKPOINT for kind, _ in self._holdings.waiting)
            return len(self._holdings.places) - self._holdings.num_checkpoints + waiting

    @property
    def on_change(self) -> OnChange | None:
        """Called with each checkpoint of which there is a copy from now on (True), or none any more, and its note; in
        the thread of the cache, and in the writer's. Must not raise, and must not call the tier."""
        return self._holdings.on_change

    @on_change.setter
    def on_change(self, function: OnChange | None) -> None:
        with self._lock:
            self._holdings.on_change = function

    def checkpoints(self) -> list[tuple[bytes, Note | None, int]]:
        """The names of copies of checkpoints, their notes, and the bytes of their contents."""
        with self._lock:
            return [*self._holdings.checkpoints()]

    def tell_all(self) -> None:
        """Call `on_change` with each checkpoint of which there is a copy."""
        with self._lock:
            notify = self._holdings.on_change
            if notify is not None:
                for name, note, num_bytes in self._holdings.checkpoints():
                    notify(True, name, note, num_bytes)

    @property
    def is_empty(self) -> bool:
        """See `Tier.is_empty`."""
        held = self._holdings
        return not (held.num_checkpoints or held.foreign or held.waiting or self.failure)

    @property
    def failure(self) -> str | None:
        """Why the directory is not used now; None: it is."""
        return FORKED if self._lock.is_foreign else self._health.failure

    def note(self, name: Name) -> Note | None:
        """See `Tier.note`."""
        with self._lock:
            found = self._holdings.waiting.get(name) or self._holdings.places.get(name)
            return found.note if found is not None else None

    def why_missing(self, name: Name) -> str:
        """See `Tier.why_missing`."""
        foreign = self._holdings.foreign.get(name, "")
        return foreign if self.failure is None else f"the disk is not used: {self.failure}"

    def violations(self) -> list[str]:
        """See `Tier.violations`."""
        with self._lock:
            wrong = self._holdings.violations()
            waiting = self._holdings.waiting
            if sum(len(pending.copy) for pending in waiting.values()) != self._pending_bytes:
                wrong.append(f"the disk counts {self._pending_bytes} bytes that wait, which is wrong")
            if not set(self._batch) <= set(waiting):
                wrong.append("a copy of the next segment does not wait for the disk")
            return wrong + self.reader.violations()

    # What comes

    def offer(self, offer: Offer) -> bool:
        """See `Tier.offer`. It is written later; until then it is in memory."""
        self.bytes_offered += offer.num_bytes
        self._wait_for_writer(offer.num_bytes)
        with self._lock:
            if self._renew(offer):
                return True
            is_needed = offer.is_worth_it if offer.note is not None else offer.name[1] in self._holdings.refs
            if self._is_closed or not is_needed or not self._has_room(offer.num_bytes):
                return False
        contents = offer.read()
        copy = HeldCopy(contents, checksum_of(contents) if offer.checksum is None else offer.checksum)
        with self._lock:
            above: bytes | None = None
            if offer.note is not None:
                self._holdings.count(offer.name[1], offer.note, offer.path)
            elif path := [*islice(offer.path, 1)]:
                above = path[0]
                self._holdings.extend(offer.name[1], path)
            self._holdings.wait(offer.name, PendingCopy(copy, offer.note, above))
            self._batch.append(offer.name)
            self._batch_bytes += len(contents)
            self._pending_bytes += len(contents)
        if self._batch_bytes >= self._segment_bytes:
            self._submit_batch()
        return True

    def _renew(self, offer: Offer) -> bool:
        """Tell whether there is a copy, and rank it as if it came now."""
        held = self._holdings
        found = held.places.get(offer.name) or held.waiting.get(offer.name)
        if found is None:
            return False
        found.note = offer.note
        if isinstance(found, CopyPlace):
            held.order.use(found.segment, held.segments[found.segment].value)
        return True

    def _has_room(self, num_bytes: int) -> bool:
        if num_bytes + self._pending_bytes > self.num_bytes:
            return False
        is_read_only = self._folder is not None and self._folder.read_only  # None: the writer opens it again
        if is_read_only or self._health.is_paused or self._is_behind(num_bytes):
            self.counts.bytes_refused += num_bytes
            return False
        return True

    def _is_behind(self, num_bytes: int) -> bool:
        return self._pending_bytes > max(0, self._max_pending_bytes - num_bytes)

    def _wait_for_writer(self, num_bytes: int) -> None:
        """Within `be_patient`: let the writer catch up before something is refused."""
        left = self._patient_until - time.monotonic()
        if left > 0 and self._is_behind(num_bytes):
            self.flush(left)

    def be_patient(self, seconds: float) -> None:
        """For this time offers wait for the writer, where they would be refused: the process ends."""
        self._patient_until = time.monotonic() + seconds

    def _submit_batch(self) -> Future[None]:
        with self._lock:
            names, self._batch, self._batch_bytes = self._batch, [], 0
            return self._writer.submit(partial(self._write, names, self._epoch))

    def flush(self, seconds: float = 60.0) -> bool:
        """Have on the disk what was offered. False: it took longer than `seconds`, or the tier is closed."""
        if self._is_closed or self._lock.is_foreign:
            return False
        return ended_within(seconds, self._submit_batch())

    # What goes

    def begin(self, names: Sequence[Name]) -> Reading:
        """See `Tier.begin`."""
        return self._begin(names, self.reader.begin)

    def read_ahead(self, names: Sequence[Name]) -> Reading:
        """Begin to read, as `begin` does, for a request that does not wait for the copies yet."""
        return self._begin(names, self.reader.begin_ahead)

    def _begin(self, names: Sequence[Name], begin: Begin) -> Reading:
        with self._lock:
            folder = self._folder
            wanted = [self._wanted(name) for name in names]
        at_hand = [want for want in wanted if not isinstance(want, Wanted)]
        if folder is None or len(at_hand) == len(wanted):
            return ReadyReading(at_hand)
        if self._late is not None and not self._late.is_done:
            raise UnavailableError("the disk has not answered yet to an earlier request")
        return begin(folder.store, wanted, self._refusal)

    def _wanted(self, name: Name) -> Wanted | Contents:
        """Return where a copy is; its contents, if it waits for the writer."""
        waiting = self._holdings.waiting.get(name)
        if waiting is not None:
            if not waiting.copy.is_intact:
                self.counts.num_damaged += 1
                self._drop_waiting(name)
                raise UnavailableError(DAMAGED)
            return waiting.copy.contents
        place = self._holdings.places.get(name)
        if place is None:
            raise UnavailableError("a copy on disk is not there any more")
        held = self._holdings.segments[place.segment]
        return Wanted(name, held.file, held.origin, place)

    def _refusal(self, reading: BufferedReading) -> UnavailableError:
        """Copies could not be read, or not in time. Those that are of no use are forgotten."""
        failed = reading.error
        if failed is None:
            return self._too_late(reading)
        buffer, error = failed
        if isinstance(error, UnavailableError):
            return error
        if isinstance(error, WrongCopyError):
            self.counts.num_damaged += self._forget([buffer.wanted])
            return UnavailableError(f"{error}: it is dropped")
        self.counts.num_failures += 1
        if isinstance(error, FileNotFoundError | EOFError | PermissionError):
            self._forget([one.wanted for one in reading.buffers if one.wanted.file in str(error)])
        return UnavailableError(f"the disk failed: {error!s:.200}")

    def _too_late(self, reading: BufferedReading) -> UnavailableError:
        late = reading.late()
        if late is None:
            return UnavailableError("the disk reads for other requests for longer than computing takes")
        self._late, num_bytes, seconds = late
        self.counts.num_late += 1
        self.cost.note(num_bytes, seconds)
        return UnavailableError("the disk took longer than computing")

    def used(self, name: Name) -> None:
        """See `Tier.used`."""
        held, earlier = self._holdings, None
        with self._lock:
            place = held.places.get(name)
            if place is not None:
                held.order.use(place.segment, held.segments[place.segment].value)
                earlier, place.is_earlier = place.note if place.is_earlier else None, False
        if earlier is not None:
            self._savings.reuse.count_requested(earlier.group)  # it left the device of another process

    def _forget(self, wanted: list[Wanted]) -> int:
        """Copies are of no use: they leave the manifest, too. Returns how many were not forgotten before."""
        with self._lock:
            gone = [(one.place.segment, one.name) for one in wanted if self._holdings.places.get(one.name) is one.place]
            self._drop_written(gone)
        return len(gone)

    def drop(self, names: Iterable[Name]) -> None:
        """See `Tier.drop`. They leave the manifest, too."""
        with self._lock:
            gone, places = [*names], self._holdings.places
            for name in gone:
                self._drop_waiting(name)
            self._drop_written([(places[name].segment, name) for name in gone if name in places])

    def _drop_waiting(self, name: Name) -> None:
        """Forget a copy that waits for the writer, if there is one. One that is being written is forgotten after it."""
        pending = self._holdings.waiting.get(name)
        if pending is not None:
            self._pending_bytes -= len(pending.copy)
            if name in self._batch:
                self._batch.remove(name)
                self._batch_bytes -= len(pending.copy)
            self._holdings.settle(name, pending)

    def _drop_written(self, gone: list[tuple[int, Name]]) -> None:
        """Forget copies that are there, by segment and name, and the segments that have no others."""
        held = self._holdings
        for _, name in gone:
            held.forget(name)
        empty = [number for number in {number for number, _ in gone} if not held.segments[number].names]
        files = [(number, file) for number in empty if (file := held.remove(number)) is not None]

        def change(folder: CacheFolder) -> None:
            folder.remove_copies(gone)
            folder.remove(files)

        if gone:
            self._writer.submit(partial(self._change, change))

    def clear(self) -> None:
        """Forget all copies that this process could use; those of other models stay. Does nothing once closed."""
        if self._is_closed:
            return
        with self._lock:
            self._epoch += 1
            for name, pending in [*self._holdings.waiting.items()]:
                self._holdings.settle(name, pending)
            self._batch, self._batch_bytes, self._pending_bytes = [], 0, 0
            gone = [(number, held.file) for number, held in self._holdings.segments.items() if held.origin]
            for number, _ in gone:
                self._holdings.remove(number)
        if gone:
            self._writer.submit(partial(self._change, lambda folder: folder.remove(gone)))

    def close(self, seconds: float = 60.0) -> None:
        """Write what waits, and end the threads. Another `close` does nothing.

        Args:
            seconds: that it may take, in which what `be_patient` was given counts.
        """
        if self._is_closed:
            return
        now = time.monotonic()
        end = self._patient_until if self._patient_until > now else now + seconds
        self.flush(end - now)
        self._is_closed = True
        self._writer.submit(self._leave)
        self._writer.close(max(1.0, end - time.monotonic()))
        self.reader.close()

    # The writer's thread

    def _open(self) -> None:
        """Open the directory, and learn what is in it."""
        folder = CacheFolder(self._path, self._origin, self._open_store)
        holdings = Holdings(self._savings, self.cost)
        try:
            self._savings.reuse.learn(folder.reuse())
            holdings.add(folder.load())
        except BaseException:
            folder.close()
            raise
        with self._lock:
            holdings.replace(self._holdings)
            self._holdings, self._folder = holdings, folder
        self.report = folder.report
        for line in self.report:
            logger.warning("%s: %s", self._path, line)

    def _opened(self) -> CacheFolder:
        """The directory; it is opened again where it was removed or had failed."""
        if self._folder is not None and not self._folder.is_current:
            self._leave()
        if self._folder is None:
            self._open()
            self._health.works()
        assert self._folder is not None
        return self._folder

    def _leave(self) -> None:
        """Close the directory. What is in it is not known any more."""
        with self._lock:
            folder, self._folder = self._folder, None
            former, self._holdings = self._holdings, Holdings(self._savings, self.cost)
            self._holdings.replace(former)
        if folder is not None:
            with suppress(*RECOVERABLE):
                self._teach(folder)
            folder.close()

    def _teach(self, folder: CacheFolder) -> None:
        """Write what was learned of the reuse of copies."""
        if not folder.read_only and (news := self._savings.reuse.take_news()):
            folder.add_reuse(news)

    def _failed(self, error: BaseException) -> None:
        """The directory failed: nothing is written for a while."""
        self.counts.num_failures += 1
        self._health.failed(error)
        logger.warning("%s: %s", self._path, self._health.failure)
        if isinstance(error, UnusableError) and not isinstance(error, FormatVersionError):
            self._health.ends()
        elif isinstance(error, sqlite3.Error | DamagedError):
            self._leave()
        elif isinstance(error, OSError) and error.errno in FULL:
            with self._lock:  # there is less than was asked for: from now on something must go for what comes
                self.num_bytes = self._holdings.bytes_used
                self._grows_at = time.monotonic() + GROWN_AFTER

    def _grow(self) -> None:
        """A disk that was full may have more by now: it is used little by little."""
        if self.num_bytes < self._max_bytes and time.monotonic() >= self._grows_at:
            with self._lock:
                more = 2 * self.num_bytes + self._max_pending_bytes + 4 * DATA_ALIGNMENT
                self.num_bytes = min(self._max_bytes, more)
                self._grows_at = time.monotonic() + GROWN_AFTER

    def _idle(self) -> None:
        """Nothing was offered for a while."""
        if not self._health.is_paused:
            self._grow()
            self._change(lambda folder: None)
            self._submit_batch()

    def _change(self, change: Callable[[CacheFolder], None]) -> None:
        """Change the manifest, and catch up with other processes."""
        try:
            folder = self._opened()
            if not folder.read_only:
                change(folder)
                self._teach(folder)
            self._catch_up(folder)
        except RECOVERABLE as error:
            self._failed(error)

    def _catch_up(self, folder: CacheFolder) -> None:
        """Learn what other processes have changed."""
        with self._lock:
            known = set(self._holdings.segments)
        came, went = folder.news(known)
        with self._lock:
            self._holdings.add(came)
            files = [file for number in went if (file := self._holdings.remove(number)) is not None]
        folder.unlink(files)

    def _write(self, names: list[Name], epoch: int) -> None:
        """Write copies that wait, unless all was cleared since: that is on the disk until a later job."""
        with self._lock:
            if epoch != self._epoch:
                return
            waiting = self._holdings.waiting
            pending = [(name, waiting[name]) for name in names if name in waiting]
        try:
            if pending and self._put(pending, epoch):
                self._health.works()
        except RECOVERABLE as error:
            self._failed(error)
        finally:
            with self._lock:
                for name, copy in pending:
                    if self._holdings.waiting.get(name) is copy:
                        self._pending_bytes -= len(copy.copy)
                        self._holdings.settle(name, copy)

    def _put(self, pending: list[tuple[Name, PendingCopy]], epoch: int) -> bool:
        """Write copies. False: nothing was written, since what is there is worth more, or has them already."""
        folder = self._opened()
        self._catch_up(folder)
        damaged = {name for name, one in pending if not one.copy.is_intact}
        self.counts.num_damaged += len(damaged)
        with self._lock:  # another process may have written some of them
            held = self._holdings
            pending = [(name, one) for name, one in pending if name not in held.places and name not in damaged]
            value = sum(max(0.0, held.value(name)) * len(one.copy) for name, one in pending)
        if not pending:
            return False
        arrival = folder.put(pending, lambda size: self._make_free(folder, size, value / size, epoch))
        if arrival is None:
            self._catch_up(folder)  # another process may have written all of it meanwhile
            return False
        self.bytes_written += arrival.row.num_bytes
        with self._lock:
            is_wanted, dropped = epoch == self._epoch, list[Name]()
            if is_wanted:
                held = self._holdings
                held.add([arrival])
                for name, one in pending:
                    place = held.places.get(name)
                    if held.waiting.get(name) is not one and place is not None and place.segment == arrival.row.id:
                        dropped.append(name)  # while it was written
                        held.forget(name)
        if not is_wanted:  # all was cleared meanwhile
            folder.remove([(arrival.row.id, arrival.row.file)])
        elif dropped:
            folder.remove_copies((arrival.row.id, name) for name in dropped)
        return True

    def _make_free(self, folder: CacheFolder, num_bytes: int, value: float, epoch: int) -> bool:
        """Drop segments of the lowest rank, so that `num_bytes` fit. False: what comes has the lowest, or all was
        cleared.

        Args:
            value: of what comes.
        """
        gone: list[tuple[int, str]] = []
        with self._lock:
            if epoch != self._epoch or num_bytes > self.num_bytes:
                return False
            held = self._holdings
            rank, before = held.order.rank(value), held.bytes_used
            while held.bytes_used + num_bytes > self.num_bytes:
                lowest = held.order.lowest()
                if lowest is None or lowest[0] >= rank:
                    break
                held.order.drop(lowest[1])
                file = held.remove(lowest[1])
                assert file is not None
                gone.append((lowest[1], file))
            self.counts.bytes_dropped += before - held.bytes_used
            is_free = held.bytes_used + num_bytes <= self.num_bytes
        if gone:
            folder.remove(gone)
        return is_free
