"""The batches of a vLLM over its sockets as a feed: lost ones, doubled ones, and those that make no sense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec", reason="the extra 'events' is not installed")
zmq = pytest.importorskip("zmq.asyncio", reason="the extra 'events' is not installed")

from zmq.constants import SocketType  # noqa: E402

from hybrid.events.vllm_feed import VllmFeed  # noqa: E402
from hybrid.key import Key, names_of  # noqa: E402

PAGE = 4
IDS = [*range(100, 100 + 8 * PAGE)]
NAMES = names_of(Key.of(IDS).ids, "", PAGE * 4)


class Source:
    """The sockets of a vLLM: what it sends, and what it remembers."""

    def __init__(self, folder: Path) -> None:
        self.endpoints = [f"ipc://{folder}/events", f"ipc://{folder}/replay"]
        self.context = zmq.Context()
        self.events, self.replay = self.context.socket(SocketType.PUB), self.context.socket(SocketType.ROUTER)
        for socket, address in zip((self.events, self.replay), self.endpoints, strict=True):
            socket.bind(address)
        self.batches: list[bytes] = []
        self.first = 0  # that is remembered
        self.task = asyncio.create_task(self.answer())

    async def answer(self) -> None:
        while True:
            who, empty, start = await self.replay.recv_multipart()
            for number in range(max(self.first, int.from_bytes(start, "big")), len(self.batches)):
                await self.replay.send_multipart([who, empty, b"", number.to_bytes(8, "big"), self.batches[number]])
            await self.replay.send_multipart([who, empty, b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def add(self, content: bytes, *, is_sent: bool = True) -> None:
        self.batches.append(content)
        if is_sent:
            await self.send(len(self.batches) - 1)

    async def send(self, number: int) -> None:
        await self.events.send_multipart([b"", number.to_bytes(8, "big"), self.batches[number]])

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.events.close(0)
        self.replay.close(0)
        self.context.term()


def page(at: int) -> bytes:
    """The batch with the birth of one page."""
    event = {"type": "BlockStored", "block_hashes": [at], "parent_block_hash": at - 1 if at else None}
    event |= {"token_ids": IDS[at * PAGE : (at + 1) * PAGE], "block_size": PAGE, "medium": "GPU", "group_idx": 0}
    content: bytes = msgspec.msgpack.encode([1.0, [event], 0])
    return content


def there(follower: VllmFeed) -> list[bytes]:
    """The names of pages by the changes of the feed, which are those of its snapshot."""
    found: dict[bytes, None] = {}
    for change in follower.feed.since(0) or ():
        if change.kind == "everything":
            found.clear()
        found.update(dict.fromkeys(change.each_name))
    assert {*found} == {change.names for change in follower.feed.snapshot().changes}
    return [*found]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


def run(folder: Path, life: Callable[[Source, VllmFeed], Any]) -> None:
    async def main() -> None:
        source = Source(folder)
        await source.add(page(0), is_sent=False)  # before anyone listened
        follower = VllmFeed(*source.endpoints)
        await until(lambda: there(follower) == NAMES[:1])
        await life(source, follower)
        await follower.close()
        await source.close()

    asyncio.run(main())


def test_batches_that_were_sent_before_lost_or_doubled_are_made_good(tmp_path: Path) -> None:
    async def life(source: Source, follower: VllmFeed) -> None:
        await source.add(page(1), is_sent=False)  # lost
        await source.add(page(2))
        await until(lambda: there(follower) == NAMES[:3])
        await source.send(1)
        await source.send(2)
        await source.add(page(3), is_sent=False)  # the last one is lost, and none comes after it
        await until(lambda: there(follower) == NAMES[:4])
        assert follower.num_lost == 0
        assert not any(change.ids for change in follower.feed.since(0) or ())

    run(tmp_path, life)


def test_messages_that_are_no_batches_end_nothing(tmp_path: Path) -> None:
    async def life(source: Source, follower: VllmFeed) -> None:
        rng = Random(1)
        for content in ([b"x"], [b""], [b"", b"", b""], [b"", b"\xff" * 8, b""], [b"", b"\xff" * 900, b"x"]):
            await source.events.send_multipart(content)
        await until(lambda: follower.num_refused == 5)
        for number in range(1, 60):
            content = page(number % 8)
            changed = bytes(byte ^ (rng.random() < 0.1) * rng.randrange(256) for byte in content)
            await source.add(changed if number % 3 else rng.choice([b"\x91" * 5000, b"\x92\x01\x91\xc0", b"\x01", b""]))
        await source.add(b"nonsense")
        await source.add(page(0))
        await until(lambda: there(follower) == NAMES[:1] and follower.num_lost > 10)

    run(tmp_path, life)


def test_what_vllm_does_not_remember_or_makes_no_sense_has_all_forgotten(tmp_path: Path) -> None:
    async def life(source: Source, follower: VllmFeed) -> None:
        await source.add(page(1), is_sent=False)
        source.first = 2  # too long ago
        await source.add(page(0))
        await until(lambda: follower.num_lost == 1 and there(follower) == NAMES[:1])
        await source.add(b"nonsense")
        await until(lambda: follower.num_lost == 2 and there(follower) == [])
        await source.add(page(0))
        await until(lambda: there(follower) == NAMES[:1])

    run(tmp_path, life)
