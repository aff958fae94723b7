"""Reading copies from the files of a store, and checking them, in a thread of its own.

What is read is in buffers of its own until no request wants it any more. A copy that several want is read once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybrid.tiers.folder import CopyPlace, read_copy
from hybrid.tiers.store import Store
from hybrid.tiers.tier import Contents, Name, UnavailableError
from hybrid.tiers.worker import FORKED, ProcessLock, Worker

MAX_AHEAD_BYTES = 256 * 2**20
"""Nothing is read ahead while buffers hold as much as this, or will."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A copy that is to be read: its name, and where it is."""

    name: Name
    file: str
    origin: str
    place: CopyPlace


class Buffer:
    """A copy that is read, for all that want it.

    Attributes:
        store, wanted: what is read.
        num_users: that want it.
        is_used: one of them has taken it.
        is_done: there are `contents`, or an `error`.
        started: when reading it began, on the clock `time.perf_counter`; None: it has not.
        seconds: that it took.
    """

    __slots__ = ("contents", "error", "is_done", "is_used", "num_users", "seconds", "started", "store", "wanted")

    def __init__(self, store: Store, wanted: Wanted) -> None:
        self.store: Store = store
        self.wanted: Wanted = wanted
        self.contents: Contents | None = None
        self.error: Exception | None = None
        self.num_users: int = 0
        self.is_used: bool = False
        self.is_done: bool = False
        self.started: float | None = None
        self.seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of its contents."""
        return self.wanted.place.span.num_bytes

    @property
    def is_under_way(self) -> bool:
        """Tell whether the thread reads it now."""
        return self.started is not None and not self.is_done


Failed = Callable[["BufferedReading"], UnavailableError]
"""A function that handles copies that cannot be had, and returns the error to raise."""


Begin = Callable[[Store, Sequence[Wanted | Contents], Failed], "BufferedReading"]
"""Begins to read copies: see `Reader.begin`."""


class BufferedReading:
    """Copies that a `Reader` reads for one user: a `Reading`.

    Attributes:
        buffers: of the copies, in order; contents are of copies that need not be read.
    """

    def __init__(self, reader: Reader, buffers: Sequence[Buffer | Contents], failed: Failed) -> None:
        self.buffers: list[Buffer] = [one for one in buffers if isinstance(one, Buffer)]
        self._all = buffers
        self._reader = reader
        self._failed = failed
        self._num_done = 0
        self._is_dropped = False

    @property
    def is_done(self) -> bool:
        """See `Reading.is_done`."""
        while self._num_done < len(self.buffers) and self.buffers[self._num_done].is_done:
            self._num_done += 1
        return self._num_done == len(self.buffers)

    @property
    def seconds(self) -> float:
        """See `Reading.seconds`."""
        return sum(buffer.seconds for buffer in self.buffers)

    @property
    def error(self) -> tuple[Buffer, Exception] | None:
        """The first buffer that failed, and its error; None: none has."""
        return next(((one, one.error) for one in self.buffers if one.error is not None), None)

    def late(self) -> tuple[Buffer, int, float] | None:
        """Return the buffer of it that is read now, and how many bytes of it were read in how many seconds, that one
        included; None: something else is read, or nothing."""
        now = next((buffer for buffer in self.buffers if buffer.is_under_way), None)
        if now is None or now.started is None:
            return None
        num_bytes = sum(buffer.num_bytes for buffer in self.buffers if buffer.is_done) + now.num_bytes
        return now, num_bytes, self.seconds + time.perf_counter() - now.started

    def wait(self, seconds: float) -> bool:
        """See `Reading.wait`."""
        return self._reader.wait(self, seconds)

    def take(self) -> list[Contents]:
        """See `Reading.take`."""
        found: list[Contents] = []
        for one in self._all:
            contents = one.contents if isinstance(one, Buffer) else one
            if contents is None:
                raise self._failed(self)
            found.append(contents)
        for buffer in self.buffers:
            buffer.is_used = True
        return found

    def drop(self) -> None:
        """See `Reading.drop`."""
        if not self._is_dropped:
            self._is_dropped = True
            self._reader.drop(self.buffers)


class Reader:
    """A thread that reads copies into buffers: those that requests wait for before those that are read ahead.

    Attributes:
        bytes_ahead: that were read ahead.
        bytes_in_vain: that were read, and that no request took.
    """

    def __init__(self) -> None:
        self.bytes_ahead: int = 0
        self.bytes_in_vain: int = 0
        self._lock = ProcessLock()
        self._changed = threading.Condition(self._lock)  # type: ignore[arg-type]  # of all that follows
        self._buffers: dict[Name, Buffer] = {}  # those that a request wants
        self._num_bytes = 0  # of them
        self._wanted: deque[Buffer] = deque()
        self._ahead: deque[Buffer] = deque()
        self._bytes_wanted = 0
        self._worker = Worker("hybrid disk reader")

    @property
    def reads_ahead(self) -> bool:
        """Tell whether more may be read ahead now."""
        return self._num_bytes < MAX_AHEAD_BYTES

    @property
    def bytes_before(self) -> int:
        """Bytes that are read before those that a request wants next, about."""
        return self._bytes_wanted

    def begin(self, store: Store, wanted: Sequence[Wanted | Contents], failed: Failed) -> BufferedReading:
        """Begin to read copies that a request waits for.

        Args:
            wanted: the copies, in order; contents are at hand already.
            failed: called by `BufferedReading.take` where they cannot be had.

        Raises:
            UnavailableError: this process has no such thread.
        """
        return self._begin(store, wanted, failed, self._wanted)

    def begin_ahead(self, store: Store, wanted: Sequence[Wanted | Contents], failed: Failed) -> BufferedReading:
        """Begin to read, as `begin` does, for a request that does not wait for the copies yet."""
        before = self._num_bytes
        reading = self._begin(store, wanted, failed, self._ahead)
        self.bytes_ahead += self._num_bytes - before
        return reading

    def _begin(
        self, store: Store, wanted: Sequence[Wanted | Contents], failed: Failed, todo: deque[Buffer]
    ) -> BufferedReading:
        if self._lock.is_foreign:  # there is no thread
            raise UnavailableError(f"the disk is not used: {FORKED}")
        buffers: list[Buffer | Contents] = []
        with self._changed:
            for want in wanted:
                if not isinstance(want, Wanted):
                    buffers.append(want)
                    continue
                buffer = self._buffers.get(want.name)
                if buffer is None:
                    buffer = self._buffers[want.name] = Buffer(store, want)
                    self._num_bytes += buffer.num_bytes
                buffer.num_users += 1
                if not buffer.is_done:
                    todo.append(buffer)
                    self._bytes_wanted += buffer.num_bytes if todo is self._wanted else 0
                buffers.append(buffer)
        self._worker.submit(self._work)
        return BufferedReading(self, buffers, failed)

    def wait(self, reading: BufferedReading, seconds: float) -> bool:
        """Wait until a reading is done, up to `seconds`. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: reading.is_done, seconds)

    def drop(self, buffers: Sequence[Buffer]) -> None:
        """One of the users does not want these any more."""
        with self._changed:
            for buffer in buffers:
                buffer.num_users -= 1
                if not buffer.num_users:
                    self._forget(buffer)
                    if buffer.contents is not None and not buffer.is_used:
                        self.bytes_in_vain += buffer.num_bytes

    def _forget(self, buffer: Buffer) -> None:
        """A request that wants this copy from now on has it read again."""
        if self._buffers.get(buffer.wanted.name) is buffer:
            del self._buffers[buffer.wanted.name]
            self._num_bytes -= buffer.num_bytes

    def close(self) -> None:
        """Read nothing more, and end the thread. Does not wait for what is read now."""
        with self._changed:
            todo = [*self._wanted, *self._ahead]
            self._wanted.clear()
            self._ahead.clear()
            self._bytes_wanted = 0
            for buffer in todo:
                if not buffer.is_done and not buffer.is_under_way:
                    self._finish(buffer, None, UnavailableError("the disk was closed"))
        self._worker.close(0.0)

    def violations(self) -> list[str]:
        """Return what is wrong with its bookkeeping, for the audit."""
        with self._changed:
            wrong = []
            if sum(buffer.num_bytes for buffer in self._buffers.values()) != self._num_bytes:
                wrong.append(f"buffers count {self._num_bytes} bytes, which is wrong")
            if sum(buffer.num_bytes for buffer in self._wanted) != self._bytes_wanted:
                wrong.append(f"{self._bytes_wanted} bytes are to be read, which is wrong")
            if any(buffer.num_users <= 0 for buffer in self._buffers.values()):
                wrong.append("a buffer is kept that no request wants")
            return wrong

    # In the thread

    def _work(self) -> None:
        while (buffer := self._next()) is not None:
            contents, error = None, None
            try:
                want = buffer.wanted
                contents = read_copy(buffer.store, want.file, want.origin, want.name, want.place)
            except Exception as failure:
                error = failure
            with self._changed:
                self._finish(buffer, contents, error)

    def _next(self) -> Buffer | None:
        """The next one that a request wants."""
        with self._changed:
            while self._wanted or self._ahead:
                if self._wanted:
                    buffer = self._wanted.popleft()
                    self._bytes_wanted -= buffer.num_bytes
                else:
                    buffer = self._ahead.popleft()
                if buffer.num_users and not buffer.is_done:
                    buffer.started = time.perf_counter()
                    return buffer
            return None

    def _finish(self, buffer: Buffer, contents: Contents | None, error: Exception | None) -> None:
        if buffer.started is not None:
            buffer.seconds = time.perf_counter() - buffer.started
        buffer.contents, buffer.error = contents, error
        buffer.is_done = True
        if error is not None:
            self._forget(buffer)
        elif not buffer.num_users:
            self.bytes_in_vain += buffer.num_bytes
        self._changed.notify_all()
