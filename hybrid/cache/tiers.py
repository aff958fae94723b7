"""Tiers behind the device: copies of what the tree evicts (`Restores` brings it back when a request needs it)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from hybrid.cache.config import CacheConfig
from hybrid.cache.fingerprints import fingerprint_named
from hybrid.cache.offloader import Offloader
from hybrid.cache.stats import CacheStats
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.memory.device import free_memory
from hybrid.memory.memory import CacheMemory, UnitSizes
from hybrid.tiers.cost import MeasuredTime
from hybrid.tiers.disk import DiskTier
from hybrid.tiers.fingerprint import Fingerprint, arithmetic, fingerprint_of_json
from hybrid.tiers.folder import Origin
from hybrid.tiers.host import HostTier
from hybrid.tiers.tier import CHECKPOINT, Name, Tier
from hybrid.tiers.value import Reuse, Savings
from hybrid.units import format_bytes

COMPUTE = 1e-4
"""Seconds per token computed that are assumed until they are measured."""

SHUTDOWN_SECONDS = 60.0
"""Seconds for which a cache that ends waits for the disk."""


class Tiers:
    """Copies to tiers what the tree evicts.

    Args:
        host: copies in host memory; None: there are none.
        disk: copies on disk; None: there are none.
        savings: what copies are likely to save.
        memory: its mover reads contents that leave.
        sizes: bytes of a page and of a checkpoint.
        config: of the cache.
        stats: counts copies that fail.
        fingerprint: of copies on disk; None: there are none.

    Attributes:
        host, disk, savings, fingerprint: as given.
        places: the tiers, fastest first.
        offloader: sees what the tree evicts.
    """

    def __init__(
        self,
        host: HostTier | None,
        disk: DiskTier | None,
        savings: Savings,
        memory: CacheMemory,
        sizes: UnitSizes,
        config: CacheConfig,
        stats: CacheStats,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.fingerprint: Fingerprint | None = fingerprint
        self.host: HostTier | None = host
        self.disk: DiskTier | None = disk
        self.savings: Savings = savings
        self.offloader: Offloader = Offloader(host, disk, savings, memory, sizes, config.page_size, stats)
        self.places: tuple[Tier, ...] = tuple(tier for tier in (host, disk) if tier is not None)

    def holders(self, name: bytes) -> tuple[str, ...]:
        """Labels of the tiers that have the checkpoint of a prefix, fastest first."""
        return tuple(tier.label for tier in self.places if (CHECKPOINT, name) in tier)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Copy nothing of what is evicted meanwhile, and forget all copies."""
        try:
            with self.discarding_evicted():
                yield
        finally:
            for tier in self.places:
                tier.clear()

    @contextmanager
    def discarding_evicted(self) -> Iterator[None]:
        """Copy nothing of what is evicted meanwhile."""
        self.offloader.discard(True)
        try:
            yield
        finally:
            self.offloader.discard(False)

    def drop(self, names: Iterable[Name]) -> None:
        """Forget copies that are of no use to any request."""
        gone = [*names]
        for tier in self.places:
            tier.drop(gone)

    def begin_shutdown(self) -> bool:
        """Let what is evicted from now on wait for the disk. False: there is none."""
        self.offloader.end()
        if self.disk is not None:
            self.disk.be_patient(SHUTDOWN_SECONDS)
        return self.disk is not None

    def close(self) -> None:
        """Write to disk what host memory holds and is worth it, and leave the disk."""
        if self.disk is None:
            return
        self.offloader.flush_to_disk()
        self.disk.close(SHUTDOWN_SECONDS)

    def fill_in(self, stats: CacheStats) -> None:
        """Fill in what they hold now, and add what they have counted themselves."""
        host, disk = self.host, self.disk
        if host is not None:
            stats.host_bytes_total, stats.host_bytes_used = host.num_bytes, host.bytes_used
            stats.host_pages, stats.host_checkpoints = host.num_pages, host.num_checkpoints
            stats.host_bytes_offered, stats.host_bytes_written = host.bytes_offered, host.bytes_written
            stats.tier_failures += host.num_damaged
            stats.damaged_copies += host.num_damaged
        if disk is not None:
            stats.disk_bytes_total, stats.disk_bytes_used = disk.num_bytes, disk.bytes_used
            stats.disk_pages, stats.disk_checkpoints = disk.num_pages, disk.num_checkpoints
            stats.disk_bytes_offered, stats.disk_bytes_written = disk.bytes_offered, disk.bytes_written
            stats.disk_failure, stats.disk_report = disk.failure, "; ".join(disk.report)
            stats.tier_failures += disk.counts.num_failures + disk.counts.num_damaged
            stats.damaged_copies += disk.counts.num_damaged
            stats.read_ahead_bytes, stats.read_in_vain_bytes = disk.reader.bytes_ahead, disk.reader.bytes_in_vain

    def violations(self) -> list[str]:
        """Return what is wrong with their bookkeeping, for the audit."""
        return [line for tier in self.places for line in tier.violations()]

    def note_restored(self, name: Name) -> None:
        """Record that a checkpoint is on the device again."""
        note = self.host.note(name) if self.host is not None else None
        if self.host is not None and note is not None:
            usage = note.usage
            is_copied_again = usage is None or self.offloader.would_copy(usage, note.num_tokens, has_below=True)
            self.host.restored(name[1], is_copied_again)


