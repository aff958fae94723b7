"""Host memory as a second tier: copies of what the tree evicts, brought back when a request needs it."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from hybrid.cache.archives import writer_of
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import explain
from hybrid.cache.lease import Lease
from hybrid.cache.opener import Opener
from hybrid.cache.restorer import Boundary, Outcome, Restorer
from hybrid.cache.stats import CacheStats
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.key import TOKEN_BYTES, Key
from hybrid.memory.device import free_memory
from hybrid.memory.digests import ContentWriter
from hybrid.memory.memory import CacheMemory, UnitSizes
from hybrid.tiers.chain import chain
from hybrid.tiers.host import HostTier
from hybrid.tiers.restored import Restored
from hybrid.tree.node import Kind, Node, NodeUsage, Root
from hybrid.tree.tree import Tree
from hybrid.units import format_bytes

WEIGHT = 0.2
"""Weight of the latest measurement of a rate."""

FADING = 0.01
"""Part of a rate that is forgotten whenever it prevents a measurement."""

COMPUTE, COPY = 1e-4, 1e-10
"""Seconds per token computed, and per byte copied, that are assumed until they are measured."""


class Rate:
    """Seconds per unit, as measured lately.

    Args:
        assumed: before anything is measured.
    """

    def __init__(self, assumed: float) -> None:
        self.value: float = assumed
        self.is_measured: bool = False

    def note(self, units: int, seconds: float) -> None:
        """`units` took `seconds`."""
        if units > 0:
            latest = seconds / units
            self.value = latest if not self.is_measured else (1 - WEIGHT) * self.value + WEIGHT * latest
            self.is_measured = True

    def fade(self) -> None:
        """Nothing is done at this rate: without this, one slow measurement would be the last."""
        self.value *= 1 - FADING


class Candidate(NamedTuple):
    """A checkpoint in host memory that a request could use: its position, and the bytes to copy for it."""

    num_tokens: int
    num_bytes: int


class Tiers:
    """Copies to host memory what the tree evicts (`Leaving` of the tree), and restores it.

    Args:
        host: the copies.
        memory: its mover reads contents that leave.
        sizes: bytes of a page and of a checkpoint.
        page_size, grid: of the cache.

    Attributes:
        host: as given.
        compute: seconds per token that is computed.
        copy: seconds per byte that is restored.
        restored_checkpoints, restored_tokens, restored_bytes: by requests.
        num_failures: copies and restores that raised; requests compute then.
    """

    def __init__(self, host: HostTier, memory: CacheMemory, sizes: UnitSizes, page_size: int, grid: int) -> None:
        self.host: HostTier = host
        self.compute: Rate = Rate(COMPUTE)
        self.copy: Rate = Rate(COPY)
        self.restored_checkpoints: int = 0
        self.restored_tokens: int = 0
        self.restored_bytes: int = 0
        self.num_failures: int = 0
        self._sizes = sizes
        self._memory = memory
        self._page_size = page_size
        self._grid = grid
        self._is_discarding = False
        self._latest: tuple[Key | None, list[bytes]] = (None, [])

    # What leaves the device

    def checkpoint(self, node: Node) -> None:
        """The checkpoint of a node is about to be evicted."""
        if self._is_discarding or node.slot is None:
            return
        above, slot, usage = node.checkpoint_above(), node.slot, node.usage
        num_tokens = node.end - (above.end if above is not None else 0)
        size = self._sizes.checkpoint
        group = "checkpoint", usage.kind, min(usage.hits, 2), usage.last_used == 0
        try:
            name = "checkpoint", self._names(node)[-1]
            self.host.offer(
                name, size, partial(self._reader().read_checkpoint, slot), group, self._gain(num_tokens, size), usage
            )
        except Exception:  # it is evicted without a copy
            self.num_failures += 1

    def pages(self, node: Node, num_kept: int) -> None:
        """The pages of a node after the first `num_kept` are about to be evicted."""
        if self._is_discarding:
            return
        try:
            names, pages, size = self._names(node), node.pages, self._sizes.page
            group: Hashable = "page", node.usage.kind, min(node.usage.hits, 2)
            gain = self._gain(self._page_size, size)
            first = len(names) - len(pages)
            for index in range(num_kept, len(pages)):
                read = partial(self._reader().read_page, pages[index])
                self.host.offer(("page", names[first + index]), size, read, group, gain)
        except Exception:  # they are evicted without a copy
            self.num_failures += 1

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """What is evicted meanwhile is not copied, and all copies are forgotten."""
        self._is_discarding = True
        try:
            yield
        finally:
            self._is_discarding = False
            self.host.clear()

    def count(self, stats: CacheStats) -> None:
        """Fill in what it holds and did."""
        host = self.host
        stats.host_bytes_total, stats.host_bytes_used = host.num_bytes, host.bytes_used
        stats.host_pages, stats.host_checkpoints = host.num_pages, host.num_checkpoints
        stats.host_bytes_offered, stats.host_bytes_written = host.bytes_offered, host.bytes_written
        stats.restored_checkpoints, stats.restored_tokens = self.restored_checkpoints, self.restored_tokens
        stats.restored_bytes, stats.tier_failures = self.restored_bytes, self.num_failures

    def _reader(self) -> ContentWriter:
        return writer_of(self._memory)

    def _gain(self, num_tokens: int, num_bytes: int) -> float:
        """Seconds that restoring saves over computing."""
        gain = num_tokens * self.compute.value - num_bytes * self.copy.value
        if gain <= 0:
            self.copy.fade()
        return gain

    def _names(self, node: Node) -> list[bytes]:
        """The digests of the prefixes up to each page on the path to a node's end."""
        edges, above = [], node
        while above.parent is not None:
            edges.append(above.edge)
            above = above.parent
        assert isinstance(above, Root)
        return chain(b"".join(reversed(edges)), above.namespace, self._page_size * TOKEN_BYTES)

    # What comes back

    def restore(self, lease: Lease, limit: int, tree: Tree, opener: Opener, restorer: Restorer) -> None:
        """Bring back the deepest checkpoint of a prompt that is worth it, with the pages that the device lacks, into
        the memory of the lease that was opened for it. The tree has it then, and the lease resumes from it. A restore
        that fails is a miss with a reason. When this raises, the lease is closed.

        Args:
            limit: tokens of the lease's key that may be used.
        """
        if not self.host.num_checkpoints:
            return
        try:
            restored = self._restore(lease, limit, restorer)
            if restored is None:
                return
            if restored.num_tokens:
                opener.resume(lease, lease.num_hit_tokens + restored.num_tokens)
            explanation = explain(tree, lease.key, limit, tree.peek(lease.key, limit))
            lease.explanation = replace(explanation, restored=restored)
        except BaseException:
            opener.close(lease)
            raise

    def _restore(self, lease: Lease, limit: int, restorer: Restorer) -> Restored | None:
        """What came back; None: there was nothing."""
        key, hit, page_hit = lease.key, lease.num_hit_tokens, lease.num_shared * self._page_size
        names, refused = self._names_of(key), ""
        for candidate in self._candidates(key, names, page_hit, hit, limit):
            saved = candidate.num_tokens - hit
            if self._gain(saved, candidate.num_bytes) <= 0:
                refused = refused or (
                    f"the checkpoint at {candidate.num_tokens} in host memory is not restored: computing is faster"
                )
                continue
            start = time.perf_counter()
            try:
                outcome = restorer.fill(lease, self._boundary(key, names, candidate, page_hit))
            except Exception as error:
                self.num_failures += 1
                return Restored("host", refused=f"restoring {candidate.num_tokens} tokens failed: {error!s:.200}")
            if outcome is not Outcome.RESTORED:
                return Restored("host", refused=f"{candidate.num_tokens} tokens are not restored: {outcome.value}")
            seconds = time.perf_counter() - start
            self._note(names, candidate, page_hit, seconds, saved)
            return Restored("host", saved, candidate.num_bytes, seconds, refused)
        return Restored("host", refused=refused) if refused else None

    def _names_of(self, key: Key) -> list[bytes]:
        """The digests of a key, kept for the next call: a request that waits asks again and again."""
        latest, names = self._latest
        if latest is not key:
            names = chain(key.ids, key.namespace, self._page_size * TOKEN_BYTES)
            self._latest = key, names
        return names

    def _candidates(self, key: Key, names: list[bytes], page_hit: int, hit: int, limit: int) -> list[Candidate]:
        """The checkpoints in host memory that a prompt could use, deepest first."""
        size, first = self._page_size, page_hit // self._page_size
        last = first
        while last < min(limit // size, len(names)) and ("page", names[last]) in self.host:
            last += 1
        found = []
        for end in range(last * size // self._grid * self._grid, hit, -self._grid):
            if ("checkpoint", names[end // size - 1]) in self.host and key.whole(end, 1) == end:
                num_pages = max(0, end // size - first)
                found.append(Candidate(end, num_pages * self._sizes.page + self._sizes.checkpoint))
        return found

    def _boundary(self, key: Key, names: list[bytes], candidate: Candidate, page_hit: int) -> Boundary:
        first, end = page_hit // self._page_size, candidate.num_tokens // self._page_size
        pages = [self.host.get(("page", name)) for name in names[first:end]]
        checkpoint = self.host.get(("checkpoint", names[end - 1]))
        assert checkpoint is not None
        usage: NodeUsage = checkpoint.note
        return Boundary(
            key=key,
            num_tokens=candidate.num_tokens,
            pages=[page.contents for page in pages if page is not None],
            checkpoint=checkpoint.contents,
            kind=usage.kind if usage.kind is not Kind.PAGES else Kind.BRANCH,
            turn=usage.turn,
            priority=usage.priority,
            past=usage,
        )

    def _note(self, names: list[bytes], candidate: Candidate, page_hit: int, seconds: float, saved: int) -> None:
        """Count what was restored. Its copies stay: when it is evicted again, nothing is written."""
        end = candidate.num_tokens // self._page_size
        self.host.used(("checkpoint", names[end - 1]))
        for name in names[page_hit // self._page_size : end]:
            self.host.used(("page", name))
        self.copy.note(candidate.num_bytes, seconds)
        self.restored_checkpoints += 1
        self.restored_tokens += saved
        self.restored_bytes += candidate.num_bytes


def make_tiers(memory: CacheMemory, config: CacheConfig) -> Tiers | None:
    """The tiers that a configuration asks for; None: none.

    Raises:
        ArgumentError: the memory has no contents that can be copied.
        MemoryBudgetError: there is less host memory.
    """
    if config.host is None or not config.enabled:
        return None
    writer_of(memory)
    if memory.sizes is None:
        raise ArgumentError("CacheConfig: host needs a memory that knows the bytes of its pages and states")
    assert isinstance(config.host, int)
    free = free_memory(torch.device("cpu"))
    if config.host > free:
        raise MemoryBudgetError(
            f"CacheConfig: host={format_bytes(config.host)}, but only {format_bytes(free)} is free; choose less"
        )
    return Tiers(HostTier(config.host), memory, memory.sizes, config.page_size, config.grid)
