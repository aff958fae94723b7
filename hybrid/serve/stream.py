"""The outputs of one request, as one task reads them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from hybrid.engine.output import RequestOutput
from hybrid.interrupts import deferred_interrupts
from hybrid.key import check_namespace
from hybrid.serve.door import Asked
from hybrid.serve.engine_thread import EngineThread
from hybrid.serve.inbox import Inbox


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one task at a time. Made by `AsyncEngine.stream`.

    Args:
        asked: the prompt.
        thread: runs it.
        keeps: an object that lives as long as this one: the engine.
        only_ends: there is one output, the last.

    Raises:
        ArgumentError: the namespace is not a string.
    """

    _inbox: Inbox | None = None  # in a stream that was not made wholly

    def __init__(self, asked: Asked, thread: EngineThread, *, keeps: object, only_ends: bool = False) -> None:
        self._asked = asked
        self._thread = thread
        self._keeps = keeps
        self._only_ends = only_ends
        self._has_ended = False
        self._task: asyncio.Task[Any] | None = None
        # a task that was cancelled between two outputs may keep the stream alive; it is watched, without the reverse
        self._watch: Callable[[asyncio.Task[Any]], None] = _watcher(weakref.ref(self))
        check_namespace(asked.namespace)

    def begin(self) -> tuple[Inbox, Asked]:
        """Where the outputs go, and what is asked. From now on the request is aborted with this stream."""
        self._inbox = Inbox(only_ends=self._only_ends)
        return self._inbox, self._asked

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. When the task is cancelled meanwhile, the request is aborted.

        Raises:
            RequestError: another task is waiting for it, or this is another event loop.
            HybridError: the prompt cannot be run, or the engine was closed.
        """
        if self._has_ended:
            raise StopAsyncIteration
        if self._inbox is not None:
            self._inbox.check_reader()
        self._follow(asyncio.current_task())
        try:
            if self._inbox is None:
                self._thread.ask([self.begin()])
            assert self._inbox is not None
            output = await self._inbox.take()
        except BaseException:
            self.abort()
            raise
        if output is None:  # it was aborted meanwhile
            raise StopAsyncIteration
        if output.finish_reason is not None:
            self._end()
        return output

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self.abort()

    def abort(self) -> None:
        """As `aclose`, for callers that cannot wait."""
        with deferred_interrupts():
            if not self._has_ended and self._inbox is not None:
                self._thread.forget(self._inbox)
                self._inbox.close()
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._follow(None)

    def _follow(self, task: asyncio.Task[Any] | None) -> None:
        """Have the request aborted when this task, which reads it now, ends because it was cancelled."""
        if task is self._task:
            return
        if self._task is not None:
            self._task.remove_done_callback(self._watch)
        if task is not None:
            task.add_done_callback(self._watch)
        self._task = task

    def __del__(self) -> None:
        """Any thread may collect the stream: nothing but the abort is done here."""
        if self._inbox is not None and not self._has_ended:
            self._thread.forget(self._inbox)


def _watcher(stream: weakref.ref[OutputStream]) -> Callable[[asyncio.Task[Any]], None]:
    def watch(task: asyncio.Task[Any]) -> None:
        watched = stream()
        if watched is not None and task.cancelled():
            watched.abort()

    return watch
