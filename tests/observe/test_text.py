"""The tree as text: chains folded, branches named where they part, no line too wide."""

import pytest

from hybrid import CacheConfig, CacheMemory, Facts, HybridCache, Key, Policy
from hybrid.observe.draw import draw_text
from hybrid.observe.snapshot import Snapshot
from support.pictures import cache_with, decode, serve, snapshot_of, tiered_cache


def test_an_empty_cache() -> None:
    assert cache_with().draw().startswith("(empty)\npages: 0 cached")


def test_a_chain_is_one_line_and_branches_are_named_where_they_part() -> None:
    cache = cache_with("abcdef", "abcdefgh", "abcdefghaxyy", "abcdefghazzz")
    lines = cache.draw(decode=decode).splitlines()
    assert lines[0] == "namespace ''"
    assert lines[1].startswith("└─ 0..8  4 pages  2●")
    assert "“abcdefgh" not in lines[1]  # the edge's own beginning: the first node's text
    assert "“abcdef”" in lines[1]
    assert [line.split("“")[1] for line in lines[2:4]] == ["xyy”", "zzz”"]
    assert lines[4].startswith("pages: 8 cached")


def test_every_node_can_have_a_line() -> None:
    cache = cache_with("abcdef", "abcdefgh")
    snapshot = snapshot_of(cache)
    assert len(draw_text(snapshot).splitlines()) == 3
    assert len(draw_text(snapshot, fold=False).splitlines()) == 4


class LongestKept(Policy):
    """Evict the checkpoint of the shortest prompt first."""

    def rank(self, facts: Facts) -> float:
        return facts.num_tokens


def test_a_node_has_the_value_that_the_policy_gives_its_checkpoint() -> None:
    config = CacheConfig(page_size=2, chunk_size=2, eviction=LongestKept())
    cache = HybridCache(CacheMemory.of_indices(200, 50), config)
    for text in ("abcd", "abefgh"):
        serve(cache, text)
    found = {(node.end, node.has_checkpoint): node.value for node in snapshot_of(cache).nodes}
    assert found == {(2, False): None, (4, True): 4.0, (6, True): 6.0}


def test_locks_are_shown_while_a_request_runs() -> None:
    cache = cache_with("abcd")
    lease = cache.open(Key.of([*map(ord, "abcdx")], ""), 4, 5)
    assert lease is not None
    assert "⚿ 2,1" in cache.draw()
    cache.close(lease)
    assert "⚿" not in cache.draw()


def test_namespaces_stand_apart() -> None:
    cache = cache_with("abcd")
    serve(cache, "abcd", "other")
    drawn = cache.draw()
    assert drawn.count("└─ 0..4") == 2
    assert "namespace 'other'" in drawn


@pytest.mark.parametrize("width", [60, 100, 140])
def test_no_line_is_wider_than_asked(width: int) -> None:
    cache = cache_with("ab" * 40, "ab" * 20 + "c" * 40, "ab" * 20 + "cd" * 10 + "e" * 30)
    lines = cache.draw(decode=lambda ids: "long [text] \n" * 20, width=width).splitlines()
    assert max(len(line) for line in lines[:-1]) <= width
    assert len(lines) == 2 + 4


def test_what_is_in_another_tier_is_named() -> None:
    cache = tiered_cache()
    drawn = cache.draw()
    assert "1 in host memory" in drawn
    assert drawn.splitlines()[-1].startswith("host memory: ")
    snapshot = snapshot_of(cache)
    assert [tier.name for tier in snapshot.tiers] == ["device", "host memory"]
    assert snapshot.tiers[1].num_checkpoints == 3
    assert {node.tiers for node in snapshot.nodes} == {("device",), ("host memory",)}
    assert all(node.has_checkpoint == ("device" in node.tiers) for node in snapshot.nodes)
    assert [tier.name for tier in snapshot_of(cache_with("ab")).tiers] == ["device"]


def test_drawing_changes_nothing() -> None:
    cache = cache_with("abcdef", "abcdxx")
    before: Snapshot = snapshot_of(cache)
    cache.draw()
    assert snapshot_of(cache) == before
    cache.audit()


def test_what_was_evicted_is_remembered_with_its_life() -> None:
    cache = cache_with("abcdef", "abcdef")
    cache.clear()
    snapshot = snapshot_of(cache)
    assert not snapshot.nodes
    (life,) = snapshot.lives
    assert (life.start, life.end, life.hits) == (0, 6, 1)
    assert life.stored_at <= life.used_at <= life.evicted_at == snapshot.now
