"""Ghosts: what the tree remembers about evicted prefixes, without their pages or states.

A ghost is the hash of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen: the position where a request leaves it is then known as a branching point on the second sight, whether its pages
are there or not, and a miss is known to be an eviction and not a first sight. Where a checkpoint was, the ghost keeps
its usage, so that a policy that learns gets to know of the hits that the eviction prevented.

The hash of a prefix is a chain of BLAKE2b digests over blocks of the grid: the same in every process. Evicted blocks
are hashed when the ghosts are next looked up, so that eviction itself does not wait for it. A node caches the chain at
its end once it has been needed.
"""

from __future__ import annotations

from hashlib import blake2b

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import Node, NodeUsage, Root

Chain = tuple[bytes, bytes]
"""The digest of the whole blocks of a prefix, and the ids after them."""

DIGEST_BYTES = 8

MAX_UNHASHED = 1 << 23
"""Bytes of evicted token ids that may wait to be hashed."""


def of_namespace(namespace: str) -> bytes:
    """The digest of the empty prefix of a namespace."""
    return blake2b(namespace.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def of_block(before: bytes, ids: bytes) -> bytes:
    """The digest of a prefix whose last block is `ids`, after a prefix whose digest is `before`."""
    return blake2b(ids, digest_size=DIGEST_BYTES, salt=before).digest()


class Ghosts:
    """The ghosts of a tree.

    Args:
        grid: tokens per block.
        limit: maximum number of ghosts; the older half is forgotten when there would be more.
    """

    def __init__(self, grid: int, limit: int) -> None:
        self.limit = limit
        self._block = grid * TOKEN_BYTES
        self._half = max(1, limit // 2)
        self._young: dict[bytes, NodeUsage | None] = {}
        self._old: dict[bytes, NodeUsage | None] = {}
        self._unhashed: list[tuple[Chain, bytes, int, NodeUsage | None]] = []
        self._num_unhashed = 0

    def __len__(self) -> int:
        self._hash()
        return len(self._young) + sum(value not in self._young for value in self._old)

    def chain(self, node: Node) -> Chain:
        """The chain of the path from the root to a node's end."""
        path = []
        above: Node | None = node
        while above is not None and above.chain is None:
            path.append(above)
            above = above.parent
        chain: Chain = (b"", b"")
        if above is not None and above.chain is not None:
            chain = above.chain
        for below in reversed(path):
            chain = (of_namespace(below.namespace), b"") if isinstance(below, Root) else self._extend(chain, below.edge)
            below.chain = chain
        return chain

    def _extend(self, chain: Chain, edge: bytes) -> Chain:
        value, rest = chain
        ids, block = rest + edge if rest else edge, self._block
        whole = len(ids) - len(ids) % block
        for start in range(0, whole, block):
            value = of_block(value, ids[start : start + block])
        return value, ids[whole:]

    def remember(self, node: Node, keep: int) -> None:
        """Remember the blocks of a node's edge after its first `keep` bytes, and the usage of its lost checkpoint."""
        parent = node.parent
        assert parent is not None
        self._unhashed.append((self.chain(parent), node.edge, keep, node.usage if node.lost_checkpoint else None))
        self._num_unhashed += len(node.edge)
        if self._num_unhashed > MAX_UNHASHED:
            self._hash()

    def _hash(self) -> None:
        unhashed, self._unhashed, self._num_unhashed = self._unhashed, [], 0
        block = self._block
        for (value, rest), edge, keep, lost in unhashed:
            ids, young = rest + edge if rest else edge, self._young
            whole = len(ids) - len(ids) % block
            for start in range(0, whole, block):
                value = of_block(value, ids[start : start + block])
                if start + block > keep + len(rest):
                    young[value] = None
            if lost is not None and whole == len(ids):
                young[value] = lost
            if len(young) > self._half:
                self._old, self._young = young, {}

    def follow(
        self, key: Key, node: Node | None, num_tokens: int, limit: int
    ) -> tuple[int, list[tuple[NodeUsage, int]]]:
        """How far beyond `num_tokens`, where the node ends, a key was once known.

        Args:
            node: where the key's pages end; None for the empty prefix.
            limit: number of tokens at which to stop.

        Returns:
            Length of the prefix that was known (a multiple of the grid, or `num_tokens`); the usage of each evicted
            checkpoint beyond `num_tokens`, and its number of tokens.
        """
        if self._unhashed:
            self._hash()
        young, old, block = self._young, self._old, self._block
        if not young and not old:
            return num_tokens, []
        value, rest = self.chain(node) if node is not None else (of_namespace(key.namespace), b"")
        ids, start = key.ids, num_tokens * TOKEN_BYTES - len(rest)
        known = num_tokens
        gone: list[tuple[NodeUsage, int]] = []
        end = min(limit * TOKEN_BYTES, len(ids))
        while start + block <= end:
            value = of_block(value, ids[start : start + block])
            if value not in young and value not in old:
                break
            start += block
            known = start // TOKEN_BYTES
            usage = young[value] if value in young else old[value]
            if usage is not None:
                gone.append((usage, known))
        return known, gone
