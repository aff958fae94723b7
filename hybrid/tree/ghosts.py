"""What was here and has gone: hashes of evicted prefixes, for no bytes of the memory that is managed.

A ghost is the hash of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen, so that the point where a request leaves it is known as a branching point on the second sight, pages or not; that
a miss was an eviction and not a first sight; and, where a checkpoint stood, how it had been used, so that a policy that
learns is told of the hits which it made impossible.

The hash of a prefix is a chain over blocks of the grid. A node keeps the chain at its end once it has been asked for.
"""

from __future__ import annotations

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import Node, Root
from hybrid.tree.policy import Usage

Chain = tuple[int, bytes]
"""The hash of the whole blocks of a prefix, and the bytes after them."""


class Ghosts:
    """The ghosts of a tree.

    Args:
        grid: tokens per block.
        limit: at most so many; the older half is forgotten when there would be more.
    """

    def __init__(self, grid: int, limit: int) -> None:
        self._block = grid * TOKEN_BYTES
        self._half = max(1, limit // 2)
        self._young: dict[int, Usage | None] = {}
        self._old: dict[int, Usage | None] = {}

    def __len__(self) -> int:
        return len(self._young) + sum(value not in self._young for value in self._old)

    def chain(self, node: Node) -> Chain:
        """The hash of the way from the root to a node's end."""
        way = []
        above: Node | None = node
        while above is not None and above.chain is None:
            way.append(above)
            above = above.parent
        chain: Chain = (0, b"")
        if above is not None and above.chain is not None:
            chain = above.chain
        for below in reversed(way):
            chain = (hash(below.namespace), b"") if isinstance(below, Root) else self._extend(chain, below.edge)
            below.chain = chain
        return chain

    def _extend(self, chain: Chain, edge: bytes) -> Chain:
        value, rest = chain
        ids, block = rest + edge if rest else edge, self._block
        whole = len(ids) - len(ids) % block
        for start in range(0, whole, block):
            value = hash((value, ids[start : start + block]))
        return value, ids[whole:]

    def bury(self, node: Node, keep: int) -> None:
        """Remember the blocks of a node's edge after its first `keep` bytes, and the use of its lost checkpoint."""
        parent = node.parent
        assert parent is not None
        value, rest = self.chain(parent)
        ids, block, young = rest + node.edge if rest else node.edge, self._block, self._young
        keep += len(rest)
        whole = len(ids) - len(ids) % block
        for start in range(0, whole, block):
            value = hash((value, ids[start : start + block]))
            if start + block > keep:
                young[value] = None
        if node.lost_checkpoint and whole == len(ids):
            young[value] = node.usage
        if len(young) > self._half:
            self._old, self._young = young, {}

    def follow(self, key: Key, node: Node | None, num_tokens: int, limit: int) -> tuple[int, list[tuple[Usage, int]]]:
        """How far beyond `num_tokens`, where the node ends, a key was once known.

        Args:
            node: where the key's pages end; None for the empty prefix.
            limit: look no further than so many tokens.

        Returns:
            Tokens to which it was known (a multiple of the grid, or `num_tokens`); the use of each evicted checkpoint
            on that way, and its tokens.
        """
        young, old, block = self._young, self._old, self._block
        if not young and not old:
            return num_tokens, []
        value, rest = self.chain(node) if node is not None else (hash(key.namespace), b"")
        ids, start = key.ids, num_tokens * TOKEN_BYTES - len(rest)
        known = num_tokens
        gone: list[tuple[Usage, int]] = []
        end = min(limit * TOKEN_BYTES, len(ids))
        while start + block <= end:
            value = hash((value, ids[start : start + block]))
            if value not in young and value not in old:
                break
            start += block
            known = start // TOKEN_BYTES
            usage = young[value] if value in young else old[value]
            if usage is not None:
                gone.append((usage, known))
        return known, gone
