"""Mistakes of an engine of one's own are refused by the call that is wrong, and change nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError, HybridError, OwnershipError
from hybrid.key import Key
from hybrid.memory.arena import Arena
from hybrid.memory.memory import CacheMemory
from hybrid.tree.node import Kind
from support.caches import audited_cache, key_of, serve, start


class Case:
    """A request of a to h with a hit of abcd, in pages of two tokens and a grid of four. Nothing is computed yet."""

    def __init__(self) -> None:
        self.cache = audited_cache(24, 12, page_size=2, chunk_size=4)
        serve(self.cache, key_of(self.cache, "abcd"))
        self.key = key_of(self.cache, "abcdefgh")
        self.lease = start(self.cache, self.key)
        assert self.lease.num_hit_tokens == 8

    def open(self, limit: int) -> Any:
        return self.cache.open(self.key, limit, 16)

    def commit(self, num_tokens: int, text: str = "abcdefgh", namespace: str = "") -> None:
        self.cache.commit(self.lease, key_of(self.cache, text, namespace), num_tokens)

    def advance(self, num_tokens: int = 11) -> None:
        self.cache.advance(self.lease, num_tokens)

    def capture(self, num_tokens: int) -> Any:
        return self.cache.capture(self.lease, num_tokens)

    def everything(self) -> tuple[object, ...]:
        lease = self.lease
        held = (lease.front, lease.front_tokens, lease.back, lease.back_tokens, lease.read_slot, lease.num_shared)
        nodes = [(node.end, node.slot, node.page_locks, node.state_locks) for _, node in self.cache.tree.nodes()]
        return held, list(lease.block_table), list(lease.captured), nodes, self.cache.stats()


class Wrong(NamedTuple):
    """A call, and what was called before it."""

    error: type[HybridError]
    text: str
    call: Callable[[Case], Any]
    before: Callable[[Case], Any] = lambda case: None


CALLS = {
    "limit that leaves no token": Wrong(ArgumentError, "limit must be from 0 to 15", lambda case: case.open(16)),
    "limit beyond the key": Wrong(ArgumentError, "limit must be", lambda case: case.open(17)),
    "negative limit": Wrong(ArgumentError, "limit must be", lambda case: case.open(-1)),
    "empty key": Wrong(ArgumentError, "limit must be", lambda case: case.cache.open(Key.of([]), 0, 0)),
    "commit before the first pass": Wrong(OwnershipError, "advanced to 8", lambda case: case.commit(10)),
    "commit beyond the front": Wrong(OwnershipError, "advanced to 11", lambda case: case.commit(12), Case.advance),
    "commit inside a page": Wrong(OwnershipError, "9 tokens", lambda case: case.commit(9), Case.advance),
    "commit beyond the key": Wrong(
        OwnershipError, "10 tokens of a key of 8", lambda case: case.commit(10, "abcd"), Case.advance
    ),
    "commit of another prompt": Wrong(
        OwnershipError, "does not begin", lambda case: case.commit(10, "abcdxfgh"), Case.advance
    ),
    "commit in another namespace": Wrong(
        OwnershipError, "does not begin", lambda case: case.commit(10, namespace="other"), Case.advance
    ),
    "capture behind the front": Wrong(ArgumentError, "the front is at 11", lambda case: case.capture(8), Case.advance),
    "capture at the hit": Wrong(ArgumentError, "the front is at 8", lambda case: case.capture(8)),
    "capture off the grid": Wrong(ArgumentError, "multiple of the grid of 4", lambda case: case.capture(10)),
    "spare capture off the grid": Wrong(
        ArgumentError, "multiple of the grid of 4", lambda case: case.cache.capture_spare(case.lease, 10)
    ),
    "capture twice": Wrong(
        ArgumentError, "captured already", lambda case: case.capture(12), lambda case: case.capture(12)
    ),
    "spare capture twice": Wrong(
        ArgumentError,
        "captured already",
        lambda case: case.cache.capture_spare(case.lease, 12),
        lambda case: case.capture(12),
    ),
    "advance backwards": Wrong(ArgumentError, "from 8 on", lambda case: case.advance(7)),
    "advance beyond the pages": Wrong(ArgumentError, "with pages for 16", lambda case: case.advance(17)),
    "swap without a back": Wrong(
        OwnershipError, "no back slot", lambda case: case.cache.swap(case.lease), Case.advance
    ),
    "swap in the first pass after a hit": Wrong(
        OwnershipError,
        "does not read its front",
        lambda case: case.cache.swap(case.lease),
        lambda case: case.cache.take_back(case.lease),
    ),
    "commit after a discarded pass": Wrong(
        OwnershipError,
        "can only be closed",
        lambda case: case.commit(8),
        lambda case: (case.advance(), case.cache.discard(case.lease)),
    ),
    "advance after a discarded pass": Wrong(
        OwnershipError, "can only be closed", Case.advance, lambda case: case.cache.discard(case.lease)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_and_changes_nothing(name: str) -> None:
    wrong, case = CALLS[name], Case()
    wrong.before(case)
    before = case.everything()
    with pytest.raises(wrong.error, match=wrong.text):
        wrong.call(case)
    assert case.everything() == before
    case.cache.close(case.lease)
    case.cache.audit()


def test_sizes_of_stored_checkpoints_without_a_way_to_store_them_are_refused() -> None:
    with pytest.raises(ArgumentError, match="needs checkpoint_bytes, store, restore and move_stored; got 64"):
        CacheMemory.of_bytes(10_000, 64, 256, store=64)  # type: ignore[arg-type]
    arena = Arena(8)
    states, pages, stored = arena.pool(1, 1, "state slot"), arena.pool(4, 0, "page"), arena.pool(4, 0, "stored")
    with pytest.raises(ArgumentError, match="got None"):
        CacheMemory(pages, states, stored, arena)


@pytest.mark.parametrize("namespace", [1, True, 1.0, None, b"a"])
def test_a_namespace_is_a_string(namespace: object) -> None:
    """1, True and 1.0 are one key of a dictionary: three tenants would share everything."""
    with pytest.raises(ArgumentError, match="a namespace must be a string, got"):
        Key.of([1, 2, 3], namespace)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="a namespace must be a string, got"):
        Key(b"", namespace)  # type: ignore[arg-type]


def test_a_replay_may_find_all_of_its_key() -> None:
    """States are wanted and no logits: nothing is left to compute."""
    cache = HybridCache(CacheMemory.of_indices(8, 4), CacheConfig(page_size=2, chunk_size=2))
    serve(cache, key_of(cache, "ab"))
    lease = cache.open_whole(key_of(cache, "ab"))
    assert lease is not None
    assert lease.num_hit_tokens == 4
    cache.close(lease)
    cache.audit()


# A pass whose numbers are not finite


def test_a_discarded_pass_frees_what_it_captured_and_keeps_what_was_committed_before() -> None:
    cache = audited_cache(24, 12, page_size=2, chunk_size=4)
    key = key_of(cache, "abcdefgh")
    lease = start(cache, key)
    assert cache.capture(lease, 8) is not None
    cache.advance(lease, 8)
    cache.commit(lease, key, 8)
    private = cache.stats().states_private
    assert cache.capture(lease, 12) is not None and cache.capture(lease, 16) is not None
    cache.discard(lease)
    cache.audit()
    assert (cache.stats().states_private, lease.captured) == (private, [])
    cache.close(lease)
    found = cache.tree.peek(key, 16)
    assert (found.num_tokens, found.num_page_tokens) == (8, 8)
    stats = cache.stats()
    assert (stats.pages_private, stats.states_private) == (0, 0)


# What is there is not captured again


def test_a_prompt_that_ends_on_the_grid_and_is_repeated_captures_nothing_that_is_there() -> None:
    cache = audited_cache(24, 3, page_size=2, chunk_size=4)
    for repeated in range(3):
        key = key_of(cache, "abcd")
        lease = start(cache, key)
        assert (cache.capture(lease, 8) is None) == (repeated > 0)
        cache.advance(lease, 8)
        cache.commit(lease, key, 8)
        cache.close(lease)
    assert cache.stats().evicted_checkpoints == 0
    assert cache.stats().checkpoints == 1


# Units


def test_a_commit_that_ended_inside_a_unit_is_followed_by_the_next() -> None:
    """An image in tokens [4, 12) is computed in three passes; its pages are shared when all of it is computed."""
    cache = audited_cache(24, 12)
    key = Key.of([1, 2, 3, 4, *range(10, 18), 5, 6], units=[(4, 12)])
    lease = start(cache, key)
    for end, num_shared in ((8, 4), (10, 4), (14, 14)):
        cache.advance(lease, end)
        cache.commit(lease, key, end)
        assert lease.num_shared * 2 == num_shared
    cache.close(lease)
    assert cache.tree.peek(key, 14).num_page_tokens == 14


def test_a_checkpoint_is_never_placed_inside_a_unit() -> None:
    cache = audited_cache(24, 12)
    key = Key.of([1, 2, 3, 4, *range(10, 18), 5, 6], units=[(4, 12)])
    lease = start(cache, key)
    captured = [position for position in range(2, 15, 2) if cache.capture(lease, position) is not None]
    assert captured == [2, 4, 12, 14]
    cache.advance(lease, 14)
    cache.commit(lease, key, 14)
    cache.close(lease)
    lease = start(cache, Key.of([9, *range(10, 18), 5], units=[(1, 9)]))
    assert cache.capture_spare(lease, 4) is None
    cache.advance(lease, 4)
    cache.donate_states(lease, 4)
    assert lease.captured == []
    cache.close(lease)


NUMBERS: dict[str, Callable[[Case, Any], Any]] = {
    "open: limit": lambda case, value: case.open(value),
    "open: num_tokens": lambda case, value: case.cache.open(case.key, 8, value),
    "open: priority": lambda case, value: case.cache.open(case.key, 8, 16, value),
    "reserve: num_tokens": lambda case, value: case.cache.reserve(case.lease, value),
    "trim: num_pages": lambda case, value: case.cache.trim(case.lease, value),
    "advance: num_tokens": lambda case, value: case.advance(value),
    "capture: num_tokens": lambda case, value: case.capture(value),
    "commit: num_tokens": lambda case, value: case.commit(value),
    "end_turn: num_tokens": lambda case, value: case.cache.end_turn(case.lease, value),
    "donate_states: limit": lambda case, value: case.cache.donate_states(case.lease, value),
}
SIGNED = ("open: limit", "open: priority", "donate_states: limit")
"""Where a negative number is a number too, or is refused with other words."""


@pytest.mark.parametrize("value", [None, -5, "8", 8.0, [], float("nan")])
@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_not_a_number_of_tokens_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    if name in SIGNED and value == -5:
        return
    case = Case()
    before = case.everything()
    with pytest.raises(ArgumentError, match=f"{name} must be an integer from"):
        NUMBERS[name](case, value)
    assert case.everything() == before


@pytest.mark.parametrize("value", [None, 5, "abcd", [1, 2]])
def test_what_is_not_a_key_a_lease_or_a_pin_is_refused_and_changes_nothing(value: Any) -> None:
    case = Case()
    before, cache = case.everything(), case.cache
    for call in (
        lambda: cache.open(value, 8, 16),
        lambda: cache.open_whole(value),
        lambda: cache.commit(case.lease, value, 8),
        lambda: cache.pin(value),
        lambda: cache.extend_pin(value, case.key),
        lambda: cache.record(value),
        lambda: cache.capture(case.lease, 12, value),
    ):
        with pytest.raises(ArgumentError, match=r"must be|is needed"):
            call()
    with pytest.raises(OwnershipError, match="belongs to another cache"):
        cache.close(value)
    assert case.everything() == before


def test_a_kind_may_be_given_by_its_name() -> None:
    case = Case()
    checkpoint = case.cache.capture(case.lease, 12, "user")  # type: ignore[arg-type]
    assert checkpoint is not None
    assert checkpoint.kind is Kind.USER
