"""One call over HTTP, on ASGI's three functions: its body within limits, its response whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any

import orjson

from hybrid.server.body import Body
from hybrid.server.errors import HttpError
from hybrid.server.tenants import Caller

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
"""Headers of a response that is a stream of events: proxies are not to keep them back."""

READ_AT_ONCE = 16 * 1024
"""Bytes of a body that is read in the event loop."""

MAX_FORGOTTEN = 64 * 2**20
"""Bytes of a body beyond its limit that are read and forgotten: most clients read no answer before all is sent."""


class Call:
    """A call.

    Args:
        scope, receive, send: of ASGI.

    Attributes:
        path: of the URL.
        headers: names in lower case.
        tenant: set once it is known.
        has_begun: the response's headers were sent.
        is_large: its body is read beside the event loop.
    """

    tenant: Caller

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.path: str = scope["path"]
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.has_begun: bool = False
        self.is_large: bool = False
        self._receive = receive
        self._send = send

    async def body(self, max_bytes: int, max_text: int, max_values: int, seconds: float) -> Body:
        """Wait for the body.

        Args:
            max_bytes: that it may have.
            max_text: that it may have without the data of images.
            max_values: that it may have.
            seconds: that its sender may take.

        Raises:
            HttpError: it is too large, or too slow.
        """
        body = Body(max_bytes, max_text, max_values)
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise HttpError(400, "the client left before its body had come", code="disconnected")
                    body.add(message.get("body", b""))
                    if not message.get("more_body") or body.size > max_bytes + MAX_FORGOTTEN:
                        break
        except TimeoutError:
            raise HttpError(
                408, f"the body did not come within {seconds:g} seconds", headers={"connection": "close"}
            ) from None
        if body.is_too_large:
            text = f"the body has more than {max_bytes} bytes"
            if body.size <= max_bytes:
                text = f"the body has more than {max_text} bytes without the data of images"
            text += "; send less, or start the server with --max-body"
            raise HttpError(413, text, code="body_too_large", headers={"connection": "close"})
        self.is_large = body.size > READ_AT_ONCE
        return body

    async def left(self) -> None:
        """Wait until the client has left."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def respond(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send JSON, or bytes that are text, as the whole response."""
        body = value if isinstance(value, bytes) else orjson.dumps(value)
        kind = {"content-type": "text/plain; charset=utf-8" if isinstance(value, bytes) else "application/json"}
        await self._begin(status, kind | {"content-length": str(len(body))} | (headers or {}))
        await self._send({"type": "http.response.body", "body": body})

    async def begin_events(self, headers: dict[str, str]) -> None:
        """Send the headers of a stream of events."""
        await self._begin(200, EVENTS | headers)

    async def send(self, events: bytes) -> None:
        """Send events."""
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    def send_now(self, events: bytes) -> asyncio.Future[None] | None:
        """Send events without a task, as `send` does. Returns what ends when they were taken, where the client is slow;
        None: they are."""
        sending: Any = self.send(events)
        try:
            waiting = sending.send(None)
        except StopIteration:
            return None
        return asyncio.ensure_future(_Begun(sending, waiting))

    async def end(self) -> None:
        """End a stream of events."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, headers: dict[str, str]) -> None:
        self.has_begun = True
        pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


class _Begun:
    """The rest of a coroutine that has begun outside of a task.

    Args:
        coroutine: that has begun.
        waiting: that it waits for.
    """

    def __init__(self, coroutine: Any, waiting: Any) -> None:
        self._coroutine = coroutine
        self._waiting = waiting

    def __await__(self) -> Generator[Any, Any, None]:
        waiting = self._waiting
        try:
            while True:
                try:
                    value = yield waiting
                except BaseException as error:
                    waiting = self._coroutine.throw(error)
                else:
                    waiting = self._coroutine.send(value)
        except StopIteration:
            return
