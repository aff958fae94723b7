"""Which replicas have which prefixes: a set of replicas, as the bits of an integer, for each digest."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np

from hybrid.events.change import DEVICE, DISK, EVERYTHING, PAGES, STORE, Change

FEW = 24
"""Members of a set that are taken one by one; more are unpacked together."""

MAX_DEPTHS = 64
"""Depths that are distinguished, the deepest first: the time of a choice does not grow with the replicas. Others
count as having the pages that all of them have, and no checkpoint."""

MAX_STORED = 1 << 20
"""Prefixes in a store that are remembered; of more the oldest are forgotten."""

Depths = np.ndarray[tuple[int], np.dtype[np.float64]]
"""Tokens, for each replica."""

Sets = dict[bytes, int]
"""Replicas by digests."""


class Coverage(NamedTuple):
    """How much of a prompt each replica has, in tokens.

    Attributes:
        pages: whose pages it has, `[width]`.
        checkpoints: up to its deepest checkpoint, `[width]`.
        copies: up to the deepest checkpoint of which it has a copy in host memory, `[width]`; None: there are none.
        on_disk: the same on its disk.
    """

    pages: Depths
    checkpoints: Depths
    copies: Depths | None
    on_disk: Depths | None = None


class Stored(NamedTuple):
    """A prefix in a store that all replicas reach.

    Attributes:
        name: its digest.
        num_tokens: of it.
        num_bytes: that are to be fetched.
    """

    name: bytes
    num_tokens: int
    num_bytes: int


class Index:
    """The prefixes of the replicas of a fleet, which have numbers from 0 on.

    Args:
        page_size: tokens per page, of all replicas.
        has_gaps: a replica may have a page, or a checkpoint, without the pages before it, which is of no use then: vLLM
            evicts blocks one by one. Finding takes longer.

    Attributes:
        page_size: as given.
        width: numbers that replicas can have; it grows.
    """

    def __init__(self, page_size: int, has_gaps: bool = False) -> None:
        self.page_size: int = page_size
        self._has_gaps = has_gaps
        self.width: int = 64
        self._pages: Sets = {}
        self._checkpoints: Sets = {}
        self._copies: Sets = {}
        self._on_disk: Sets = {}
        self._stored: dict[bytes, Stored] = {}  # the replica that put them there may be gone

    def __len__(self) -> int:
        """Number of digests that some replica has the page of."""
        return len(self._pages)

    def reserve(self, replica: int) -> None:
        """Make room for the number of a replica."""
        while replica >= self.width:
            self.width *= 2

    def apply(self, replica: int, changes: Iterable[Change]) -> None:
        """Learn what a replica took and gave up. What is known already, and a death of what is not, changes nothing."""
        self.reserve(replica)
        bit = 1 << replica
        for change in changes:
            if change.kind == EVERYTHING:
                self.forget(replica)
                continue
            if change.tier == STORE:
                self._store(change)
                continue
            if change.tier == DEVICE:
                sets = self._pages if change.kind == PAGES else self._checkpoints
            elif change.kind == PAGES:
                continue  # a copy of a checkpoint is restored with its pages, or not at all
            else:
                sets = self._on_disk if change.tier == DISK else self._copies
            known, then = -1, -1  # neighbours most often have equal sets, which are one object
            for name in change.each_name:
                now = sets.get(name, 0)
                if now != known:
                    known, then = now, now | bit if change.born else now & ~bit
                if then:
                    sets[name] = then
                else:
                    sets.pop(name, None)

    def _store(self, change: Change) -> None:
        stored = self._stored
        stored.pop(change.names, None)
        if change.born:
            stored[change.names] = Stored(change.names, change.num_tokens, change.num_bytes)
            if len(stored) > MAX_STORED:
                del stored[next(iter(stored))]

    def deepest_stored(self, names: Sequence[bytes]) -> Stored | None:
        """The longest prefix of a prompt that is in the store; None: there is none. Arguments as for `find`."""
        stored = self._stored
        if not stored:
            return None
        return next((stored[name] for name in reversed(names) if name in stored), None)

    def forget(self, replica: int) -> None:
        """Forget all that a replica has: it ended, or is read anew. Looks at every digest."""
        others = ~(1 << replica)
        for sets in (self._pages, self._checkpoints, self._copies, self._on_disk):
            changed = {name: found & others for name, found in sets.items() if found & ~others}
            for name, left in changed.items():
                if left:
                    sets[name] = left
                else:
                    del sets[name]

    def find(self, names: Sequence[bytes]) -> Coverage:
        """How much of a prompt each replica has.

        Args:
            names: the digests at the ends of its pages, in order (`hybrid.key.names_of`), as far as a hit may go.
        """
        pages = self._pages
        copies, on_disk = (self._deepest(sets, names) if sets else None for sets in (self._copies, self._on_disk))
        if self._has_gaps:
            return Coverage(*self._before_gaps(names), copies, on_disk)
        known = bisect_left(names, True, key=lambda name: name not in pages)  # who has a page has those before it
        checkpoints = self._deepest(self._checkpoints, names[:known])
        return Coverage(self._deepest_pages(names, known), checkpoints, copies, on_disk)

    def _before_gaps(self, names: Sequence[bytes]) -> tuple[Depths, Depths]:
        """The depths of pages that have all pages before them, and of checkpoints among these."""
        whole, left = list[int](), -1
        for name in names:
            left &= self._pages.get(name, 0)
            if not left:
                break
            whole.append(left)
        pages, checkpoints = np.zeros(self.width), np.zeros(self.width)
        has_page = has_checkpoint = 0
        for place in range(len(whole), 0, -1):
            there = whole[place - 1]
            self._set(pages, there & ~has_page, place)
            has_page |= there
            usable = there & self._checkpoints.get(names[place - 1], 0)
            self._set(checkpoints, usable & ~has_checkpoint, place)
            has_checkpoint |= usable
        return pages, checkpoints

    def _deepest_pages(self, names: Sequence[bytes], known: int) -> Depths:
        """The depths of pages: sets grow towards the beginning. Each change of them is looked for in growing steps,
        since those of a conversation's replicas are far apart, and those of many replicas close together."""
        pages, depths, seen = self._pages, np.zeros(self.width), 0
        if not known:
            return depths
        everyone = pages.get(names[0], 0)  # 0: a replica says that it has what it cannot have
        for _ in range(MAX_DEPTHS):
            found = pages.get(names[known - 1], 0)
            self._set(depths, found & ~seen, known)
            seen |= found
            if seen == everyone:
                return depths
            low, high, step = known - 1, known, 1
            while low and pages.get(names[low - 1]) == found:
                low, high, step = max(0, low - step), low, 2 * step
            known = bisect_left(names, True, low, high - 1, key=lambda name: pages.get(name) == found)
            if not known:
                return depths
        self._set(
            depths, everyone & ~seen, bisect_left(names, True, 0, known, key=lambda name: pages.get(name) != everyone)
        )
        return depths

    def _deepest(self, sets: Sets, names: Sequence[bytes]) -> Depths:
        depths, seen, left = np.zeros(self.width), 0, MAX_DEPTHS
        there = [*compress(range(1, len(names) + 1), map(sets.__contains__, names))]
        for place in reversed(there):
            fresh = sets[names[place - 1]] & ~seen
            if fresh:
                self._set(depths, fresh, place)
                seen |= fresh
                left -= 1
                if not left:
                    break
        return depths

    def _set(self, depths: Depths, replicas: int, num_pages: int) -> None:
        """Set the depths of the replicas of a set."""
        num_tokens = num_pages * self.page_size
        if not replicas & (replicas - 1):
            if replicas:
                depths[replicas.bit_length() - 1] = num_tokens
            return
        if replicas.bit_count() > FEW:
            packed = np.frombuffer(replicas.to_bytes(self.width // 8, "little"), np.uint8)
            depths[np.unpackbits(packed, bitorder="little").view(np.bool_)] = num_tokens
            return
        while replicas:
            last = replicas.bit_length() - 1
            depths[last] = num_tokens
            replicas ^= 1 << last
