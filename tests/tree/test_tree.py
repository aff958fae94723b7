"""The tree: what a key finds in it, and what an insert makes of it.

Trees are drawn as lists of lines, one letter a page of two tokens, "*" a node with a checkpoint and "o" a tombstone:

    ab o          two keys share the pages a and b; nobody keeps a state there
      cd *        the first goes on with c and d, and has a checkpoint after eight tokens
      e *         the second goes on with e, and has one after six
"""

from array import array

import pytest

from hybrid.errors import OwnershipError
from hybrid.key import Key
from hybrid.tree.node import Checkpoint, Match
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree
from support.caches import TreeCase

NOTHING = Match(0, 0, None, None, None)


@pytest.fixture
def case() -> TreeCase:
    return TreeCase()


# Matching


def test_a_match_is_usable_to_the_deepest_checkpoint_and_has_pages_beyond(case: TreeCase) -> None:
    case.put("ab*")
    case.put("abcd")
    assert case.draw() == ["ab *", "  cd o"]
    found = case.peek("abcde")
    assert (found.num_tokens, found.num_page_tokens) == (4, 8)
    assert found.checkpoint is case.node("ab")
    assert found.deepest is case.node("abcd")


def test_of_two_checkpoints_on_the_way_the_deeper_is_used(case: TreeCase) -> None:
    case.put("a*")
    case.put("abc*")
    assert case.draw() == ["a *", "  bc *"]
    assert case.peek("abcd").num_tokens == 6
    assert case.peek("abd").num_tokens == 2


def test_a_match_may_end_inside_an_edge_and_does_not_use_the_checkpoint_at_its_end(case: TreeCase) -> None:
    case.put("abcd*")
    found = case.peek("abx")
    assert (found.num_tokens, found.num_page_tokens, found.checkpoint) == (0, 4, None)
    assert found.deepest is case.node("abcd")


def test_a_match_of_a_whole_edge_uses_its_checkpoint(case: TreeCase) -> None:
    case.put("ab*")
    assert case.peek("ab").num_tokens == 4


@pytest.mark.parametrize(
    ("limit", "num_tokens", "num_page_tokens"),
    [(0, 0, 0), (1, 0, 0), (2, 0, 2), (3, 0, 2), (4, 4, 4), (5, 4, 4), (6, 4, 6), (7, 4, 6), (8, 8, 8), (99, 8, 8)],
)
def test_the_limit_caps_pages_and_checkpoint(case: TreeCase, limit: int, num_tokens: int, num_page_tokens: int) -> None:
    case.put("ab*")
    case.put("abcd*")
    found = case.peek("abcd", limit=limit)
    assert (found.num_tokens, found.num_page_tokens) == (num_tokens, num_page_tokens)


def test_a_key_may_leave_a_path_of_many_checkpoints_after_any_of_them(case: TreeCase) -> None:
    """The path begins where another one branches off."""
    path = "abcdefghijkl"
    case.put("az*")
    for end in range(2, len(path) + 1):
        case.put(path[:end] + "*")
    for end in range(2, len(path) + 1):
        found = case.peek(path[:end] + "xyz")
        assert (found.num_tokens, found.num_page_tokens) == (2 * end, 2 * end)


def test_pages_that_differ_in_their_last_token_are_different_pages() -> None:
    tree = Tree(page_size=4, grid=4, policy=LeastRecentlyUsed())
    tree.insert(Key.of([1, 2, 3, 4, 5, 6, 7, 8]), 8, [0, 1], Checkpoint(1, 8))
    assert tree.peek(Key.of([1, 2, 3, 4, 5, 6, 7, 9]), 8).num_page_tokens == 4
    assert tree.peek(Key.of([1, 2, 3, 9, 5, 6, 7, 8]), 8).num_page_tokens == 0


