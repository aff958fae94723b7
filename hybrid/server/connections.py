"""Connections of clients, within limits that hold before a key is asked: uvicorn's protocol, and what it leaves open.

A connection waits for a head (between requests: idle), then for a body, and then its response is sent. Each has its
time. The bytes of a head are counted before they reach the parser, which takes quadratic time for a long one. Where
there are as many connections as there may be, the one that has waited longest for its client is closed for a new one;
those with a request under way stay.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from hybrid.units import BYTES

MAX_AHEAD = 16
"""Requests that a connection may have sent before the first of them is answered."""

ONCE = {b"host", b"origin", b"authorization", b"x-api-key", b"transfer-encoding"}
"""Headers that a request has once: of two values who stands before this server may have checked the other one."""

LINGER_SECONDS = 5.0
"""Seconds in which what a client still sends is dropped after its request was refused: until it has sent it, most
clients read no answer."""


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The limits of connections. The defaults are those of nginx, which has no number of headers: that is of Envoy.

    Attributes:
        head: bytes of a request line with its headers.
        headers: of a request.
        head_seconds: that a head may take to come.
        idle_seconds: that a connection may wait for its next request.
        send_seconds: in which a client must take something of what is sent to it.
        connections: in all; fewer where the process may not open as many files.
        per_address: connections of one address; None: any number, since behind a proxy all clients have one.
    """

    head: int | str = "32KiB"
    headers: int = 100
    head_seconds: float = 60.0
    idle_seconds: float = 75.0
    send_seconds: float = 60.0
    connections: int = 1024
    per_address: int | None = None

    @property
    def head_bytes(self) -> int:
        """`head` as a number of bytes."""
        return BYTES.check("--max-head", self.head)


