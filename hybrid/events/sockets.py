"""A feed over a socket, for followers in other processes.

A publisher has one socket. A follower asks for the changes after the last that it knows, gets them, or all that there
is where the feed does not remember them, and from then on what comes. Each second the publisher says the number of its
last change: a follower that lacks one, because a message was lost or was late, asks again.

A socket is a file in a directory that only its owner may enter, or a TCP port: that needs a key. Both sides derive the
same CURVE key pair from it; who does not have it gets no connection, and what is sent is encrypted.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import blake2b

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.constants import SocketOption, SocketType
from zmq.utils import z85

from hybrid.errors import ArgumentError, HybridError
from hybrid.events.feed import Feed, FeedSnapshot
from hybrid.events.wire import (
    Message,
    Question,
    WireError,
    decode,
    decode_question,
    encode,
    encode_question,
    encode_snapshot,
)

log: logging.Logger = logging.getLogger(__name__)

EVENTS_KEY = "HYBRID_EVENTS_KEY"
"""The environment variable with the key of a fleet's sockets, where they are of several machines."""

HEARTBEAT = 1.0
"""Seconds after which the publisher says its number, and a follower that has heard nothing for three of them asks."""

GATHER = 0.002
"""Seconds in which changes are gathered to one message."""

MAX_QUESTION = 1024
"""Bytes of a question; who sends more is disconnected."""

MAX_BEHIND = 4096
"""Messages that wait for a follower; more are dropped, and asked for again."""


def key_pair(key: str) -> tuple[bytes, bytes]:
    """The CURVE keys that follow from a shared key: public and secret.

    Raises:
        ArgumentError: it is too short.
    """
    if len(key) < 16:
        raise ArgumentError("events: the key must have 16 characters or more, such as secrets.token_urlsafe() gives")
    secret = z85.encode(blake2b(key.encode(), digest_size=32, person=b"hybrid events").digest())
    return zmq.curve_public(secret), secret


def check_address(address: str, key: str | None) -> None:
    """Check where a socket is to be.

    Raises:
        ArgumentError: it would be reached by other machines, and has no key.
    """
    if key is None and not address.startswith(("ipc://", "inproc://")):
        raise ArgumentError(f"events: {address} may be reached by other users and machines, which needs a key")


