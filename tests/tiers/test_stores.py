"""Stores: each does the same by four verbs, and hands an archive from one engine to another."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hybrid import Engine
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError, CacheFileError
from hybrid.tiers.remote import CHUNK_BYTES, ObjectStore, RedisStore
from hybrid.tiers.store import DirectoryStore, Store
from support.engines import GRID, answer, cold, greedy, ids
from support.redis_server import redis_at

PARAMS = greedy(8, logprobs=3)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_at(tmp_path_factory.mktemp("redis")) as url:
        yield url


def in_redis(request: pytest.FixtureRequest, path: Path) -> Store:
    return RedisStore(request.getfixturevalue("redis_server"), prefix=f"{path}:")


def in_obstore_folder(request: pytest.FixtureRequest, path: Path) -> Store:
    stores = pytest.importorskip("obstore.store")
    return ObjectStore(stores.LocalStore(str(path)))


def in_obstore_memory(request: pytest.FixtureRequest, path: Path) -> Store:
    stores = pytest.importorskip("obstore.store")
    return ObjectStore(stores.MemoryStore())


def in_directory(request: pytest.FixtureRequest, path: Path) -> Store:
    return DirectoryStore(str(path))  # a path may be a text


@pytest.fixture(params=[in_directory, in_redis, in_obstore_folder, in_obstore_memory])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    make: Callable[[pytest.FixtureRequest, Path], Store] = request.param
    return make(request, tmp_path)


def get(store: Store, name: str, start: int, size: int) -> bytes:
    buffer = bytearray(size)
    store.get_into(name, start, memoryview(buffer))
    return bytes(buffer)


def test_four_verbs(store: Store) -> None:
    assert not store.contains("a.b")
    store.put_from("a.b", [b"one ", bytearray(b"two "), memoryview(b""), b"three"])
    assert store.contains("a.b")
    assert get(store, "a.b", 0, 13) == b"one two three"
    assert get(store, "a.b", 4, 3) == b"two"
    assert get(store, "a.b", 13, 0) == b""
    store.put_from("a.b", [b"other"])
    assert get(store, "a.b", 0, 5) == b"other"
    store.delete("a.b")
    store.delete("a.b")
    assert not store.contains("a.b")


def test_what_is_not_there_and_what_is_too_short_are_told_apart(store: Store) -> None:
    store.put_from("there", [b"12345"])
    for start, size in ((0, 6), (5, 1), (50, 3)):
        with pytest.raises(EOFError, match="there is cut off"):
            get(store, "there", start, size)
    with pytest.raises(FileNotFoundError):
        get(store, "elsewhere", 0, 3)
    with pytest.raises(FileNotFoundError):
        get(store, "elsewhere", 0, 0)


def test_large_contents_in_many_parts(store: Store) -> None:
    whole = Random(0).randbytes(CHUNK_BYTES + 70_000)
    cuts = sorted({0, len(whole), *(Random(1).randrange(len(whole)) for _ in range(1500))})
    store.put_from("large", [whole[a:b] for a, b in pairwise(cuts)])
    assert get(store, "large", 0, len(whole)) == whole
    assert get(store, "large", CHUNK_BYTES - 7, 20) == whole[CHUNK_BYTES - 7 : CHUNK_BYTES + 13]


@pytest.mark.parametrize("name", ["", "A", "../up", "a/b", ".hidden", "x.part", "a" * 200, "ä", 3])
def test_names_that_some_store_cannot_hold_are_refused(store: Store, name: Any) -> None:
    for call in (
        lambda: store.put_from(name, [b""]),
        lambda: store.contains(name),
        lambda: store.delete(name),
        lambda: get(store, name, 0, 1),
    ):
        with pytest.raises(ArgumentError, match="a name in a store must match"):
            call()


def test_what_fails_half_way_leaves_what_was_there(store: Store) -> None:
    store.put_from("name", [b"before"])
    with pytest.raises((TypeError, ValueError, AttributeError)):
        store.put_from("name", [b"half of it", "no bytes"])  # type: ignore[list-item]
    assert get(store, "name", 0, 6) == b"before"


def test_one_engine_saves_to_a_store_and_another_loads(store: Store, tiny: Engine) -> None:
    config = CacheConfig(page_size=GRID, chunk_size=GRID, memory="32MiB", deterministic=True)
    prompt = ids(6 * GRID + 3, seed=1)
    first, second = tiny.with_cache(config), tiny.with_cache(config)
    answer(first, prompt, PARAMS)
    saved = first.save("support.hybrid", store=store)
    loaded = second.load("support.hybrid", store=store)
    assert (loaded.checkpoints, loaded.pages) == (saved.checkpoints, saved.pages)
    warm, expected = answer(second, prompt, PARAMS), cold(tiny, prompt, PARAMS)
    assert warm.usage.cached_tokens == 6 * GRID
    assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)
    with pytest.raises(CacheFileError, match=r"nothing\.hybrid cannot be read from the store"):
        second.load("nothing.hybrid", store=store)
    with pytest.raises(ArgumentError, match="a name in a store must match"):
        second.load("../support.hybrid", store=store)


@pytest.mark.parametrize("contents", [b"", b"short", b"\xff" * 100, (2).to_bytes(8, "little") + b"[]", bytes(8)])
def test_what_is_no_archive_is_refused(tmp_path: Path, tiny: Engine, contents: bytes) -> None:
    store = DirectoryStore(tmp_path)
    store.put_from("other", [contents])
    with pytest.raises(CacheFileError, match="other"):
        tiny.load("other", store=store)


def test_a_flipped_bit_in_a_store_is_found(tmp_path: Path, tiny: Engine) -> None:
    store = DirectoryStore(tmp_path)
    engine = tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, memory="32MiB"))
    answer(engine, ids(3 * GRID, seed=2), PARAMS)
    engine.save("a", store=store)
    data = bytearray((tmp_path / "a").read_bytes())
    data[len(data) // 2] ^= 4
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CacheFileError, match="damaged"):
        engine.load("a", store=store)


def test_a_server_that_is_away_is_an_error_that_says_so(tiny: Engine) -> None:
    pytest.importorskip("redis")
    store = RedisStore("unix:///nowhere/socket", timeout=0.5)
    for call in (
        lambda: store.contains("a"),
        lambda: store.delete("a"),
        lambda: store.put_from("a", [b"b"]),
        lambda: get(store, "a", 0, 1),
    ):
        with pytest.raises(ConnectionError, match="the server failed"):
            call()
    with pytest.raises(CacheFileError, match="cannot be read from the store: the server failed"):
        tiny.load("a", store=store)
    with pytest.raises(ArgumentError, match="got 'no url'"):
        RedisStore("no url")


# What does not fit into the device


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_does_not_fit_into_the_device_goes_to_a_tier_and_is_a_hit(tiny: Engine, tmp_path: Path, tier: str) -> None:
    page_bytes, state_bytes = tiny.cache.unit_bytes
    settings: dict[str, Any] = {"page_size": GRID, "chunk_size": GRID, "deterministic": True}
    prompts = [ids(6 * GRID + 3, seed=seed) for seed in range(8)]
    first = tiny.with_cache(CacheConfig(memory="64MiB", **settings))
    for prompt in prompts:
        answer(first, prompt, PARAMS)
    data = first.dump()
    small = 30 * page_bytes + 8 * state_bytes
    alone = tiny.with_cache(CacheConfig(memory=small, **settings))
    assert sum(alone.load(data).skipped.values()) > 0
    more: dict[str, Any] = {"host": "64MiB"} if tier == "host" else {"disk": "64MiB", "directory": tmp_path / "cache"}
    with tiny.with_cache(CacheConfig(memory=small, **settings, **more)) as engine:
        loaded = engine.load(data)
        assert loaded.copies > 0
        assert not loaded.skipped
        assert "went to host memory or disk" in str(loaded)
        for prompt in prompts:
            warm, expected = answer(engine, prompt, PARAMS), cold(tiny, prompt, PARAMS)
            assert warm.usage.cached_tokens == 6 * GRID
            assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)
        assert engine.cache.stats().restored_checkpoints > 0
        engine.cache.audit()