def make_tiers(
    memory: CacheMemory, config: CacheConfig, model: str | Fingerprint | None, stats: CacheStats
) -> Tiers | None:
    """Make the tiers that a configuration asks for; None if there are none.

    Args:
        model: a name for the model and its weights, or a whole fingerprint: for copies on disk.
        stats: counts copies that fail.

    Raises:
        ArgumentError: the memory has no contents that can be copied, or the disk needs a name of the model.
        MemoryBudgetError: there is less host memory.
    """
    if not config.enabled or (config.host is None and config.disk is None):
        return None
    memory.contents.check_writable()
    if memory.sizes is None:
        raise ArgumentError("CacheConfig: host and disk need a memory that knows the bytes of its pages and states")
    host, disk, here = None, None, None
    sizes = memory.sizes
    savings = Savings(MeasuredTime(COMPUTE), Reuse(), sizes.page, sizes.checkpoint, config.page_size)
    if config.host is not None:
        assert isinstance(config.host, int)
        free = free_memory(torch.device("cpu"))
        if config.host > free:
            raise MemoryBudgetError(
                f"CacheConfig: host={format_bytes(config.host)}, but only {format_bytes(free)} is free; choose less"
            )
        host = HostTier(config.host, passes_on=config.disk is not None, has_arrived=memory.downloads.has_arrived)
    if config.disk is not None:
        assert isinstance(config.disk, int) and isinstance(config.directory, Path)
        if model is None:
            raise ArgumentError(
                "CacheConfig: disk needs a name for the model and its weights, so that copies are used with the model "
                "that made them: HybridCache(memory, config, model='my-model 3')"
            )
        here = fingerprint_named(memory, config, model)
        disk = DiskTier(
            config.directory, config.disk, _origin(here, memory), savings, wants_ids=config.directory_readable
        )
    return Tiers(host, disk, savings, memory, sizes, config, stats, here)


def _origin(here: Fingerprint, memory: CacheMemory) -> Origin:
    """Copies with this fingerprint, or one that differs in what does not matter, can be used. Those that must be
    bitwise what is computed here must be of the same arithmetic, too."""
    own = arithmetic() if here.deterministic else {}

    def differences(text: str) -> list[str]:
        content = json.loads(text)
        there = content.pop("arithmetic")
        found = here.differences(fingerprint_of_json(content))
        others = [name for name, value in own.items() if there.get(name) != value]
        return found + [f"{name} is {there.get(name)!r:.100} there and {own[name]!r:.100} here" for name in others]

    return Origin(
        json.dumps({**here.as_json(), "arithmetic": own}, sort_keys=True), differences, memory.contents.num_bytes
    )