class Connections:
    """The connections of a server.

    Args:
        limits: of them.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.head_bytes: int = limits.head_bytes
        self.without_head: dict[Connection, None] = {}  # in the order in which they began to wait
        self.without_body: dict[Connection, None] = {}
        self._addresses: dict[Connection, str] = {}  # of all
        self._by_address: Counter[str] = Counter()

    def __call__(self, *args: Any, **arguments: Any) -> Connection:
        """A connection, which uvicorn asks for when one comes."""
        return Connection(self, *args, **arguments)

    def add(self, one: Connection, address: str) -> bool:
        """A connection has come. Where they are too many, the one that has waited longest for its client is closed.
        Returns whether there is room."""
        allowed = self.limits.per_address
        if allowed is not None and self._by_address[address] >= allowed:
            return False
        if len(self._addresses) >= self.limits.connections:
            waiting = next(chain(self.without_head, self.without_body), None)
            if waiting is None:
                return False
            waiting.drop()
        self._addresses[one] = address
        self._by_address[address] += 1
        self.without_head[one] = None
        return True

    def remove(self, one: Connection) -> None:
        """A connection ends."""
        self.stop_waiting(one)
        address = self._addresses.pop(one, None)
        if address is None:  # it was refused
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def stop_waiting(self, one: Connection) -> None:
        """A connection has sent what it was waited for."""
        self.without_head.pop(one, None)
        self.without_body.pop(one, None)


class _TooMuchError(Exception):
    """Ends the parsing of what a client sends."""


class _AmbiguousError(Exception):
    """Ends the parsing of a request that may mean two things, or does not say to which host."""


class _CodingError(Exception):
    """Ends the parsing of a request whose body comes in a form that is not read here."""


class Connection(HttpToolsProtocol):
    """One connection. For what is not here see uvicorn's `HttpToolsProtocol`.

    Args:
        all_connections: of the server.
    """

    def __init__(self, all_connections: Connections, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.timeout_keep_alive = all_connections.limits.idle_seconds
        self._all = all_connections
        self._is_in_head = True  # or before one
        self._num_parsed = 0  # bytes since a head, data of a body, or a request was there wholly
        self._num_headers = 0
        self._has_other_coding = False
        self._is_refused = False
        self._unanswered: deque[Any] = deque()  # cycles of requests, in order; `cycle` is the last one
        self._reading: asyncio.TimerHandle | None = None  # the client is to send something until then
        self._sending: asyncio.TimerHandle | None = None  # and to take something

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        if not self._all.add(self, self.client[0] if self.client else ""):
            self._refuse(503, "there are as many connections as this server takes; try again later")
            self.transport.close()
            return
        self._await(self._all.limits.head_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        _cancel(self._reading, self._sending, self.timeout_keep_alive_task)
        self._all.remove(self)
        for cycle in self._unanswered:  # uvicorn knows the last one alone
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def drop(self) -> None:
        """End the connection at once."""
        self._all.remove(self)
        self.transport.abort()

    # What the client sends

    def data_received(self, data: bytes) -> None:
        """Parse what has come, up to the limit of a head at once."""
        limit, start = self._all.head_bytes, 0
        while start < len(data) and not self._is_refused and not self.transport.is_closing():
            room = limit - self._num_parsed
            if not room:
                what = (
                    "request line and the headers have" if self._is_in_head else "trailers or a chunk's extensions have"
                )
                return self._refuse(431, f"the {what} more than {limit} bytes")
            piece = data[start : start + room]
            start += room
            self._num_parsed += len(piece)
            super().data_received(piece)
        if self._is_in_head and self._reading is None and not self._is_answering:
            self._await(self._all.limits.head_seconds, self._head_is_late)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header was parsed."""
        self._num_headers += 1
        if self._num_headers > self._all.limits.headers:
            raise _TooMuchError
        if not self._is_in_head:  # a trailer: who reads headers before the body is to find all that count
            return
        name = name.lower()
        if name in ONCE and any(known == name for known, _ in self.headers):
            raise _AmbiguousError
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            self._has_other_coding = True
            raise _CodingError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head was parsed."""
        if len(self.pipeline) >= MAX_AHEAD:
            raise _TooMuchError
        if self.parser.get_http_version() != "1.0" and not any(name == b"host" for name, _ in self.headers):
            raise _AmbiguousError
        self._is_in_head, self._num_parsed = False, 0
        self._await_no_more()
        self._all.stop_waiting(self)
        self._all.without_body[self] = None
        super().on_headers_complete()
        self._unanswered.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        """Data of a body was parsed."""
        self._num_parsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come wholly."""
        self._is_in_head, self._num_parsed, self._num_headers = True, 0, 0
        self._all.stop_waiting(self)
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed."""
        if self._num_headers > self._all.limits.headers:
            self._refuse(431, f"the request has more than {self._all.limits.headers} headers")
        elif self._has_other_coding:
            self._refuse(501, "of transfer encodings this server knows chunked alone")
        else:
            self._refuse(400, "this is no request of HTTP")

    def _head_is_late(self) -> None:
        if self._num_parsed:
            self._refuse(408, f"the headers did not come within {self._all.limits.head_seconds:g} seconds")
        else:
            self.drop()

    def _refuse(self, status: int, text: str) -> None:
        """Say why the request is refused, unless another one is being answered, and drop what its client still
        sends."""
        self._is_refused = True
        if self._is_answering:
            return self.drop()
        body = f'{{"error":{{"message":"{text}","type":"invalid_request_error","code":null,"param":null}}}}'.encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._await(LINGER_SECONDS, self.drop)

    def _await(self, seconds: float, function: Callable[[], None]) -> None:
        """Wait for the client to send something; the function is called when its time is over."""
        self._await_no_more()
        self._reading = self.loop.call_later(seconds, function)

    def _await_no_more(self) -> None:
        _cancel(self._reading)
        self._reading = None

    # What is sent to the client

    def on_response_complete(self) -> None:
        """A response was sent."""
        self._unanswered.popleft()
        super().on_response_complete()
        if self.transport.is_closing():  # which it does when all was taken
            self._await_taking()
        elif self._is_answering:
            return
        elif self._is_in_head:
            self._all.without_head[self] = None
        else:  # and its request has not come wholly
            self._await(LINGER_SECONDS, self.drop)

    def pause_writing(self) -> None:
        """Wait for the client to take something."""
        super().pause_writing()
        self._await_taking()

    def _await_taking(self) -> None:
        _cancel(self._sending)
        self._sending = self.loop.call_later(self._all.limits.send_seconds, self.drop)

    def resume_writing(self) -> None:
        """The client takes what is sent."""
        _cancel(self._sending)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """The next request did not come."""
        self.drop()


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
