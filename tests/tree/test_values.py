"""A tree whose pages and checkpoints are values of the caller's own: it behaves as with integers, and returns the very
values that it was given."""

import random
from array import array
from typing import Any

import pytest

from hybrid.key import Key
from hybrid.mirror.page_parts import PageParts
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.node import Checkpoint, Released
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.policy import Facts, Policy
from hybrid.tree.tree import Tree
from hybrid.tree.values import move_end, page_ids
from hybrid.units import Prices


class Rows:
    """Values of pages that nothing may look into: only a length, and slices."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, where: slice) -> "Rows":
        assert isinstance(where, slice)
        return Rows(self.ids[where])


def ids_of(parts: PageParts) -> list[int]:
    return [page for part in parts.parts for page in part.ids]


def flat(pages: Any) -> list[int]:
    return ids_of(pages) if isinstance(pages, PageParts) else [*pages]


def opaque() -> Tree:
    return Tree(1, 2, LeastRecentlyUsed(), page_values=PageParts.of)


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_cut_and_joined_as_a_list_is(seed: int) -> None:
    rng = random.Random(seed)
    parts, expected = PageParts(), []
    for _ in range(60):
        match rng.randrange(5):
            case 0:
                more = [rng.random() for _ in range(rng.randrange(5))]
                parts.extend(Rows(more))  # type: ignore[arg-type]
                expected += more
            case 1:
                start, end = sorted(rng.randrange(len(expected) + 1) for _ in range(2))
                assert ids_of(parts[start:end]) == expected[start:end]
            case 2:
                count = rng.randrange(min(3, len(expected)) + 1)
                del parts[len(expected) - count :]
                del expected[len(expected) - count :]
            case 3 if len(expected) < 200:
                parts.extend(parts[: len(expected) // 2])
                expected += expected[: len(expected) // 2]
            case 4 if expected:
                start, others = rng.randrange(len(expected)), PageParts([Rows([-1.0, -2.0])])  # type: ignore[list-item]
                move_end(parts, start, others)
                assert ids_of(others) == [-1, -2, *expected[start:]]
                assert len(others) == 2 + len(expected) - start
                del expected[start:]
        assert ids_of(parts) == expected
        assert len(parts) == len(expected)
        assert all(len(part) for part in parts.parts)


def test_pages_that_cannot_be_cut_are_not_moved() -> None:
    class Uncut(Rows):
        def __getitem__(self, where: slice) -> Rows:
            raise MemoryError

    parts, others = PageParts([Rows([1]), Uncut([2, 3]), Rows([4])]), PageParts([Rows([0])])
    with pytest.raises(MemoryError):
        move_end(parts, 2, others)
    assert ids_of(parts) == [1, 2, 3, 4]
    assert ids_of(others) == [0]
    assert (len(parts), len(others)) == (4, 1)


def test_the_tree_returns_the_values_that_it_was_given() -> None:
    tree, state, key = opaque(), object(), Key.of(range(6))
    tree.insert(key, 6, Rows([60, 61, 62, 63, 64, 65]), Checkpoint(state, 6))
    found = tree.match(key, 6)
    assert found.checkpoint is not None
    assert found.checkpoint.slot is state
    assert ids_of(tree.pages(found.deepest, 4)) == [60, 61, 62, 63]
    released = Released(PageParts())
    tree.evict_all(released)
    assert ids_of(released.pages) == [60, 61, 62, 63, 64, 65]
    assert released.slots == [state]


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, LearnedHitDensity])
def test_opaque_values_change_nothing_about_what_a_tree_does(policy: Any) -> None:
    """The same random calls on a tree of integers and on one of opaque values: the same pages at every step."""
    trees = [Tree(1, 2, policy(), seed=3, page_values=made) for made in (page_ids, PageParts.of)]
    rng, next_id = random.Random(5), 0
    for _ in range(400):
        key = Key.of([rng.randrange(3) for _ in range(2 * rng.randrange(1, 9))])
        ids = list(range(next_id, next_id + len(key)))
        next_id += len(key)
        limit, count = rng.randrange(len(key) + 1), rng.randrange(6)
        seen = []
        for tree, pages in zip(trees, (array("i", ids), Rows(ids)), strict=True):
            found = tree.match(key, limit)
            inserted = tree.insert(key, len(key), pages, Checkpoint(next_id, len(key)) if count % 2 else None)
            evicted = tree.evict_pages(count)
            states = tree.evict_checkpoints(count // 4)
            numbers = [
                ids_of(one.pages) if isinstance(one.pages, PageParts) else [*one.pages] for one in (evicted, states)
            ]
            seen.append((found[:3], inserted[1:], numbers, evicted.slots, states.slots, tree.num_pages))
        assert seen[0] == seen[1]


def test_checkpoints_may_be_off_the_grid_of_branches() -> None:
    tree = opaque()
    tree.insert(Key.of(range(5)), 5, Rows([1, 2, 3, 4, 5]), Checkpoint("s", 5))
    assert tree.peek(Key.of(range(6)), 6).num_tokens == 5
    assert tree.peek(Key.of([0, 1, 2, 9]), 4).branching_len == 2  # pages to 3, the grid is 2


class Sizes(Policy):
    """Notes what candidates would free."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def rank(self, facts: Facts) -> float:
        self.seen.add(facts.bytes_freed)
        return facts.last_used


@pytest.mark.parametrize(("apart", "of_states", "of_pages"), [(False, {1020}, {1020}), (True, {1000}, {20})])
def test_what_is_evicted_of_a_memory_of_its_own_is_ranked_by_what_it_frees_of_that(
    apart: bool, of_states: set[int], of_pages: set[int]
) -> None:
    for evict, expected in (("evict_checkpoints", of_states), ("evict_pages", of_pages)):
        policy = Sizes()
        tree = Tree(1, 2, policy, Prices(10, 1000, are_apart=apart), page_values=PageParts.of)
        tree.insert(Key.of([1, 2]), 2, Rows([1, 2]), Checkpoint("a", 2))
        getattr(tree, evict)(1, Released(PageParts()))
        assert policy.seen == expected
