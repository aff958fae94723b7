"""Names of what the tree has: those of whole prefixes, whatever was split, joined and cut, and each computed once."""

from array import array
from collections.abc import Iterator
from random import Random

import pytest

from hybrid.key import TOKEN_BYTES, Key, name_of_namespace, names_after, names_of
from hybrid.tree.names import Chain, Names
from hybrid.tree.node import Checkpoint, Node
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree
from support.prefixes import noted_in

PAGE = 2


def tree_of(step: int = PAGE, chain: Chain = names_after) -> Tree:
    return Tree(PAGE, step, LeastRecentlyUsed(), names=Names(step, chain))


def put(tree: Tree, ids: list[int], namespace: str = "", slot: int | None = None) -> None:
    checkpoint = Checkpoint(slot, len(ids)) if slot is not None and len(ids) % tree.grid == 0 else None
    tree.insert(Key.of(ids, namespace), len(ids), array("i", range(len(ids) // PAGE)), checkpoint)


def path_of(node: Node) -> bytes:
    edges = []
    while node.parent is not None:
        edges.append(node.edge)
        node = node.parent
    return b"".join(reversed(edges))


@pytest.mark.parametrize("step", [PAGE, 2 * PAGE, 4 * PAGE])
@pytest.mark.parametrize("seed", range(4))
def test_names_are_those_of_whole_prefixes_through_random_changes(seed: int, step: int) -> None:
    rng, tree = Random(seed), tree_of(step)
    for number in range(400):
        namespace = rng.choice(("", "other"))
        ids = [id for _ in range(rng.randrange(1, 12)) for id in [rng.randrange(2)] * PAGE]
        put(tree, ids, namespace, number if rng.random() < 0.5 else None)
        if rng.random() < 0.4:
            tree.evict_checkpoints(rng.randrange(4))
        if rng.random() < 0.4:
            tree.evict_pages(rng.randrange(12))
        for namespace, node in tree.nodes():
            if rng.random() < 0.3:
                path = path_of(node)
                expected = names_of(path, namespace, step * TOKEN_BYTES)
                end = rng.randrange(node.end // step + 1)
                assert tree.names.at(node, end * step) == [name_of_namespace(namespace), *expected][end]
                assert [*tree.names.upward(node, end * step)] == expected[:end][::-1]
                start = rng.randrange(node.run.start, node.end)
                own = [at for at in range(step, node.end + 1, step) if at > start]
                assert tree.names.between(node, start, node.end, step) == [expected[at // step - 1] for at in own]
                key = Key(path + Key.of([7] * 2 * step).ids, namespace)
                found = tree.peek(key, end * step)
                names = tree.names.of(key, len(key), found.deepest, found.num_page_tokens)
                assert names == names_of(key.ids, namespace, step * TOKEN_BYTES)


@pytest.mark.parametrize("depth", [100, 1000, 5000])
def test_a_name_costs_the_pages_that_came_since_whatever_is_before(depth: int) -> None:
    named: list[bytes] = []
    tree, ids = tree_of(chain=noted_in(named)), [*range(depth * PAGE)]
    put(tree, ids, slot=0)
    assert len(named) == 0
    node = next(node for _, node in tree.nodes())
    tree.names.at(node, node.end)
    assert len(named) == depth
    put(tree, ids + [7] * (3 * PAGE), slot=1)  # three pages more
    put(tree, ids[: -4 * PAGE] + [8] * PAGE, slot=2)  # a branch of one
    put(tree, ids[: 9 * PAGE], slot=3)
    named.clear()
    for _, node in tree.nodes():
        tree.names.at(node, node.end)
    assert len(named) == 4
    tree.evict_checkpoints(4)
    tree.evict_pages(3)
    named.clear()
    for _, node in tree.nodes():
        upward: Iterator[bytes] = tree.names.upward(node, node.end)
        next(upward)
    assert len(named) == 0
