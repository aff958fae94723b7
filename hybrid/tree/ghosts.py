"""Ghosts: what the tree remembers about evicted prefixes, without their pages or states.

A ghost is the name of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen: the position where a request leaves it is then known as a branching point on the second sight, whether its pages
are there or not, and a miss is known to be an eviction and not a first sight. Where a checkpoint was, the ghost keeps
its usage, so that a policy that learns gets to know of the hits that the eviction prevented.

A prompt is named as far as ghosts know it, and for one block of the grid after that. What is cached is found by
comparing tokens: no hit is wrong where two prefixes have one name.
"""

from __future__ import annotations

from itertools import islice

from hybrid.key import Key, name_of_namespace
from hybrid.tree.names import Names
from hybrid.tree.node import Node, NodeUsage


class Ghosts:
    """The ghosts of a tree.

    Args:
        names: of the tree's prefixes.
        grid: tokens per block, whole steps of names.
        limit: maximum number of ghosts; the older half is forgotten when there would be more. 0: nothing is remembered.
    """

    def __init__(self, names: Names, grid: int, limit: int) -> None:
        self.limit: int = limit
        self._names = names
        self._grid = grid
        self._half = max(1, limit // 2)
        self._young: dict[bytes, NodeUsage | None] = {}
        self._old: dict[bytes, NodeUsage | None] = {}

    def __len__(self) -> int:
        return len(self._young) + sum(name not in self._young for name in self._old)

    def remember(self, leaf: Node, num_kept: int) -> None:
        """Remember the blocks that end in a leaf's edge after its first `num_kept` tokens, which are about to be
        evicted, and the usage of its lost checkpoint."""
        if not self.limit:
            return
        names = self._names.between(leaf, leaf.start + num_kept, leaf.end, self._grid)[-self._half :]
        self._young.update(dict.fromkeys(names))
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}
        if names and leaf.lost_checkpoint and not leaf.end % self._grid:
            self._young[names[-1]] = leaf.usage

    def follow(
        self, key: Key, node: Node | None, num_tokens: int, limit: int
    ) -> tuple[int, list[tuple[NodeUsage, int]]]:
        """Follow a key beyond `num_tokens`, to which the tree has its pages, as far as it was once known.

        Args:
            node: the node of the last page; None for the empty prefix.
            limit: number of tokens at which to stop.

        Returns:
            Length of the prefix that was known (a multiple of the grid, or `num_tokens`); the usage of each evicted
            checkpoint beyond `num_tokens`, and its number of tokens.
        """
        grid, names, young, old = self._grid, self._names, self._young, self._old
        known, gone = num_tokens, list[tuple[NodeUsage, int]]()
        start = num_tokens - num_tokens % grid
        positions = range(start + grid, min(limit, len(key)) + 1, grid)
        if not positions or not (young or old):
            return known, gone
        last = names.at(node, start) if node is not None else name_of_namespace(key.namespace)
        each = grid // names.step
        for position, name in zip(
            positions, islice(names.after(last, key.ids, start), each - 1, None, each), strict=False
        ):
            if name in young:
                usage = young[name]
            elif name in old:
                usage = old[name]
            else:
                break
            known = position
            if usage is not None:
                gone.append((usage, known))
        return known, gone
