"""The thread that owns an engine, and runs it for others.

Other threads put commands into a queue; the thread runs them between two steps. While there is no work it waits for
the next command.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from hybrid.engine.engine import Engine
from hybrid.engine.output import Accepted, RequestOutput
from hybrid.engine.request import Request
from hybrid.engine.stats import EngineStats
from hybrid.engine.step_loop import queue_full, tenant_full
from hybrid.errors import AuditError, ClosedError, EncodingLimitError, HybridError, RequestError
from hybrid.serve.admission import AdmissionQueue, Inbox, LoopCall, LoopNotifier, PendingPrompt
from hybrid.serve.encoding import Encoded, EncodingPool
from hybrid.units import format_bytes

log: logging.Logger = logging.getLogger(__name__)

Settle = Callable[[Any, BaseException | None], None]
"""Ends a call, with its result or an exception."""

MAX_FAILURES = 3
"""The thread ends when this many unexpected exceptions came in a row and no request is the reason."""

FORKED = (
    "this process was forked from the one that has the engine's thread, and does not have it. Load the model in this "
    "process, or start processes with 'spawn'"
)

_running: WeakSet[EngineThread] = WeakSet()


@atexit.register
def _end_all() -> None:
    """Before Python ends: a thread that computes meanwhile would be stopped in the middle."""
    for thread in list(_running):
        thread.close()
        thread.join()


class EngineThread:
    """Owns an engine.

    Args:
        engine: which nothing else uses from now on.
        refuses: a prompt for which the engine has no room (`Scheduler.room`) is refused with `QueueFullError`; else it
            waits.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: Engine, *, refuses: bool) -> None:
        self.engine = engine
        self._refuses = refuses
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.RLock()  # re-entrant: a stream may be collected at any time, and posts its abort then
        self._end: Callable[[], ClosedError] | None = None  # set when no command is run any more
        self._is_asked_to_close = False
        self._is_closing = False  # no command is run any more, and no step
        self._is_draining = False  # no prompt is taken any more
        self._drains: list[Settle] = []  # callers that wait until nothing is unanswered
        self._process = os.getpid()
        self._admission = AdmissionQueue()
        config = engine.config
        self._encoding = EncodingPool(
            self._encode, self._deliver_encoded, config.encoding_threads, config.encoding_seconds
        )
        self._ready: deque[tuple[Inbox, Encoded]] = deque()  # encoded, and not taken by the engine yet
        self._names: dict[str, Inbox] = {}  # of prompts that are encoded, by the ids of their requests
        self._inboxes: dict[str, Inbox] = {}  # of the engine's requests, by their ids
        self._outputs: deque[RequestOutput] = deque()  # of the engine's latest step, not delivered yet
        self._unanswered: set[Inbox] = set()  # wherever they are: whatever raises, their readers get an error
        self._calls: set[Settle] = set()  # settle those that were not answered
        self._failures = 0  # one after the other
        self._ending: set[str] = set()  # ids of requests that were aborted, and whose last output the engine has
        self._notifiers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopNotifier] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run, name="hybrid-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    # In any thread

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: it has not ended, and does not drain."""
        return not self.has_ended and not self._is_draining

    @property
    def has_ended(self) -> bool:
        """Whether nothing runs any more, or will not soon: it was closed, or ended with an error, or is in another
        process."""
        return self._end is not None or self._is_asked_to_close or self._process != os.getpid()

    def stats(self) -> EngineStats:
        """The engine's, with all that wait."""
        stats = self.engine.stats()
        return replace(stats, waiting=stats.waiting + len(self._admission) + len(self._encoding.asked))

    def ask(self, asked: list[tuple[Inbox, PendingPrompt]]) -> None:
        """Run prompts; all of them are refused, or none.

        Raises:
            ClosedError: the thread has ended, or drains.
        """
        inboxes = {inbox for inbox, _ in asked}
        try:
            with self._lock:
                if self._is_draining and self._end is None:
                    raise ClosedError("this engine takes no prompts any more: it drains; send them to another one")
                self._unanswered.update(inboxes)
                self._post(partial(self._take_in, asked))
        except ClosedError:
            self._unanswered.difference_update(inboxes)
            raise

    def forget(self, inbox: Inbox) -> None:
        """Abort the request of an inbox, which is not read any more."""
        with suppress(ClosedError):  # it has ended
            self._post(partial(self._drop, inbox))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function with the engine, between two steps.

        Raises:
            ClosedError: the thread has ended.
            Exception: that of the function.
        """

        def run(settle: Settle) -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                if self._end is not None:
                    raise self._end()
                result = function(self.engine)
            except StopIteration as failure:  # no future and no coroutine can raise it
                error = RuntimeError("the function raised StopIteration")
                error.__cause__ = failure
            except BaseException as failure:
                error = failure
            settle(result, error)
            self._calls.discard(settle)  # where its loop was closed nothing else does

        return await self._settled(run)

    async def drain(self) -> None:
        """Take no prompt from now on, and wait until all have ended.

        Raises:
            ClosedError: the thread has ended.
        """
        with self._lock:
            self._is_draining = True
        await self._settled(self._drains.append)

    async def _settled(self, run: Callable[[Settle], None]) -> Any:
        """Run a function in the thread, and wait until what it is given was called, now or later.

        Raises:
            ClosedError: the thread has ended.
            Exception: with which it was called.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.done():  # the caller was cancelled
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def settle_there(result: Any, error: BaseException | None) -> None:
            LoopCall(loop, partial(settle, result, error))

        try:
            with self._lock:
                self._calls.add(settle_there)
                self._post(partial(run, settle_there))
            return await future
        finally:
            self._calls.discard(settle_there)

    def close(self) -> None:
        """End the thread after the step that is under way. Does not wait for it. From any thread, at any time."""
        self._is_asked_to_close = True
        with suppress(ClosedError):
            self._post(self._begin_to_close)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Callable[[], None]) -> None:
        if self._process != os.getpid():  # the lock may be held for ever here
            raise ClosedError(FORKED)
        with self._lock:
            if self._end is not None:
                raise self._end()
            self._commands.put(command)

    # In the thread

    def _run(self) -> None:
        try:
            self.engine.cache.adopt()
            while not self._is_closing:
                try:
                    self._advance()
                except BaseException as error:
                    self._continue_after(error)
        except BaseException as error:
            log.exception("the thread of the engine ends with an error")
            _insist(partial(self._finish, partial(_caused_by, error)))
            _insist(self._close_engine)
        else:
            _insist(self._close_engine)
            end = partial(ClosedError, "this engine was closed; make another one with from_pretrained")
            _insist(partial(self._finish, end))

    def _advance(self) -> None:
        """Run the commands that are there, and a step."""
        self._run_commands()
        self._fail_overdue()
        self._enter_ready()
        self._admit()
        self._deliver_outputs()  # those that an exception has left
        if self.engine.has_work:
            self._outputs.extend(self.engine.step())
        self._deliver_outputs()
        while self._drains and not self._unanswered:
            settle = self._drains.pop()
            settle(None, None)
            self._calls.discard(settle)
        self._failures = 0

    def _continue_after(self, error: BaseException) -> None:
        """After an unexpected exception: what is not answered because of it ends with it, and nothing else.

        Raises:
            BaseException: this one, if it came again and again, or the cache is inconsistent.
        """
        self._failures += not self.engine.is_retrying
        if self._failures == MAX_FAILURES or isinstance(error, AuditError):
            raise error
        log.warning("an unexpected exception; the engine continues", exc_info=error)
        self._admission.mend()
        self._encoding.mend()
        self._names = {asked.request_id or "": inbox for inbox, asked in self._encoding.asked}
        with self._lock:  # what was asked up to now has its command in the queue, or had it
            own = error if isinstance(error, Exception) else _ended_nothing(error)
            self._commands.put(partial(self._fail_lost, [*self._unanswered], [*self._calls], own))
            if self._is_asked_to_close:
                self._commands.put(self._begin_to_close)

    def _fail_lost(self, inboxes: list[Inbox], calls: list[Settle], error: Exception) -> None:
        """Fail the prompts and calls of which nothing else knows: their commands have been run."""
        for inbox in inboxes:
            is_waiting = inbox in self._admission or inbox in self._encoding.asked
            is_known = is_waiting or self._inboxes.get(inbox.request_id or "") is inbox
            if inbox in self._unanswered and not is_known:
                self._fail(inbox, error)
        for settle in calls:
            if settle in self._calls:
                settle(None, error)
                self._calls.discard(settle)

    def _run_commands(self) -> None:
        """Run the commands that are there; without other work, wait for one."""
        is_idle = not self.engine.has_work and not (self._admission_has_room and len(self._admission))
        try:
            while not self._is_closing:
                self._commands.get(block=is_idle, timeout=self._encoding.seconds_left)()
                is_idle = False
        except Empty:
            pass

    def _deliver_outputs(self) -> None:
        while self._outputs:
            self._deliver(self._outputs[0])
            self._outputs.popleft()

    def _deliver(self, output: RequestOutput) -> None:
        """Nothing of it is lost by an exception: it is delivered again then."""
        inbox, has_ended = self._inboxes.get(output.request_id), output.finish_reason is not None
        if inbox is not None and inbox.loop.is_closed() and not has_ended:
            self._drop(inbox)  # it has no reader any more
            return
        if inbox is not None and (has_ended or not inbox.only_ends):
            inbox.put(output)
            self._notify(inbox)
        if has_ended:
            self._ending.discard(output.request_id)
            if inbox is not None:
                self._unanswered.discard(inbox)
                del self._inboxes[output.request_id]

    def _notify(self, inbox: Inbox) -> None:
        notifier = self._notifiers.get(inbox.loop)
        if notifier is None:
            notifier = self._notifiers[inbox.loop] = LoopNotifier()
        notifier.notify(inbox)

    def _fail(self, inbox: Inbox, error: BaseException) -> None:
        inbox.fail(error)
        self._notify(inbox)
        self._unanswered.discard(inbox)

    def _take_in(self, asked: list[tuple[Inbox, PendingPrompt]]) -> None:
        refusal = self._refusal([one for _, one in asked])
        for inbox, one in asked:
            if refusal is not None:
                self._fail(inbox, refusal)
            else:
                self._admission.add(inbox, one)

    def _refusal(self, asked: list[PendingPrompt]) -> HybridError | None:
        """Why prompts cannot be taken now; None: they can."""
        config, room = self.engine.config, self._room
        if self._refuses and room is not None and len(self._admission) + len(asked) > room:
            return queue_full(self._num_waiting, len(asked), config)
        for tenant, num_more in Counter(one.tenant for one in asked).items():
            under_way = self._admission.num_of(tenant) + self._encoding.asked.num_of(tenant)
            under_way += self.engine.num_requests_of(tenant)
            if (refusal := tenant_full(tenant, under_way + num_more, config)) is not None:
                return refusal
        most, held = config.encoding_bytes, self._admission.num_bytes + self._encoding.asked.num_bytes
        if most is not None and held + sum(one.num_bytes for one in asked) > most:
            return EncodingLimitError(
                f"prompts of {format_bytes(held)} wait to be encoded, and {len(asked)} more exceed "
                f"{format_bytes(most)}: send them later, or set EngineConfig(encoding_memory=...)"
            )
        return None

    @property
    def _num_waiting(self) -> int:
        """Requests that wait in the engine, and prompts that wait to be encoded for it."""
        return self.engine.scheduler.waiting.num_requests + len(self._encoding.asked) + len(self._admission)

    @property
    def _room(self) -> int | None:
        """The number of prompts that can be encoded for the engine now; None: any number."""
        room = self.engine.scheduler.room
        return None if room is None else room - len(self._encoding.asked)

    @property
    def _admission_has_room(self) -> bool:
        room = self._room
        return room is None or room > 0

    def _admit(self) -> None:
        """Have the prompts encoded that the engine takes now."""
        while self._admission_has_room and (following := self._admission.next()) is not None:
            inbox, asked = following
            if (
                isinstance(asked.request_id, str) and asked.request_id in self._ending
            ):  # after the next step it can be used again
                self._admission.put_back(inbox, asked)
                return
            try:
                name = self.engine.new_id(asked.request_id, self._names)
                self._names[name] = inbox
                self._encoding.add(inbox, replace(asked, request_id=name))
            except Exception as error:
                self._fail(inbox, error)

    def _encode(self, asked: PendingPrompt) -> Request:
        """In a thread of the pool."""
        assert asked.request_id is not None
        request = self.engine.prepare(asked.prompt, asked.params, asked.namespace, asked.request_id)
        for answer in request.answers:
            answer.arrived = asked.arrived
        return request

    def _deliver_encoded(self, inbox: Inbox, encoded: Encoded) -> None:
        """In a thread of the pool."""
        with suppress(ClosedError):
            self._post(partial(self._ready.append, (inbox, encoded)))

    def _enter_ready(self) -> None:
        """Give the engine the requests that are encoded."""
        scheduler = self.engine.scheduler
        while self._ready and ((room := scheduler.room) is None or room > 0):
            inbox, encoded = self._ready[0]
            is_wanted = self._stop_encoding(inbox)
            self._ready.popleft()
            if not is_wanted:
                continue
            try:
                if not isinstance(encoded, Request):
                    raise encoded if isinstance(encoded, Exception) else _ended_nothing(encoded)
                self.engine.enter(encoded)
                self._inboxes[encoded.request_id], inbox.request_id = inbox, encoded.request_id
                self._accept(inbox, encoded)
            except Exception as error:
                self._fail(inbox, error)

    def _accept(self, inbox: Inbox, request: Request) -> None:
        """Say to a reader that its request was queued, if it waits for that."""
        if not inbox.awaits_acceptance:
            return
        engine = self.engine
        ends = frozenset(request.end_tokens(engine.loaded.end_tokens))
        inbox.accept(Accepted(request.request_id, request.prompt_len, engine.predict(request), ends))
        self._notify(inbox)

    def _fail_overdue(self) -> None:
        while (inbox := self._encoding.next_overdue()) is not None:
            text = (
                f"the prompt was not encoded within {self.engine.config.encoding_seconds:g} s: make it smaller, send "
                "fewer at once, or set EngineConfig(encoding_seconds=..., encoding_threads=...)"
            )
            self._fail(inbox, EncodingLimitError(text))
            self._stop_encoding(inbox)

    def _stop_encoding(self, inbox: Inbox) -> bool:
        """Forget a prompt that is being encoded, or is encoded. Returns whether it was there."""
        asked = self._encoding.remove(inbox)
        if asked is not None:
            self._names.pop(asked.request_id or "", None)
        return asked is not None

    def abort(self, request_id: str) -> None:
        """Stop a request, in the thread: its last output has `finish_reason="abort"`.

        Raises:
            RequestError: there is no such request.
        """
        pending = chain(self._admission, self._encoding.asked)
        waiting = next((inbox for inbox, asked in pending if asked.request_id == request_id), None)
        if waiting is None or request_id in self._inboxes:
            self.engine.abort(request_id)
            self._ending.add(request_id)
            return
        self._fail(waiting, RequestError(f"{request_id} was aborted before the engine took it"))
        self._admission.remove(waiting)
        self._stop_encoding(waiting)

    def _drop(self, inbox: Inbox) -> None:
        """Abort the request of an inbox, wherever it is."""
        self._admission.remove(inbox)
        self._stop_encoding(inbox)
        self._unanswered.discard(inbox)
        name = inbox.request_id
        if name is not None and self._inboxes.get(name) is inbox:
            del self._inboxes[name]
            self._ending.add(name)
            with suppress(RequestError):  # it has ended, and its output was not taken yet
                self.engine.abort(name)

    def _begin_to_close(self) -> None:
        self._is_closing = True

    def _close_engine(self) -> None:
        """Abort what runs, for readers that have not got an error."""
        self._deliver_outputs()
        self.engine.close()
        while self.engine.has_work:
            self._outputs.extend(self.engine.step())
            self._deliver_outputs()

    def _finish(self, end: Callable[[], ClosedError]) -> None:
        """From now on every call fails, and so do the readers that wait."""
        with self._lock:
            self._end = end
        while not self._commands.empty():  # nothing is added any more
            self._commands.get()()
        for inbox in [*self._unanswered]:
            self._fail(inbox, end())
        for settle in [*self._calls]:
            settle(None, end())
        self._admission = AdmissionQueue()
        self._encoding.close()
        self._ready.clear()
        self._names.clear()
        self._inboxes.clear()
        self._outputs.clear()
        self._ending.clear()


def _insist(function: Callable[[], None]) -> None:
    """Call a function, and once more if it raises: it continues then, and nothing may wait for ever."""
    try:
        function()
    except BaseException:
        log.exception("ending the engine failed, and is tried again")
        function()


def _ended_nothing(error: BaseException) -> RequestError:
    """What readers get of `sys.exit` in a function that this thread called: their event loop would end by it."""
    failure = RequestError(
        f"{type(error).__name__}: {error} was raised in a thread of the engine, and ends no process there"
    )
    failure.__cause__ = error
    return failure


def _caused_by(error: BaseException) -> ClosedError:
    closed = ClosedError(f"the engine's thread ended with an error: {type(error).__name__}: {error}")
    closed.__cause__ = error
    return closed
