"""From the engine's thread to readers in event loops.

A reader that is slow holds up nothing: its inbox keeps the latest output, and outputs hold the whole answer. An event
loop that is slow has at most one callback waiting, however many steps were made meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from weakref import WeakKeyDictionary

from hybrid.engine.output import RequestOutput
from hybrid.errors import RequestError
from hybrid.serve.loop_call import LoopCall


class Inbox:
    """The outputs of one request, for its one reader.

    Args:
        only_ends: the reader wants the last output alone.

    Attributes:
        loop: the event loop that it is read in.
        only_ends: as given.
        request_id: of the request of the engine; None: the engine has not taken it.
    """

    def __init__(self, *, only_ends: bool = False) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.only_ends = only_ends
        self.request_id: str | None = None
        self._lock = threading.Lock()
        self._latest: RequestOutput | None = None
        self._read: RequestOutput | None = None  # what the reader had last
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._is_read = False
        self._is_closed = False

    # In the engine's thread

    def put(self, output: RequestOutput) -> None:
        """Add an output. It replaces one that was not read; nothing of it is lost by that."""
        with self._lock:
            self._latest = output

    def fail(self, error: BaseException) -> None:
        """Nothing more will come. The reader gets what it did not read, and then the error."""
        with self._lock:
            self._error = self._error or error

    # In the event loop

    def wake(self) -> None:
        """There is something to read."""
        self._arrived.set()

    def close(self) -> None:
        """Nothing more is wanted: a reader that waits gets nothing."""
        self._is_closed = True
        self._arrived.set()

    def check_reader(self) -> None:
        """Check that the running task may read.

        Raises:
            RequestError: another task is waiting for outputs, or this is another event loop.
        """
        if self._is_read:
            raise RequestError("another task is waiting for the next output of this stream; one task reads a stream")
        if asyncio.get_running_loop() is not self.loop:
            raise RequestError("this stream was started in another event loop; read it there")

    async def take(self) -> RequestOutput | None:
        """Wait for an output, and remove it. Its delta begins where that of the one before ended. None: the inbox was
        closed.

        Raises:
            Exception: with which the call failed.
        """
        self._is_read = True
        try:
            while not self._is_closed:
                await self._arrived.wait()
                self._arrived.clear()
                with self._lock:
                    latest, self._latest, error = self._latest, None, self._error
                if error is not None:
                    self._arrived.set()  # it stays
                if latest is not None and latest is not self._read:  # it may be put twice
                    before, self._read = self._read, latest
                    return latest.since(before)
                if error is not None:
                    raise error
            return None
        finally:
            self._is_read = False


class Courier:
    """Wakes the readers of one event loop, with one callback for all of them. Keeps neither them nor the loop alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: WeakKeyDictionary[Inbox, None] = WeakKeyDictionary()
        self._is_due = False  # the loop has the callback

    def notify(self, inbox: Inbox) -> None:
        """Have the reader of an inbox woken. A loop that was closed has no readers any more."""
        with self._lock:
            self._waiting[inbox] = None
            if not self._is_due:
                LoopCall(inbox.loop, self._wake)
                self._is_due = True

    def _wake(self) -> None:
        with self._lock:
            for inbox in self._waiting:
                inbox.wake()
            self._waiting.clear()
            self._is_due = False
