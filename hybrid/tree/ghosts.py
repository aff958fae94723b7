"""Ghosts: what the tree remembers about evicted prefixes, without their pages or states.

A ghost is the hash of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen: the position where a request leaves it is then known as a branching point on the second sight, whether its pages
are there or not, and a miss is known to be an eviction and not a first sight. Where a checkpoint was, the ghost keeps
its usage, so that a policy that learns gets to know of the hits that the eviction prevented.

The hash of a prefix is a chain of BLAKE2b digests over blocks of the grid: the same in every process. Evicted blocks
are hashed when the ghosts are next looked up, so that eviction itself does not wait for it. A run of nodes keeps the
digests of the blocks that end inside it once they have been needed.
"""

from __future__ import annotations

from hashlib import blake2b

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import DIGEST_BYTES, Node, NodeUsage, Root, Run

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
        limit: maximum number of ghosts; the older half is forgotten when there would be more. 0: nothing is remembered.
    """

    def __init__(self, grid: int, limit: int) -> None:
        self.limit: int = limit
        self._grid = grid
        self._block = grid * TOKEN_BYTES
        self._half = max(1, limit // 2)
        self._young: dict[bytes, NodeUsage | None] = {}
        self._old: dict[bytes, NodeUsage | None] = {}
        # The digest before the first block and ids, or None and digests; the usage of a checkpoint lost at the end.
        self._evicted: list[tuple[bytes | None, bytes, NodeUsage | None]] = []
        self._num_unhashed = 0

    def __len__(self) -> int:
        self._hash()
        return len(self._young) + sum(value not in self._young for value in self._old)

    def remember(self, leaf: Node, num_kept: int) -> None:
        """Remember the blocks of a leaf's edge after its first `num_kept` tokens, which are about to be evicted, and
        the usage of its lost checkpoint."""
        if not self.limit:
            return
        grid, run = self._grid, leaf.run
        block = (leaf.start + num_kept) // grid  # the first that is evicted
        if leaf.end // grid == block:
            return  # no block ends there
        lost = leaf.usage if leaf.lost_checkpoint and not leaf.end % grid else None
        kept = (block - run.start // grid) * DIGEST_BYTES  # digests of the run that stay
        if len(run.digests) > kept:
            self._digest(run, leaf.end)
            self._evicted.append((None, bytes(run.digests[kept:]), lost))
        else:
            ids = ids_between(run, block * grid, leaf.end)
            self._evicted.append((self._digest(run, block * grid), ids, lost))
            self._num_unhashed += len(ids)
        if self._num_unhashed > MAX_UNHASHED or len(self._evicted) > self.limit:
            self._hash()

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
        ids, block, known = key.ids, self._block, num_tokens
        start, end = num_tokens - num_tokens % self._grid, min(limit * TOKEN_BYTES, len(ids))
        if not self.limit or start * TOKEN_BYTES + block > end:
            return num_tokens, []
        self._hash()
        young, old = self._young, self._old
        if not young and not old:
            return num_tokens, []
        digest = self._digest(node.run, start) if node is not None else of_namespace(key.namespace)
        start *= TOKEN_BYTES
        gone: list[tuple[NodeUsage, int]] = []
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

    def _hash(self) -> None:
        """Enter what was evicted since the last call."""
        if not self._evicted:
            return
        evicted, self._evicted, self._num_unhashed = self._evicted, [], 0
        for before, ids, lost in evicted:
            digests = ids if before is None else self._digests_after(before, ids)
            for end in range(DIGEST_BYTES, len(digests) + 1, DIGEST_BYTES):
                self._young[digests[end - DIGEST_BYTES : end]] = None
                if len(self._young) > self._half:
                    self._old, self._young = self._young, {}
            if lost is not None:
                self._young[digests[-DIGEST_BYTES:]] = lost

    def _digests_after(self, digest: bytes, ids: bytes) -> bytes:
        """The digests at the end of each block of `ids`, which follow a prefix whose digest is given."""
        block, digests = self._block, []
        for start in range(0, len(ids) - block + 1, block):
            digest = of_block(digest, ids[start : start + block])
            digests.append(digest)
        return b"".join(digests)

    def _digest(self, run: Run, num_tokens: int) -> bytes:
        """The digest of the first `num_tokens` tokens, a multiple of the grid, of the path to a run and in it. The runs
        keep the digests on the way."""
        incomplete = []
        while True:
            wanted = (num_tokens // self._grid - run.start // self._grid) * DIGEST_BYTES
            if wanted > 0:
                if wanted <= len(run.digests):
                    digest = bytes(run.digests[wanted - DIGEST_BYTES : wanted])
                    break
                incomplete.append((run, wanted))
                if run.digests:
                    digest = bytes(run.digests[-DIGEST_BYTES:])
                    break
            if num_tokens > run.start:
                num_tokens = run.start
            above = run.nodes[0].parent
            assert above is not None
            if isinstance(above, Root):
                digest = of_namespace(above.namespace)
                break
            run = above.run
        for run, wanted in reversed(incomplete):
            first = run.start // self._grid
            start, end = first + len(run.digests) // DIGEST_BYTES, first + wanted // DIGEST_BYTES
            ids = ids_between(run, start * self._grid, end * self._grid)
            run.digests += self._digests_after(digest, ids)
            digest = bytes(run.digests[-DIGEST_BYTES:])
        return digest


def ids_between(run: Run, start: int, end: int) -> bytes:
    """The bytes of the token ids of positions `[start, end)` on the path to a run and in it."""
    first = run.start
    if start >= first:
        return bytes(run.ids[(start - first) * TOKEN_BYTES : (end - first) * TOKEN_BYTES])
    parts = [bytes(run.ids[: max(0, end - first) * TOKEN_BYTES])]
    while start < first:
        above, end = run.nodes[0].parent, min(end, first)
        assert above is not None
        run, first = above.run, above.run.start
        parts.append(bytes(run.ids[max(0, start - first) * TOKEN_BYTES : max(0, end - first) * TOKEN_BYTES]))
    return b"".join(reversed(parts))
