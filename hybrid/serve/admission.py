"""From the engine's thread to readers in event loops.

A reader that is slow holds up nothing: its inbox keeps the latest output, and outputs hold the whole answer. An event
loop that is slow has at most one callback waiting, however many steps were made meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from hybrid.engine.output import Accepted, RequestOutput
from hybrid.engine.sampling_params import SamplingParams, tenant_of
from hybrid.errors import RequestError
from hybrid.interrupts import deferred
from hybrid.prompts.encode import Prompt


class LoopCall:
    """One call of a function in an event loop, from any thread.

    A signal handler that raises in the lines of the event loop makes it drop the callback that it is about to run. So
    the loop gets each call twice, and the second does nothing if the first was made. While the function runs handlers
    wait. If it raises it is called again.

    Args:
        loop: if it is closed, the call is not made.
        function: without arguments.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        self._loop = loop
        self._function = function
        self._is_due = True
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(self)
            loop.call_soon_threadsafe(self)

    def __call__(self) -> None:
        """In the event loop."""
        if not self._is_due:
            return
        try:
            with deferred():  # an event loop drops what a handler raises in a callback
                self._function()
                self._is_due = False
        finally:
            if self._is_due:
                self._loop.call_soon(self)


Passed = Callable[[RequestOutput], "asyncio.Future[None] | None"]
"""Takes an output in the event loop. It returns what ends when the next one can be taken; None: that is at once."""


class Inbox:
    """The outputs of one request, for its one reader. A function may take all but the last, in the event loop, without
    the reader's task.

    Args:
        only_ends: the reader wants the last output alone.
        awaits_acceptance: the reader waits first until the engine has queued the request (`accepted`).

    Attributes:
        loop: the event loop that it is read in.
        only_ends, awaits_acceptance: as given.
        request_id: of the request of the engine; None: the engine has not taken it.
        passed: takes all outputs but the last; None: the reader does.
    """

    def __init__(self, *, only_ends: bool = False, awaits_acceptance: bool = False) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self.only_ends = only_ends
        self.awaits_acceptance = awaits_acceptance
        self.request_id: str | None = None
        self.passed: Passed | None = None
        self._is_passing = False  # what was passed on is not taken yet
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
        """The engine has queued the request."""
        with self._lock:
            self._accepted = accepted

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
        if self.passed is None or not (self._is_passing or self._pass_on(self.passed)):
            self._arrived.set()

    def _pass_on(self, passed: Passed) -> bool:
        """Pass the latest output on. Returns whether nothing is left for the reader: the last one is, and an error."""
        with self._lock:
            latest, error = self._latest, self._error
            if error is not None or latest is None or latest.finish_reason is not None or self._is_closed:
                return False
            self._latest = None
        if latest is self._read:  # it may be put twice
            return True
        before, self._read = self._read, latest
        try:
            waiting = passed(latest.since(before))
        except Exception as failure:
            self.fail(failure)
            return False
        if waiting is not None:
            self._is_passing = True
            waiting.add_done_callback(self._was_passed)
        return True

    def _was_passed(self, waiting: asyncio.Future[None]) -> None:
        self._is_passing = False
        if not waiting.cancelled() and (failure := waiting.exception()) is not None:
            self.fail(failure)
        self.wake()

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


class LoopNotifier:
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
            inboxes = [*self._waiting]
            self._waiting.clear()
            self._is_due = False
        try:
            for inbox in inboxes:
                inbox.wake()
        except BaseException:
            with self._lock:  # this is called again then
                self._waiting.update(dict.fromkeys(inboxes))
            raise


@dataclass(frozen=True, eq=False)
class PendingPrompt:
    """One prompt, as it was asked.

    Attributes:
        prompt, params, namespace, request_id: as for `Engine.add_request`.
        num_bytes: that the prompt takes about.
        arrived: when it was asked, as `time.perf_counter`: what it waits to be encoded is a part of the time to its
            first token.
    """

    prompt: Prompt
    params: SamplingParams | None
    namespace: str
    request_id: str | None
    num_bytes: int = 0
    arrived: float = field(default_factory=time.perf_counter)

    @property
    def tenant(self) -> str:
        """Who sends it."""
        return tenant_of(self.params, self.namespace)


class AdmissionQueue:
    """Prompts that wait until the engine takes another request, by turns between tenants.

    Attributes:
        num_bytes: of all of them.
    """

    def __init__(self) -> None:
        self.num_bytes: int = 0
        self._by_tenant: OrderedDict[str, OrderedDict[Inbox, PendingPrompt]] = (
            OrderedDict()
        )  # both with the next one first
        self._tenants: dict[Inbox, str] = {}

    def __len__(self) -> int:
        return len(self._tenants)

    def __contains__(self, inbox: object) -> bool:
        return inbox in self._tenants

    def __iter__(self) -> Iterator[tuple[Inbox, PendingPrompt]]:
        for own in self._by_tenant.values():
            yield from own.items()

    def add(self, inbox: Inbox, asked: PendingPrompt) -> None:
        """Another one waits; its outputs go to the inbox."""
        self._by_tenant.setdefault(asked.tenant, OrderedDict())[inbox] = asked
        self._tenants[inbox] = asked.tenant
        self.num_bytes += asked.num_bytes

    def next(self, skipped: Container[str] = ()) -> tuple[Inbox, PendingPrompt] | None:
        """Remove and return the one whose turn it is. None: there is none.

        Args:
            skipped: tenants whose turn it is not.
        """
        turns = self._by_tenant.items()
        found = next(((name, own) for name, own in turns if own and name not in skipped), None)
        if found is None:
            return None
        tenant, own = found
        inbox, asked = own.popitem(last=False)  # at first: it is not offered twice, whatever raises
        self._tenants.pop(inbox, None)
        self.num_bytes -= asked.num_bytes
        if own:
            self._by_tenant.move_to_end(tenant)
        else:
            del self._by_tenant[tenant]
        return inbox, asked

    def put_back(self, inbox: Inbox, asked: PendingPrompt) -> None:
        """The one that was removed last could not be taken: it is the next again."""
        self.add(inbox, asked)
        self._by_tenant[asked.tenant].move_to_end(inbox, last=False)
        self._by_tenant.move_to_end(asked.tenant, last=False)

    def remove(self, inbox: Inbox) -> PendingPrompt | None:
        """Forget the one of an inbox. None: it does not wait."""
        tenant = self._tenants.pop(inbox, None)
        if tenant is None:
            return None
        own = self._by_tenant[tenant]
        asked = own.pop(inbox)
        self.num_bytes -= asked.num_bytes
        if not own:
            del self._by_tenant[tenant]
        return asked

    def num_of(self, tenant: str) -> int:
        """The number of prompts of a tenant."""
        return len(self._by_tenant.get(tenant, ()))

    def mend(self) -> None:
        """Make it consistent after an exception in one of the calls. Who was added or removed then may be there."""
        for tenant in [name for name, own in self._by_tenant.items() if not own]:
            del self._by_tenant[tenant]
        self._tenants = {inbox: asked.tenant for inbox, asked in self}
        self.num_bytes = sum(asked.num_bytes for _, asked in self)
