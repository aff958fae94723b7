"""The index finds what each replica has, as looking at each one would."""

from __future__ import annotations

import random

import pytest

from hybrid.events import Change
from hybrid.fleet import Index
from hybrid.fleet.index import MAX_DEPTHS
from support.prefixes import PAGE, checkpoint, names_of, pages


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("num_replicas", [3, 64, 200])
def test_it_finds_the_deepest_page_and_checkpoint_of_each_replica(num_replicas: int, has_gaps: bool) -> None:
    rng = random.Random(num_replicas)
    index = Index(PAGE, has_gaps)
    there: list[tuple[set[bytes], set[bytes]]] = [(set(), set()) for _ in range(num_replicas)]
    paths = [names_of(*(rng.randrange(2) for _ in range(12))) for _ in range(30)]
    for _ in range(1500):
        replica, path = rng.randrange(num_replicas), rng.choice(paths)
        own_pages, own_checkpoints = there[replica]
        depth = rng.randrange(1, 13)
        if rng.random() < 0.6:
            fresh = path[: max(depth, sum(name in own_pages for name in path))]
            index.apply(replica, [pages(fresh), checkpoint(path[:depth])])
            own_pages |= set(fresh)
            own_checkpoints.add(path[depth - 1])
        else:
            index.apply(replica, [checkpoint(path[:depth], False)])
            own_checkpoints.discard(path[depth - 1])
        if rng.random() < 0.01:
            index.forget(replica)
            own_pages.clear()
            own_checkpoints.clear()
    for path in paths:
        found = index.find(path)
        for replica, (own_pages, own_checkpoints) in enumerate(there):
            deepest = max((at + 1 for at, name in enumerate(path) if name in own_checkpoints), default=0)
            assert found.pages[replica] == PAGE * sum(name in own_pages for name in path)
            assert found.checkpoints[replica] == PAGE * deepest
        assert not found.pages[num_replicas:].any()


@pytest.mark.parametrize("num_replicas", [2, 30, 70])
def test_where_blocks_go_one_by_one_what_lacks_a_page_before_it_does_not_count(num_replicas: int) -> None:
    rng = random.Random(num_replicas)
    index = Index(PAGE, has_gaps=True)
    there: list[tuple[set[bytes], set[bytes]]] = [(set(), set()) for _ in range(num_replicas)]
    paths = [names_of(*(rng.randrange(2) for _ in range(8))) for _ in range(12)]
    for _ in range(3000):
        replica, path, depth = rng.randrange(num_replicas), rng.choice(paths), rng.randrange(1, 9)
        for own, of in zip(there[replica], (pages, checkpoint), strict=True):
            born = rng.random() < 0.7
            index.apply(replica, [of(path[depth - 1 : depth], born)])
            (own.add if born else own.discard)(path[depth - 1])
    for path in paths:
        found = index.find(path)
        for replica, (own_pages, own_checkpoints) in enumerate(there):
            whole = next((at for at, name in enumerate(path) if name not in own_pages), len(path))
            deepest = max((at + 1 for at, name in enumerate(path[:whole]) if name in own_checkpoints), default=0)
            assert (found.pages[replica], found.checkpoints[replica]) == (PAGE * whole, PAGE * deepest)


def test_of_many_depths_the_deepest_are_told_apart_and_others_have_what_all_have() -> None:
    index, path = Index(PAGE), names_of(*range(MAX_DEPTHS + 40))
    for replica in range(MAX_DEPTHS + 20):
        index.apply(replica, [pages(path[: 10 + replica]), checkpoint(path[: 10 + replica])])
    found = index.find(path)
    for replica in range(MAX_DEPTHS + 20):
        is_deep = replica >= 20
        assert found.pages[replica] == PAGE * (10 + replica if is_deep else 10)
        assert found.checkpoints[replica] == (PAGE * (10 + replica) if is_deep else 0)


def test_what_comes_twice_and_deaths_of_what_is_not_there_change_nothing() -> None:
    index, path = Index(PAGE), names_of(1, 2, 3)
    for _ in range(2):
        index.apply(5, [pages(path), checkpoint(path[:2])])
    for _ in range(2):
        index.apply(6, [pages(path, False), checkpoint(path, False)])
    found = index.find(path)
    assert (found.pages[5], found.checkpoints[5], found.pages[6]) == (12, 8, 0)
    for _ in range(2):
        index.apply(5, [Change(False, "everything", b"", 0)])
    assert len(index) == 0


def test_pages_that_no_cache_can_have_without_those_before_them_break_nothing() -> None:
    rng = random.Random(7)
    for _ in range(300):
        index, path = Index(PAGE), names_of(*range(12))
        for replica in range(3):
            for name in rng.sample(path, 6):
                index.apply(replica, [pages([name]), checkpoint([name])])
        found = index.find(path)
        assert found.pages.max() <= 12 * PAGE and found.checkpoints.max() <= 12 * PAGE


def test_copies_in_host_memory_are_told_apart() -> None:
    index, path = Index(PAGE), names_of(1, 2, 3)
    index.apply(0, [pages(path[:1])])
    assert index.find(path).copies is None
    index.apply(1, [checkpoint(path, tier="host"), pages(path)._replace(tier="host")])
    found = index.find(path)
    assert found.copies is not None
    assert (found.copies[0], found.copies[1], found.checkpoints[1], found.pages[1]) == (0, 12, 0, 0)


def test_copies_on_disk_are_told_apart_from_those_in_host_memory_and_forgotten_with_their_replica() -> None:
    index, path = Index(PAGE), names_of(1, 2, 3)
    index.apply(0, [checkpoint(path[:2], tier="host"), checkpoint(path, tier="disk")])
    index.apply(1, [checkpoint(path[:1], tier="disk"), checkpoint(path[:2], False, tier="host")])
    found = index.find(path)
    assert found.copies is not None and found.on_disk is not None
    assert [*found.copies[:2], *found.on_disk[:2], *found.checkpoints[:2]] == [8, 0, 12, 4, 0, 0]
    index.apply(0, [checkpoint(path, False, tier="disk")])
    found = index.find(path)
    assert found.on_disk is not None and [*found.on_disk[:2]] == [0, 4]
    index.forget(1)
    assert index.find(path).on_disk is None


def test_it_grows_with_the_numbers_of_replicas_and_keeps_what_it_knows() -> None:
    index, path = Index(PAGE), names_of(1, 2)
    index.apply(3, [pages(path)])
    index.apply(900, [pages(path[:1])])
    found = index.find(path)
    assert index.width == len(found.pages) == 1024
    assert {at: depth for at, depth in enumerate(found.pages) if depth} == {3: 8, 900: 4}
