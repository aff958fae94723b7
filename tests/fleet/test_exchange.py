"""Prefixes in a store between engines: what one computed another fetches, whole or not at all."""

from __future__ import annotations

import asyncio
import random
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybrid import AsyncEngine, CacheConfig, SamplingParams
from hybrid.errors import ArgumentError
from hybrid.fleet.exchange import Exchange
from hybrid.fleet.index import Index, Stored
from hybrid.tiers.remote import ObjectStore, RedisStore, open_store
from hybrid.tiers.store import DirectoryStore, Store
from support.redis_server import redis_at

PAGE = 64
PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True)
RNG = random.Random(1)
PROMPT = [RNG.randrange(3, 1000) for _ in range(900)]
OTHER = [RNG.randrange(3, 1000) for _ in range(300)]


class Replica:
    """An engine, its exchange, and what an index learns of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def __aenter__(self) -> Replica:
        self.engine = AsyncEngine.from_pretrained("tiny", cache=CacheConfig(memory="16MiB"))
        self.feed = await self.engine.call(lambda own: own.cache.subscribe())
        self.exchange = Exchange(self.engine, DirectoryStore(self.folder), self.feed, PAGE)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.exchange.close()
        await self.engine.close()

    async def ask(self, prompt: list[int], stored: Stored | None) -> tuple[list[int], int]:
        """The answer's tokens, and the tokens that were not computed: as a replica of a fleet runs it."""
        if stored is not None:
            stored = await self.exchange.fetch(prompt, None, "", stored)
        output = [one async for one in await self.engine.submit(prompt, PARAMS)][-1]
        self.exchange.keep(prompt, None, "", stored)
        await self.exchange.close()
        return [*output.token_ids], output.usage.cached_tokens

    def index(self) -> Index:
        index = Index(PAGE)
        index.apply(0, self.feed.since(0) or ())
        return index


def names(prompt: list[int]) -> list[bytes]:
    from hybrid.key import Key, names_of

    return names_of(Key.of(prompt).ids, "", PAGE * 4)


def test_what_one_engine_computed_another_fetches_and_long_continuations_are_stored_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with Replica(tmp_path) as one, Replica(tmp_path) as other:
            answer, hit = await one.ask(PROMPT, None)
            assert hit == 0
            stored = one.index().deepest_stored(names(PROMPT))
            assert stored is not None and stored.num_tokens == 896 and stored.num_bytes > 0
            assert stored.name == names(PROMPT)[13]
            assert [change.names for change in one.exchange.births()] == [stored.name]
            assert await other.ask(PROMPT, stored) == (answer, 896)
            assert (other.exchange.num_fetched, other.exchange.num_stored) == (1, 0)
            await other.ask([*PROMPT, 5], stored)  # it is on the device
            assert other.exchange.num_fetched == 1
            longer = PROMPT + [RNG.randrange(3, 1000) for _ in range(100)]
            await one.ask(longer, stored)  # less than half as long again
            assert one.exchange.num_stored == 1
            longest = longer + [RNG.randrange(3, 1000) for _ in range(500)]
            await one.ask(longest, stored)
            assert one.exchange.num_stored == 2
            found = one.index().deepest_stored(names(longest))
            assert found is not None and found.num_tokens > 1400
            # The replica that stored them may be gone: they are there.
            index = one.index()
            index.forget(0)
            assert index.deepest_stored(names(PROMPT)) == stored

    asyncio.run(main())


