"""The places of checkpoints."""

from itertools import pairwise

import pytest

from hybrid.cache.config import DEFAULT_PLACEMENT
from hybrid.cache.placement import of_prompt, spare, sparse
from hybrid.key import Key
from hybrid.tree.node import Kind

GRID = 16


def positions(names: tuple[str, ...] = DEFAULT_PLACEMENT, end: int = 100, **more: object) -> dict[int, str]:
    arguments: dict = {"branching_len": None, "shared": (), "declared": (), "is_replay": False, **more}
    return of_prompt(names, end, GRID, **arguments)


def test_a_prompt_has_one_at_the_last_position_that_leaves_a_token() -> None:
    assert positions(end=100) == {96: Kind.PROMPT_END}
    assert positions(end=96) == {80: Kind.PROMPT_END, 96: Kind.PROMPT_END}  # the same prompt again; a next turn
    assert positions(end=16) == {16: Kind.PROMPT_END}
    assert positions(end=5) == {}


def test_a_replay_has_one_at_its_end_alone() -> None:
    assert positions(end=96, is_replay=True) == {96: Kind.TURN_END}
    assert positions(("prompt_end",), end=96, is_replay=True) == {}


def test_each_position_says_why_in_order() -> None:
    assert positions(branching_len=32, shared={48}, declared=(70, -1)) == {
        32: Kind.BRANCH,
        48: Kind.BRANCH,
        64: Kind.USER,
        96: Kind.USER,
    }


def test_only_the_placements_that_are_wanted() -> None:
    assert positions((), branching_len=32) == {}
    assert positions(("branch",), branching_len=32) == {32: Kind.BRANCH}
    assert positions((), shared={48}, declared=(20,)) == {
        16: Kind.USER,
        48: Kind.BRANCH,
    }  # who waits, and who asks, gets one


def test_a_position_inside_a_unit_moves_before_the_unit() -> None:
    """An image in tokens [20, 90): nothing inside it could be used."""
    key = Key.of(range(100), units=[(20, 90)])
    assert positions(key=key) == {96: Kind.PROMPT_END}
    assert positions(end=88, key=key) == {16: Kind.PROMPT_END}
    assert positions(end=88, declared=(70,), branching_len=48, key=key) == {16: Kind.USER}


def test_anchors_follow_the_hit_at_their_distance_and_leave_the_end_alone() -> None:
    assert positions(end=100, spacing=32) == {96: Kind.PROMPT_END, 32: Kind.ANCHOR, 64: Kind.ANCHOR}
    assert positions(end=100, spacing=32, hit=48) == {96: Kind.PROMPT_END, 80: Kind.ANCHOR}
    assert positions(end=80, spacing=32) == {64: Kind.PROMPT_END, 80: Kind.PROMPT_END, 32: Kind.ANCHOR}
    assert positions(("prompt_end",), end=100, spacing=32) == {96: Kind.PROMPT_END}
    assert positions(end=96, spacing=32, is_replay=True) == {96: Kind.TURN_END}


def test_what_is_there_for_another_reason_is_no_anchor() -> None:
    assert positions(end=100, spacing=32, branching_len=64) == {
        64: Kind.BRANCH,
        96: Kind.PROMPT_END,
        32: Kind.ANCHOR,
    }
    key = Key.of(range(100), units=[(20, 60)])
    assert positions(end=100, spacing=32, key=key) == {96: Kind.PROMPT_END, 16: Kind.ANCHOR, 64: Kind.ANCHOR}


@pytest.mark.parametrize("declared", [-100, -90, 0, 15])
def test_a_declared_position_before_the_first_grid_point_is_none(declared: int) -> None:
    assert positions((), declared=(declared,)) == {}


def test_spare_ones_are_dense_while_memory_is_free_and_ever_further_apart_when_it_is_not() -> None:
    assert list(spare(16, 100, GRID, free=0.9)) == [32, 48, 64, 80, 96]
    sparse = list(spare(0, 100 * GRID, GRID, free=0.4))
    assert sparse[0] == 4 * GRID
    assert all(1.2 < after / before < 1.6 for before, after in pairwise(sparse))
    assert list(spare(sparse[3], sparse[5], GRID, free=0.4)) == sparse[4:6]


def test_sparse_ones_lie_at_doubling_distances_in_the_first_half() -> None:
    assert list(sparse(0, 100 * GRID, GRID)) == [position * GRID for position in (4, 8, 16, 32)]
    assert list(sparse(8 * GRID, 100 * GRID, GRID)) == [16 * GRID, 32 * GRID]
    assert list(sparse(0, 7 * GRID, GRID)) == []
