"""Tiers behind the device: copies of what the tree evicts, brought back when a request needs it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from hybrid.cache.archives import fingerprint_named, writer_of
from hybrid.cache.config import CacheConfig
from hybrid.cache.departures import Departures
from hybrid.cache.explain import explain
from hybrid.cache.lease import Lease
from hybrid.cache.names import name_at
from hybrid.cache.opener import Opener
from hybrid.cache.restorer import Boundary, Outcome, Restorer
from hybrid.cache.stats import CacheStats
from hybrid.errors import ArgumentError, MemoryBudgetError
from hybrid.key import TOKEN_BYTES, Key
from hybrid.memory.device import free_memory
from hybrid.memory.memory import CacheMemory, UnitSizes
from hybrid.tiers.chain import chain
from hybrid.tiers.disk import DiskTier
from hybrid.tiers.fingerprint import Fingerprint, fingerprint_of_json
from hybrid.tiers.host import HostTier
from hybrid.tiers.rate import Rate
from hybrid.tiers.restored import Restored
from hybrid.tiers.session import Origin
from hybrid.tiers.tier import CHECKPOINT, PAGE, Contents, Name, Tier, UnavailableError
from hybrid.tree.node import Kind, Node
from hybrid.tree.tree import Tree
from hybrid.units import format_bytes

COMPUTE = 1e-4
"""Seconds per token computed that are assumed until they are measured."""

SHUTDOWN_SECONDS = 60.0
"""How long a cache that ends waits for the disk."""


class Candidate(NamedTuple):
    """A checkpoint in the tiers that a request could use.

    Attributes:
        num_tokens: its position.
        names: of the copies to restore, by tier; the checkpoint is among them.
        num_bytes: of them.
        seconds: that restoring them takes, about.
    """

    num_tokens: int
    names: dict[Tier, list[Name]]
    num_bytes: int
    seconds: float

    @property
    def label(self) -> str:
        """What it is restored from."""
        return " and ".join(tier.label for tier in self.names)

    def refusal(self, why: str) -> str:
        """Why it is not restored, as a sentence."""
        where = " and ".join(tier.where for tier in self.names)
        return f"the checkpoint at {self.num_tokens} {where} is not restored: {why}"


class Tiers:
    """Copies to tiers what the tree evicts, and restores it.

    Args:
        host: copies in host memory; None: there are none.
        disk: copies on disk; None: there are none.
        memory: its mover reads contents that leave.
        sizes: bytes of a page and of a checkpoint.
        config: of the cache.
        fingerprint: of copies on disk; None: there are none.

    Attributes:
        host, disk, fingerprint: as given.
        departures: sees what the tree evicts.
        compute: seconds per token that is computed.
        restored_checkpoints, restored_tokens, restored_bytes: by requests.
        num_failures: restores that raised; requests compute then.
    """

    def __init__(
        self,
        host: HostTier | None,
        disk: DiskTier | None,
        memory: CacheMemory,
        sizes: UnitSizes,
        config: CacheConfig,
        fingerprint: Fingerprint | None = None,
    ) -> None:
        self.fingerprint: Fingerprint | None = fingerprint
        self.host: HostTier | None = host
        self.disk: DiskTier | None = disk
        self.compute: Rate = Rate(COMPUTE)
        self.restored_checkpoints: int = 0
        self.restored_tokens: int = 0
        self.restored_bytes: int = 0
        self.num_failures: int = 0
        self.departures: Departures = Departures(host, disk, self.compute, memory, sizes, config.page_size)
        self._tiers: list[Tier] = [tier for tier in (host, disk) if tier is not None]
        self._sizes = sizes
        self._page_size = config.page_size
        self._grid = config.grid
        self._latest: tuple[Key | None, list[bytes]] = (None, [])

    @property
    def places(self) -> tuple[Tier, ...]:
        """The tiers, fastest first."""
        return tuple(self._tiers)

    def holders(self, node: Node) -> tuple[str, ...]:
        """Labels of the tiers that have the checkpoint at a node's end, fastest first."""
        name = CHECKPOINT, name_at(node, node.end)
        return tuple(tier.label for tier in self._tiers if name in tier)

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """What is evicted meanwhile is not copied, and all copies are forgotten."""
        self.departures.discard(True)
        try:
            yield
        finally:
            self.departures.discard(False)
            for tier in self._tiers:
                tier.clear()

    def begin_shutdown(self) -> bool:
        """What is evicted from now on may wait for the disk. False: there is none."""
        self.departures.end()
        if self.disk is not None:
            self.disk.be_patient(SHUTDOWN_SECONDS)
        return self.disk is not None

    def close(self) -> None:
        """Write to disk what host memory holds and is worth it, and leave the disk."""
        if self.disk is None:
            return
        self.departures.let_all_go()
        self.disk.close(SHUTDOWN_SECONDS)

    def count(self, stats: CacheStats) -> None:
        """Fill in what they hold and did."""
        host, disk = self.host, self.disk
        if host is not None:
            stats.host_bytes_total, stats.host_bytes_used = host.num_bytes, host.bytes_used
            stats.host_pages, stats.host_checkpoints = host.num_pages, host.num_checkpoints
            stats.host_bytes_offered, stats.host_bytes_written = host.bytes_offered, host.bytes_written
        if disk is not None:
            stats.disk_bytes_total, stats.disk_bytes_used = disk.num_bytes, disk.bytes_used
            stats.disk_pages, stats.disk_checkpoints = disk.num_pages, disk.num_checkpoints
            stats.disk_bytes_offered, stats.disk_bytes_written = disk.bytes_offered, disk.bytes_written
            stats.disk_failure, stats.disk_report = disk.failure, "; ".join(disk.report)
        stats.restored_checkpoints, stats.restored_tokens = self.restored_checkpoints, self.restored_tokens
        stats.restored_bytes, stats.tier_failures = self.restored_bytes, self._failures()

    def _failures(self) -> int:
        counts = self.disk.counts if self.disk is not None else None
        of_disk = counts.num_failures + counts.num_damaged if counts is not None else 0
        return self.num_failures + self.departures.num_failures + of_disk

    def violations(self) -> list[str]:
        """What is wrong with their bookkeeping, for the audit."""
        return [line for tier in self._tiers for line in tier.violations()]

    # What comes back

    def restore(self, lease: Lease, limit: int, tree: Tree, opener: Opener, restorer: Restorer) -> None:
        """Bring back the deepest checkpoint of a prompt that is worth it, with the pages that the device lacks, into
        the memory of the lease that was opened for it. The tree has it then, and the lease resumes from it. A restore
        that fails is a miss with a reason. When this raises, the lease is closed.

        Args:
            limit: tokens of the lease's key that may be used.
        """
        lost = [end for end in lease.lost if lease.num_hit_tokens < end <= limit]
        if lost:
            self.departures.chances.wanted(lease.lost[max(lost)])
        if all(tier.is_empty for tier in self._tiers):
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
        names = self._names_of(key)
        refused = self._why_missing(names, hit, limit)
        for candidate in self._candidates(key, names, page_hit, hit, limit):
            position, saved = candidate.num_tokens, candidate.num_tokens - hit
            if self.departures.gain(saved, candidate.seconds, *candidate.names) <= 0:
                refused = refused or candidate.refusal("computing is faster")
                continue
            start = time.perf_counter()
            try:
                fetched, times = self._fetch(candidate, saved * self.compute.value)
                outcome = restorer.fill(lease, self._boundary(key, names, candidate, page_hit, fetched))
            except UnavailableError as error:
                refused = refused or candidate.refusal(str(error))
                continue
            except Exception as error:
                self.num_failures += 1
                return Restored(candidate.label, refused=f"restoring {position} tokens failed: {error!s:.200}")
            if outcome is not Outcome.RESTORED:
                return Restored(candidate.label, refused=f"{position} tokens are not restored: {outcome.value}")
            seconds = time.perf_counter() - start
            self._note(candidate, fetched, times, seconds)
            self.restored_tokens += saved
            return Restored(candidate.label, saved, candidate.num_bytes, seconds, refused)
        return Restored("", refused=refused) if refused else None

    def _names_of(self, key: Key) -> list[bytes]:
        """The digests of a key, kept for the next call: a request that waits asks again and again."""
        latest, names = self._latest
        if latest is not key:
            names = chain(key.ids, key.namespace, self._page_size * TOKEN_BYTES)
            self._latest = key, names
        return names

    def _why_missing(self, names: list[bytes], hit: int, limit: int) -> str:
        """Why a checkpoint beyond a hit is not there, of the deepest of which that is known; empty: of none."""
        if self.disk is None:
            return ""
        for end in range(min(limit, len(names) * self._page_size) // self._grid * self._grid, hit, -self._grid):
            name = CHECKPOINT, names[end // self._page_size - 1]
            why = self.disk.why_missing(name) if name not in self.disk else ""
            if why:
                return f"the checkpoint at {end} on disk is not used: {why}" if self.disk.failure is None else why
        return ""

    def _candidates(self, key: Key, names: list[bytes], page_hit: int, hit: int, limit: int) -> Iterator[Candidate]:
        """The checkpoints in the tiers that a prompt could use, deepest first."""
        size, first = self._page_size, page_hit // self._page_size
        places: list[Tier] = []  # of the pages that the device lacks
        for name in names[first : limit // size]:
            place = self._place((PAGE, name))
            if place is None:
                break
            places.append(place)
        for end in range((first + len(places)) * size // self._grid * self._grid, hit, -self._grid):
            checkpoint = CHECKPOINT, names[end // size - 1]
            place = self._place(checkpoint)
            if place is None or key.whole(end, 1) != end:
                continue
            found: dict[Tier, list[Name]] = {}
            num_pages = max(0, end // size - first)
            for tier, name in zip(places[:num_pages], names[first:], strict=False):
                found.setdefault(tier, []).append((PAGE, name))
            num_bytes = {tier: len(pages) * self._sizes.page for tier, pages in found.items()}
            found.setdefault(place, []).append(checkpoint)
            num_bytes[place] = num_bytes.get(place, 0) + self._sizes.checkpoint
            seconds = sum(tier.cost.seconds(count) for tier, count in num_bytes.items())
            yield Candidate(end, found, sum(num_bytes.values()), seconds)

    def _place(self, name: Name) -> Tier | None:
        """The first tier that has a copy."""
        return next((tier for tier in self._tiers if name in tier), None)

    def _fetch(self, candidate: Candidate, seconds: float) -> tuple[dict[Name, Contents], dict[Tier, float]]:
        """The contents of a candidate, and how long each tier took.

        Args:
            seconds: that it may take.
        """
        contents: dict[Name, Contents] = {}
        times: dict[Tier, float] = {}
        for tier, names in candidate.names.items():
            start = time.perf_counter()
            contents.update(zip(names, tier.fetch(names, seconds), strict=True))
            times[tier] = time.perf_counter() - start
        return contents, times

    def _boundary(
        self, key: Key, names: list[bytes], candidate: Candidate, page_hit: int, contents: dict[Name, Contents]
    ) -> Boundary:
        first, end = page_hit // self._page_size, candidate.num_tokens // self._page_size
        checkpoint = CHECKPOINT, names[end - 1]
        note = next((note for tier in candidate.names if (note := tier.note(checkpoint)) is not None), None)
        if note is None:
            raise UnavailableError("a copy is not there any more")
        kind = Kind(note.kind)
        return Boundary(
            key=key,
            num_tokens=candidate.num_tokens,
            pages=[contents[PAGE, name] for name in names[first:end]],
            checkpoint=contents[checkpoint],
            kind=kind if kind is not Kind.PAGES else Kind.BRANCH,
            turn=note.turn,
            priority=note.priority,
            past=note.usage,
        )

    def _note(
        self, candidate: Candidate, fetched: dict[Name, Contents], times: dict[Tier, float], seconds: float
    ) -> None:
        """Count what was restored. Its copies stay: when it is evicted again, nothing is written.

        Args:
            times: that each tier took.
            seconds: that the whole took.
        """
        written = max(0.0, seconds - sum(times.values()))  # to the device
        for tier, names in candidate.names.items():
            num_bytes = sum(len(fetched[name]) for name in names)
            share = num_bytes / max(1, candidate.num_bytes)
            tier.cost.note(num_bytes, times[tier] + share * written)
            for name in names:
                tier.used(name)
                if name[0] == CHECKPOINT:
                    self._is_back(name)
        self.restored_checkpoints += 1
        self.restored_bytes += candidate.num_bytes

    def _is_back(self, name: Name) -> None:
        """A checkpoint is on the device again."""
        note = self.host.note(name) if self.host is not None else None
        if self.host is not None and note is not None:
            usage = note.usage
            is_copied_again = usage is None or self.departures.would_copy(usage, note.num_tokens, has_below=True)
            self.host.restored(name[1], is_copied_again)


def make_tiers(memory: CacheMemory, config: CacheConfig, model: str | Fingerprint | None) -> Tiers | None:
    """The tiers that a configuration asks for; None: none.

    Args:
        model: a name for the model and its weights, or a whole fingerprint: for copies on disk.

    Raises:
        ArgumentError: the memory has no contents that can be copied, or the disk needs a name of the model.
        MemoryBudgetError: there is less host memory.
    """
    if not config.enabled or (config.host is None and config.disk is None):
        return None
    writer_of(memory)
    if memory.sizes is None:
        raise ArgumentError("CacheConfig: host and disk need a memory that knows the bytes of its pages and states")
    host, disk, here = None, None, None
    if config.host is not None:
        assert isinstance(config.host, int)
        free = free_memory(torch.device("cpu"))
        if config.host > free:
            raise MemoryBudgetError(
                f"CacheConfig: host={format_bytes(config.host)}, but only {format_bytes(free)} is free; choose less"
            )
        host = HostTier(config.host, memory.sizes.page, passes_on=config.disk is not None)
    if config.disk is not None:
        assert isinstance(config.disk, int) and isinstance(config.directory, Path)
        if model is None:
            raise ArgumentError(
                "CacheConfig: disk needs a name for the model and its weights, so that copies are used with the model "
                "that made them: HybridCache(memory, config, model='my-model 3')"
            )
        here = fingerprint_named(memory, config, model)
        disk = DiskTier(config.directory, config.disk, _origin(here), wants_ids=config.directory_readable)
    return Tiers(host, disk, memory, memory.sizes, config, here)


def _origin(here: Fingerprint) -> Origin:
    """Copies with this fingerprint, or one that differs in what does not matter, can be used."""
    return Origin(
        json.dumps(here.as_json(), sort_keys=True),
        lambda text: here.differences(fingerprint_of_json(json.loads(text))),
    )