def test_what_is_damaged_or_gone_is_computed_and_said_to_be_gone(tmp_path: Path) -> None:
    async def main() -> None:
        async with Replica(tmp_path) as one, Replica(tmp_path) as other:
            answer, _ = await one.ask(PROMPT, None)
            stored = one.index().deepest_stored(names(PROMPT))
            assert stored is not None
            file = tmp_path / stored.name.hex()
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            assert await other.ask(PROMPT, stored) == (answer, 0)
            assert other.exchange.num_failed == 1 and other.exchange.num_fetched == 0
            gone = [change for change in other.feed.since(0) or () if change.tier == "store"]
            assert [change.born for change in gone] == [False, True]  # it has stored its own
            assert stored.name.hex() == file.name and file.read_bytes() != content

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["redis", "obstore", "no server"])
def test_whatever_a_store_has_under_a_name_the_prompt_is_answered(kind: str, tmp_path: Path) -> None:
    """Contents that are cut, of another prefix, or of another type; and a server that is none."""

    async def main(store: Store) -> None:
        async with Replica(tmp_path) as own:
            answer, _ = await own.ask(PROMPT, None)
            await own.ask(OTHER, None)
            right, other = (own.index().deepest_stored(names(prompt)) for prompt in (PROMPT, OTHER))
            assert right is not None and other is not None
            whole = (tmp_path / right.name.hex()).read_bytes()
            others = (tmp_path / other.name.hex()).read_bytes()
            wrong = [b"\0" * 100, whole[:-1], others, None] if kind != "no server" else [None]
            own.exchange = Exchange(own.engine, store, own.feed, PAGE)
            for number, content in enumerate(wrong, 1):
                name = right.name.hex()
                if content is not None:
                    store.put_from(name, [content])
                elif kind == "redis":
                    make_list(store, name)
                elif kind == "obstore":
                    store.delete(name)
                await own.engine.call(lambda engine: engine.cache.clear())
                assert await own.ask(PROMPT, right) == (answer, 0)
                assert own.exchange.num_failed == number
            if kind != "no server":
                store.put_from(name, [whole])
                await own.engine.call(lambda engine: engine.cache.clear())
                assert await own.ask(PROMPT, right) == (answer, 896)

    def make_list(store: Store, name: str) -> None:
        import redis

        store.delete(name)
        redis.Redis.from_url(url).rpush(f"hybrid:{name}", b"a", b"b")

    if kind == "obstore":
        stores = pytest.importorskip("obstore.store")
        asyncio.run(main(ObjectStore(stores.MemoryStore())))
    elif kind == "redis":
        with redis_at(tmp_path) as url:
            asyncio.run(main(RedisStore(url)))
    else:
        pytest.importorskip("redis")
        with nonsense_at(tmp_path / "nonsense") as url:
            asyncio.run(main(RedisStore(url, timeout=1.0)))


@contextmanager
def nonsense_at(path: Path) -> Iterator[str]:
    """A server that answers each call with something else than Redis would."""
    rng = random.Random(1)

    class Nonsense(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            if self.request.recv(1000):
                self.request.sendall(
                    rng.choice([b"$abc\r\n", b"*-5\r\n", b"\xff" * 100, b"+OK\r\n" * 3, b":x\r\n", b""])
                )

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    with Server(str(path), Nonsense) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"unix://{path}"
        server.shutdown()


def test_a_fetch_that_takes_longer_than_computing_is_not_made(tmp_path: Path) -> None:
    async def main() -> None:
        async with Replica(tmp_path) as one, Replica(tmp_path) as other:
            answer, _ = await one.ask(PROMPT, None)
            stored = one.index().deepest_stored(names(PROMPT))
            assert stored is not None
            for _ in range(40):
                other.exchange.fetching.note(stored.num_bytes, 60.0)
            assert await other.ask(PROMPT, stored) == (answer, 0)
            assert (other.exchange.num_fetched, other.exchange.num_failed) == (0, 0)

    asyncio.run(main())


def test_stores_are_opened_by_urls(tmp_path: Path) -> None:
    for url in (str(tmp_path / "a"), f"file://{tmp_path}/b"):
        store = open_store(url)
        assert isinstance(store, DirectoryStore)
        store.put_from("name", [b"content"])
        assert store.contains("name")
    pytest.importorskip("redis")
    assert isinstance(open_store("redis://localhost:1/0"), RedisStore)
    pytest.importorskip("obstore")
    with pytest.raises(ArgumentError, match="is no store"):
        open_store("nothing://there")
    assert not open_store("memory:///").contains("name")
