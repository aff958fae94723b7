"""Saving and loading prefixes: each boundary whole or not at all, whatever fails in between."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import make_cache
from hybrid.errors import ArgumentError, CacheFileError, OwnershipError, PromptError
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory
from hybrid.spec import HybridSpec, StateTensor, TokenTensor
from hybrid.tiers.archive import Archive, read_archive
from support.caches import key_of
from support.threads import in_a_thread

SPEC = HybridSpec(
    tokens=(TokenTensor.kv(1, 1, 8, torch.float32), TokenTensor("index", (), (3,), torch.float16, block=2)),
    state=(StateTensor("conv", (2, 8), torch.float32), StateTensor("recurrent", (1, 2, 3, 4), torch.float32)),
)
CPU = torch.device("cpu")

MEMORIES: dict[str, Callable[[int], CacheMemory]] = {
    "fixed": lambda size: CacheMemory.fixed(SPEC, 2, 12 * size, 6 * size, CPU),
    "one budget": lambda size: CacheMemory.for_spec(SPEC, 4000 * size, CPU, page_size=2),
    "stored smaller": lambda size: CacheMemory.for_spec(SPEC, 4000 * size, CPU, page_size=2, state_dtype="int8"),
}
CONFIG = CacheConfig(page_size=2, chunk_size=2, eviction="lru", verify_contents=True)
TEXTS = ("abcd", "abxy", "abxyz", "e")


@pytest.fixture(params=MEMORIES)
def memory(request: pytest.FixtureRequest) -> Callable[[int], CacheMemory]:
    return MEMORIES[request.param]


def cache_on(memory: Callable[[int], CacheMemory], size: int = 3, **config: Any) -> HybridCache:
    return HybridCache(memory(size), replace(CONFIG, **config))


def fill(cache: HybridCache, text: str, namespace: str = "") -> Key:
    """A request whose pass writes random numbers, committed, with a checkpoint at its end."""
    rng, key = torch.Generator().manual_seed(sum(map(ord, text))), key_of(cache, text, namespace)
    lease, tensors = cache.open(key, len(key) - 1, len(key)), cache.memory.tensors
    assert lease is not None and tensors is not None
    checkpoint = cache.capture(lease, len(key))
    slots = [checkpoint.slot] if checkpoint is not None else []
    for views, places in ((tensors.tokens, lease.private_pages), (tensors.state, slots)):
        for place in places:
            for tensor in views.values():
                tensor[place] = torch.randn(tensor[place].shape, generator=rng)
    cache.advance(lease, len(key))
    cache.commit(lease, key, len(key))
    cache.close(lease)
    return key


def filled(memory: Callable[[int], CacheMemory]) -> HybridCache:
    cache = cache_on(memory)
    for text in TEXTS:
        fill(cache, text)
    fill(cache, "abcd", "tenant")
    return cache


def contents(cache: HybridCache) -> dict[tuple[str, bytes], tuple[bytes, bytes | None]]:
    """Return the page contents and the checkpoint of every node, by namespace and path."""
    found, paths = {}, dict[int, bytes]()
    tensors = cache.memory.tensors
    assert tensors is not None
    for namespace, node in cache.tree.nodes():
        path = paths[id(node)] = paths.get(id(node.parent), b"") + node.edge
        pages = b"".join(tensors.read_page(page) for page in node.pages)
        found[namespace, path] = pages, tensors.read_checkpoint(node.slot) if node.slot is not None else None
    return found


def test_everything_is_loaded_as_it_was(memory: Callable[[int], CacheMemory], tmp_path: Path) -> None:
    source, target = filled(memory), cache_on(memory)
    saved = source.save(tmp_path / "a", model="m")
    loaded = target.load(tmp_path / "a", model="m")
    assert contents(target) == contents(source)
    assert (saved.checkpoints, saved.pages) == (loaded.checkpoints, loaded.pages) == (5, 12)
    assert saved.num_bytes == loaded.num_bytes
    target.audit(contents=True)
    again = target.load(tmp_path / "a", model="m")
    assert (again.checkpoints, again.pages, again.present) == (0, 0, 5)
    target.audit(contents=True)


def test_only_what_is_asked_for_is_saved(memory: Callable[[int], CacheMemory]) -> None:
    source = filled(memory)
    one = source.archive([key_of(source, "abxy")], model="m")
    assert [(node.start, node.end, node.kind is None) for node in one.nodes] == [(0, 4, True), (4, 8, False)]
    both = [key_of(source, "abxy"), key_of(source, "abxyzu")]
    kinds = [
        [(node.end, node.kind is None) for node in source.archive(both[at:], model="m", only=only).nodes]
        for at, only in ((0, None), (0, "deepest"), (1, None), (1, "deepest"))
    ]
    assert kinds[0] == kinds[1] == kinds[2] == [(4, True), (8, False), (10, False)]
    assert kinds[3] == [(4, True), (8, True), (10, False)]
    deepest = source.archive(model="m", only="deepest")
    ends = {node.end for at, node in enumerate(deepest.nodes) if at in set(deepest.leaves())}
    assert {node.end for node in deepest.nodes if node.kind is not None} == ends
    target = cache_on(memory)
    assert target.load(source.archive(both[1:], model="m", only="deepest"), model="m").checkpoints == 1
    assert target.tree.peek(both[1], 12).num_tokens == 10
    with pytest.raises(ArgumentError, match="only must be 'deepest'"):
        source.archive(model="m", only="last")  # type: ignore[arg-type]
    tenant = source.archive(namespace="tenant", model="m")
    assert {node.namespace for node in tenant.nodes} == {"tenant"}
    with pytest.raises(PromptError, match="prompt 1 of 4 tokens has no checkpoint in the cache"):
        source.archive([key_of(source, "abxy"), key_of(source, "ab")], model="m")


def test_pages_behind_the_last_checkpoint_are_not_saved(memory: Callable[[int], CacheMemory]) -> None:
    source = filled(memory)
    key = key_of(source, "abxyzuv")
    lease = source.open(key, len(key) - 1, len(key))
    assert lease is not None
    source.advance(lease, len(key))
    source.commit(lease, key, len(key))
    source.close(lease)
    assert max(node.end for node in source.archive([key], model="m").nodes) == 10


def test_usage_goes_with_a_checkpoint(memory: Callable[[int], CacheMemory]) -> None:
    source, target = filled(memory), cache_on(memory)
    node = source.tree.peek(key_of(source, "abcd"), 8).checkpoint
    assert node is not None
    node.usage.turn, node.usage.priority = 3, 2
    target.load(source.archive(model="m").to_bytes(), model="m")
    here = target.tree.peek(key_of(target, "abcd"), 8).checkpoint
    assert here is not None
    assert (here.usage.kind, here.usage.turn, here.usage.priority) == (node.usage.kind, 3, 2)


def test_only_the_pages_that_the_other_lacks_go_from_one_cache_to_another(memory: Callable[[int], CacheMemory]) -> None:
    source, target = filled(memory), cache_on(memory)
    fill(target, "abcd")
    key = key_of(source, "abxyz")
    hit = target.tree.peek(key, len(key)).num_page_tokens
    assert hit == 4
    part = source.archive([key], model="m", after=hit)
    assert len(part.pages) == 3
    empty = cache_on(memory)
    assert empty.load(part.to_bytes(), model="m").skipped == {"pages before it are missing": 2}
    assert [*empty.tree.nodes()] == []
    assert target.load(part.to_bytes(), model="m").pages == 3
    assert contents(target)["", key.ids[:40]] is not None
    target.audit(contents=True)
    assert target.tree.peek(key, len(key)).num_tokens == 10


def test_another_model_another_layout_and_other_settings_are_refused(memory: Callable[[int], CacheMemory]) -> None:
    data = filled(memory).archive(model="m").to_bytes()
    wider = HybridSpec((TokenTensor.kv(2, 1, 8, torch.float32),), SPEC.state)
    others = {
        "model is 'm' there and 'n' here": (cache_on(memory), "n"),
        "chunk_size is 2 there and 4 here": (cache_on(memory, chunk_size=4), "m"),
        "deterministic is False there and True here": (cache_on(MEMORIES["fixed"], deterministic=True), "m"),
        "page is": (HybridCache(CacheMemory.fixed(wider, 2, 24, 10, CPU), CONFIG), "m"),
    }
    for reason, (target, model) in others.items():
        with pytest.raises(CacheFileError, match=reason):
            target.load(data, model=model)
        assert [*target.tree.nodes()] == []


def test_checkpoints_that_are_stored_otherwise_are_refused() -> None:
    data = filled(MEMORIES["one budget"]).archive(model="m").to_bytes()
    with pytest.raises(CacheFileError, match="checkpoint is"):
        cache_on(MEMORIES["stored smaller"]).load(data, model="m")


def test_what_does_not_fit_is_skipped_and_nothing_that_was_loaded_goes_for_it(
    memory: Callable[[int], CacheMemory],
) -> None:
    source, target = cache_on(memory, size=6), cache_on(memory, size=1)
    rng = Random(0)
    for _ in range(12):
        fill(source, "".join(rng.choice("abc") for _ in range(5)))
    loaded = target.load(source.archive(model="m").to_bytes(), model="m")
    assert loaded.checkpoints >= 2
    assert loaded.skipped["there is no memory for it"] > 0
    assert target.stats().evicted_checkpoints == 0
    assert target.stats().checkpoints == loaded.checkpoints
    held = contents(target)
    assert all(held[where] == what for where, what in contents(source).items() if where in held and held[where][1])
    target.audit(contents=True)
    stats = target.stats()
    assert (stats.pages_private, stats.states_private) == (0, 0)


def test_what_is_in_use_is_not_evicted_for_a_file(memory: Callable[[int], CacheMemory]) -> None:
    source, target = filled(memory), cache_on(memory, size=1)
    key = fill(target, "uvw")
    lease = target.open(key, len(key) - 1, len(key))
    assert lease is not None
    target.load(source.archive(model="m").to_bytes(), model="m")
    target.audit(contents=True)
    assert target.tree.peek(key, len(key)).num_page_tokens >= lease.num_shared * 2
    target.close(lease)


class PlantedError(Exception):
    """The failure of these tests."""


@contextmanager
def failing(cache: HybridCache, monkeypatch: pytest.MonkeyPatch, number: int) -> Iterator[list[str]]:
    """The `number`-th call of anything that a restore needs fails."""
    calls: list[str] = []

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                raise PlantedError(name)
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        memory = cache.memory
        for owner, name in (
            (memory.tensors, "write_page"),
            (memory.tensors, "write_checkpoint"),
            (memory.pages, "allocate"),
            (memory.states, "allocate"),
            *([(memory.checkpoints, "allocate")] if memory.stores_smaller else []),
            (cache.tree, "insert"),
            (cache.tree, "peek"),
            (cache.allocator, "lock_state"),
        ):
            watched(owner, name)
        yield calls


def test_a_failure_anywhere_leaves_whole_boundaries_or_nothing(
    memory: Callable[[int], CacheMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = filled(memory)
    data, whole = source.archive(model="m").to_bytes(), contents(source)
    seen, number = set[str](), 0
    while True:
        number += 1
        target = cache_on(memory)
        try:
            with failing(target, monkeypatch, number):
                target.load(data, model="m")
        except PlantedError as planted:
            seen.add(str(planted))
        else:
            break
        target.audit(contents=True)
        stats = target.stats()
        assert (stats.pages_private, stats.states_private) == (0, 0)
        assert not target.tree.locks.num_pages
        for where, (pages, checkpoint) in contents(target).items():
            if where in whole and checkpoint is not None:
                assert whole[where][1] == checkpoint
                assert whole[where][0].endswith(pages) or pages.endswith(whole[where][0])
        assert not target.load(data, model="m").skipped
        assert contents(target) == whole
    assert seen >= {"write_page", "write_checkpoint", "allocate", "insert", "lock_state"}
    assert number > 30


def test_a_hostile_archive_is_refused_before_anything_is_changed() -> None:
    made = filled(MEMORIES["fixed"]).archive(model="m")
    for change, why in (({"kind": "wild"}, "unknown kind"), ({"kind": "pages"}, "unknown kind")):
        nodes = tuple(replace(node, **change) if node.kind else node for node in made.nodes)
        bad = Archive(made.fingerprint, nodes, made.ids, made.pages, made.checkpoints)
        target = cache_on(MEMORIES["fixed"])
        with pytest.raises(CacheFileError, match=why):
            target.load(bad.to_bytes(), model="m")
        assert [*target.tree.nodes()] == []


def test_an_archive_off_the_grid_is_skipped_with_a_reason() -> None:
    source = cache_on(MEMORIES["fixed"], chunk_size=4)
    fill(source, "abcd")
    data = read_archive(source.archive(model="m").to_bytes())
    nodes = tuple(replace(node, end=node.end - 2) for node in data.nodes)
    odd = Archive(data.fingerprint, nodes, data.ids[:-8], data.pages[:-1], data.checkpoints)
    target = cache_on(MEMORIES["fixed"], chunk_size=4)
    assert target.load(odd.to_bytes(), model="m").skipped == {"it is not at a multiple of 4 tokens": 1}


def test_memories_without_contents_and_caches_that_are_off_say_so(tmp_path: Path) -> None:
    plain = HybridCache(CacheMemory.of_indices(8, 4), CacheConfig(page_size=2, chunk_size=2))
    for call in (lambda: plain.save(tmp_path / "a", model="m"), lambda: plain.load(tmp_path / "a", model="m")):
        with pytest.raises(ArgumentError, match="this memory has no contents that can be saved"):
            call()
    off = make_cache(MEMORIES["fixed"](2), replace(CONFIG, enabled=False))
    with pytest.raises(ArgumentError, match="this cache is disabled"):
        off.load(tmp_path / "a", model="m")


@pytest.mark.parametrize("model", ["", None, 7])
def test_a_model_needs_a_name(model: Any) -> None:
    with pytest.raises(ArgumentError, match="model must be a name"):
        cache_on(MEMORIES["fixed"]).archive(model=model)


def test_another_thread_may_not_load() -> None:
    cache = filled(MEMORIES["fixed"])
    assert isinstance(in_a_thread(lambda: cache.load(b"", model="m")), OwnershipError)
