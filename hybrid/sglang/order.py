"""The order of waiting requests by how much they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hybrid.tree.node import Node


def dfs_weight_order(nodes: Sequence[Node | None]) -> list[int]:
    """The order of a walk through the tree, at every node first to where most requests are; None is the empty prefix.

    Returns:
        Places in `nodes`: requests of one node come one after the other, those of a node after all below it.
    """
    paths = []
    weights: Counter[int] = Counter()
    for node in nodes:
        path = []
        while node is not None and node.parent is not None:
            path.append(node)
            weights[id(node)] += 1
            node = node.parent
        paths.append(path[::-1])
    first = {id(node): place for place, path in reversed([*enumerate(paths)]) for node in path}

    def rank(place: int) -> list[tuple[float, int]]:
        steps: list[tuple[float, int]] = [(-weights[id(node)], first[id(node)]) for node in paths[place]]
        return [*steps, (1.0, 0)]  # after all below

    return sorted(range(len(nodes)), key=rank)
