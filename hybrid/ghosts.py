"""What was here and has gone: hashes of evicted prefixes, for no bytes of the memory that is managed.

A ghost is the hash of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen, so that the point where a request leaves it is known as a branching point on the second sight, pages or not; that
a miss was an eviction and not a first sight; and, where a checkpoint stood, how it had been used, so that a policy that
learns is told of the hits which it made impossible.

The hash of a prefix is a chain over blocks of the grid. A node keeps the chain at its end once it has been asked for.
"""

from __future__ import annotations

from hybrid.eviction import Usage
from hybrid.key import TOKEN_BYTES, Key
from hybrid.node import Node, Root

Chain = tuple[int, bytes]
"""The hash of the whole blocks of a prefix, and the bytes after them."""


class Ghosts:
    """The ghosts of a tree.

    Args:
        grid: tokens per block.
        limit: at most so many; the oldest are forgotten first.
    """

    def __init__(self, grid: int, limit: int) -> None:
        self._block = grid * TOKEN_BYTES
        self._limit = limit
        self._ghosts: dict[int, Usage | None] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

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
        ids, block, ghosts = rest + node.edge if rest else node.edge, self._block, self._ghosts
        keep += len(rest)
        whole = len(ids) - len(ids) % block
        for start in range(0, whole, block):
            value = hash((value, ids[start : start + block]))
            if start + block > keep:
                ghosts.pop(value, None)  # it is the newest now
                ghosts[value] = None
        if node.lost_checkpoint and whole == len(ids):
            ghosts[value] = node.usage
        while len(ghosts) > self._limit:
            del ghosts[next(iter(ghosts))]

    def follow(self, key: Key, node: Node | None, num_tokens: int, limit: int) -> tuple[int, Usage | None, int]:
        """How far beyond `num_tokens`, where the node ends, a key was once known.

        Args:
            node: where the key's pages end; None for the empty prefix.
            limit: look no further than so many tokens.

        Returns:
            Tokens to which it was known (a multiple of the grid, or `num_tokens`); the use of the deepest evicted
            checkpoint on that way, and its tokens.
        """
        ghosts, block = self._ghosts, self._block
        if not ghosts:
            return num_tokens, None, 0
        value, rest = self.chain(node) if node is not None else (hash(key.namespace), b"")
        ids, start = key.ids, num_tokens * TOKEN_BYTES - len(rest)
        known, lost, lost_tokens = num_tokens, None, 0
        end = min(limit * TOKEN_BYTES, len(ids))
        while start + block <= end:
            value = hash((value, ids[start : start + block]))
            if value not in ghosts:
                break
            start += block
            known = start // TOKEN_BYTES
            if ghosts[value] is not None:
                lost, lost_tokens = ghosts[value], known
        return known, lost, lost_tokens
