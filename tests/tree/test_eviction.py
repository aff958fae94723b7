"""The tree: what locks keep, what goes first, what is remembered of what went. Trees are drawn as in test_tree.py."""

import gc

import pytest

from hybrid.errors import LockError
from hybrid.tree.node import Node
from support.caches import TreeCase


@pytest.fixture
def case() -> TreeCase:
    return TreeCase()


def forked(case: TreeCase) -> TreeCase:
    """Pages 0 to 3 are abcd, 6 and 7 are ef; slots 1, 2, 3 as they come."""
    for text in ("abcd*", "abef*", "ab*"):
        case.put(text)
    assert case.draw() == ["ab *", "  cd *", "  ef *"]
    return case


# Locks


def test_a_page_lock_keeps_every_page_above_it(case: TreeCase) -> None:
    forked(case)
    case.tree.lock_pages(case.node("abcd"))
    released = case.tree.evict_all()
    assert sorted(released.pages) == [6, 7]
    assert sorted(released.slots) == [1, 2, 3]
    assert case.draw() == ["ab o", "  cd o"]


def test_a_state_lock_keeps_one_checkpoint_and_the_pages_to_it(case: TreeCase) -> None:
    forked(case)
    case.tree.lock_state(case.node("ab"))
    released = case.tree.evict_all()
    assert (sorted(released.pages), sorted(released.slots)) == ([2, 3, 6, 7], [1, 2])
    assert case.draw() == ["ab *"]


def test_a_state_lock_is_a_page_lock_too(case: TreeCase) -> None:
    forked(case)
    node = case.node("ab")
    page_lock, state_lock = case.tree.lock_pages(node), case.tree.lock_state(node)
    assert (node.page_locks, node.state_locks) == (2, 1)
    case.tree.unlock(page_lock)
    assert (node.page_locks, node.state_locks) == (1, 1)
    case.tree.unlock(state_lock)
    assert (node.page_locks, node.state_locks) == (0, 0)


def test_what_is_unlocked_can_be_evicted_again(case: TreeCase) -> None:
    case.put("ab*")
    lock = case.tree.lock_state(case.node("ab"))
    assert list(case.tree.evict_pages(9).pages) == case.tree.evict_checkpoints(9).slots == []
    case.tree.unlock(lock)
    assert case.tree.evict_checkpoints(9).slots == [1]
    assert list(case.tree.evict_pages(9).pages) == [0, 1]


def test_locked_pages_are_counted_once_however_many_locks_share_them(case: TreeCase) -> None:
    forked(case)
    locks, counts = [], []
    for text in ("ab", "abcd", "abef", "abef"):
        locks.append(case.tree.lock_pages(case.node(text)))
        counts.append(case.tree.locks.num_pages)
    assert counts == [2, 4, 6, 6]
    counts = []
    for lock in locks:
        case.tree.unlock(lock)
        counts.append(case.tree.locks.num_pages)
    assert counts == [6, 4, 4, 0]


def test_a_split_of_a_locked_node_keeps_both_halves_locked(case: TreeCase) -> None:
    case.put("abcd*")
    locks = [case.tree.lock_pages(case.node("abcd")), case.tree.lock_state(case.node("abcd"))]
    case.put("abx")
    assert case.draw() == ["ab o", "  cd *", "  x o"]
    assert case.tree.locks.num_pages == 4
    assert case.tree.evict_all().slots == []
    assert case.draw() == ["abcd *"]
    assert case.tree.locks.num_pages == 4
    for lock in locks:
        case.tree.unlock(lock)
    assert len(case.tree.evict_all().pages) == 4


def test_a_lock_of_another_tree_raises_and_stays_valid_at_home(case: TreeCase) -> None:
    other = TreeCase()
    other.put("ab*")
    case.put("ab*")
    lock = other.tree.lock_pages(other.node("ab"))
    with pytest.raises(LockError, match="another cache"):
        case.tree.unlock(lock)
    assert (case.node("ab").page_locks, other.node("ab").page_locks) == (0, 1)
    other.tree.unlock(lock)


# Pages


def test_a_leaf_gives_up_its_tail_and_with_it_its_checkpoint(case: TreeCase) -> None:
    case.put("abcde*")
    released = case.tree.evict_pages(2)
    assert (list(released.pages), released.slots) == ([3, 4], [1])
    assert case.draw() == ["abc o"]
    assert (case.tree.num_pages, case.tree.num_checkpoints) == (3, 0)
    assert case.peek("abcde").num_page_tokens == 6


def test_a_cut_leaf_can_be_cut_again_and_grows_again(case: TreeCase) -> None:
    case.put("abcde*")
    assert list(case.tree.evict_pages(1).pages) == [4]
    assert list(case.tree.evict_pages(1).pages) == [3]
    assert case.put("abcde*").num_existing == 6
    assert case.draw() == ["abcde *"]


def test_the_least_recently_used_leaf_goes_first(case: TreeCase) -> None:
    for text in ("ab*", "cd*", "ef*"):
        case.put(text)
    case.use("ab")
    assert list(case.tree.evict_pages(4).pages) == [2, 3, 4, 5]
    assert case.draw() == ["ab *"]


