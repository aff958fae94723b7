"""Ghosts: what the tree remembers about evicted prefixes, without their pages or states.

A ghost is the hash of a prefix whose pages were evicted, at a multiple of the grid. It says that the prefix has been
seen: the position where a request leaves it is then known as a branching point on the second sight, whether its pages
are there or not, and a miss is known to be an eviction and not a first sight. Where a checkpoint was, the ghost keeps
its usage, so that a policy that learns gets to know of the hits that the eviction prevented.

The hash of a prefix is a polynomial in the hashes of its blocks of the grid, which are sums of products, computed for
many blocks at once: a fixed function, the same in every process. Prefixes could be made that have one hash; what is
cached is found by comparing tokens, so that no hit is wrong for it.

A prompt is hashed when it is looked up, and the nodes that are made of it keep these hashes (`keep`), so that they are
not hashed again. Other blocks are hashed after their eviction, when the ghosts are next looked up, so that eviction
itself does not wait for it. A run of nodes keeps the hashes of the blocks that end inside it once they were needed.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b

import numpy as np

from hybrid.key import TOKEN_BYTES, Key
from hybrid.tree.node import KeyHashes, Node, NodeUsage, Root, Run

MAX_UNHASHED = 1 << 23
"""Bytes of evicted token ids that may wait to be hashed."""

STEP = 0x9E3779B97F4A7C15
"""The factor of the hash of a prefix for each block that follows: odd."""

MASK = (1 << 64) - 1

FEW = 24
"""Hashes that are chained one by one, which is faster for a few than sums are."""


Hashes = np.ndarray[tuple[int], np.dtype[np.uint64]]


@lru_cache
def of_namespace(namespace: str) -> int:
    """The hash of the empty prefix of a namespace."""
    return int.from_bytes(blake2b(namespace.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


class BlockHash:
    """Hashes of prefixes, from their blocks of token ids.

    Args:
        block: bytes of a block.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self._type = np.dtype(np.uint32 if block % 8 else np.uint64)
        lanes = block // self._type.itemsize
        drawn = b"".join(blake2b(at.to_bytes(8, "little")).digest() for at in range(lanes // 8 + 1))
        self._factors = np.frombuffer(drawn, "<u8")[:lanes] | np.uint64(1)
        self._powers = self._inverses = np.zeros(0, np.uint64)  # of STEP, from the first on

    def blocks(self, ids: bytes, start: int = 0) -> Hashes:
        """The hash of each block by itself, from byte `start` on; less than a block at the end is left out."""
        shape = (len(ids) - start) // self._block, len(self._factors)
        hashes: Hashes = np.ndarray(shape, self._type, ids, start).dot(self._factors)
        return hashes

    def chain(self, before: int, blocks: Hashes) -> array[int]:
        """The hashes of the prefixes that continue one with the hash `before` by the first of some blocks, the first
        two, and so on.

        Each is `STEP` times the one before, plus the block's own: here for all of them in sums.
        """
        count = len(blocks)
        if count <= FEW:
            chained = array("Q")
            for block in blocks.tolist():
                before = (before * STEP + block) & MASK
                chained.append(before)
            return chained
        if count > len(self._powers):
            self._powers, self._inverses = powers(STEP, 2 * count), powers(pow(STEP, -1, 1 << 64), 2 * count)
        sums = np.add.accumulate(blocks * self._inverses[:count])
        sums += before
        sums *= self._powers[:count]
        return array("Q", sums.tobytes())


def powers(of: int, count: int) -> Hashes:
    """The first powers of a number, modulo 2**64."""
    return np.cumprod(np.full(count, of, np.uint64), dtype=np.uint64)


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
        self._hashes = BlockHash(self._block)
        self._half = max(1, limit // 2)
        self._young: dict[int, NodeUsage | None] = {}
        self._old: dict[int, NodeUsage | None] = {}
        # The hash before the first block and ids, or hashes; the usage of a checkpoint lost at the end.
        self._evicted: list[tuple[int, bytes | array[int], NodeUsage | None]] = []
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
        hashed = run.digests[block - run.start // grid :]
        before = hashed[-1] if hashed else self._digest(run, block * grid)
        block += len(hashed)
        is_hashed = leaf.end // grid == block  # all blocks are
        if hashed:
            self._evicted.append((0, hashed, lost if is_hashed else None))
        if not is_hashed:
            ids = ids_between(run, block * grid, leaf.end - leaf.end % grid)
            self._evicted.append((before, ids, lost))
            self._num_unhashed += len(ids)
        if self._num_unhashed > MAX_UNHASHED or len(self._evicted) > self.limit:
            self._hash()

    def follow(
        self, key: Key, node: Node | None, num_tokens: int, limit: int
    ) -> tuple[int, list[tuple[NodeUsage, int]], KeyHashes | None]:
        """Follow a key beyond `num_tokens`, to which the tree has its pages, as far as it was once known.

        Args:
            node: the node of the last page; None for the empty prefix.
            limit: number of tokens at which to stop.

        Returns:
            Length of the prefix that was known (a multiple of the grid, or `num_tokens`); the usage of each evicted
            checkpoint beyond `num_tokens`, and its number of tokens; the hashes that were computed for it.
        """
        ids, known = key.ids if limit >= len(key) else key.ids[: limit * TOKEN_BYTES], num_tokens
        start = num_tokens - num_tokens % self._grid
        if not self.limit or start * TOKEN_BYTES + self._block > len(ids):
            return num_tokens, [], None
        self._hash()
        young, old = self._young, self._old
        if not young and not old:
            return num_tokens, [], None
        digest = self._digest(node.run, start) if node is not None else of_namespace(key.namespace)
        hashes = self._hashes.chain(digest, self._hashes.blocks(ids, start * TOKEN_BYTES))
        first, gone = start // self._grid, list[tuple[NodeUsage, int]]()
        for digest in hashes:
            if digest in young:
                usage = young[digest]
            elif digest in old:
                usage = old[digest]
            else:
                break
            start += self._grid
            known = start
            if usage is not None:
                gone.append((usage, known))
        return known, gone, KeyHashes(first, hashes)

    def keep(self, node: Node, hashes: KeyHashes) -> None:
        """Have the run of a node, its last and on a key's path, keep the hashes of the key up to the node's end."""
        run = node.run
        start = run.start // self._grid + len(run.digests) - hashes.first
        if start >= 0:
            with suppress(MemoryError):  # they are computed again
                run.digests.extend(hashes.values[start : max(start, node.end // self._grid - hashes.first)])

    def _hash(self) -> None:
        """Enter what was evicted since the last call."""
        if not self._evicted:
            return
        evicted, self._evicted, self._num_unhashed = self._evicted, [], 0
        unhashed, start = [ids for _, ids, _ in evicted if not isinstance(ids, array)], 0
        if unhashed:
            blocks = self._hashes.blocks(b"".join(unhashed))
        for before, ids, lost in evicted:
            if isinstance(ids, array):
                digests = ids
            else:
                stop = start + len(ids) // self._block
                digests, start = self._hashes.chain(before, blocks[start:stop]), stop
            for first in range(0, len(digests), self._half):
                self._young.update(dict.fromkeys(digests[first : first + self._half].tolist()))
                if len(self._young) > self._half:
                    self._old, self._young = self._young, {}
            if lost is not None:
                self._young[digests[-1]] = lost

    def _digest(self, run: Run, num_tokens: int) -> int:
        """The hash of the first `num_tokens` tokens, a multiple of the grid, of the path to a run and in it. The runs
        keep the hashes on the way."""
        incomplete = []
        while True:
            wanted = num_tokens // self._grid - run.start // self._grid
            if wanted > 0:
                if wanted <= len(run.digests):
                    digest = run.digests[wanted - 1]
                    break
                incomplete.append((run, wanted))
                if run.digests:
                    digest = run.digests[-1]
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
            ids = ids_between(run, (first + len(run.digests)) * self._grid, (first + wanted) * self._grid)
            run.digests.extend(self._hashes.chain(digest, self._hashes.blocks(ids)))
            digest = run.digests[-1]
        return digest


def ids_between(run: Run, start: int, end: int) -> bytes:
    """The bytes of the token ids of positions `[start, end)` on the path to a run and in it."""
    first = run.start
    if start >= first:
        return bytes(memoryview(run.ids)[(start - first) * TOKEN_BYTES : (end - first) * TOKEN_BYTES])
    parts = [bytes(run.ids[: max(0, end - first) * TOKEN_BYTES])]
    while start < first:
        above, end = run.nodes[0].parent, min(end, first)
        assert above is not None
        run, first = above.run, above.run.start
        parts.append(bytes(run.ids[max(0, start - first) * TOKEN_BYTES : max(0, end - first) * TOKEN_BYTES]))
    return b"".join(reversed(parts))