def test_negative_and_large_token_ids_are_told_apart() -> None:
    tree = Tree(page_size=1, grid=1, policy=LeastRecentlyUsed())
    tree.insert(Key.of([-1, 2**31 - 1, 256]), 3, [0, 1, 2])
    assert tree.peek(Key.of([-1, 2**31 - 1, 256]), 3).num_page_tokens == 3
    assert tree.peek(Key.of([-1, 2**31 - 1, 1]), 3).num_page_tokens == 2
    assert tree.peek(Key.of([255, 2**31 - 1]), 3).num_page_tokens == 0


def test_peek_changes_nothing_and_match_counts_a_use_of_the_checkpoint_it_found_only(case: TreeCase) -> None:
    case.put("ab*")
    case.put("abcd*")
    case.put("abcdef")
    upper, lower, tail = case.node("ab"), case.node("abcd"), case.node("abcdef")
    before = [(n.usage.last_used, n.usage.hits) for n in (upper, lower, tail)]
    case.peek("abcdef")
    assert [(n.usage.last_used, n.usage.hits) for n in (upper, lower, tail)] == before
    case.use("abcdef")
    assert (lower.usage.last_used > before[1][0], lower.usage.hits) == (True, 1)
    assert [(n.usage.last_used, n.usage.hits) for n in (upper, tail)] == [before[0], before[2]]


def test_the_pages_of_a_match_are_those_of_the_way_in_order_and_end_where_it_ends(case: TreeCase) -> None:
    case.put("ab")  # pages 0 1
    case.put("abcde")  # 4 5 6 are kept of 2 3 4 5 6
    case.put("abx")  # 9
    found = case.peek("abcdy")
    assert list(case.tree.pages(found.deepest, found.num_page_tokens)) == [0, 1, 4, 5]
    assert list(case.tree.pages(case.node("abx"), 6)) == [0, 1, 9]
    assert list(case.tree.pages(None, 0)) == []


def test_the_pages_of_a_match_are_a_copy(case: TreeCase) -> None:
    case.put("ab")
    case.tree.pages(case.node("ab"), 4)[0] = 99
    assert list(case.node("ab").pages) == [0, 1]


# Where a checkpoint would have served


@pytest.mark.parametrize(
    ("text", "num_tokens", "branching_len"),
    [
        ("abcdefgh", 4, 12),  # pages to 14, and 12 is the deepest multiple of four
        ("abcdefx", 4, 12),
        ("abcdex", 4, 8),  # pages to 10
        ("abcx", 4, None),  # pages to 6: the checkpoint at 4 is the best there can be
        ("ab", 4, None),
        ("ax", 0, None),
    ],
)
def test_branching_len_is_the_deepest_grid_position_with_pages_beyond_the_checkpoint(
    text: str, num_tokens: int, branching_len: int | None
) -> None:
    case = TreeCase(page_size=2, grid=4)
    case.put("ab*")
    case.put("abcdefg")
    found = case.peek(text)
    assert (found.num_tokens, found.branching_len) == (num_tokens, branching_len)


def test_branching_len_crosses_tombstones() -> None:
    case = TreeCase(page_size=2, grid=4)
    for text in ("abx", "abcdx", "abcdefgh*"):
        case.put(text)
    assert case.draw() == ["ab o", "  cd o", "    efgh *", "    x o", "  x o"]
    assert case.peek("abcdefgz").branching_len == 12


# Inserting


def test_an_insert_into_an_empty_tree_is_one_node(case: TreeCase) -> None:
    inserted = case.put("abc*")
    assert case.draw() == ["abc *"]
    assert (inserted.num_existing, inserted.adopted) == (0, True)
    assert inserted.node is case.node("abc")
    assert (case.tree.num_pages, case.tree.num_checkpoints) == (3, 1)


def test_an_insert_that_goes_on_hangs_below_without_a_split(case: TreeCase) -> None:
    case.put("ab*")
    inserted = case.put("abcd*")
    assert case.draw() == ["ab *", "  cd *"]
    assert inserted.num_existing == 4


