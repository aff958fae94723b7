"""The thread that owns an engine, and runs it for others.

Other threads put commands into a queue; the thread runs them between two steps. While there is no work it waits for
the next command. A prompt goes to the threads that encode it, and comes back as a command that queues its request in
the engine, where it waits its turn.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from hybrid.engine.engine import Engine
from hybrid.engine.output import Accepted, RequestOutput
from hybrid.engine.request import Request
from hybrid.engine.requests import queue_full, tenant_full
from hybrid.engine.stats import EngineStats
from hybrid.errors import AuditError, ClosedError, EncodingLimitError, RequestError
from hybrid.serve.encoding import EncodingPool, PendingPrompt
from hybrid.serve.inbox import Inbox, LoopNotifier
from hybrid.units import format_bytes

log: logging.Logger = logging.getLogger(__name__)

Command = Callable[[], None]

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


@dataclass(frozen=True, eq=False)
class Encoding:
    """A prompt that is being encoded.

    Attributes:
        asked: the prompt, with the id that its request has.
        encoded: its request.
        deadline: when it has taken too long, as `time.monotonic`.
    """

    asked: PendingPrompt
    encoded: Future[Request]
    deadline: float


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
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.RLock()  # re-entrant: a stream may be collected at any time, and posts its abort then
        self._end: Callable[[], ClosedError] | None = None  # set when no command is run any more
        self._is_asked_to_close = False
        self._is_closing = False  # no command is run any more, and no step
        self._is_draining = False  # no prompt is taken any more
        self._process = os.getpid()
        self._pool = EncodingPool(self._encode, engine.config.encoding_threads)
        self._encoding: dict[Inbox, Encoding] = {}  # the one that was asked first first
        self._encoding_bytes = 0
        self._names: dict[str, Inbox] = {}  # of these, by the ids of their requests
        self._inboxes: dict[str, Inbox] = {}  # of the engine's requests, by their ids
        self._ending: set[str] = set()  # ids of requests that were aborted, and whose last output the engine has
        self._postponed: list[Command] = []  # they need an id that is free after the next step
        self._unanswered: set[Inbox] = set()  # wherever they are: when the thread ends, their readers get an error
        self._calls: set[Future[Any]] = set()  # likewise
        self._drains: list[Future[None]] = []  # of callers that wait until nothing is unanswered
        self._failures = 0  # one after the other
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
        """The engine's, where prompts that are being encoded wait."""
        stats = self.engine.stats()
        return replace(stats, waiting=stats.waiting + len(self._encoding))

    def ask(self, asked: list[tuple[Inbox, PendingPrompt]]) -> None:
        """Run prompts; all of them are refused, or none.

        Raises:
            ClosedError: the thread has ended, or drains.
        """
        with self._lock:
            self._check_open()
            if self._is_draining:
                raise ClosedError("this engine takes no prompts any more: it drains; send them to another one")
            self._unanswered.update(inbox for inbox, _ in asked)
            self._commands.put(partial(self._take_prompts, asked))

    def forget(self, inbox: Inbox) -> None:
        """Abort the request of an inbox, which is not read any more."""
        with suppress(ClosedError):  # it has ended
            self._post(partial(self._drop, inbox))

    async def call(self, function: Callable[[Engine], Any]) -> Any:
        """Run a function with the engine, between two steps. It is not run if the caller is cancelled before.

        Raises:
            ClosedError: the thread has ended.
            Exception: that of the function.
        """
        return await self._answer_of(lambda answer: _resolve(answer, partial(function, self.engine)))

    async def drain(self) -> None:
        """Take no prompt from now on, and wait until all have ended.

        Raises:
            ClosedError: the thread has ended.
        """
        with self._lock:
            self._is_draining = True
        await self._answer_of(self._drains.append)

    async def _answer_of(self, command: Callable[[Future[Any]], None]) -> Any:
        """Run a command in the thread, and wait until it, or what comes after it, has resolved its future."""
        answer: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._calls.add(answer)
            answer.add_done_callback(self._calls.discard)
            self._commands.put(partial(command, answer))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """End the thread after the step that is under way. Does not wait for it. From any thread, at any time."""
        self._is_asked_to_close = True
        with suppress(ClosedError):
            self._post(self._begin_closing)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, command: Command) -> None:
        with self._lock:
            self._check_open()
            self._commands.put(command)

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ClosedError(FORKED)
        if self._end is not None:
            raise self._end()

    # In the thread

    def _run(self) -> None:
        try:
            self.engine.cache.adopt()
            while not self._is_closing:
                self._advance()
        except BaseException as error:
            log.exception("the thread of the engine ends with an error")
            self._end_readers(partial(_caused_by, error))
            self._close_engine()
        else:
            try:
                self._close_engine()
            finally:
                self._end_readers(partial(ClosedError, "this engine was closed; make another one with from_pretrained"))

    def _advance(self) -> None:
        """Run the commands that are there, and a step."""
        self._run_commands()
        self._fail_overdue()
        if self.engine.has_work:
            for output in self._step():
                self._deliver(output)
        postponed, self._postponed = self._postponed, []
        for command in postponed:
            self._commands.put(command)
        while self._drains and not self._unanswered:
            _resolve(self._drains.pop(), lambda: None)

    def _step(self) -> list[RequestOutput]:
        try:
            outputs = self.engine.step()
        except BaseException as error:
            self._survive(error)
            return []
        self._failures = 0
        return outputs

    def _survive(self, error: BaseException) -> None:
        """Continue after an unexpected exception, of a step, or of a command whose caller does not wait.

        Raises:
            BaseException: this one, if it came again and again, or the cache is inconsistent.
        """
        self._failures += not self.engine.is_retrying
        if self._failures == MAX_FAILURES or isinstance(error, AuditError):
            raise error
        log.warning("an unexpected exception; the engine continues", exc_info=error)

    def _run_commands(self) -> None:
        """Run the commands that are there; without other work, wait for one."""
        is_idle = not self.engine.has_work
        try:
            while not self._is_closing:
                first = next(iter(self._encoding.values()), None)
                seconds = max(0.0, first.deadline - time.monotonic()) if first is not None else math.inf
                command = self._commands.get(block=is_idle, timeout=seconds if seconds < math.inf else None)
                is_idle = False
                try:
                    command()
                except BaseException as error:
                    self._survive(error)
        except Empty:
            pass

    def _take_prompts(self, asked: list[tuple[Inbox, PendingPrompt]]) -> None:
        """Have prompts encoded. If one is refused, all of them fail."""
        names = {one.request_id for _, one in asked if isinstance(one.request_id, str)}
        if self.engine.has_work and names & self._ending:
            self._postponed.append(partial(self._take_prompts, asked))
            return
        wanted = [(inbox, one) for inbox, one in asked if inbox in self._unanswered]
        try:
            self._check_room([one for _, one in wanted])
            for inbox, one in wanted:
                self._begin_encoding(inbox, one)
        except Exception as error:
            for inbox, _ in wanted:
                self._fail(inbox, error)

    def _check_room(self, asked: list[PendingPrompt]) -> None:
        """Check that prompts can be taken now.

        Raises:
            QueueFullError: too many would wait, or a tenant would have too many.
            EncodingLimitError: too many bytes would wait to be encoded.
        """
        config, room, others = self.engine.config, self.engine.scheduler.room, len(self._encoding)
        if self._refuses and room is not None and others + len(asked) > room:
            raise queue_full(self.engine.scheduler.waiting.num_requests + others, len(asked), config)
        for tenant, num_more in Counter(one.tenant for one in asked).items():
            if tenant in config.tenants:
                num_encoding = sum(one.asked.tenant == tenant for one in self._encoding.values())
                under_way = self.engine.num_requests_of(tenant) + num_encoding + num_more
                if (refusal := tenant_full(tenant, under_way, config)) is not None:
                    raise refusal
        most, held = config.encoding_bytes, self._encoding_bytes
        if most is not None and held + sum(one.num_bytes for one in asked) > most:
            raise EncodingLimitError(
                f"prompts of {format_bytes(held)} wait to be encoded, and {len(asked)} more exceed "
                f"{format_bytes(most)}: send them later, or set EngineConfig(encoding_memory=...)"
            )

    def _begin_encoding(self, inbox: Inbox, asked: PendingPrompt) -> None:
        name = self.engine.new_id(asked.request_id, self._names)
        asked = replace(asked, request_id=name)
        encoded = self._pool.submit(asked)
        seconds = self.engine.config.encoding_seconds
        self._encoding[inbox] = Encoding(asked, encoded, time.monotonic() + (math.inf if seconds is None else seconds))
        self._names[name] = inbox
        self._encoding_bytes += asked.num_bytes
        encoded.add_done_callback(partial(self._post_encoded, inbox))

    def _end_encoding(self, inbox: Inbox) -> bool:
        """Forget a prompt that is being encoded, or is encoded. Returns whether it was there."""
        encoding = self._encoding.pop(inbox, None)
        if encoding is None:
            return False
        self._names.pop(encoding.asked.request_id or "", None)
        self._encoding_bytes -= encoding.asked.num_bytes
        encoding.encoded.cancel()
        return True

    def _encode(self, asked: PendingPrompt) -> Request:
        """In a thread of the pool."""
        assert asked.request_id is not None
        request = self.engine.prepare(asked.prompt, asked.params, asked.namespace, asked.request_id)
        for answer in request.answers:
            answer.arrived = asked.arrived
        return request

    def _post_encoded(self, inbox: Inbox, encoded: Future[Request]) -> None:
        """In a thread of the pool."""
        with suppress(ClosedError):
            self._post(partial(self._enter, inbox, encoded))

    def _enter(self, inbox: Inbox, encoded: Future[Request]) -> None:
        """Give the engine a request that is encoded, if it is still wanted."""
        if not self._end_encoding(inbox):
            return
        try:
            request = encoded.result()
            self.engine.enter(request, has_room=True)
            self._inboxes[request.request_id], inbox.request_id = inbox, request.request_id
            if inbox.awaits_acceptance:
                ends = frozenset(request.end_tokens(self.engine.loaded.end_tokens))
                predicted = self.engine.predict(request)
                inbox.accept(Accepted(request.request_id, request.prompt_len, predicted, ends))
                self._notify(inbox)
        except BaseException as error:
            self._fail(inbox, error if isinstance(error, Exception) else _ended_nothing(error))

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        for inbox in [inbox for inbox, one in self._encoding.items() if one.deadline <= now]:
            text = (
                f"the prompt was not encoded within {self.engine.config.encoding_seconds:g} s: make it smaller, send "
                "fewer at once, or set EngineConfig(encoding_seconds=..., encoding_threads=...)"
            )
            self._fail(inbox, EncodingLimitError(text))

    def _deliver(self, output: RequestOutput) -> None:
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
        """End a prompt with an error, wherever it is."""
        inbox.fail(error)
        self._notify(inbox)
        self._drop(inbox)

    def _drop(self, inbox: Inbox) -> None:
        """Abort the request of an inbox, wherever it is."""
        self._unanswered.discard(inbox)
        self._end_encoding(inbox)
        name = inbox.request_id
        if name is not None and self._inboxes.get(name) is inbox:
            del self._inboxes[name]
            self._ending.add(name)
            with suppress(RequestError):  # it has ended, and its output was not taken yet
                self.engine.abort(name)

    def abort(self, request_id: str) -> None:
        """Stop a request, in the thread: its last output has `finish_reason="abort"`.

        Raises:
            RequestError: there is no such request.
        """
        encoding = self._names.get(request_id)
        if encoding is not None:
            self._fail(encoding, RequestError(f"{request_id} was aborted before the engine took it"))
        else:
            self.engine.abort(request_id)
            self._ending.add(request_id)

    def _begin_closing(self) -> None:
        self._is_closing = True

    def _close_engine(self) -> None:
        """Abort what runs, for readers that have not got an error."""
        self.engine.close()
        while self.engine.has_work:
            for output in self.engine.step():
                self._deliver(output)

    def _end_readers(self, end: Callable[[], ClosedError]) -> None:
        """From now on every call fails, and so do the readers that wait."""
        with self._lock:
            self._end = end
        self._pool.close()
        for inbox in [*self._unanswered]:
            inbox.fail(end())
            self._notify(inbox)
        for answer in [*self._calls]:
            with suppress(InvalidStateError):  # the caller was cancelled
                answer.set_exception(end())
        for kept in (self._unanswered, self._calls, self._encoding, self._names, self._inboxes, self._ending):
            kept.clear()
        while not self._commands.empty():
            self._commands.get()


def _resolve(answer: Future[Any], function: Callable[[], Any]) -> None:
    """Resolve the future of a caller with the result of a function, unless the caller was cancelled."""
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except StopIteration as failure:  # no future and no coroutine can raise it
        error = RuntimeError("the function raised StopIteration")
        error.__cause__ = failure
        answer.set_exception(error)
    except BaseException as failure:
        answer.set_exception(failure)


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
