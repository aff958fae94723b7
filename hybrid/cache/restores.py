"""Bringing back from tiers what requests need.

A restore begins when a lease is opened, and waits for nothing: what is on disk is read by a thread meanwhile, and the
lease gets it (`Restores.proceed`) when everything is there, into its own memory. Of a request that is queued the
reading begins at once (`Restores.read_ahead`): when its lease is opened, most of it is in buffers already.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import explain_now
from hybrid.cache.lease import Lease
from hybrid.cache.opener import Opener
from hybrid.cache.restorer import Boundary, RestoreOutcome, Restorer
from hybrid.cache.restoring import Candidate, Restoring
from hybrid.cache.stats import CacheStats
from hybrid.cache.tiers import Tiers
from hybrid.key import Key
from hybrid.memory.copies import Uploads
from hybrid.memory.memory import UnitSizes
from hybrid.tiers.tier import CHECKPOINT, PAGE, Contents, Name, Reading, Restored, Tier, UnavailableError
from hybrid.tree.node import Kind
from hybrid.tree.tree import Tree

MIN_WAIT = 0.05
"""Seconds that a request waits for a tier at least."""


class Restores:
    """Brings back from tiers what requests need.

    Args:
        tiers: have the copies.
        tree: what is on the device.
        opener: has a lease resume from what came back.
        restorer: writes it into the memory of a lease, and inserts it.
        sizes: bytes of a page and of a checkpoint.
        config: of the cache.
        stats: counts what comes back for requests, restores that raise, and those that hold NaN or infinity.
        audit: raises where the cache is inconsistent.

    Attributes:
        arrivals: what was restored, and is on its way.
    """

    def __init__(
        self,
        tiers: Tiers,
        tree: Tree,
        opener: Opener,
        restorer: Restorer,
        sizes: UnitSizes,
        config: CacheConfig,
        stats: CacheStats,
        audit: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._tree = tree
        self._opener = opener
        self.arrivals: Uploads = restorer.arrivals
        self._restorer = restorer
        self._sizes = sizes
        self._page_size = config.page_size
        self._grid = config.grid
        self._stats = stats
        self._audit = audit

    # Before a lease is opened

    @property
    def reads_ahead(self) -> bool:
        """Tell whether more may be read ahead now."""
        disk = self._tiers.disk
        return disk is not None and not disk.is_empty and disk.reader.reads_ahead

    def read_ahead(self, key: Key, limit: int) -> Reading | None:
        """Begin to read what a request that is queued will need from disk, into buffers that are kept until the reading
        is dropped. None: nothing.

        Args:
            limit: tokens of the key that may be used.
        """
        try:
            return self._read_ahead(key, limit)
        except UnavailableError:
            return None
        except Exception:
            self._stats.tier_failures += 1
            return None

    def _read_ahead(self, key: Key, limit: int) -> Reading | None:
        disk = self._tiers.disk
        if disk is None or not self.reads_ahead:
            return None
        found = self._tree.peek(key, limit)
        first = found.num_page_tokens // self._page_size
        names = self._tree.names.of(key, limit, found.deepest, found.num_page_tokens)
        for candidate in self._candidates(key, names, first, found.num_tokens, limit):
            saved = (candidate.num_tokens - found.num_tokens) * self._tiers.savings.compute.value
            if saved > candidate.seconds:
                return disk.read_ahead(candidate.names[disk]) if disk in candidate.names else None
        return None

    # For a lease

    def begin(self, lease: Lease, limit: int) -> None:
        """Begin to bring back the deepest checkpoint of a prompt that is worth it, with the pages that the device
        lacks, into the memory of the lease that was opened for it. `lease.restoring` is None afterwards if nothing has
        to be waited for. When this raises, the lease is closed.

        Args:
            limit: tokens of the lease's key that may be used.
        """
        lost = [end for end in lease.lost if lease.num_hit_tokens < end <= limit]
        if lost:
            self._tiers.offloader.reuse.count_requested(lease.lost[max(lost)])
        if all(tier.is_empty for tier in self._tiers.places):
            return
        try:
            names = self._tree.names.of(lease.key, limit, lease.shared_node, lease.num_shared * self._page_size)
            candidates = self._candidates(lease.key, names, lease.num_shared, lease.num_hit_tokens, limit)
            restoring = Restoring(names, limit, candidates, self._why_missing(names, lease.num_hit_tokens, limit))
            self._choose(lease, restoring)
            self.proceed(lease)
        except BaseException:
            self._opener.close(lease)
            raise

    def proceed(self, lease: Lease) -> bool:
        """Restore what was read meanwhile. The tree has it then, and the lease resumes from it. A restore that fails is
        a miss with a reason. False: it is being read.

        When this raises, the lease can only be closed.
        """
        while (restoring := lease.restoring) is not None and restoring.is_due:
            assert restoring.candidate is not None
            try:
                self._finish(lease, restoring, self._restored(lease, restoring, restoring.candidate))
            except UnavailableError as error:
                restoring.refused = restoring.refused or restoring.candidate.refusal(str(error))
                self._choose(lease, restoring)
        return lease.restoring is None

    def wait(self, lease: Lease) -> None:
        """Wait until nothing is read for a lease any more. When this raises, the lease is closed."""
        try:
            while not self.proceed(lease):
                assert lease.restoring is not None
                lease.restoring.wait(math.inf)
        except BaseException:
            self._opener.close(lease)
            raise

    def _choose(self, lease: Lease, restoring: Restoring) -> None:
        """Begin to read the next candidate that is worth it; without one the restore ends."""
        restoring.drop()
        lease.restoring = restoring
        for candidate in restoring.candidates:
            saved = candidate.num_tokens - lease.num_hit_tokens
            readings: dict[Tier, Reading] = {}
            try:
                self._check_gain(candidate, saved)
                for tier, names in candidate.names.items():
                    readings[tier] = tier.begin(names)
            except UnavailableError as error:
                restoring.refused = restoring.refused or candidate.refusal(str(error))
                for reading in readings.values():
                    reading.drop()
                continue
            restoring.candidate, restoring.readings = candidate, readings
            restoring.until = time.monotonic() + max(MIN_WAIT, saved * self._tiers.savings.compute.value)
            return
        self._finish(lease, restoring, Restored("", refused=restoring.refused) if restoring.refused else None)

    def _check_gain(self, candidate: Candidate, num_tokens: int) -> None:
        """Refuse what is not worth it.

        Raises:
            UnavailableError: computing is faster.
        """
        gain = self._tiers.savings.gain(num_tokens, candidate.seconds, *(tier.cost for tier in candidate.names))
        if gain <= 0:
            raise UnavailableError("computing is faster")
        disk = self._tiers.disk
        if disk is not None and disk in candidate.names and disk.cost.per_byte * disk.reader.bytes_before >= gain:
            raise UnavailableError("computing is faster than waiting until the disk has read for other requests")

    def _finish(self, lease: Lease, restoring: Restoring, restored: Restored | None) -> None:
        """End the restore of a lease.

        Args:
            restored: what came back; None: there was nothing.
        """
        lease.restoring = None
        restoring.drop()
        if restored is None:
            return
        if restored.num_tokens:
            self._opener.resume(lease, lease.num_hit_tokens + restored.num_tokens)
            lease.explanation = explain_now(self._tree, lease.key, restoring.limit)
        lease.explanation = replace(lease.explanation, restored=restored)

    def _restored(self, lease: Lease, restoring: Restoring, candidate: Candidate) -> Restored:
        """Write what was read.

        Raises:
            UnavailableError: it could not be read, or not in time, or holds NaN or infinity.
        """
        position, saved = candidate.num_tokens, candidate.num_tokens - lease.num_hit_tokens
        contents = restoring.take()
        waited, start = time.monotonic() - restoring.began, time.perf_counter()
        try:
            outcome = self._restorer.fill(lease, self._boundary(lease, restoring.names, candidate, contents))
        except UnavailableError:
            raise
        except Exception as error:
            self._stats.tier_failures += 1
            self._audit()  # it may have come between any two lines of the bookkeeping
            return Restored(candidate.label, refused=f"restoring {position} tokens failed: {error!s:.200}")
        if outcome is RestoreOutcome.NOT_FINITE:
            self._stats.tier_failures += 1
            self._stats.damaged_copies += 1
            self._tiers.drop(name for names in candidate.names.values() for name in names)
            raise UnavailableError(f"{outcome.value}, and is dropped")
        if outcome is not RestoreOutcome.RESTORED:
            return Restored(candidate.label, refused=f"{position} tokens are not restored: {outcome.value}")
        written = time.perf_counter() - start + self.arrivals.seconds(candidate.num_bytes)
        seconds = self._note(restoring, candidate, contents, written)
        self._stats.restored_tokens += saved
        return Restored(candidate.label, saved, candidate.num_bytes, seconds, waited, restoring.refused)

    # What there is

    def _why_missing(self, names: list[bytes], hit: int, limit: int) -> str:
        """Say why a checkpoint beyond a hit is not there, of the deepest of which that is known; empty if of none."""
        disk = self._tiers.disk
        if disk is None:
            return ""
        for end in range(min(limit, len(names) * self._page_size) // self._grid * self._grid, hit, -self._grid):
            name = CHECKPOINT, names[end // self._page_size - 1]
            why = disk.why_missing(name) if name not in disk else ""
            if why:
                return f"the checkpoint at {end} on disk is not used: {why}" if disk.failure is None else why
        return ""

    def _candidates(self, key: Key, names: list[bytes], first: int, hit: int, limit: int) -> Iterator[Candidate]:
        """Yield the checkpoints in the tiers that a prompt could use, deepest first.

        Args:
            first: pages of the prompt that the device has.
        """
        size = self._page_size
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
            yield Candidate(end, checkpoint, found, sum(num_bytes.values()), seconds, place.note(checkpoint))

    def _place(self, name: Name) -> Tier | None:
        """Find the first tier that has a copy."""
        return next((tier for tier in self._tiers.places if name in tier), None)

    def _boundary(
        self, lease: Lease, names: list[bytes], candidate: Candidate, contents: dict[Name, Contents]
    ) -> Boundary:
        note = candidate.note
        if note is None:
            raise UnavailableError("a copy is not there any more")
        kind = Kind(note.kind)
        return Boundary(
            key=lease.key,
            num_tokens=candidate.num_tokens,
            pages=[contents[PAGE, name] for name in names[lease.num_shared : candidate.num_tokens // self._page_size]],
            checkpoint=contents[candidate.checkpoint],
            kind=kind if kind is not Kind.PAGES else Kind.BRANCH,
            turn=note.turn,
            priority=note.priority,
            past=note.usage,
        )

    def _note(
        self, restoring: Restoring, candidate: Candidate, contents: dict[Name, Contents], written: float
    ) -> float:
        """Count what was restored. Its copies stay: when it is evicted again, nothing is written.

        Args:
            written: seconds that writing to the device takes.

        Returns:
            Seconds that all of it took.
        """
        read = 0.0
        for tier, reading in restoring.readings.items():
            names = candidate.names[tier]
            num_bytes = sum(len(contents[name]) for name in names)
            tier.cost.note(num_bytes, reading.seconds + num_bytes / max(1, candidate.num_bytes) * written)
            read += reading.seconds
            for name in names:
                tier.used(name)
                if name[0] == CHECKPOINT:
                    self._tiers.note_restored(name)
        self._stats.restored_checkpoints += 1
        self._stats.restored_bytes += candidate.num_bytes
        return read + written


def wait_until_restored(lease: Lease | None, restores: Restores | None) -> Lease | None:
    """Wait until nothing is read for a lease any more. What was restored may be used at once: the device's next work
    waits for it."""
    if lease is not None and restores is not None:
        if lease.restoring is not None:
            restores.wait(lease)
        restores.arrivals.wait_for_all()
    return lease
