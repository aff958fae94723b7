"""Ghosts: what the tree remembers about evicted prefixes, without their pages or states.

A ghost is the hash of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen: the position where a request leaves it is then known as a branching point on the second sight, whether its pages
are there or not, and a miss is known to be an eviction and not a first sight. Where a checkpoint was, the ghost keeps
its usage, so that a policy that learns gets to know of the hits that the eviction prevented.

The hash of a prefix is a chain of BLAKE2b digests over blocks of the grid: the same in every process. Evicted blocks
are hashed when the ghosts are next looked up, so that eviction itself does not wait for it. A node caches the digests
of the blocks that end inside its edge once they have been needed.
"""

from __future__ import annotations

from hashlib import blake2b

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import DIGEST_BYTES, Node, NodeUsage, Root

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
        self.limit: int = limit
        self._grid = grid
        self._block = grid * TOKEN_BYTES
        self._half = max(1, limit // 2)
        self._young: dict[bytes, NodeUsage | None] = {}
        self._old: dict[bytes, NodeUsage | None] = {}
        self._unhashed: list[tuple[bytes, bytes, NodeUsage | None]] = []
        self._num_unhashed = 0

    def __len__(self) -> int:
        self._hash()
        return len(self._young) + sum(value not in self._young for value in self._old)

    def remember(self, node: Node, num_kept: int) -> None:
        """Remember the blocks of a leaf's edge after its first `num_kept` tokens, which are about to be evicted, and
        the usage of its lost checkpoint."""
        lost = node.usage if node.lost_checkpoint and node.end % self._grid == 0 else None
        if not num_kept and not node.digests:
            start = node.start - node.start % self._grid
            ids = ids_between(node, start, node.end)
            self._unhashed.append((self._digest(node.parent, start), ids, lost))
            self._num_unhashed += len(ids)
            if self._num_unhashed > MAX_UNHASHED:
                self._hash()
            return
        self._hash()
        self._complete(node, node.end)
        num_left = (node.start + num_kept) // self._grid - node.start // self._grid
        for at in range(num_left * DIGEST_BYTES, len(node.digests), DIGEST_BYTES):
            self._add(bytes(node.digests[at : at + DIGEST_BYTES]), None)
        if lost is not None:
            self._add(bytes(node.digests[-DIGEST_BYTES:]), lost)
        del node.digests[num_left * DIGEST_BYTES :]

    def follow(
        self, key: Key, node: Node | None, num_tokens: int, limit: int
    ) -> tuple[int, list[tuple[NodeUsage, int]]]:
        """How far beyond `num_tokens`, to which the tree has its pages, a key was once known.

        Args:
            node: the node of the last page; None for the empty prefix.
            limit: number of tokens at which to stop.

        Returns:
            Length of the prefix that was known (a multiple of the grid, or `num_tokens`); the usage of each evicted
            checkpoint beyond `num_tokens`, and its number of tokens.
        """
        self._hash()
        young, old, block = self._young, self._old, self._block
        if not young and not old:
            return num_tokens, []
        start = num_tokens - num_tokens % self._grid
        digest = self._digest(node, start) if node is not None else of_namespace(key.namespace)
        ids, start, known = key.ids, start * TOKEN_BYTES, num_tokens
        gone: list[tuple[NodeUsage, int]] = []
        end = min(limit * TOKEN_BYTES, len(ids))
        while start + block <= end:
            digest = of_block(digest, ids[start : start + block])
            if digest not in young and digest not in old:
                break
            start += block
            known = start // TOKEN_BYTES
            usage = young[digest] if digest in young else old[digest]
            if usage is not None:
                gone.append((usage, known))
        return known, gone

    def _add(self, digest: bytes, lost: NodeUsage | None) -> None:
        self._young[digest] = lost
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def _hash(self) -> None:
        """Hash what was evicted since the last call."""
        unhashed, self._unhashed, self._num_unhashed = self._unhashed, [], 0
        for digest, ids, lost in unhashed:
            for start in range(0, len(ids) - self._block + 1, self._block):
                digest = of_block(digest, ids[start : start + self._block])
                self._add(digest, None)
            if lost is not None:
                self._add(digest, lost)

    def _digest(self, node: Node | None, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens, a multiple of the grid, of the path to a node; the next multiple
        is beyond its end."""
        if node is not None:
            self._complete(node, num_tokens)
        while node is not None:
            if isinstance(node, Root):
                return of_namespace(node.namespace)
            num_digests = (num_tokens // self._grid - node.start // self._grid) * DIGEST_BYTES
            if num_digests > 0:
                return bytes(node.digests[num_digests - DIGEST_BYTES : num_digests])
            node = node.parent
        raise AssertionError("a path begins at a root")

    def _complete(self, node: Node, num_tokens: int) -> None:
        """Have the digests of all blocks on the path to a node, up to `num_tokens`."""
        path = []
        above: Node | None = node
        while above is not None and not isinstance(above, Root):
            wanted = min(above.end, num_tokens) // self._grid - above.start // self._grid
            if len(above.digests) < wanted * DIGEST_BYTES:
                path.append((above, wanted))
            elif wanted > 0:
                break
            above = above.parent
        for below, wanted in reversed(path):
            start = (below.start // self._grid + len(below.digests) // DIGEST_BYTES) * self._grid
            end = (below.start // self._grid + wanted) * self._grid
            digest = bytes(below.digests[-DIGEST_BYTES:]) or self._digest(below.parent, start)
            ids = ids_between(below, start, end)
            for at in range(0, len(ids), self._block):
                digest = of_block(digest, ids[at : at + self._block])
                below.digests += digest


def ids_between(node: Node, start: int, end: int) -> bytes:
    """The bytes of the token ids of positions `[start, end)` on the path to a node; `end` is at most the node's."""
    parts = []
    above: Node | None = node
    while end > start:
        assert above is not None
        run = above.run
        first = max(start, run.start)
        parts.append(bytes(run.ids[(first - run.start) * TOKEN_BYTES : (end - run.start) * TOKEN_BYTES]))
        above, end = run.nodes[0].parent, first
    return b"".join(reversed(parts))