def test_childless_tombstones_go_with_their_last_child(case: TreeCase) -> None:
    """The record of their checkpoints keeps the cuts."""
    case.put("ab*")
    case.put("abc*")
    case.put("abcd*")
    case.tree.evict_checkpoints(3)
    assert case.draw() == ["ab o", "  c o", "    d o"]
    assert list(case.tree.evict_pages(1).pages) == [8, 4, 0, 1]
    assert case.draw() == []


def test_what_comes_after_a_tombstone_that_nothing_else_needs_is_one_node_with_it(case: TreeCase) -> None:
    case.put("ab")
    case.put("abc")
    case.put("abcd*")
    case.put("abcdef")
    assert case.draw() == ["abcd *", "  ef o"]
    assert list(case.tree.evict_pages(1).pages) == [14]


def test_a_tombstone_whose_last_branch_goes_is_one_node_with_what_is_left(case: TreeCase) -> None:
    """Whichever of the two came first."""
    for first, second in (("abcd*", "abxy*"), ("abxy*", "abcd*")):
        case.put(first)
        case.put(second)
        assert case.draw() == ["ab o", "  cd *", "  xy *"]
        case.use("abcd")
        assert len(case.tree.evict_pages(2).pages) == 2
        assert case.draw() == ["abcd *"]
        assert list(case.tree.pages(case.node("abcd"), 8)) == list(case.node("abcd").pages)
        assert case.peek("abcd").num_tokens == 8
        case.tree.evict_all()


def test_a_spare_checkpoint_that_goes_unused_leaves_no_cut(case: TreeCase) -> None:
    case.put("ab*", spare=True)
    case.put("abcd*")
    assert case.draw() == ["ab *", "  cd *"]
    case.tree.evict_checkpoints(1)
    assert case.draw() == ["abcd *"]


def test_a_lock_on_the_first_pages_of_an_edge_lets_the_rest_of_it_go(case: TreeCase) -> None:
    case.put("abcdef*")
    lock = case.tree.lock_pages(case.node("abcdef"), 4)
    assert case.draw() == ["ab o", "  cdef *"]
    assert case.tree.locks.num_pages == 2
    case.tree.unlock(lock)
    assert case.draw() == ["abcdef *"]
    lock = case.tree.lock_pages(case.node("abcdef"), 4)
    assert list(case.tree.evict_all().pages) == [2, 3, 4, 5]
    assert case.draw() == ["ab o"]
    case.tree.unlock(lock)
    assert list(case.tree.evict_all().pages) == [0, 1]


def test_a_locked_leaf_grows_in_place_for_its_only_holder_and_not_for_others(case: TreeCase) -> None:
    case.put("ab")
    lock = case.tree.lock_pages(case.node("ab"))
    key = case.key("abcd")
    case.tree.insert(key, 8, [10, 11, 12, 13], below=lock.node)
    assert case.draw() == ["abcd o"]
    assert case.tree.locks.num_pages == 4
    other = case.tree.lock_pages(case.node("abcd"))
    key = case.key("abcdef")
    case.tree.insert(key, 12, [20, 21, 22, 23, 24, 25], below=lock.node)
    assert case.draw() == ["abcd o", "  ef o"]
    assert case.tree.locks.num_pages == 4
    case.tree.unlock(lock)
    case.tree.unlock(other)
    assert case.draw() == ["abcdef o"]
    assert case.tree.locks.num_pages == 0


def test_the_cascade_ends_at_a_checkpoint_and_its_node_is_a_leaf_then(case: TreeCase) -> None:
    case.put("ab*")
    case.put("abc*")
    case.put("abcd*")
    case.use("ab")
    case.tree.evict_checkpoints(1)
    assert case.draw() == ["ab *", "  c o", "    d *"]
    case.tree.evict_pages(1)
    assert case.draw() == ["ab *"]
    assert list(case.tree.evict_pages(1).pages) == [1]


def test_the_cascade_ends_at_a_locked_tombstone(case: TreeCase) -> None:
    case.put("ab")
    lock = case.tree.lock_pages(case.node("ab"))
    case.put("abc*")
    case.put("abcd")
    case.tree.evict_checkpoints(1)
    assert case.draw() == ["ab o", "  c o", "    d o"]
    case.tree.evict_pages(1)
    assert case.draw() == ["ab o"]
    case.tree.unlock(lock)
    assert list(case.tree.evict_pages(9).pages) == [0, 1]


def test_the_cascade_ends_where_another_child_is_left(case: TreeCase) -> None:
    forked(case)
    case.tree.evict_checkpoints(3)
    case.tree.evict_pages(2)
    assert case.draw() == ["ab o", "  ef o"]


def test_only_leaves_give_up_pages(case: TreeCase) -> None:
    case.put("ab*")
    case.put("abcd*")
    case.use("abcd")
    assert list(case.tree.evict_pages(1).pages) == [5]  # ab was used less recently, but the tail of cd goes
    assert case.draw() == ["ab *", "  c o"]


