"""The memory of a cache: how many bytes it has, and how many are in no use."""

import pytest

from hybrid.memory.memory import CacheMemory, UnitSizes
from hybrid.memory.pool import EMPTY_STATE, IndexPool


def test_bytes_of_pools_of_fixed_sizes_are_those_of_their_units() -> None:
    pages, states = IndexPool(10, 0, "page"), IndexPool(6, EMPTY_STATE + 1, "state slot")
    memory = CacheMemory(pages, states, sizes=UnitSizes(page=7, state=100, checkpoint=100))
    assert memory.num_bytes == (10 * 7 + 6 * 100, 10 * 7 + 5 * 100)  # one slot is the empty state
    assert pages.allocate(3) and states.allocate(2)
    assert memory.num_bytes == (10 * 7 + 6 * 100, 7 * 7 + 3 * 100)


@pytest.mark.parametrize("used", [1, 3, 4, 7])
def test_bytes_of_one_budget_are_free_in_free_pieces_and_in_those_that_are_used_in_part(used: int) -> None:
    memory = CacheMemory.of_bytes(20 * 64, 64, 256)  # a piece holds four pages, or a state
    total, free = memory.num_bytes
    assert (total, free) == (6 * 256, 5 * 256)  # one piece holds the empty state
    assert memory.pages.allocate(used)
    assert memory.num_bytes == (total, free - 64 * used)


def test_bytes_are_unknown_where_sizes_are() -> None:
    assert CacheMemory.of_indices(10, 4).num_bytes == (0, 0)
