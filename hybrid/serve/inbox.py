"""From the engine's thread to readers in event loops.

A reader that is slow holds up nothing: its inbox keeps the latest output, and outputs hold the whole answer. An event
loop that is slow has at most one callback waiting, however many steps were made meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary

from hybrid.engine.output import Accepted, RequestOutput
from hybrid.errors import RequestError

OutputCallback = Callable[[RequestOutput], "asyncio.Future[None] | None"]
"""Takes an output in the event loop. It returns what ends when the next one can be taken; None if that is at once."""


class Inbox:
    """The outputs of one request, for its one reader. A function may take all but the last, in the event loop, without
    the reader's task.

    Args:
        only_ends: the reader wants the last output alone.
        awaits_acceptance: the reader waits first until the engine has queued the request (`accepted`).

    Attributes:
        loop: the event loop that it is read in.
        only_ends, awaits_acceptance: as given.
        request_id: of the request of the engine; None if the engine has not taken it.
        callback: takes all outputs but the last; None if the reader does.
    """

    def __init__(self, *, only_ends: bool = False, awaits_acceptance: bool = False) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.only_ends = only_ends
        self.awaits_acceptance = awaits_acceptance
        self.request_id: str | None = None
        self.callback: OutputCallback | None = None
        self._is_forwarding = False  # the callback has not taken its output yet
        self._lock = threading.Lock()
        self._accepted: Accepted | None = None
        self._latest: RequestOutput | None = None
        self._read: RequestOutput | None = None  # what the reader had last
        self._error: BaseException | None = None
        self._arrived = asyncio.Event()
        self._is_read = False
        self._is_closed = False

    # In the engine's thread

    def accept(self, accepted: Accepted) -> None:
        """Record that the engine has queued the request."""
        with self._lock:
            self._accepted = accepted

    def put(self, output: RequestOutput) -> None:
        """Add an output. It replaces one that was not read; nothing of it is lost by that."""
        with self._lock:
            self._latest = output

    def fail(self, error: BaseException) -> None:
        """Record that nothing more will come. The reader gets what it did not read, and then the error."""
        with self._lock:
            self._error = self._error or error

    # In the event loop

    def wake_reader(self) -> None:
        """Wake the reader, or call the function that takes outputs."""
        if self.callback is None or not (self._is_forwarding or self._forward(self.callback)):
            self._arrived.set()

    def _forward(self, callback: OutputCallback) -> bool:
        """Have the callback take the latest output. Returns whether nothing is left for the reader, who gets the last
        output, and errors."""
        with self._lock:
            latest, error = self._latest, self._error
            if error is not None or latest is None or latest.finish_reason is not None or self._is_closed:
                return False
            self._latest = None
        before, self._read = self._read, latest
        try:
            waiting = callback(latest.since(before))
        except Exception as failure:
            self.fail(failure)
            return False
        if waiting is not None:
            self._is_forwarding = True
            waiting.add_done_callback(self._callback_done)
        return True

    def _callback_done(self, waiting: asyncio.Future[None]) -> None:
        self._is_forwarding = False
        if not waiting.cancelled() and (failure := waiting.exception()) is not None:
            self.fail(failure)
        self.wake_reader()

    def close(self) -> None:
        """Record that nothing more is wanted: a reader that waits gets nothing."""
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

    async def accepted(self) -> Accepted:
        """Wait until the engine has queued the request.

        Raises:
            Exception: with which the call failed.
            RequestError: the inbox was closed meanwhile.
        """
        self._is_read = True
        try:
            while not self._is_closed:
                await self._arrived.wait()
                self._arrived.clear()
                with self._lock:
                    accepted, latest, error = self._accepted, self._latest, self._error
                if latest is not None or error is not None:
                    self._arrived.set()  # for the next one who waits
                if accepted is not None:
                    return accepted
                if error is not None:
                    raise error
            raise RequestError("the request was aborted before the engine took it")
        finally:
            self._is_read = False

    async def take(self) -> RequestOutput | None:
        """Wait for an output, and remove it. Its delta begins where that of the one before ended.

        Returns:
            None if the inbox was closed.

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
                if latest is not None:
                    before, self._read = self._read, latest
                    return latest.since(before)
                if error is not None:
                    raise error
            return None
        finally:
            self._is_read = False


class LoopNotifier:
    """Wakes the readers of one event loop, with one callback for all of them. Keeps neither them nor the loop alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: WeakKeyDictionary[Inbox, None] = WeakKeyDictionary()
        self._is_scheduled = False  # the loop has the callback

    def notify(self, inbox: Inbox) -> None:
        """Have the reader of an inbox woken. A loop that was closed has no readers any more."""
        with self._lock:
            self._waiting[inbox] = None
            if not self._is_scheduled:
                self._is_scheduled = True
                with suppress(RuntimeError):  # the loop was closed
                    inbox.loop.call_soon_threadsafe(self._wake_readers)

    def _wake_readers(self) -> None:
        with self._lock:
            inboxes = [*self._waiting]
            self._waiting.clear()
            self._is_scheduled = False
        for inbox in inboxes:
            inbox.wake_reader()
