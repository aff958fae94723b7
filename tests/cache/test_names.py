"""Names of what the tree has: those of whole prefixes, whatever was split, joined and cut, and each computed once."""

from array import array
from collections.abc import Iterator
from random import Random

import pytest

from hybrid.cache import names
from hybrid.cache.names import name_at, names_upward
from hybrid.key import TOKEN_BYTES, Key, names_after, names_of
from hybrid.tree.node import Checkpoint, Node
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree

PAGE = 2


def tree_of() -> Tree:
    return Tree(PAGE, PAGE, LeastRecentlyUsed())


def put(tree: Tree, ids: list[int], namespace: str = "", slot: int | None = None) -> None:
    checkpoint = Checkpoint(slot, len(ids)) if slot is not None else None
    tree.insert(Key.of(ids, namespace), len(ids), array("i", range(len(ids) // PAGE)), checkpoint)


def path_of(node: Node) -> bytes:
    edges = []
    while node.parent is not None:
        edges.append(node.edge)
        node = node.parent
    return b"".join(reversed(edges))


@pytest.mark.parametrize("seed", range(4))
def test_names_are_those_of_whole_prefixes_through_random_changes(seed: int) -> None:
    rng, tree = Random(seed), tree_of()
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
                expected = names_of(path_of(node), namespace, PAGE * TOKEN_BYTES)
                end = rng.randrange(node.start // PAGE + 1, node.end // PAGE + 1)
                assert name_at(node, end * PAGE) == expected[end - 1]
                assert [*names_upward(node, end * PAGE)] == expected[end - 1 :: -1]


@pytest.mark.parametrize("depth", [100, 1000, 5000])
def test_a_name_costs_the_pages_that_came_since_whatever_is_before(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(last: bytes, ids: bytes, page_bytes: int) -> list[bytes]:
        hashed.append(len(ids) // page_bytes)
        return names_after(last, ids, page_bytes)

    monkeypatch.setattr(names, "names_after", counted)
    tree, ids = tree_of(), [*range(depth * PAGE)]
    put(tree, ids, slot=0)
    assert sum(hashed) == 0
    node = next(node for _, node in tree.nodes())
    name_at(node, node.end)
    assert sum(hashed) == depth
    put(tree, ids + [7] * (3 * PAGE), slot=1)  # three pages more
    put(tree, ids[: -4 * PAGE] + [8] * PAGE, slot=2)  # a branch of one
    put(tree, ids[: 9 * PAGE], slot=3)
    hashed.clear()
    for _, node in tree.nodes():
        name_at(node, node.end)
    assert sum(hashed) == 4
    tree.evict_checkpoints(4)
    tree.evict_pages(3)
    hashed.clear()
    for _, node in tree.nodes():
        upward: Iterator[bytes] = names_upward(node, node.end)
        next(upward)
    assert sum(hashed) == 0
