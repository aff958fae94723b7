"""The disk behind the cache: what was evicted comes back, also to a later process, whole or not at all."""

from pathlib import Path
from typing import Any

import pytest

from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import make_cache
from hybrid.errors import ArgumentError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from support.caches import AuditedCache, Contents, Memory, RandomWorkload, compute, contents_of, evict, key_of, release

PAGE_BYTES, STATE_BYTES = 64, 128


def cache_on(
    path: Path, contents: Contents | None = None, num_pages: int = 12, model: str = "m", **config: Any
) -> AuditedCache:
    """A cache of few pages and states, with contents that a test can name, and a directory."""
    memory = CacheMemory.of_bytes(num_pages * PAGE_BYTES, PAGE_BYTES, STATE_BYTES, mover=contents or Contents())
    settings = {"page_size": 2, "chunk_size": 2, "eviction": "lru", "disk": "1MiB", "directory": path, **config}
    cache = AuditedCache(memory, CacheConfig(**settings), model=model)
    cache.note_pass(1, 1.0)  # what takes a second a token is worth a restore
    return cache


def next_life(cache: AuditedCache, path: Path, **config: Any) -> AuditedCache:
    """Another process, whose contents have the same names."""
    cache.shutdown()
    contents = Contents()
    contents.seen += contents_of(cache).seen
    return cache_on(path, contents, **config)


def flush(cache: AuditedCache) -> None:
    assert cache.tiers is not None and cache.tiers.disk is not None
    assert cache.tiers.disk.flush()


def ask(cache: AuditedCache, key: Key) -> str:
    lease = cache.open(key, len(key) - 1, len(key))
    assert lease is not None
    Memory(cache).check()
    text = str(lease.explanation)
    cache.close(lease)
    return text


@pytest.mark.parametrize("host", [None, 300, 100_000])
def test_what_was_evicted_is_a_hit_also_in_the_next_life(tmp_path: Path, host: int | None) -> None:
    cache = cache_on(tmp_path, host=host)
    keys = [compute(cache, text) for text in ("abcd", "xyz", "abce")]
    evict(cache)
    flush(cache)
    assert all("tokens restored from" in ask(cache, key) for key in keys)
    cache = next_life(cache, tmp_path, host=host)
    for key in keys:
        text = ask(cache, key)
        assert "tokens restored from disk" in text or "tokens restored from host memory and disk" in text
        evict(cache)
    stats = cache.stats()
    assert stats.restored_checkpoints == 3
    assert stats.disk_bytes_written == 0, "what is on disk is not written again"
    assert (stats.disk_failure, stats.disk_report, stats.tier_failures) == (None, "", 0)
    cache.shutdown()


def test_what_host_memory_drops_goes_to_disk_and_a_hit_may_need_both(tmp_path: Path) -> None:
    cache = cache_on(tmp_path, host=130, num_pages=30)  # of one checkpoint, or two pages
    keys = [compute(cache, text) for text in ("abcd", "efgh", "ijkl")]
    evict(cache)
    stats = cache.stats()
    assert stats.host_pages + stats.host_checkpoints > 0
    assert stats.disk_pages + stats.disk_checkpoints > 0
    assert all("8 tokens restored from" in ask(cache, key) for key in keys)
    cache.shutdown()


def test_a_device_alone_is_on_disk_after_the_end(tmp_path: Path) -> None:
    cache = cache_on(tmp_path)
    key = compute(cache, "abcd")
    assert cache.stats().evicted_pages == 0
    cache = next_life(cache, tmp_path)
    assert ask(cache, key).startswith("8 of 9 tokens cached")
    cache.shutdown()


