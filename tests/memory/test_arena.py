"""The arena: pieces that hold one kind of unit or another, against a model that keeps sets."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybrid.errors import OwnershipError
from hybrid.memory.arena import ALIGNMENT, MAX_PASSED_OVER, MAX_STATES, MAX_WASTE, Arena, ArenaPool, PieceLayout

MIB = 2**20


# How a piece is divided


@pytest.mark.parametrize(
    ("page_bytes", "state_bytes", "pages", "states"),
    [
        (2 * MIB, 51_511_296, 25, 1),  # Qwen3.5-4B
        (4 * MIB, 26_787_840, 13, 2),  # one state would waste 9 % of seven pages
        (192, 128, 2, 3),
        (4096, 128, 1, 32),  # a page is larger than a state
        (6400, 640, 1, 4),
        (64, 64, 2, 2),  # a piece of one page could never be put together from loose ones
    ],
)
def test_a_piece_is_the_smallest_that_wastes_little(page_bytes: int, state_bytes: int, pages: int, states: int) -> None:
    assert PieceLayout.of(page_bytes, state_bytes) == (pages * page_bytes, pages, states, 0)


@pytest.mark.parametrize(
    ("state_bytes", "record_bytes", "pages", "records"),
    [
        (51_511_296, 26_345_472, 26, 2),  # Qwen3.5-4B in bfloat16: a page more, and a second one fits
        (51_511_296, 14_155_776, 27, 4),  # in int8
        (8 * MIB, 2 * MIB, 4, 4),
    ],
)
def test_a_piece_is_made_to_hold_stored_checkpoints_well(
    state_bytes: int, record_bytes: int, pages: int, records: int
) -> None:
    assert PieceLayout.of(2 * MIB, state_bytes, record_bytes) == (pages * 2 * MIB, pages, 1, records)
    assert records * record_bytes <= pages * 2 * MIB


@pytest.mark.parametrize("page_bytes", [64, 192, 1024, 6400, 2**16, 2 * MIB, 4 * MIB])
@pytest.mark.parametrize("state_bytes", [64, 640, 26_432, 100_032, 26_787_840, 51_511_296])
def test_states_fit_into_their_piece_at_aligned_places(page_bytes: int, state_bytes: int) -> None:
    layout = PieceLayout.of(page_bytes, state_bytes)
    assert layout.num_bytes == layout.pages * page_bytes
    assert layout.states * state_bytes <= layout.num_bytes
    assert layout.num_bytes % (layout.states * ALIGNMENT) == 0
    assert layout.states <= MAX_STATES or layout.pages == 1


@pytest.mark.parametrize("page_bytes", [16 * 1024, 64 * 1024, 256 * 1024])
@pytest.mark.parametrize("state_bytes", [26_787_840, 51_511_296, 13_000_000 // 64 * 64])
def test_little_is_wasted_where_pages_are_much_smaller_than_states(page_bytes: int, state_bytes: int) -> None:
    layout = PieceLayout.of(page_bytes, state_bytes)
    assert 1 - layout.states * state_bytes / layout.num_bytes <= MAX_WASTE


# Allocating


class TwoKinds:
    """Three pieces; a piece holds four pages or two states, and state 0 is reserved: states keep piece 0."""

    def __init__(self) -> None:
        self.arena = Arena(3)
        self.states = self.arena.pool(2, 1, "state slot")
        self.pages = self.arena.pool(4, 0, "page")

    def counts(self) -> tuple[int, int, int]:
        return self.arena.num_free, self.pages.num_free, self.states.num_free


@pytest.fixture
def kinds() -> TwoKinds:
    return TwoKinds()


def take(pool: ArenaPool, count: int) -> list[int]:
    units = pool.allocate(count)
    assert units is not None
    return units


def test_free_pieces_count_for_every_kind(kinds: TwoKinds) -> None:
    assert kinds.counts() == (2, 8, 5)
    assert (kinds.pages.capacity, kinds.states.capacity) == (8, 5)
    take(kinds.pages, 1)
    assert kinds.counts() == (1, 7, 3)
    take(kinds.states, 2)
    assert kinds.counts() == (0, 3, 1)
    assert (kinds.pages.num_loose, kinds.pages.num_used) == (3, 1)
    assert (kinds.states.num_loose, kinds.states.num_used) == (1, 2)
    assert (kinds.pages.capacity, kinds.states.capacity) == (8, 5)


def test_a_unit_lies_in_a_piece_of_its_kind(kinds: TwoKinds) -> None:
    pages, states = take(kinds.pages, 3), take(kinds.states, 3)
    assert {page // 4 for page in pages} == set(kinds.pages.pieces)
    assert {state // 2 for state in states} == set(kinds.states.pieces)
    assert not set(kinds.pages.pieces) & set(kinds.states.pieces)


def test_the_reserved_unit_is_never_handed_out_and_its_piece_stays(kinds: TwoKinds) -> None:
    states = take(kinds.states, 5)
    assert sorted(states) == [1, 2, 3, 4, 5]
    assert kinds.pages.num_free == 0
    kinds.states.free(states)
    assert kinds.states.pieces == (0,)
    assert kinds.counts() == (2, 8, 5)
    assert 0 not in kinds.states.indices()
    with pytest.raises(OwnershipError, match="state slot 0 "):
        kinds.states.free([0])


def test_a_piece_whose_units_are_all_reserved_is_never_free() -> None:
    arena = Arena(2)
    states = arena.pool(1, 1, "state slot")
    assert (states.num_free, states.num_loose, states.num_used) == (1, 0, 0)
    assert take(states, 1) == [1]
    states.free([1])
    assert arena.free_pieces() == (1,)


def test_more_than_there_is_takes_nothing(kinds: TwoKinds) -> None:
    assert kinds.pages.allocate(9) is None
    assert kinds.counts() == (2, 8, 5)
    assert kinds.pages.allocate(0) == []
    assert kinds.counts() == (2, 8, 5)


def test_a_piece_comes_free_with_its_last_unit_and_then_serves_the_other_kind(kinds: TwoKinds) -> None:
    pages = take(kinds.pages, 8)
    assert take(kinds.states, 1) == [1]
    assert kinds.states.allocate(1) is None
    first_piece = [page for page in pages if page // 4 == pages[0] // 4]
    kinds.pages.free(first_piece[:3])
    assert kinds.states.allocate(1) is None
    kinds.pages.free(first_piece[3:])
    assert {state // 2 for state in take(kinds.states, 2)} == {pages[0] // 4}
    assert kinds.counts() == (0, 0, 0)


@pytest.mark.parametrize(
    "wrong", ["free already", "twice in one call", "in a free piece", "beyond the end", "negative"]
)
def test_a_wrong_unit_is_refused_and_none_is_freed(kinds: TwoKinds, wrong: str) -> None:
    pages = take(kinds.pages, 3)
    last = {
        "free already": next(iter(kinds.pages.free_indices())),
        "twice in one call": pages[0],
        "in a free piece": kinds.arena.free_pieces()[0] * 4,
        "beyond the end": 12,
        "negative": -1,
    }[wrong]
    with pytest.raises(OwnershipError, match="page"):
        kinds.pages.free([*pages, last])
    assert kinds.counts() == (1, 5, 3)
    kinds.pages.free(pages)
    assert kinds.counts() == (2, 8, 5)


# Moving


def scattered() -> tuple[ArenaPool, list[int]]:
    """Three full pieces of four pages, of which one, two and three are still used: (piece 0) .xxx (1) ..xx (2) ...x"""
    pool = Arena(3).pool(4, 0, "page")
    pages = sorted(take(pool, 12))
    pool.free([0, 4, 5, 8, 9, 10])
    return pool, [page for page in pages if page not in {0, 4, 5, 8, 9, 10}]


def test_the_emptiest_piece_is_emptied_into_the_fullest() -> None:
    pool, _ = scattered()
    assert pool.plan_moves(lambda page: True) == {11: 0}


def test_planning_changes_nothing() -> None:
    pool, used = scattered()
    before = sorted(pool.free_indices()), pool.num_free, pool.num_used, pool.arena.num_free
    for _ in range(3):
        pool.plan_moves(lambda page: page % 2 == 0)
    assert (sorted(pool.free_indices()), pool.num_free, pool.num_used, pool.arena.num_free) == before
    pool.free(used)


def test_a_piece_with_a_unit_that_may_not_move_stays() -> None:
    pool, _ = scattered()
    moves = pool.plan_moves(lambda page: page != 11)
    assert moves is not None
    assert set(moves) == {6, 7}
    assert {page // 4 for page in moves.values()} <= {0, 2}
    assert pool.plan_moves(lambda page: page not in (7, 11)) is not None  # piece 0 into the two others
    assert pool.plan_moves(lambda page: False) is None


def test_nothing_is_planned_where_the_others_have_no_room() -> None:
    pool = Arena(2).pool(4, 0, "page")
    take(pool, 8)
    assert pool.plan_moves(lambda page: True) is None
    pool.free([0, 4, 5])
    assert pool.plan_moves(lambda page: True) is None


def test_after_a_move_the_old_places_are_free_and_the_others_are_not() -> None:
    pool, used = scattered()
    moves = pool.plan_moves(lambda page: page != 11)
    assert moves is not None
    pool.move(moves)
    assert (pool.arena.num_free, pool.num_used, pool.num_loose) == (1, 6, 2)
    pool.free([moves.get(page, page) for page in used])
    assert (pool.arena.num_free, pool.num_used, pool.num_loose) == (3, 0, 0)


def test_planning_passes_over_few_pieces_that_cannot_be_emptied_and_over_others_the_next_time() -> None:
    pool = Arena(1000).pool(2, 0, "page")
    pages = take(pool, 2000)
    pool.free(pages[::2])
    asked: list[int] = []

    def may_move(page: int) -> bool:
        asked.append(page)
        return page == pages[201]

    plans = [pool.plan_moves(may_move) for _ in range(20)]
    assert len(asked) <= 20 * MAX_PASSED_OVER
    assert {page for plan in plans for page in plan or ()} == {pages[201]}


class ArenaMachine(RuleBasedStateMachine):
    """Three kinds over one arena. The model: for each kind, the set of units handed out. A piece belongs to the kind
    that has a unit in it."""

    @initialize(num_pieces=st.integers(2, 6), per_piece=st.tuples(*[st.integers(1, 5)] * 3), reserved=st.integers(0, 2))
    def make(self, num_pieces: int, per_piece: tuple[int, int, int], reserved: int) -> None:
        self.arena = Arena(num_pieces)
        reserved = min(reserved, num_pieces * per_piece[0])
        self.pools = [self.arena.pool(per_piece[0], reserved, "state slot")]
        self.pools += [self.arena.pool(per_piece[1], 0, "page"), self.arena.pool(per_piece[2], 0, "record")]
        self.used: list[set[int]] = [set(), set(), set()]

    def pieces(self, kind: int) -> set[int]:
        pool = self.pools[kind]
        return {unit // pool.per_piece for unit in (*self.used[kind], *range(pool.reserved))}

    def num_free_pieces(self) -> int:
        return self.arena.num_pieces - sum(len(self.pieces(kind)) for kind in range(3))

    @rule(kind=st.integers(0, 2), count=st.integers(0, 9))
    def allocate(self, kind: int, count: int) -> None:
        pool = self.pools[kind]
        possible = len(self.pieces(kind)) + self.num_free_pieces()
        num_free = possible * pool.per_piece - len(self.used[kind]) - pool.reserved
        units = pool.allocate(count)
        assert (units is not None) == (count <= num_free)
        assert not self.used[kind] & set(units or ())
        self.used[kind] |= set(units or ())

    @precondition(lambda self: any(self.used))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        kind = data.draw(st.sampled_from([kind for kind in range(3) if self.used[kind]]))
        units = data.draw(st.lists(st.sampled_from(sorted(self.used[kind])), unique=True))
        self.pools[kind].free(units)
        self.used[kind] -= set(units)

    @rule(kind=st.integers(0, 2), unit=st.integers(-2, 32))
    def free_what_is_not_used(self, kind: int, unit: int) -> None:
        if unit not in self.used[kind]:
            with pytest.raises(OwnershipError):
                self.pools[kind].free([*self.used[kind], unit])

    @rule(kind=st.integers(0, 2), stuck=st.sets(st.integers(0, 30), max_size=6))
    def move(self, kind: int, stuck: set[int]) -> None:
        pool, used, before = self.pools[kind], self.used[kind], self.arena.num_free
        moves = pool.plan_moves(lambda unit: unit not in stuck)
        self.books_are_those_of_the_model()
        if moves is None:
            return
        assert set(moves) <= used - stuck
        assert not set(moves.values()) & used
        assert len(set(moves.values())) == len(moves)
        assert len(moves) == min(map(len, self.movable(pool, used, stuck)))
        pool.move(moves)
        self.used[kind] = used - set(moves) | set(moves.values())
        assert self.arena.num_free == before + 1

    @staticmethod
    def movable(pool: ArenaPool, used: set[int], stuck: set[int]) -> list[set[int]]:
        """The units in use of each piece that could be emptied."""
        pieces = [range(piece * pool.per_piece, (piece + 1) * pool.per_piece) for piece in pool.pieces]
        mine = [used & set(piece) for piece in pieces if piece[0] >= pool.reserved]
        return [units for units in mine if len(units) < pool.per_piece and not units & stuck]

    @rule(kind=st.integers(1, 2))
    def a_piece_can_be_emptied_where_the_loose_units_would_fill_one(self, kind: int) -> None:
        pool = self.pools[kind]
        can = pool.num_loose >= pool.per_piece and bool(self.used[kind])
        assert (pool.plan_moves(lambda unit: True) is not None) == can

    @invariant()
    def books_are_those_of_the_model(self) -> None:
        num_free_pieces = self.num_free_pieces()
        assert self.arena.num_free == len(set(self.arena.free_pieces())) == num_free_pieces
        for kind, pool in enumerate(self.pools):
            mine = self.pieces(kind)
            assert set(pool.pieces) == mine
            existing = {p * pool.per_piece + i for p in mine for i in range(pool.per_piece)} - {*range(pool.reserved)}
            assert set(pool.indices()) == existing
            assert sorted(pool.free_indices()) == sorted(existing - self.used[kind])
            assert pool.num_used == len(self.used[kind])
            assert pool.num_loose == len(existing) - len(self.used[kind])
            assert pool.num_free == pool.num_loose + num_free_pieces * pool.per_piece <= pool.capacity
            assert pool.arena.check() == []


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=30, database=None)
