"""Handles: integers that stand for nodes, and locks that are counted by them."""

from itertools import count

import pytest

from hybrid.errors import LockError
from hybrid.key import Key
from hybrid.tree.locks import Handles
from hybrid.tree.node import Checkpoint
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree


@pytest.fixture
def tree() -> Tree:
    tree = Tree(2, 2, LeastRecentlyUsed())
    tree.insert(Key.of([1, 1, 2, 2]), 4, [1, 2], Checkpoint(7, 4))
    return tree


@pytest.fixture
def handles(tree: Tree) -> Handles:
    return Handles(tree.locks)


def leaf(tree: Tree, handles: Handles) -> int:
    return handles.of(tree.peek(Key.of([1, 1, 2, 2]), 4).deepest)


def protected(tree: Tree) -> tuple[int, int]:
    return tree.locks.num_pages, tree.locks.num_checkpoints


def test_a_handle_is_given_once_and_leads_back(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    assert leaf(tree, handles) == handle != handles.root
    assert handles.of(None) == handles.root
    assert handles.node(handles.root) is None
    node = handles.node(handle)
    assert node is not None
    assert node.slot == 7


def test_the_handle_of_a_node_that_was_evicted_stands_for_nothing(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    tree.evict_all()
    for call in (handles.node, handles.lock):
        with pytest.raises(LockError, match="stands for no node"):
            call(handle)
    assert handles.num_locks(handle) == (0, 0)


def test_handles_of_two_trees_from_one_counter_differ(tree: Tree) -> None:
    numbers = count(1)
    first, second = Handles(tree.locks, numbers), Handles(tree.locks, numbers)
    assert len({first.root, leaf(tree, first), second.root, leaf(tree, second)}) == 4


def test_pages_and_checkpoint_are_locked_and_released_apart(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    handles.lock(handle)
    handles.lock(handle, state=False)
    assert handles.num_locks(handle) == (2, 1)
    assert protected(tree) == (2, 1)
    handles.unlock(handle, pages=False)
    assert protected(tree) == (2, 0)
    assert tree.evict_checkpoints(1).slots == [7]
    handles.unlock(handle, state=False)
    handles.unlock(handle, state=False)
    assert protected(tree) == (0, 0)
    assert [*tree.evict_all().pages] == [1, 2]


def test_a_lock_too_many_is_not_released_and_changes_nothing(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    handles.lock(handle, state=False)
    with pytest.raises(LockError, match="no lock on its checkpoint"):
        handles.unlock(handle)
    assert protected(tree) == (2, 0)
    handles.unlock(handle, state=False)
    with pytest.raises(LockError, match="no lock on its pages"):
        handles.unlock(handle, state=False)


def test_a_checkpoint_that_comes_to_a_locked_tombstone_is_protected(tree: Tree, handles: Handles) -> None:
    handle = leaf(tree, handles)
    tree.evict_checkpoints(1)
    handles.lock(handle)
    assert protected(tree) == (2, 0)
    assert tree.insert(Key.of([1, 1, 2, 2]), 4, [8, 9], Checkpoint(5, 4)).adopted
    assert protected(tree) == (2, 1)
    assert tree.evict_all().slots == []
    handles.unlock(handle)
    assert protected(tree) == (0, 0)
    assert tree.evict_all().slots == [5]


def test_locks_on_the_empty_prefix_protect_nothing_and_are_counted(tree: Tree, handles: Handles) -> None:
    handles.lock(handles.root)
    assert handles.num_locks(handles.root) == (1, 1)
    assert protected(tree) == (0, 0)
    handles.unlock(handles.root)
    with pytest.raises(LockError, match="released exactly once"):
        handles.unlock(handles.root)


def test_nodes_that_were_removed_are_forgotten_in_time(tree: Tree, handles: Handles) -> None:
    kept = leaf(tree, handles)
    handles.lock(kept)
    given = set()
    for token in range(5000):
        node = tree.insert(Key.of([token, token + 1]), 2, [token], Checkpoint(token, 2)).node
        given.add(handles.of(node))
        tree.evict_all()
    assert len(given) == 5000
    assert handles.num_known < 2500
    assert handles.node(kept) is not None


@pytest.mark.parametrize(("num_pages", "left"), [(1, 1), (2, 0)])
def test_pages_evicted_right_after_their_lock_ended_are_not_counted(num_pages: int, left: int) -> None:
    """A leaf loses a part of its edge, or all of it, before the end of its lock is counted."""
    tree = Tree(2, 2, LeastRecentlyUsed())
    leaf = tree.insert(Key.of([3, 3, 4, 4]), 4, [3, 4]).node
    lock = tree.lock_pages(leaf)
    assert tree.locks.num_pages == 2
    tree.unlock(lock)
    tree.evict_pages(num_pages)
    assert (tree.num_pages, tree.locks.num_pages) == (left, 0)
    if left:
        tree.lock_pages(leaf)
        assert tree.locks.num_pages == 1