def test_namespaces_share_nothing_and_are_not_on_disk(tmp_path: Path) -> None:
    cache = cache_on(tmp_path)
    compute(cache, "abcd", "tenant one")
    cache = next_life(cache, tmp_path)
    assert "0 of 9 tokens" in ask(cache, key_of(cache, "abcd", "tenant two", extra=1))
    assert "8 of 9 tokens" in ask(cache, key_of(cache, "abcd", "tenant one", extra=1))
    cache.shutdown()
    assert not any(b"tenant" in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize("change", [{"model": "another"}, {"page_size": 4, "chunk_size": 4}])
def test_another_model_or_other_settings_are_a_miss_with_a_reason(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = cache_on(tmp_path)
    key = compute(cache, "abcd")
    cache = next_life(cache, tmp_path, **change)
    text = ask(cache, key)
    assert text.startswith("0 of 9 tokens cached")
    if "model" in change:
        assert "the checkpoint at 8 on disk is not used: model is 'm' there and 'another' here" in text
    assert "checkpoints of another model or version" in cache.stats().disk_report
    cache.shutdown()


def test_deterministic_contents_can_be_used_by_a_mode_that_needs_less_and_not_the_other_way(tmp_path: Path) -> None:
    cache = cache_on(tmp_path, deterministic=True)
    key = compute(cache, "abcd")
    cache = next_life(cache, tmp_path, deterministic=False)
    assert "restored from disk" in ask(cache, key)
    other = compute(cache, "xyz")
    cache = next_life(cache, tmp_path, deterministic=True)
    assert "restored from disk" in ask(cache, key)
    assert "deterministic is False there and True here" in ask(cache, other)
    cache.shutdown()


def test_a_restore_that_fails_is_a_miss_with_a_reason_and_the_copy_is_used_later(tmp_path: Path) -> None:
    cache = cache_on(tmp_path)
    key = compute(cache, "abcd")
    evict(cache)
    flush(cache)
    contents_of(cache).fails_at = contents_of(cache).calls + 2
    assert "restoring 8 tokens failed: planted" in ask(cache, key)
    assert [*cache.tree.nodes()] == []
    assert "8 tokens restored from disk" in ask(cache, key)
    cache.shutdown()


def test_damage_is_a_miss_with_a_reason_and_what_is_whole_is_used(tmp_path: Path) -> None:
    cache = cache_on(tmp_path)
    compute(cache, "ab")
    flush(cache)
    evict(cache)
    flush(cache)
    key = compute(cache, "abcd")
    evict(cache)
    flush(cache)
    for file in tmp_path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[4096:] = bytes(len(data) - 4096)
        file.write_bytes(data)
    text = ask(cache, key)
    assert text.startswith("0 of 9 tokens cached")
    assert "the checkpoint at 8 on disk is not restored: a copy on disk is damaged: it is dropped" in text
    assert cache.stats().tier_failures > 0
    cache.shutdown()


def test_a_disk_that_computing_beats_is_not_waited_for(tmp_path: Path) -> None:
    cache = cache_on(tmp_path)
    key = compute(cache, "abcd")
    evict(cache)
    flush(cache)
    for _ in range(100):
        cache.note_pass(10**9, 1e-6)
    assert "the checkpoint at 8 on disk is not restored: computing is faster" in ask(cache, key)
    written = cache.stats().disk_bytes_written
    compute(cache, "xyz")
    evict(cache)
    flush(cache)
    assert cache.stats().disk_bytes_written == written, "what would never be restored is not written"
    cache.shutdown()


def test_a_directory_that_cannot_be_used_costs_nothing_but_its_hits(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = cache_on(tmp_path / "file")
    key = compute(cache, "abcd")
    evict(cache)
    text = ask(cache, key)
    assert text.startswith("0 of 9 tokens cached")
    assert "the disk is not used: FileExistsError" in text
    assert cache.stats().disk_failure is not None
    cache.shutdown()


def test_cleared_is_forgotten_on_disk_too(tmp_path: Path) -> None:
    cache = cache_on(tmp_path, host=1000)
    key = compute(cache, "abcd")
    evict(cache)
    flush(cache)
    cache.clear()
    stats = cache.stats()
    assert (stats.disk_pages, stats.disk_checkpoints, stats.host_pages) == (0, 0, 0)
    cache = next_life(cache, tmp_path)
    assert "0 of 9 tokens" in ask(cache, key)
    assert [*tmp_path.glob("*.safetensors")] == []
    cache.shutdown()


def test_ids_are_in_the_manifest_only_where_that_is_asked_for(tmp_path: Path) -> None:
    for readable in (False, True):
        cache = cache_on(tmp_path / str(readable), num_pages=40, directory_readable=readable)
        key = compute(cache, "abcdefgh")
        cache.shutdown()
        assert (key.ids[:64] in (tmp_path / str(readable) / "manifest.sqlite").read_bytes()) == readable


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("host", [None, 130])
def test_contents_are_right_through_random_requests_evictions_and_lives(
    tmp_path: Path, seed: int, host: int | None
) -> None:
    cache = cache_on(tmp_path, num_pages=24, host=host)
    for _ in range(3):
        workload = RandomWorkload(cache, seed, has_faults=seed % 2 == 1)
        for _ in range(6):
            workload.run(40)
            flush(cache)
        assert cache.stats().disk_bytes_used <= 2**20
        assert cache.stats().restored_checkpoints > 0
        while cache.leases:
            cache.close(next(iter(cache.leases)))
        cache = next_life(cache, tmp_path, num_pages=24, host=host)
    release(cache)
    cache.shutdown()


def test_a_disk_needs_a_name_of_the_model_and_contents(tmp_path: Path) -> None:
    config = CacheConfig(page_size=2, chunk_size=2, disk=1000, directory=tmp_path)
    memory = CacheMemory.of_bytes(2000, PAGE_BYTES, STATE_BYTES, mover=Contents())
    with pytest.raises(ArgumentError, match="disk needs a name for the model"):
        AuditedCache(memory, config)
    with pytest.raises(ArgumentError, match="this memory has no contents"):
        AuditedCache(CacheMemory.of_indices(8, 4), config, model="m")
    assert make_cache(memory, CacheConfig(disk=1000, directory=tmp_path, enabled=False)).stats().disk_bytes_total == 0
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"disk": "1GiB"},
        {"directory": "somewhere"},
        {"disk": 0, "directory": "x"},
        {"disk": "50%", "directory": "x"},
        {"disk": "1GiB", "directory": 3},
        {"disk": "1GiB", "directory": ""},
        {"disk": "1GiB", "directory": "~no_such_user/x"},
        {"disk": "1GiB", "directory": "a\0b"},
        {"disk": "1GiB", "directory": "\ud800"},
        {"directory_readable": "yes"},
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"CacheConfig: (disk|directory)"):
        CacheConfig(**settings)


def test_a_home_directory_is_found() -> None:
    assert CacheConfig(disk="2MiB", directory="~/x").directory == Path.home() / "x"
