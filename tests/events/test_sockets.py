"""A feed over a socket: what a follower knows is what the cache has, whatever is lost, late or doubled."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

zmq = pytest.importorskip("zmq.asyncio", reason="the extra 'events' is not installed")
pytest.importorskip("msgspec", reason="the extra 'events' is not installed")

from zmq.constants import SocketType  # noqa: E402

from hybrid import ArgumentError  # noqa: E402
from hybrid.events import Change, Feed  # noqa: E402
from hybrid.events.sockets import Follower, Publisher, new_address  # noqa: E402
from hybrid.events.wire import (  # noqa: E402
    Message,
    Question,
    WireError,
    decode,
    decode_question,
    encode,
    encode_question,
)
from hybrid.fleet import Index  # noqa: E402
from support.prefixes import PAGE, checkpoint, names_of, pages  # noqa: E402

PATH = names_of(*range(40))


class Cache:
    """A cache of one path, which grows and shrinks, with a feed."""

    def __init__(self, limit: int = 1000) -> None:
        self.depth = 0
        self.feed = Feed(lambda: iter([pages(PATH[: self.depth])] if self.depth else []), lambda feed: None, limit)

    def set(self, depth: int) -> None:
        if depth != self.depth:
            born = depth > self.depth
            low, high = sorted((depth, self.depth))
            self.feed.add(Change(born, "pages", b"".join(PATH[low:high]), high * PAGE))
            self.depth = depth

    async def snapshot(self) -> object:
        return self.feed.snapshot()


class Reader:
    """An index that follows one cache."""

    def __init__(self) -> None:
        self.index = Index(PAGE)
        self.messages: list[Message] = []

    def apply(self, message: Message) -> None:
        self.messages.append(message)
        if message.is_snapshot:
            self.index.forget(0)
        self.index.apply(0, message.changes)

    @property
    def depth(self) -> int:
        return int(self.index.find(PATH).pages[0]) // PAGE


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def followed(address: str, key: str | None = None) -> None:
    cache, reader = Cache(), Reader()
    cache.set(7)
    publisher = Publisher(cache.feed, cache.snapshot, address, key)
    follower = Follower(publisher.address, key, reader.apply)
    try:
        await until(lambda: reader.depth == 7)
        for depth in (9, 30, 2, 3, 40, 0, 5):
            cache.set(depth)
            await until(lambda depth=depth: reader.depth == depth)
        assert reader.messages[0].is_snapshot and not any(message.is_snapshot for message in reader.messages[1:])
        assert follower.num_gaps == follower.num_refused == 0
    finally:
        await follower.close()
        await publisher.close()


def test_a_follower_gets_a_snapshot_and_then_what_changes(tmp_path: Path) -> None:
    asyncio.run(followed(new_address(str(tmp_path))))


def test_a_port_needs_a_key_and_with_it_serves_those_who_have_it() -> None:
    with pytest.raises(ArgumentError, match="needs a key"):
        Publisher(Cache().feed, Cache().snapshot, "tcp://127.0.0.1:*")
    with pytest.raises(ArgumentError, match="16 characters"):
        Follower("tcp://127.0.0.1:1", "short", print)
    asyncio.run(followed("tcp://127.0.0.1:*", "a key that both of them have"))


def test_who_has_another_key_hears_nothing() -> None:
    async def main() -> None:
        cache, right, wrong = Cache(), Reader(), Reader()
        cache.set(7)
        publisher = Publisher(cache.feed, cache.snapshot, "tcp://127.0.0.1:*", "a key that both of them have")
        spy = Follower(publisher.address, "a key that is another one", wrong.apply)
        follower = Follower(publisher.address, "a key that both of them have", right.apply)
        await until(lambda: right.depth == 7)
        await asyncio.sleep(0.3)
        assert wrong.messages == []
        for each in (spy, follower, publisher):
            await each.close()

    asyncio.run(main())


def test_what_is_lost_doubled_late_or_nonsense_is_made_good(tmp_path: Path) -> None:
    async def main() -> None:
        cache, reader = Cache(), Reader()
        cache.set(7)
        publisher = Publisher(cache.feed, cache.snapshot, new_address(str(tmp_path)))
        follower = Follower(publisher.address, None, reader.apply)
        await until(lambda: reader.depth == 7)
        feed_id, number = cache.feed.feed_id, cache.feed.number
        late = encode(Message(feed_id, number, False, [pages(PATH[:7])]))
        assert follower.take(late)  # doubled: it changes nothing
        assert len(reader.messages) == 1
        assert not follower.take(encode(Message(feed_id, number + 3, False, [checkpoint(PATH[:3])])))  # two are lost
        assert not follower.take(encode(Message("another feed", 5, False, [checkpoint(PATH[:3])])))
        assert not follower.take(b"nonsense")
        assert (reader.depth, len(reader.messages), follower.num_gaps, follower.num_refused) == (7, 1, 2, 1)
        cache.feed.on_change = None  # what changes now is not sent; the number that comes each second shows it
        cache.set(12)
        await until(lambda: reader.depth == 12)
        await follower.close()
        await publisher.close()

    asyncio.run(main())


def test_a_follower_that_is_too_far_behind_and_one_of_a_cache_that_began_anew_get_snapshots(tmp_path: Path) -> None:
    async def main() -> None:
        cache, reader = Cache(limit=2), Reader()
        address = new_address(str(tmp_path))
        publisher = Publisher(cache.feed, cache.snapshot, address)
        follower = Follower(address, None, reader.apply)
        await until(lambda: bool(reader.messages))
        await publisher.close()
        for depth in range(1, 20):
            cache.set(depth)
        publisher = Publisher(cache.feed, cache.snapshot, address)
        await until(lambda: reader.depth == 19)
        assert reader.messages[-1].is_snapshot
        await publisher.close()
        other = Cache()
        other.set(3)
        publisher = Publisher(other.feed, other.snapshot, address)
        await until(lambda: reader.depth == 3)
        await follower.close()
        await publisher.close()

    asyncio.run(main())


NO_MESSAGES = [
    b"",
    b"\xff",
    encode(Message("a", 1, True, []))[:-1],
    b"\x95\x02\xa1a\x01\xc3\x90",
    b"\x95\x01\xa1a\xff\xc3\x90",
    b"\x95\x01\xa1\xff\x00\xc2\x90",  # a text that is not UTF-8
    b"\x93\x01\xa1\xff\x00",
    b"\x91" * 5000,
]


def test_bytes_that_are_no_message_end_nothing(tmp_path: Path) -> None:
    """A publisher answers the next question, and a follower hears the next answer; both count."""

    async def main() -> None:
        cache, reader = Cache(), Reader()
        cache.set(7)
        publisher = Publisher(cache.feed, cache.snapshot, new_address(str(tmp_path)))
        context = zmq.Context()
        asking, lying = context.socket(SocketType.DEALER), context.socket(SocketType.ROUTER)
        asking.connect(publisher.address)
        rng = random.Random(1)
        good = encode_question(Question("", 0))
        changed = [bytes(byte ^ (rng.random() < 0.3) * rng.randrange(256) for byte in good) for _ in range(300)]
        for content in [*changed, *NO_MESSAGES]:  # the last is so long that the connection ends
            await asking.send_multipart([content])
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(publisher.address.removeprefix("ipc://"))
            raw.sendall(rng.randbytes(5000))
        follower = Follower(publisher.address, None, reader.apply)
        await until(lambda: reader.depth == 7 and publisher.num_refused > 100)
        await follower.close()

        lying.bind(address := new_address(str(tmp_path)))
        follower = Follower(address, None, reader.apply)
        who, _ = await lying.recv_multipart()
        good = encode(Message("feed", 9, True, [pages(PATH[:3]), checkpoint(PATH[:3])]))
        changed = [bytes(byte ^ (rng.random() < 0.1) * rng.randrange(256) for byte in good) for _ in range(300)]
        for content in [*NO_MESSAGES, *changed, b"", good]:
            await lying.send_multipart([who, content])
        await until(lambda: reader.depth == 3)
        assert follower.num_refused > 100
        for socket_ in (asking, lying):
            socket_.close(0)
        for each in (follower, publisher):
            await each.close()
        context.term()

    asyncio.run(main())


@pytest.mark.parametrize("content", NO_MESSAGES)
def test_bytes_that_are_no_message_are_refused(content: bytes) -> None:
    with pytest.raises(WireError):
        decode(content)
    with pytest.raises(WireError):
        decode_question(content)


def test_messages_come_back_as_they_were_without_token_ids() -> None:
    change = Change(True, "checkpoint", b"n" * 16, 64, "host", 100, 0.5, b"p" * 16, b"ids!")
    message = Message("feed", 3, False, [change, Change(False, "everything", b"", 0)])
    back = decode(encode(message))
    assert back.changes[0] == change._replace(parent=b"", ids=b"")
    assert (back.feed_id, back.number, back.is_snapshot, back.changes[1]) == ("feed", 3, False, message.changes[1])
    assert b"ids!" not in encode(message)
    assert Question("", 0).number == 0
