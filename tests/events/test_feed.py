"""A feed has what the tree has, at every moment."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from hybrid import ArgumentError, CacheConfig, CacheMemory, HybridCache, Key, OwnershipError
from hybrid.events import Change, Feed
from hybrid.events.change import DISK, EVERYTHING, HOST
from hybrid.key import names_of
from hybrid.tree.node import Kind
from support.caches import Contents

PAGE = 4


def cache_of(num_pages: int = 64, num_states: int = 12) -> HybridCache:
    return HybridCache(CacheMemory.of_indices(num_pages, num_states), CacheConfig(page_size=PAGE, chunk_size=PAGE))


def serve(cache: HybridCache, ids: list[int], namespace: str = "") -> None:
    """A prompt that is computed, and cached with a checkpoint at its last page."""
    key, whole = Key.of(ids, namespace), len(ids) // PAGE * PAGE
    lease = cache.open(key, len(ids) - 1, len(ids))
    if lease is None:
        return
    if whole > lease.num_hit_tokens:
        cache.capture(lease, whole, Kind.PROMPT_END)
    cache.advance(lease, len(ids))
    cache.commit(lease, key, whole)
    cache.close(lease)


class Mirror:
    """What a reader of changes knows."""

    def __init__(self) -> None:
        self.there: dict[tuple[str, bytes], int] = {}

    def apply(self, changes: list[Change]) -> None:
        for change in changes:
            if change.kind == EVERYTHING:
                self.there.clear()
            step = PAGE if change.kind == "pages" else 0
            names = change.each_name
            for at, name in enumerate(names):
                if change.born:
                    self.there[change.kind, name] = change.num_tokens - (len(names) - 1 - at) * step
                else:
                    del self.there[change.kind, name]


def whole(feed: Feed) -> dict[tuple[str, bytes], int]:
    mirror = Mirror()
    mirror.apply(feed.snapshot().changes)
    return mirror.there


def test_changes_on_top_of_a_snapshot_are_what_the_tree_has_through_random_lives() -> None:
    rng = random.Random(41)
    cache = cache_of()
    paths: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8]]
    for _ in range(20):
        serve(cache, paths[0] + [rng.randrange(3) for _ in range(9)])
    feed, mirror = cache.subscribe(), Mirror()
    start = feed.snapshot()
    mirror.apply(start.changes)
    number, born, died = start.number, 0, 0
    for step in range(400):
        base = rng.choice(paths)
        ids = base[: rng.randrange(len(base) + 1)] + [rng.randrange(4) for _ in range(rng.randrange(1, 24))]
        paths = [*paths[-20:], ids]
        serve(cache, ids, rng.choice(["", "ann"]))
        if step == 200:
            cache.clear()
        if step == 300:
            cache.reset()
        changes = feed.since(number)
        assert changes is not None
        number += len(changes)
        born += sum(change.born for change in changes)
        died += sum(not change.born for change in changes)
        mirror.apply(changes)
        assert mirror.there == whole(feed)
    assert number == feed.number
    assert born > 200 and died > 200  # memory was short: much came, and much went


def test_a_change_has_the_digest_of_namespace_and_tokens_and_what_a_reader_needs() -> None:
    cache = cache_of()
    feed = cache.subscribe(with_values=True)
    serve(cache, [*range(13)], "ann")
    names = names_of(Key.of([*range(12)]).ids, "ann", PAGE * 4)
    pages, checkpoint = feed.since(0) or ()
    assert (pages.born, pages.kind, pages.each_name, pages.num_tokens) == (True, "pages", names, 12)
    assert pages.ids == Key.of([*range(12)]).ids
    assert (checkpoint.kind, checkpoint.each_name, checkpoint.num_tokens) == ("checkpoint", names[-1:], 12)
    assert isinstance(checkpoint.value, float)
    serve(cache, [*range(12), 7, 7, 7, 7, 7], "ann")
    further = (feed.since(2) or [])[0]
    assert further.parent == names[-1]
    assert further.num_tokens == 16


def test_copies_in_host_memory_come_and_go_by_their_names() -> None:
    rng = random.Random(5)
    memory = CacheMemory.of_bytes(2000, 16, 64, mover=Contents())
    cache = HybridCache(memory, CacheConfig(page_size=PAGE, chunk_size=PAGE, host=2000, eviction="lru"))
    cache.note_pass(10, 1.0)  # computing is slow: copies are worth it
    paths = [[rng.randrange(9) for _ in range(4 * PAGE + 1)] for _ in range(40)]
    feed = cache.subscribe()
    there: set[bytes] = set()
    number = 0
    came = went = 0
    assert cache.tiers is not None and cache.tiers.host is not None
    for step in range(300):
        serve(cache, rng.choice(paths))
        if step == 200:
            cache.clear()
        changes = feed.since(number)
        assert changes is not None
        number += len(changes)
        for change in changes:
            if change.tier != HOST:
                continue
            assert change.kind == "checkpoint" and change.num_tokens == 4 * PAGE
            (there.add if change.born else there.remove)(change.names)
            came, went = came + change.born, went + (not change.born)
        held = {name for kind, name in cache.tiers.host.names() if kind == "checkpoint"}
        assert there == held == {one.names for one in feed.snapshot().changes if one.tier == HOST}
    assert came > 30 and went > 30
    feed.close()
    assert cache.tiers.host.on_change is None


def disk_cache(path: Path, size: int, host: int | None = None) -> HybridCache:
    config = CacheConfig(page_size=PAGE, chunk_size=PAGE, host=host, disk=size, directory=path, eviction="lru")
    cache = HybridCache(CacheMemory.of_bytes(2000, 16, 64, mover=Contents()), config, model="random numbers")
    cache.note_pass(10, 1.0)  # computing is slow: copies are worth it
    return cache


def on_disk(cache: HybridCache) -> set[bytes]:
    """Names of the checkpoints that the disk of a cache has."""
    assert cache.tiers is not None and cache.tiers.disk is not None
    return {name for name, _, _ in cache.tiers.disk.checkpoints() if ("checkpoint", name) in cache.tiers.disk}


@pytest.mark.parametrize("host", [None, 300])
def test_copies_on_disk_come_and_go_by_their_names_as_those_of_host_memory_do(tmp_path: Path, host: int | None) -> None:
    rng = random.Random(6)
    cache = disk_cache(tmp_path, 60_000, host)
    assert cache.tiers is not None and cache.tiers.disk is not None
    paths = [[rng.randrange(9) for _ in range(4 * PAGE + 1)] for _ in range(60)]
    feed, tiers = cache.subscribe(), set()
    there: dict[bytes, int] = {}
    number = came = went = 0
    for step in range(400):
        serve(cache, rng.choice(paths))
        if step == 300:
            cache.clear()
        if step == 350:
            cache.reset()
        if step % 10:
            continue
        cache.tiers.disk.flush()  # what the writer's thread drops is told by it
        changes = feed.since(number)
        assert changes is not None
        number += len(changes)
        for change in changes:
            tiers.add(change.tier)
            if change.kind == EVERYTHING:
                there.clear()
            if change.tier != DISK:
                continue
            assert change.kind == "checkpoint" and change.num_tokens == 4 * PAGE
            if change.born:
                assert change.names not in there
                there[change.names] = change.num_bytes
            else:
                del there[change.names]
            came, went = came + change.born, went + (not change.born)
        assert there.keys() == on_disk(cache)
        assert there == {one.names: one.num_bytes for one in feed.snapshot().changes if one.tier == DISK}
    assert came > 30 and went > 30
    assert tiers == {"device", DISK} | ({HOST} if host else set())
    feed.close()
    assert cache.tiers.disk.on_change is None
    cache.tiers.disk.close()


def test_what_another_process_writes_to_the_disk_is_born_here_and_what_is_dropped_dies(tmp_path: Path) -> None:
    cache, other = disk_cache(tmp_path, 1 << 20), disk_cache(tmp_path, 1 << 20)
    assert cache.tiers is not None and cache.tiers.disk is not None
    assert other.tiers is not None and other.tiers.disk is not None
    feed = cache.subscribe()
    for at in range(40):
        serve(other, [at] * (4 * PAGE + 1))
    assert other.tiers.disk.flush()
    written = on_disk(other)
    assert len(written) > 10
    deadline = time.monotonic() + 60.0
    while on_disk(cache) != written and time.monotonic() < deadline:
        time.sleep(0.05)  # it looks every few seconds
    assert {one.names for one in feed.since(0) or () if one.tier == DISK and one.born} == written
    number = feed.number
    cache.tiers.drop([("checkpoint", name) for name in written])
    assert {one.names for one in feed.since(number) or () if one.tier == DISK and not one.born} == written
    other.tiers.disk.close()
    cache.tiers.disk.close()


def test_a_reader_that_is_too_far_behind_gets_none_and_one_that_is_up_to_date_nothing() -> None:
    cache = cache_of()
    feed = cache.subscribe(limit=4)
    for at in range(8):
        serve(cache, [at] * 9)
    assert feed.since(feed.number) == []
    assert feed.since(0) is None
    assert feed.since(feed.number + 1) is None
    assert len(feed.since(feed.number - 4) or []) == 4


def test_where_nothing_is_subscribed_the_tree_is_not_watched_and_no_page_is_named() -> None:
    cache = cache_of()
    serve(cache, [*range(13)])
    assert cache.tree.watcher is None
    assert all(not node.run.names for _, node in cache.tree.nodes())
    first, second = cache.subscribe(), cache.subscribe()
    serve(cache, [9] * 9)
    first.close()
    assert cache.tree.watcher is not None
    serve(cache, [8] * 9)
    second.close()
    assert cache.tree.watcher is None
    assert (first.number, second.number) == (2, 4)


def test_the_cache_is_told_of_once_until_its_reader_has_read() -> None:
    cache = cache_of()
    feed, told = cache.subscribe(), []
    feed.on_change = lambda: told.append(feed.number)
    serve(cache, [1] * 9)
    serve(cache, [2] * 9)
    assert told == [1]
    feed.since(0)
    serve(cache, [3] * 9)
    assert len(told) == 2


def test_a_snapshot_belongs_to_the_owner_of_the_cache_and_changes_to_any_thread() -> None:
    cache = cache_of()
    feed = cache.subscribe()
    serve(cache, [1] * 9)
    found: list[object] = []

    def other() -> None:
        found.append(len(feed.since(0) or []))
        with pytest.raises(OwnershipError):
            feed.snapshot()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [2]
    with pytest.raises(ArgumentError, match="limit"):
        cache.subscribe(limit=0)
