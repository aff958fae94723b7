"""Copies of pages and checkpoints in a directory on disk, which other processes may share, and later ones find.

The thread of the cache knows what is there (`Index`), reads no file and waits for no other process. A writer thread
puts what was offered into segments, and a reader thread (`Reader`) reads and checks what is wanted. Whatever fails is a
copy less, never an error.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

from hybrid.tiers.folder import (
    DATA_ALIGNMENT,
    RECOVERABLE,
    CacheFolder,
    DamagedError,
    Origin,
    Pending,
    Place,
    UnusableError,
    VersionError,
    WrongCopyError,
)
from hybrid.tiers.health import FULL, DiskCounts, Health
from hybrid.tiers.index import Index, mean
from hybrid.tiers.process_lock import FORKED, ProcessLock
from hybrid.tiers.rate import Cost
from hybrid.tiers.reading import Begin, Buffer, BufferedReading, Reader, Wanted
from hybrid.tiers.savings import WORTHLESS, Savings
from hybrid.tiers.store import DirectoryStore, Store
from hybrid.tiers.tier import CHECKPOINT, AtHand, Contents, Name, Note, Offer, Reading, UnavailableError
from hybrid.tiers.worker import Worker, ended_within

READ_LATENCY, READ = 5e-4, 1e-9
"""Seconds per restore, and per byte restored, that are assumed until they are measured."""

MAX_SEGMENT_BYTES = 8 * 2**20
"""A segment is written when its copies are as large, or a sixteenth of the disk. Of a larger one more goes at once."""

MAX_PENDING_BYTES = 256 * 2**20
"""As much as this, or a quarter of the disk, may wait for the writer; what comes then is not kept: it is too slow."""

WRITTEN_AFTER = 2.0
"""Seconds after which copies are written that do not fill a segment."""

START_SECONDS = 10.0
"""How long a cache that is made waits for the directory. One that hangs longer is used when it answers."""

GROWN_AFTER = 60.0  # seconds
"""A disk that was full is tried with more again after this."""

logger = logging.getLogger("hybrid.tiers")


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
        self.cost: Cost = Cost(READ_LATENCY, READ)
        self.wants_ids: bool = wants_ids
        self.bytes_offered: int = 0
        self.bytes_written: int = 0
        self.counts: DiskCounts = DiskCounts()
        self.report: list[str] = []
        self._path = path
        self._origin = origin
        self._savings = savings
        self._open_store = open_store
        self._segment_bytes = max(1, min(MAX_SEGMENT_BYTES, num_bytes // 16))
        self._max_pending_bytes = max(4, min(MAX_PENDING_BYTES, num_bytes // 4))
        self._lock = ProcessLock()  # of all that follows
        self._index = Index(num_bytes, savings, self.cost)
        self._pending: dict[Name, Pending] = {}
        self._pending_bytes = 0
        self._batch: list[Name] = []
        self._batch_bytes = 0
        self._epoch = 0
        self._health = Health()
        self._patient_until = 0.0
        self._max_bytes = num_bytes
        self._grows_at = 0.0
        self._is_closed = False
        self._late: Buffer | None = None
        self._folder: CacheFolder | None = None  # used by the writer's thread, once it runs
        self._writer = Worker("hybrid disk writer", self._idle, WRITTEN_AFTER)
        self.reader: Reader = Reader()
        opening = self._writer.submit(partial(self._change, lambda folder: None))
        if not ended_within(START_SECONDS, opening):
            with self._lock:
                if self._folder is None:  # else it has answered just now
                    self._health.failed(TimeoutError(f"no answer within {START_SECONDS:.0f} seconds"))

    # What it holds

    def __contains__(self, name: object) -> bool:
        return name in self._index.places or name in self._pending

    @property
    def num_bytes(self) -> int:
        """Bytes that it may hold."""
        return self._index.ranking.num_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of its files, those of other processes and models too."""
        return self._index.ranking.bytes_used

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that it holds, those too that wait for the writer."""
        with self._lock:
            return self._index.num_checkpoints + sum(kind == CHECKPOINT for kind, _ in self._pending)

    @property
    def num_pages(self) -> int:
        """Pages that it holds, likewise."""
        with self._lock:
            pending = sum(kind != CHECKPOINT for kind, _ in self._pending)
            return len(self._index.places) - self._index.num_checkpoints + pending

    @property
    def is_empty(self) -> bool:
        """See `Tier.is_empty`."""
        return not (self._index.num_checkpoints or self._index.foreign or self._pending or self.failure)

    @property
    def failure(self) -> str | None:
        """Why the directory is not used now; None: it is."""
        return FORKED if self._lock.is_foreign else self._health.failure

    def note(self, name: Name) -> Note | None:
        """See `Tier.note`."""
        with self._lock:
            found = self._pending.get(name) or self._index.places.get(name)
            return found.note if found is not None else None

    def why_missing(self, name: Name) -> str:
        """See `Tier.why_missing`."""
        foreign = self._index.foreign.get(name, "")
        return foreign if self.failure is None else f"the disk is not used: {self.failure}"

    def violations(self) -> list[str]:
        """See `Tier.violations`."""
        with self._lock:
            wrong = self._index.violations()
            if sum(len(pending.contents) for pending in self._pending.values()) != self._pending_bytes:
                wrong.append(f"the disk counts {self._pending_bytes} bytes that wait, which is wrong")
            if not set(self._batch) <= set(self._pending):
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
            if self._is_closed:
                return False
            path, value = self._index.appraise(offer)
            if value == WORTHLESS or not self._has_room(offer.num_bytes, value):
                return False
        contents = offer.read()
        with self._lock:
            above = self._index.expect(offer.name, offer.note, path)
            self._pending[offer.name] = Pending(contents, offer.note, value, above)
            self._batch.append(offer.name)
            self._batch_bytes += len(contents)
            self._pending_bytes += len(contents)
        if self._batch_bytes >= self._segment_bytes:
            with self._lock:
                self._index.refresh()
            self._submit_batch()
        return True

    def _renew(self, offer: Offer) -> bool:
        """Whether there is a copy. It is ranked as if it came now."""
        found = self._index.places.get(offer.name) or self._pending.get(offer.name)
        if found is None:
            return False
        found.note = offer.note
        if isinstance(found, Place):
            self._index.ranking.changed(found.segment)
        return True

    def _has_room(self, num_bytes: int, value: float) -> bool:
        if not self._index.ranking.has_room(num_bytes, value, self._pending_bytes):
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
        """As `begin`, for a request that does not wait for them yet."""
        return self._begin(names, self.reader.begin_ahead)

    def _begin(self, names: Sequence[Name], begin: Begin) -> Reading:
        with self._lock:
            folder = self._folder
            wanted = [self._wanted(name) for name in names]
        at_hand = [want for want in wanted if not isinstance(want, Wanted)]
        if folder is None or len(at_hand) == len(wanted):
            return AtHand(at_hand)
        if self._late is not None and not self._late.is_done:
            raise UnavailableError("the disk has not answered yet to an earlier request")
        return begin(folder.store, wanted, self._refusal)

    def _wanted(self, name: Name) -> Wanted | Contents:
        """Where a copy is; its contents, if it waits for the writer."""
        if name in self._pending:
            return self._pending[name].contents
        place = self._index.places.get(name)
        if place is None:
            raise UnavailableError("a copy on disk is not there any more")
        held = self._index.segments[place.segment]
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
        with self._lock:
            earlier = self._index.used(name)
        if earlier is not None:
            self._savings.reuse.wanted(earlier.group)  # it left the device of another process

    def _forget(self, wanted: list[Wanted]) -> int:
        """Copies are of no use: they leave the manifest, too. Returns how many were not forgotten before."""
        with self._lock:
            gone = [(one.place.segment, one.name) for one in wanted if self._index.places.get(one.name) is one.place]
            for _, name in gone:
                self._index.forget(name)
        if gone:
            self._writer.submit(partial(self._change, lambda folder: folder.remove_copies(gone)))
        return len(gone)

    def clear(self) -> None:
        """Forget all copies that this process could use; those of other models stay. Does nothing once closed."""
        if self._is_closed:
            return
        with self._lock:
            self._epoch += 1
            for name in self._pending:
                self._index.settle(name)
            self._pending.clear()
            self._batch, self._batch_bytes, self._pending_bytes = [], 0, 0
            gone = [(number, held.file) for number, held in self._index.segments.items() if held.origin]
            for number, _ in gone:
                self._index.remove(number)
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
        index = Index(self.num_bytes, self._savings, self.cost)
        try:
            self._savings.reuse.learn(folder.reuse())
            for arrival in folder.load():
                index.add(arrival, None)
        except BaseException:
            folder.close()
            raise
        with self._lock:
            index.take_waiting(self._index)
            self._index, self._folder = index, folder
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
            former, self._index = self._index, Index(self.num_bytes, self._savings, self.cost)
            self._index.take_waiting(former)
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
        if isinstance(error, UnusableError) and not isinstance(error, VersionError):
            self._health.ends()
        elif isinstance(error, sqlite3.Error | DamagedError):
            self._leave()
        elif isinstance(error, OSError) and error.errno in FULL:
            with self._lock:  # there is less than was asked for: from now on something must go for what comes
                self._index.ranking.limit(self._index.ranking.bytes_used)
                self._grows_at = time.monotonic() + GROWN_AFTER

    def _grow(self) -> None:
        """A disk that was full may have more by now: it is used little by little."""
        if self.num_bytes < self._max_bytes and time.monotonic() >= self._grows_at:
            with self._lock:
                more = 2 * self.num_bytes + self._max_pending_bytes + 4 * DATA_ALIGNMENT
                self._index.ranking.limit(min(self._max_bytes, more))
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
            known = set(self._index.segments)
        came, went = folder.news(known)
        with self._lock:
            for arrival in came:
                self._index.add(arrival, None)
            files = [file for number in went if (file := self._index.remove(number)) is not None]
        folder.unlink(files)

    def _write(self, names: list[Name], epoch: int) -> None:
        """Write copies that wait, unless all was cleared since: that is on the disk until a later job."""
        with self._lock:
            if epoch != self._epoch:
                return
            pending = [(name, self._pending[name]) for name in names if name in self._pending]
        try:
            if pending and self._put(pending, epoch):
                self._health.works()
        except RECOVERABLE as error:
            self._failed(error)
        finally:
            with self._lock:
                for name, copy in pending:
                    if self._pending.get(name) is copy:
                        del self._pending[name]
                        self._pending_bytes -= len(copy.contents)
                        self._index.settle(name)

    def _put(self, pending: list[tuple[Name, Pending]], epoch: int) -> bool:
        """Write copies. False: nothing was written, since what is there is worth more, or has them already."""
        folder = self._opened()
        self._catch_up(folder)
        with self._lock:  # another process may have written some of them
            pending = [(name, copy) for name, copy in pending if name not in self._index.places]
        if not pending:
            return False
        values = [(copy.value, len(copy.contents)) for _, copy in pending]
        arrival = folder.put(pending, lambda size: self._make_free(folder, size, mean(values, size), epoch))
        if arrival is None:
            self._catch_up(folder)  # another process may have written all of it meanwhile
            return False
        self.bytes_written += arrival.row.num_bytes
        with self._lock:
            is_wanted = epoch == self._epoch
            if is_wanted:
                self._index.add(arrival, mean(values, arrival.row.num_bytes))
        if not is_wanted:  # all was cleared meanwhile
            folder.remove([(arrival.row.id, arrival.row.file)])
        return True

    def _make_free(self, folder: CacheFolder, num_bytes: int, value: float, epoch: int) -> bool:
        """Drop segments that are worth less, so that `num_bytes` fit. False: too few are, or all was cleared."""
        with self._lock:
            if epoch != self._epoch:
                return False
            ranking = self._index.ranking
            before = ranking.bytes_used
            dropped = ranking.make_free(num_bytes, value)
            if dropped is None:
                return False
            self.counts.bytes_dropped += before - ranking.bytes_used
            gone = [(number, file) for number in dropped if (file := self._index.remove(number)) is not None]
        if gone:
            folder.remove(gone)
        return True