class Publisher:
    """Sends a feed to those who follow it. For one event loop.

    Args:
        feed: whose changes are sent.
        snapshot: takes a snapshot of the feed's cache, in the thread that owns it.
        address: "ipc://PATH", or "tcp://IP:PORT", with * as the port for any that is free.
        key: that followers have, too; None: the address is of this machine and this user.

    Raises:
        ArgumentError: a key is needed.

    Attributes:
        address: for followers.
        num_refused: questions that made no sense.
    """

    def __init__(
        self, feed: Feed, snapshot: Callable[[], Awaitable[FeedSnapshot]], address: str, key: str | None = None
    ) -> None:
        check_address(address, key)
        self._feed = feed
        self._snapshot = snapshot
        self._context = zmq.asyncio.Context()
        self._guard: AsyncioAuthenticator | None = None
        self._socket = self._context.socket(SocketType.ROUTER)
        self._socket.setsockopt(SocketOption.SNDHWM, MAX_BEHIND)
        self._socket.setsockopt(SocketOption.MAXMSGSIZE, MAX_QUESTION)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        if key is not None:
            public, secret = key_pair(key)
            self._guard = AsyncioAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback("*", credentials_provider=_Only(public))
            self._socket.curve_secretkey, self._socket.curve_publickey = secret, public
            self._socket.curve_server = True
        self._socket.bind(address)
        self.address: str = self._socket.getsockopt_string(SocketOption.LAST_ENDPOINT)
        self.num_refused: int = 0
        self._followers: dict[bytes, float] = {}  # when they asked last
        self._sent = feed.number
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        feed.on_change = self._tell
        self._tasks = [asyncio.create_task(self._answer()), asyncio.create_task(self._send())]

    def _tell(self) -> None:
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._changed.set)

    async def _answer(self) -> None:
        while True:
            identity, *contents = await self._socket.recv_multipart()
            try:
                question = decode_question(contents[0] if contents else b"")
            except WireError as error:
                self.num_refused += 1
                _say_once(self.num_refused, error)
                continue
            changes = self._feed.since(question.number) if question.feed_id == self._feed.feed_id else None
            if changes is None:
                try:
                    answer = encode_snapshot(await self._snapshot())
                except HybridError as error:
                    log.warning("a follower gets no snapshot: %s", error)
                    continue
            else:
                answer = encode(Message(self._feed.feed_id, question.number + len(changes), False, changes))
            self._followers[identity] = self._loop.time()
            await self._socket.send_multipart([identity, answer])

    async def _send(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    await self._changed.wait()
                    await asyncio.sleep(GATHER)
            self._changed.clear()
            changes = self._feed.since(self._sent)
            self._sent = self._feed.number if changes is None else self._sent + len(changes)
            message = encode(Message(self._feed.feed_id, self._sent, False, changes or ()))
            now = self._loop.time()
            self._followers = {who: at for who, at in self._followers.items() if at > now - 60 * HEARTBEAT}
            for identity in self._followers:
                await self._socket.send_multipart([identity, message])

    async def close(self) -> None:
        """End it; followers hear nothing any more. The feed stays open."""
        self._feed.on_change = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._guard is not None:
            self._guard.stop()
        self._socket.close(0)
        self._context.term()


class _Only:
    """Lets those in who have one public key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Tell whether who has this key may come in."""
        return secrets.compare_digest(key, self._public)


class Follower:
    """Follows a feed in another process. For one event loop.

    Args:
        address, key: of the publisher.
        apply: called with each message that continues what was applied before, without what was applied already; a
            snapshot replaces it all.

    Attributes:
        number: of the last change that was applied.
        num_gaps: how often something was missing, and was asked for again.
        num_refused: messages that made no sense.
    """

    def __init__(self, address: str, key: str | None, apply: Callable[[Message], None]) -> None:
        check_address(address, key)
        self.number: int = 0
        self.num_gaps: int = 0
        self.num_refused: int = 0
        self._feed_id = ""
        self._apply = apply
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(SocketType.DEALER)
        self._socket.setsockopt(SocketOption.LINGER, 0)
        if key is not None:
            public, secret = key_pair(key)
            self._socket.curve_secretkey, self._socket.curve_publickey = secret, public
            self._socket.curve_serverkey = public
        self._socket.connect(address)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._ask()
        asked = heard = asyncio.get_running_loop().time()
        while True:
            content = None
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT):
                    content = (await self._socket.recv_multipart())[-1]
            now = asyncio.get_running_loop().time()
            is_behind, soon, num_refused = False, GATHER, self.num_refused
            if content is not None:
                heard = now
                is_behind = not self.take(content)
                if self.num_refused > num_refused:  # the answer may be refused, too
                    soon = HEARTBEAT
            if (is_behind and now > asked + soon) or now > heard + 3 * HEARTBEAT or now > asked + 20 * HEARTBEAT:
                await self._ask()
                asked = heard = now

    def take(self, content: bytes) -> bool:
        """Apply a message. False: something before it is missing, or it makes no sense."""
        try:
            message = decode(content)
        except WireError as error:
            self.num_refused += 1
            _say_once(self.num_refused, error)
            return False
        if message.is_snapshot:
            if message.feed_id == self._feed_id and message.number < self.number:
                return True  # it was late
            self._apply(message)
        elif message.feed_id != self._feed_id:
            self.num_gaps += bool(self._feed_id)
            return False
        else:
            fresh = message.number - self.number
            if fresh > len(message.changes):
                self.num_gaps += 1
                return False
            if fresh <= 0:
                return True
            self._apply(message._replace(changes=message.changes[len(message.changes) - fresh :]))
        self._feed_id, self.number = message.feed_id, message.number
        return True

    def start_anew(self) -> None:
        """Ask for all that there is: what was applied may be wrong."""
        self._feed_id, self.number = "", 0
        asyncio.ensure_future(self._ask())  # noqa: RUF006 - it only sends

    async def _ask(self) -> None:
        await self._socket.send(encode_question(Question(self._feed_id, self.number)))

    async def close(self) -> None:
        """Follow no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(0)
        self._context.term()


def _say_once(number: int, error: WireError) -> None:
    """Log the first message that makes no sense; others are counted, since who sends one sends many."""
    if number == 1:
        log.warning("events that make no sense, others are counted: %s", error)


def new_address(directory: str) -> str:
    """An address of a socket file in a directory."""
    return f"ipc://{directory}/{secrets.token_hex(8)}"
