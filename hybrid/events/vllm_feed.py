"""The KV events of a vLLM on this machine as a feed of ours, which followers of other machines can have safely."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import zmq
import zmq.asyncio
from zmq.constants import SocketOption, SocketType

from hybrid.events.feed import Feed
from hybrid.events.vllm import VllmReader
from hybrid.events.wire import WireError

log: logging.Logger = logging.getLogger(__name__)

QUIET = 1.0
"""Seconds without a batch after which vLLM is asked whether one was missed."""

NUMBER_BYTES = 8

PATIENCE = 5.0
"""Seconds in which it is to answer."""


class VllmFeed:
    """Reads vLLM's batches and numbers their changes as those of a cache. For one event loop.

    Batches are numbered. One that is missing is asked for; where vLLM does not remember it any more, all that was known
    is forgotten, so that less is promised than is there.

    Args:
        endpoint, replay_endpoint: of vLLM's `kv_events_config`, such as "ipc://PATH".

    Attributes:
        feed: of the changes.
        num_lost: how often batches were lost for good.
        num_refused: messages that are no batches.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._reader = VllmReader()
        self.feed = Feed(self._reader.everything, lambda feed: None)
        self.num_lost: int = 0
        self.num_refused: int = 0
        self._next = 0  # the number of the batch that is to come
        self._context = zmq.asyncio.Context()
        self._batches, self._replay = self._context.socket(SocketType.SUB), self._context.socket(SocketType.DEALER)
        for socket, address in ((self._batches, endpoint), (self._replay, replay_endpoint)):
            socket.setsockopt(SocketOption.LINGER, 0)
            socket.connect(address)
        self._batches.setsockopt(SocketOption.SUBSCRIBE, b"")
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._catch_up()
        while True:
            content: list[bytes] | None = None
            with suppress(TimeoutError):
                async with asyncio.timeout(QUIET):
                    content = await self._batches.recv_multipart()
            if content is None:
                await self._catch_up()
                continue
            number = _number(content)
            if number is None or number < 0:
                self.num_refused += 1
                continue
            if number > self._next:
                await self._catch_up()
            self._take(number, content[-1])

    async def _catch_up(self) -> None:
        """Ask for the batches from the next one on, and read what vLLM remembers of them."""
        await self._replay.send_multipart([b"", self._next.to_bytes(8, "big")])
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                while True:
                    content = await self._replay.recv_multipart()
                    number = _number(content)
                    if number is None:
                        self.num_refused += 1
                        continue
                    if number < 0:
                        return
                    self._take(number, content[-1])

    def _take(self, number: int, content: bytes) -> None:
        """Read a batch; one that was read already is passed over."""
        if number < self._next:
            return
        try:
            if number > self._next:
                raise WireError(f"batches {self._next} to {number - 1} are lost")
            changes = self._reader.read(content)
        except WireError as error:
            log.warning("vLLM's events: %s; what is known is forgotten", error)
            self.num_lost += 1
            changes = self._reader.clear()
            if number > self._next:
                with suppress(WireError):
                    changes = changes + self._reader.read(content)
        self._next = number + 1
        for change in changes:
            self.feed.add(change._replace(ids=b""))

    async def close(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._batches.close(0)
        self._replay.close(0)
        self._context.term()


def _number(content: list[bytes]) -> int | None:
    """The number of a batch, -1 at the end of those that were asked for; None: the message is none."""
    if len(content) < 2 or len(content[-2]) != NUMBER_BYTES:
        return None
    return int.from_bytes(content[-2], "big", signed=True)