# Checkpoints


def test_a_checkpoint_may_go_from_any_node_and_the_pages_stay(case: TreeCase) -> None:
    forked(case)
    assert case.tree.evict_checkpoints(2).slots == [1, 2]
    assert case.draw() == ["ab *", "  cd o", "  ef o"]
    assert case.tree.evict_checkpoints(2).slots == [3]
    assert case.peek("abcd").num_page_tokens == 8
    assert case.tree.num_pages == 6


def test_the_least_recently_used_checkpoint_goes_first(case: TreeCase) -> None:
    forked(case)
    case.use("abcd")
    case.use("ab")
    assert [case.tree.evict_checkpoints(1).slots for _ in range(3)] == [[2], [1], [3]]


def test_a_spare_checkpoint_goes_first_until_somebody_has_used_it(case: TreeCase) -> None:
    case.put("ab*")
    case.put("cd*", spare=True)
    case.put("ef*", spare=True)
    case.use("cd")
    assert [case.tree.evict_checkpoints(1).slots for _ in range(3)] == [[3], [1], [2]]


def test_a_checkpoint_that_comes_again_is_as_recent_as_its_coming(case: TreeCase) -> None:
    for text in ("ab*", "cd*"):
        case.put(text)
    case.tree.evict_checkpoints(1)
    case.put("ab*")
    assert case.tree.evict_checkpoints(1).slots == [2]


def test_a_refused_checkpoint_does_not_refresh_the_one_that_is_there(case: TreeCase) -> None:
    for text in ("ab*", "cd*", "ab*"):
        case.put(text)
    assert case.tree.evict_checkpoints(1).slots == [1]


# What is remembered of what went


def was_evicted(case: TreeCase, text: str) -> bool:
    key = case.key(text)
    return case.tree.recall(key, case.peek(text), len(key)).was_evicted


def lost_checkpoint(case: TreeCase, text: str) -> bool:
    """Whether a checkpoint went between the usable hit and the page hit."""
    key, found = case.key(text), case.peek(text)
    return any(end <= found.num_page_tokens for end in case.tree.recall(key, found, len(key)).gone)


def test_a_tail_that_was_cut_is_known_as_evicted(case: TreeCase) -> None:
    case.put("abcd")
    case.tree.evict_pages(2)
    assert was_evicted(case, "abcd")
    assert not was_evicted(case, "abx")


def test_a_child_that_went_is_known_as_evicted(case: TreeCase) -> None:
    forked(case)
    case.tree.evict_pages(2)
    assert case.draw() == ["ab *", "  ef *"]
    assert was_evicted(case, "abcd")
    assert not was_evicted(case, "abxy")


def test_what_was_lost_below_a_node_says_nothing_of_places_above_it(case: TreeCase) -> None:
    case.put("ab*")
    case.put("abc")
    case.tree.evict_checkpoints(1)
    case.put("ab*")
    case.use("ab")
    case.tree.evict_pages(1)
    assert case.draw() == ["ab *"]
    assert was_evicted(case, "abc")
    assert not was_evicted(case, "ac")  # a c was never here, though b's child c was
    case.tree.evict_pages(1)
    assert case.draw() == ["a o"]
    assert was_evicted(case, "ab")
    assert not was_evicted(case, "ac")


def test_a_checkpoint_that_went_between_the_usable_hit_and_the_page_hit_is_known(case: TreeCase) -> None:
    for text in ("ab*", "a*", "abcd"):
        case.put(text)
    case.tree.evict_checkpoints(1)
    assert case.draw() == ["a *", "  b o", "    cd o"]
    assert lost_checkpoint(case, "abcd")
    assert not lost_checkpoint(case, "ax")
    case.put("ab*")
    assert not lost_checkpoint(case, "abcd")
    assert not case.node("ab").lost_checkpoint


def test_a_checkpoint_that_went_beyond_the_page_hit_explains_nothing(case: TreeCase) -> None:
    case.put("abcd*")
    case.tree.evict_checkpoints(1)
    assert lost_checkpoint(case, "abcd")
    assert not lost_checkpoint(case, "abx")


def test_a_tree_remembers_a_bounded_number_of_evicted_prefixes() -> None:
    case = TreeCase(max_ghosts=10)
    for letter in range(25):
        case.put("a" + chr(1000 + letter))
    case.tree.evict_all()
    assert 5 <= len(case.tree.ghosts) <= 10


def num_nodes() -> int:
    """Nodes of all trees of this process."""
    gc.collect()
    return sum(type(one) is Node for one in gc.get_objects())


def test_locks_that_came_and_went_keep_no_node_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.tree.locks.MAX_CHANGED", 4)
    case, letters, before = TreeCase(), "abcdefghijklmnopqrstuvwxyz", num_nodes()
    for letter in letters:
        case.put(f"{letter}*")
        case.tree.unlock(case.tree.lock_state(case.node(letter)))
        case.tree.evict_checkpoints(1)
        case.tree.evict_pages(1)
    assert num_nodes() <= before + 6