def test_a_fork_splits_the_edge_and_the_checkpoint_stays_below(case: TreeCase) -> None:
    case.put("abcd*")
    lower = case.node("abcd")
    inserted = case.put("abxy*")
    assert case.draw() == ["ab o", "  cd *", "  xy *"]
    assert (inserted.num_existing, inserted.adopted) == (4, True)
    assert case.node("abcd") is lower
    assert (case.tree.num_pages, case.tree.num_checkpoints) == (6, 2)


def test_a_split_keeps_the_children_below(case: TreeCase) -> None:
    for text in ("abc*", "abcd*", "abce*", "ax*"):
        case.put(text)
    assert case.draw() == ["a o", "  bc *", "    d *", "    e *", "  x *"]


def test_an_insert_that_ends_inside_an_edge_splits_it_and_may_bring_a_checkpoint(case: TreeCase) -> None:
    case.put("abcd*")
    inserted = case.put("ab*")
    assert case.draw() == ["ab *", "  cd *"]
    assert (inserted.num_existing, inserted.adopted, inserted.node.end) == (4, True, 4)
    assert list(inserted.node.pages) == [0, 1]


def test_the_first_page_never_splits(case: TreeCase) -> None:
    case.put("ab*")
    case.put("xy*")
    assert case.draw() == ["ab *", "xy *"]


def test_a_split_halves_the_pages_where_it_halves_the_edge(case: TreeCase) -> None:
    case.put("abcde")
    case.put("abcx")
    assert list(case.node("abc").pages) == [0, 1, 2]
    assert list(case.node("abcde").pages) == [3, 4]
    assert list(case.node("abcx").pages) == [8]


def test_a_key_cut_inside_a_page_is_inserted_up_to_its_last_full_page(case: TreeCase) -> None:
    key = case.key("abc", cut=1)
    case.tree.insert(key, 4, [0, 1])
    assert case.draw() == ["ab o"]
    with pytest.raises(OwnershipError):
        case.tree.insert(key, 5, [0, 1, 2])
    assert case.draw() == ["ab o"]


def test_the_same_again_is_refused_and_changes_nothing(case: TreeCase) -> None:
    case.put("abc*")
    again = case.put("abc*")
    assert (again.num_existing, again.adopted) == (6, False)
    assert case.draw() == ["abc *"]
    assert list(case.node("abc").pages) == [0, 1, 2]
    assert case.node("abc").slot == 1
    assert (case.tree.num_pages, case.tree.num_checkpoints) == (3, 1)


def test_an_insert_without_checkpoint_leaves_the_one_that_is_there(case: TreeCase) -> None:
    case.put("ab*")
    case.put("ab")
    assert case.draw() == ["ab *"]


def test_a_tombstone_takes_a_checkpoint(case: TreeCase) -> None:
    case.put("abc")
    case.put("abd")
    assert case.put("ab*").adopted
    assert case.draw() == ["ab *", "  c o", "  d o"]


def test_the_tree_keeps_no_reference_to_the_pages_it_was_given(case: TreeCase) -> None:
    pages = array("i", [5, 6])
    case.tree.insert(case.key("ab"), 4, pages)
    pages[0] = 99
    pages.append(98)
    assert list(case.node("ab").pages) == [5, 6]


def test_the_error_names_the_position_of_the_state_and_the_one_it_is_offered_for(case: TreeCase) -> None:
    with pytest.raises(OwnershipError, match=r"captured after 2 tokens is offered for 4"):
        case.tree.insert(case.key("ab"), 4, [0, 1], Checkpoint(1, 2))


# Namespaces


def test_nodes_come_parents_first_with_their_namespace(case: TreeCase) -> None:
    for text, namespace in (("abc", ""), ("abd", ""), ("xy", "one")):
        case.put(text, namespace)
    seen: set[int] = set()
    names = []
    for namespace, node in case.tree.nodes():
        assert node.parent is not None
        assert node.parent.parent is None or id(node.parent) in seen
        seen.add(id(node))
        names.append(namespace)
    assert sorted(names) == ["", "", "", "one"]


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
