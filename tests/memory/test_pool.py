"""The free indices of a pool: handed out from the lowest, and never twice."""

import pytest

from hybrid.errors import OwnershipError
from hybrid.memory.pool import IndexPool


@pytest.fixture
def pool() -> IndexPool:
    return IndexPool(6, 1, "state slot")


def test_indices_are_handed_out_from_the_lowest_that_is_not_reserved(pool: IndexPool) -> None:
    assert (pool.num_free, pool.capacity) == (5, 5)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(3) == [3, 4, 5]
    assert pool.num_free == 0


def test_an_allocation_takes_all_or_nothing(pool: IndexPool) -> None:
    assert pool.allocate(6) is None
    assert pool.num_free == 5
    assert pool.allocate(5) == [1, 2, 3, 4, 5]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_what_comes_back_is_handed_out_again_in_the_same_order(pool: IndexPool) -> None:
    pool.allocate(5)
    pool.free([2, 3, 5])
    assert pool.allocate(3) == [2, 3, 5]
    assert pool.free_indices() == ()


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([4], r"state slot 4 is freed, but it is free already or reserved"),
        ([0], r"state slot 0 is freed"),
        ([6], r"state slot 6 is freed"),
        ([-1], r"state slot -1 is freed"),
        ([1, 1], r"freed twice in one call: \[1, 1\]"),
        ([1, 2, 4], r"state slot 4 is freed"),
        ([1, 2, 1], r"freed twice in one call"),
    ],
)
def test_a_wrong_free_raises_and_frees_nothing(pool: IndexPool, indices: list[int], message: str) -> None:
    pool.allocate(3)
    with pytest.raises(OwnershipError, match=message):
        pool.free(indices)
    assert set(pool.free_indices()) == {4, 5}
    pool.free([1, 2, 3])
    assert pool.num_free == 5


def test_indices_may_come_back_from_any_iterable(pool: IndexPool) -> None:
    pool.allocate(5)
    pool.free(index for index in (1, 2))
    pool.free(())
    assert pool.num_free == 2


def test_a_pool_without_indices_has_none_to_give() -> None:
    assert IndexPool(1, 1, "page").allocate(1) is None
    assert IndexPool(0, 0, "page").capacity == 0
