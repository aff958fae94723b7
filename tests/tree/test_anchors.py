"""Anchors: where a long path is trimmed to, and what keeps them until then.

Trees are written in letters, as in test_tree.py: a page is a letter, two tokens; "*" is a checkpoint.
"""

from itertools import count

import pytest

from hybrid.tree.policies import POLICIES, policy_of
from hybrid.tree.tree import Tree
from hybrid.units import Prices
from support.caches import TreeCase

PRICES = Prices(page=10, checkpoint=10, memory=80)
"""Anchors are four letters apart."""


class Case(TreeCase):
    """A tree in letters with `PRICES`."""

    def __init__(self, policy: str = "lru") -> None:
        super().__init__()
        self.tree = Tree(2, 2, policy_of(policy), PRICES)

    def states(self) -> list[str]:
        """The paths that end at a checkpoint."""
        found = []
        for _, node in self.tree.nodes():
            if node.slot is not None:
                path, above = "", node
                while above.parent is not None:
                    path, above = self._letters(above) + path, above.parent
                found.append(path)
        return sorted(found)

    def lost(self) -> str:
        """What a state was evicted of."""
        before = self.states()
        while self.states() == before:
            self.tree.evict_one(1)
        (gone,) = set(before) - set(self.states())
        return gone


def test_the_spacing_is_the_root_of_twice_what_the_memory_holds_times_a_state() -> None:
    assert PRICES.anchor_spacing == 4
    assert Prices(page=32768, checkpoint=51511296, memory=16 * 2**30).anchor_spacing == pytest.approx(40_600, abs=5)
    assert Prices(page=10, checkpoint=10).anchor_spacing == 0  # the memory is not known


def test_a_prompt_that_would_not_fit_beside_its_anchors_has_none() -> None:
    tree = Tree(2, 2, policy_of("lru"), Prices(page=10, checkpoint=10, memory=1000))
    spacing = tree.anchor_spacing(100)
    assert spacing == 28  # in tokens
    assert tree.anchor_spacing(170) == spacing  # 85 pages, 6 anchors, 5 states
    assert tree.anchor_spacing(180) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_path_is_trimmed_from_its_end(policy: str) -> None:
    case = Case(policy)
    case.put("abcd*")
    case.put("abcdefgh*")
    case.put("abcdefghijkl*")
    for _ in range(3):
        case.use("abcdefghijkl")
    assert [case.lost() for _ in range(3)] == ["abcdefghijkl", "abcdefgh", "abcd"]


def test_what_is_between_near_neighbours_is_superseded() -> None:
    """The state after "abcdef" is two pages from the one above and one from the end."""
    case = Case()
    for text in ("abcd*", "abcdef*", "abcdefg*"):
        case.put(text)
    assert case.lost() == "abcdef"


def test_what_two_paths_continue_from_is_no_anchor() -> None:
    case = Case()
    case.put("abcd*")
    case.put("abcdefgh*")
    assert case.lost() == "abcdefgh"
    case.put("abcdefgh*")
    case.put("abcdijkl*")
    assert case.lost() == "abcd"


def test_an_anchor_is_looked_at_again_when_a_state_comes_next_to_it() -> None:
    case = Case()
    for text in ("abcd*", "abcdefgh*", "x*"):
        case.put(text)
    assert case.lost() == "abcdefgh"  # the search has passed "abcd", and kept it
    for text in ("abcdefgh*", "ab*", "abcde*"):
        case.put(text)
    assert case.lost() == "abcd"


@pytest.mark.parametrize("policy", ["lru", "lhd"])
def test_the_new_end_of_a_path_is_as_recent_as_the_old_one(policy: str) -> None:
    """ "x" came after "abcd", and was used before "abcdefgh"."""
    case = Case(policy)
    for text in ("abcd*", "abcdefgh*", "x*", "y*"):
        case.put(text)
    for text in ("x", "y", "abcdefgh"):
        case.use(text)
    node = case.node("abcd")
    case.tree.evict_nodes([case.node("abcdefgh")], node.end)
    assert node.usage.last_used > case.node("y").usage.last_used
    assert case.tree.candidates.facts(node).age == 0
    if policy == "lru":
        assert [case.lost() for _ in range(3)] == ["x", "y", "abcd"]


def test_an_anchor_goes_when_there_is_nothing_else() -> None:
    case = Case()
    case.put("abcd*")
    case.put("abcdefgh*")
    lock = case.tree.lock_state(case.node("abcdefgh"))
    assert case.lost() == "abcd"
    assert case.tree.evict_one(1).slots == []
    case.tree.unlock(lock)
    assert case.tree.check() == []


@pytest.mark.parametrize("policy", ["lru", "mru", "lhd"])
def test_a_tree_of_anchors_stays_well_until_it_is_empty(policy: str) -> None:
    case, letters = Case(policy), "abcdefghijklmnop"
    for start in ("", "q", "r", "abcdes"):
        path = start
        for at in count(1):
            path = start + letters[: 3 * at]
            case.put(path + "*")
            if at == 5:
                break
    while case.tree.num_pages:
        case.tree.evict_one(2)
        assert case.tree.check() == []
