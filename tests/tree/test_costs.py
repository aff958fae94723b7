"""The work of an operation of the tree does not grow with the tree: counted where compiled code does the work."""

from array import array
from typing import Any

import pytest

from hybrid.key import Key
from hybrid.tree.candidates import MAX_NOTIFIED
from hybrid.tree.forest import descend
from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.names import Names
from hybrid.tree.node import Checkpoint, Node
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree
from support.prefixes import noted_in

PAGE = 2


class Compared(bytes):
    """Token ids that count how often they are compared with those of the tree."""

    times: int = 0

    def startswith(self, *arguments: Any) -> bool:
        self.times += 1
        return super().startswith(*arguments)


def path(tree: Tree, count: int, *, branches: bool = False) -> list[Node]:
    """Insert a path of nodes with checkpoints, one page each; with a branch at the end of each, if wanted."""
    nodes: list[Node] = []
    for number in range(1, count + 1):
        key = Key.of(range(number * PAGE))
        nodes.append(put(tree, key, Checkpoint(number, len(key))).node)
        if branches:
            put(tree, Key.of([*range(number * PAGE), -1, -1]))
    return nodes


def put(tree: Tree, key: Key, checkpoint: Checkpoint | None = None, below: Node | None = None) -> Any:
    return tree.insert(key, len(key), array("i", range(len(key) // PAGE)), checkpoint, below)


@pytest.fixture
def tree() -> Tree:
    return Tree(PAGE, PAGE, LeastRecentlyUsed())


@pytest.mark.parametrize("shared", [7, 500, 990])
def test_a_key_that_leaves_a_run_of_many_nodes_is_compared_with_few_of_them(tree: Tree, shared: int) -> None:
    nodes = path(tree, 1000)
    assert nodes[0].run is nodes[-1].run
    ids = Compared(Key.of([*range(shared * PAGE), *[-1] * (2000 - shared * PAGE)]).ids)
    root = nodes[0].parent
    assert root is not None
    node, offset = descend(ids, root, len(ids), PAGE * 4)
    assert (node, offset) == (nodes[shared - 1], shared * PAGE * 4)
    assert ids.times <= 16


def test_a_commit_is_compared_with_nothing_above_what_is_committed(tree: Tree) -> None:
    nodes = path(tree, 300, branches=True)
    ids = Compared(Key.of(range(301 * PAGE)).ids)
    found = put(tree, Key(ids), below=nodes[-1])
    assert found.num_existing == 300 * PAGE
    assert ids.times == 0


class Unwalked(list[Node]):
    """A list that is not walked through."""

    def __iter__(self) -> Any:
        raise AssertionError("all nodes are looked at")

    def index(self, *arguments: Any) -> int:
        raise AssertionError("many nodes are looked at")


def test_a_node_s_place_in_its_run_and_the_checkpoint_above_it_are_found_without_a_walk(tree: Tree) -> None:
    nodes = path(tree, 50)
    run = nodes[0].run
    run.nodes, run.stored = Unwalked(run.nodes), Unwalked(run.stored)
    assert nodes[30].checkpoint_above() is nodes[29]
    assert nodes[0].checkpoint_above() is None
    assert [run.index(node) for node in (nodes[0], nodes[30], nodes[-1])] == [0, 30, 49]


def test_of_many_children_few_are_weighed_again() -> None:
    class Children(dict[bytes, Node]):
        def values(self) -> Any:
            for seen, child in enumerate(super().values()):
                assert seen <= MAX_NOTIFIED, "many children are looked at"
                yield child

    tree = Tree(PAGE, PAGE, LearnedHitDensity())
    for last in range(3 * MAX_NOTIFIED):
        put(tree, Key.of([1, 1, last, last]), Checkpoint(last, 2 * PAGE))
    above = tree.peek(Key.of([1, 1]), PAGE).deepest
    assert above is not None
    assert len(above.children) == 3 * MAX_NOTIFIED
    above.children = Children(above.children)
    tree.candidates.reweigh_below(above)


@pytest.mark.parametrize("lock", ["lock_pages", "lock_state", "pin"])
def test_locks_that_wait_to_be_counted_are_few(tree: Tree, lock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.tree.locks.MAX_CHANGED", 8)
    nodes = path(tree, 50)
    locks = [getattr(tree.locks, lock)(node) for node in nodes]
    assert max(len(counter.changed) for counter in tree.forest.counters) <= 9
    assert tree.locks.num_pages == 50
    for one in locks:
        tree.unlock(one)
    assert tree.locks.num_pages == 0


def test_names_of_edges_that_are_joined_are_kept() -> None:
    named: list[bytes] = []
    tree = Tree(PAGE, PAGE, LeastRecentlyUsed(), names=Names(PAGE, noted_in(named)))
    shared = [*range(4 * PAGE)]
    put(tree, Key.of([*shared, -1, -1]))
    longer = Key.of([*shared, *range(100, 100 + 4 * PAGE)])
    node = put(tree, longer).node
    tree.names.at(node, node.end)
    tree.evict_pages(1)
    assert tree.peek(longer, len(longer)).deepest is node
    assert (node.start, len(named)) == (0, 9)
    tree.evict_all()
    assert (len(tree.ghosts), len(named)) == (9, 9)
    assert tree.recall(longer, tree.peek(longer, len(longer)), len(longer)).num_tokens == len(longer)
