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
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.stats import EngineStats
from hybrid.errors import AuditError, ClosedError, QueueFullError, RequestError
from hybrid.interrupts import deferred_interrupts
from hybrid.serve.door import Asked, Door
from hybrid.serve.inbox import Courier, Inbox

log: logging.Logger = logging.getLogger(__name__)

ADMISSION_SECONDS = 0.01
"""Between two steps prompts are encoded for about this long, so that many at once do not hold up those that run."""

MAX_FAILED_STEPS = 3
"""The thread ends when this many steps in a row failed and no request is the reason."""

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
        refuses: a prompt that finds as many waiting as the engine's configuration allows is refused with
            `QueueFullError`; else it waits.

    Attributes:
        engine: as given.
    """

    def __init__(self, engine: Engine, *, refuses: bool) -> None:
        self.engine = engine
        self._refuses = refuses
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.RLock()  # re-entrant: a stream may be collected at any time, and posts its abort then
        self._end: Callable[[], ClosedError] | None = None  # set when no command is run any more
        self._is_closing = False
        self._process = os.getpid()
        self._door = Door()
        self._inboxes: dict[str, Inbox] = {}  # of the engine's requests, by their ids
        self._names: dict[Inbox, str] = {}  # the reverse
        self._unanswered: set[Inbox] = set()  # wherever they are: whatever raises, their readers get an error
        self._calls: set[Callable[[Any, BaseException | None], None]] = set()  # settle those that were not answered
        self._failed_steps = 0  # one after the other
        self._ending: set[str] = set()  # ids of requests that were aborted, and whose last output the engine has
        self._couriers: WeakKeyDictionary[asyncio.AbstractEventLoop, Courier] = WeakKeyDictionary()
        self._thread = threading.Thread(target=self._run, name="hybrid-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    # In any thread

    @property
    def is_running(self) -> bool:
        """Whether requests are taken: it was not closed, did not end with an error, and is in this process."""
        return self._end is None and not self._is_closing and self._process == os.getpid()

    def stats(self) -> EngineStats:
        """The engine's, with all that wait."""
        stats = self.engine.stats()
        return replace(stats, waiting=stats.waiting + len(self._door))

    def ask(self, asked: list[tuple[Inbox, Asked]]) -> None:
        """Run prompts; all of them are refused, or none.

        Raises:
            ClosedError: the thread has ended.
        """
        inboxes = {inbox for inbox, _ in asked}
        self._unanswered.update(inboxes)
        try:
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
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            with deferred_interrupts():  # an event loop drops what a handler raises in a callback
                if future.done():  # the caller was cancelled
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        def settle_there(result: Any, error: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(settle, result, error)

        def run() -> None:
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
            settle_there(result, error)
            self._calls.discard(settle_there)  # where its loop was closed nothing else does

        try:
            self._calls.add(settle_there)
            self._post(run)
            return await future
        finally:
            self._calls.discard(settle_there)

    def close(self) -> None:
        """End the thread after the step that is under way. Does not wait for it. From any thread, at any time."""
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
                self._run_commands()
                self._admit()
                if self.engine.has_work:
                    self._step()
        except BaseException as error:
            log.exception("the thread of the engine ends with an error")
            self._finish(partial(_caused_by, error))
            self._close_engine()
        else:
            self._close_engine()
            self._finish(partial(ClosedError, "this engine was closed; make another one with from_pretrained"))

    def _run_commands(self) -> None:
        """Run the commands that are there; without other work, wait for one."""
        is_idle = not self.engine.has_work and not len(self._door)
        try:
            while not self._is_closing:
                self._commands.get(block=is_idle)()
                is_idle = False
        except Empty:
            pass

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._failed_steps += not self.engine.is_retrying
            if self._failed_steps == MAX_FAILED_STEPS or isinstance(error, AuditError):
                raise
            log.warning("a step failed, and is made again", exc_info=True)
            return
        self._failed_steps = 0
        for output in outputs:
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        inbox = self._inboxes.get(output.request_id)
        if inbox is not None and inbox.loop.is_closed() and output.finish_reason is None:
            self._drop(inbox)  # it has no reader any more
            return
        if output.finish_reason is not None:
            self._ending.discard(output.request_id)
        if inbox is not None and output.finish_reason is not None:
            del self._inboxes[self._names.pop(inbox)]
        if inbox is not None and (output.finish_reason is not None or not inbox.only_ends):
            inbox.put(output)
            self._notify(inbox)
        if inbox is not None and output.finish_reason is not None:
            self._unanswered.discard(inbox)

    def _notify(self, inbox: Inbox) -> None:
        courier = self._couriers.get(inbox.loop)
        if courier is None:
            courier = self._couriers[inbox.loop] = Courier(inbox.loop)
        courier.notify(inbox)

    def _fail(self, inbox: Inbox, error: BaseException) -> None:
        inbox.fail(error)
        self._notify(inbox)
        self._unanswered.discard(inbox)

    def _take_in(self, asked: list[tuple[Inbox, Asked]]) -> None:
        limit = self.engine.config.max_waiting
        waiting = self.engine.scheduler.waiting.num_requests + len(self._door)
        if self._refuses and limit is not None and waiting + len(asked) > limit:
            text = f"{waiting} requests wait, and {len(asked)} more are too many: max_waiting={limit}"
            for inbox, _ in asked:
                self._fail(inbox, QueueFullError(text))
            return
        for inbox, one in asked:
            self._door.add(inbox, one)

    def _admit(self) -> None:
        """Give the engine the prompts that it takes now."""
        limit, began = self.engine.config.max_waiting, time.perf_counter()
        while len(self._door):
            waiting = self.engine.scheduler.waiting.num_requests
            if limit is not None and waiting >= limit:
                return
            inbox, asked = self._door.next()
            if (
                isinstance(asked.request_id, str) and asked.request_id in self._ending
            ):  # after the next step it can be used again
                self._door.put_back(inbox, asked)
                return
            try:
                name = self.engine.add_request(
                    asked.prompt, asked.params, namespace=asked.namespace, request_id=asked.request_id
                )
                self._inboxes[name], self._names[inbox] = inbox, name
            except QueueFullError as error:  # it is more than one request, and fewer are allowed now
                if waiting:
                    self._door.put_back(inbox, asked)
                    return
                self._fail(inbox, error)
            except Exception as error:
                self._fail(inbox, error)
            if time.perf_counter() - began > ADMISSION_SECONDS:
                return

    def abort(self, request_id: str) -> None:
        """Stop a request, in the thread: its last output has `finish_reason="abort"`.

        Raises:
            RequestError: there is no such request.
        """
        waiting = next((inbox for inbox, asked in self._door if asked.request_id == request_id), None)
        if waiting is None or request_id in self._inboxes:
            self.engine.abort(request_id)
            self._ending.add(request_id)
            return
        self._fail(waiting, RequestError(f"{request_id} was aborted before the engine took it"))
        self._door.remove(waiting)

    def _drop(self, inbox: Inbox) -> None:
        """Abort the request of an inbox, wherever it is."""
        self._door.remove(inbox)
        self._unanswered.discard(inbox)
        name = self._names.pop(inbox, None)
        if name is not None:
            del self._inboxes[name]
            self._ending.add(name)
            with suppress(RequestError):  # it has ended, and its output was not taken yet
                self.engine.abort(name)

    def _begin_to_close(self) -> None:
        self._is_closing = True

    def _close_engine(self) -> None:
        """Abort what runs, for readers that have not got an error."""
        try:
            self.engine.close()
            while self.engine.has_work:
                for output in self.engine.step():
                    self._deliver(output)
        except BaseException:
            log.exception("the engine could not be closed")

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
        self._door = Door()
        self._inboxes.clear()
        self._names.clear()
        self._ending.clear()


def _caused_by(error: BaseException) -> ClosedError:
    closed = ClosedError(f"the engine's thread ended with an error: {type(error).__name__}: {error}")
    closed.__cause__ = error
    return closed
