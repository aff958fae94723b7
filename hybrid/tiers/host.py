"""Copies of pages and checkpoints in host memory, by the digests of their prefixes.

What is kept is ordered by checkpoints (`EvictionOrder`), each with the pages that only it needs: they are dropped
together, the lowest rank first. A page is copied when a checkpoint needs it that is there, and never for itself.

What the device has too is dropped before anything else, since that loses no hit: first the states, and then their
pages, which what continues them needs when it leaves the device. Of a restored checkpoint that would not be copied
again, because requests continue behind it, the state is dropped at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybrid.tiers.cost import Cost
from hybrid.tiers.tier import (
    CHECKPOINT,
    DAMAGED,
    PAGE,
    Contents,
    HeldCopy,
    Name,
    Note,
    Offer,
    OnChange,
    ReadyReading,
    UnavailableError,
    checksum_of,
)
from hybrid.tiers.value import WORTHLESS, EvictionOrder, PageRefCounts

COPY = 1e-10
"""Seconds per byte restored that are assumed until they are measured."""


@dataclass(slots=True, eq=False)
class Kept:
    """A checkpoint, or the pages of one that is on the device.

    Attributes:
        copy: its contents; None: the device has it, and only pages are kept.
        note: see `Offer`.
        num_alone: pages that only it needed when it came.
    """

    copy: HeldCopy | None
    note: Note | None
    num_alone: int


class Dropped(NamedTuple):
    """A copy that was dropped because others are worth more.

    Attributes:
        name: its name.
        copy: its contents.
        path: see `Offer`; of a checkpoint, the pages that only it needed and the one before them, of a page that one.
        note: of a checkpoint.
    """

    name: Name
    copy: HeldCopy
    path: tuple[bytes, ...]
    note: Note | None = None


class HostTier:
    """Copies in host memory, up to a number of bytes: a `Tier`.

    Args:
        num_bytes: of all copies together.
        passes_on: keep what is dropped for `take_dropped`, which is called after each offer.
        has_arrived: returns whether the host may read contents that were offered; if not, they are summed later.

    Attributes:
        label, where, cost, wants_ids, bytes_offered, bytes_written: see `Tier`.
        num_bytes: bytes that it may hold.
        bytes_used: bytes of its copies.
        num_hits: copies that were used.
        num_checkpoints: checkpoints that it holds.
        num_damaged: copies that were not what had been copied.
        on_change: called with each checkpoint of which there is a copy from now on (True), or none any more, and its
            note; None: nothing is. Must not raise.
    """

    def __init__(
        self, num_bytes: int, passes_on: bool = False, has_arrived: Callable[[Contents], bool] = lambda contents: True
    ) -> None:
        self.label: str = "host memory"
        self.where: str = "in host memory"
        self.cost = Cost(0.0, COPY)
        self.wants_ids: bool = False
        self.num_bytes: int = num_bytes
        self.bytes_used: int = 0
        self.bytes_offered: int = 0
        self.bytes_written: int = 0
        self.num_hits: int = 0
        self.num_damaged: int = 0
        self.on_change: OnChange | None = None
        self._passes_on = passes_on
        self._has_arrived = has_arrived
        self._arriving: deque[HeldCopy] = deque()  # that have no checksum yet, in the order in which they arrive
        self._dropped: list[Dropped] = []
        self._pages: dict[bytes, HeldCopy] = {}
        self._checkpoints: dict[bytes, Kept] = {}
        self._order: EvictionOrder[bytes] = EvictionOrder()
        self._on_device: set[bytes] = set()
        self._refs = PageRefCounts()
        self.num_checkpoints: int = 0

    def __len__(self) -> int:
        return len(self._pages) + self.num_checkpoints

    def __contains__(self, name: object) -> bool:
        return isinstance(name, tuple) and (name[1] in self._pages if name[0] == PAGE else self._has(name[1]))

    def _has(self, checkpoint: bytes) -> bool:
        kept = self._checkpoints.get(checkpoint)
        return kept is not None and kept.copy is not None

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self._pages)

    # What comes

    def offer(self, offer: Offer) -> bool:
        """See `Tier.offer`. Contents are read only when they are kept, and summed then."""
        self._sum_arrived()
        self.bytes_offered += offer.num_bytes
        kind, name = offer.name
        return self._offer_page(name, offer) if kind == PAGE else self._offer_checkpoint(name, offer)

    def _offer_checkpoint(self, name: bytes, offer: Offer) -> bool:
        assert offer.value is not None
        known = self._checkpoints.get(name)
        if known is not None and known.copy is not None:
            known.note = offer.note
            self._on_device.discard(name)
            self._order.use(name, offer.value(known.num_alone))
            return True
        if not offer.is_worth_it or offer.num_bytes > self.num_bytes:
            return False
        if known is None:
            num_alone = len(self._refs.add(offer.path))
            known = self._checkpoints[name] = Kept(None, offer.note, num_alone)
        contents: Contents | None = None
        try:
            value = offer.value(known.num_alone)
            self._order.discard(name)
            if self._make_free(offer.num_bytes, value):
                contents = offer.read()
                if not self._make_free(len(contents), value):  # it may be larger than was said
                    contents = None
        finally:
            self._on_device.discard(name)
            if contents is None:
                self._forget(name)
        if contents is None:
            return False
        known.copy, known.note = self._held(contents, offer.checksum), offer.note
        self.num_checkpoints += 1
        self._order.use(name, value)
        if self.on_change is not None:
            self.on_change(True, name, known.note, len(known.copy))
        return True

    def _offer_page(self, name: bytes, offer: Offer) -> bool:
        """A page of which there is no copy afterwards takes the checkpoints along that need it."""
        if name in self._pages:
            return True
        contents: Contents | None = None
        try:
            if self._make_free_for_page(name, offer.num_bytes):
                contents = offer.read()
                if not self._make_free_for_page(name, len(contents)):
                    contents = None
        finally:
            if contents is None and name in self._refs:
                for checkpoint in self._refs.checkpoints(name):
                    self._forget(checkpoint)
        if contents is None:
            return False
        self._pages[name] = self._held(contents, offer.checksum)
        return True

    def _held(self, contents: Contents, checksum: int | None) -> HeldCopy:
        """Count contents that are kept, and sum them as soon as they are there."""
        self.bytes_used += len(contents)
        self.bytes_written += len(contents)
        copy = HeldCopy(contents, checksum)
        if checksum is None:
            self._arriving.append(copy)
            self._sum_arrived()
        return copy

    def _sum_arrived(self) -> None:
        while self._arriving and self._has_arrived(self._arriving[0].contents):
            copy = self._arriving.popleft()
            copy.checksum = checksum_of(copy.contents)

    def _make_free_for_page(self, name: bytes, num_bytes: int) -> bool:
        """Drop what has the lowest rank until a page fits. False: nothing needs it any more, or never did."""
        while name in self._refs:
            if self.bytes_used + num_bytes <= self.num_bytes:
                return True
            if (lowest := self._order.lowest()) is None:
                return False
            self._drop(lowest[1])
        return False

    def _make_free(self, num_bytes: int, value: float) -> bool:
        """Drop what has the lowest rank until `num_bytes` fit. False: what comes has the lowest."""
        while self.bytes_used + num_bytes > self.num_bytes:
            lowest = self._order.lowest()
            if lowest is None or lowest[0] >= self._order.rank(value):
                return False
            self._drop(lowest[1])
        return True

    # What goes

    def restored(self, name: bytes, is_copied_again: bool) -> None:
        """Learn that the device has a checkpoint too from now on.

        Args:
            is_copied_again: when it leaves the device; False: its state is of no use here.
        """
        kept = self._checkpoints.get(name)
        if kept is None:
            return
        self._on_device.add(name)
        self._order.use(name, WORTHLESS)
        if not is_copied_again:
            self._drop_state(name, kept)

    def _drop(self, name: bytes) -> None:
        """Drop what has the lowest rank: a checkpoint, with the pages that only it needs, which may go elsewhere then.
        Of one that the device has too, first the state: what is left need not be copied again when it leaves it."""
        kept = self._checkpoints[name]
        if name in self._on_device and kept.copy is not None:
            self._drop_state(name, kept)
            self._order.use(name, WORTHLESS)
            return
        self._order.drop(name)
        copy = kept.copy if self._passes_on and name not in self._on_device else None
        gone = self._forget(name)
        if copy is not None:
            above = [before for _, before, _ in gone if before is not None]
            self._dropped.append(Dropped((CHECKPOINT, name), copy, (name, *above), kept.note))
            for page, before, own in gone:
                if own is not None:
                    self._dropped.append(Dropped((PAGE, page), own, () if before is None else (before,)))

    def _drop_state(self, name: bytes, kept: Kept) -> None:
        if kept.copy is not None:
            if self.on_change is not None:
                self.on_change(False, name, kept.note, len(kept.copy))
            self.bytes_used -= len(kept.copy)
            self.num_checkpoints -= 1
            kept.copy = None

    def _forget(self, name: bytes) -> list[tuple[bytes, bytes | None, HeldCopy | None]]:
        """Forget a checkpoint and the pages that only it needs. Returns these: name, name of the page before, copy."""
        self._drop_state(name, self._checkpoints.pop(name))
        self._order.discard(name)
        self._on_device.discard(name)
        gone = [(page, before, self._pages.pop(page, None)) for page, before in self._refs.remove(name)]
        self.bytes_used -= sum(len(own) for _, _, own in gone if own is not None)
        return gone

    def take_dropped(self) -> list[Dropped]:
        """Take what was dropped since the last call because others are worth more: each checkpoint before the pages
        that only it needed, of which the last comes first."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def drop_all(self) -> None:
        """Drop everything, for `take_dropped`."""
        while (lowest := self._order.lowest()) is not None:
            self._drop(lowest[1])

    def names(self) -> Iterable[Name]:
        """The names of all copies."""
        states = [(CHECKPOINT, name) for name, kept in self._checkpoints.items() if kept.copy is not None]
        return [*states, *((PAGE, name) for name in self._pages)]

    def checkpoints(self) -> Iterator[tuple[bytes, Note | None, int]]:
        """The names of copies of checkpoints, their notes, and the bytes of their contents."""
        for name, kept in self._checkpoints.items():
            if kept.copy is not None:
                yield name, kept.note, len(kept.copy)

    def begin(self, names: Sequence[Name]) -> ReadyReading:
        """See `Tier.begin`. Copies nothing. A copy that is not what was copied is dropped."""
        self._sum_arrived()
        found, start = list[Contents](), time.perf_counter()
        for kind, name in names:
            kept = self._checkpoints.get(name)
            own = self._pages.get(name) if kind == PAGE else kept.copy if kept is not None else None
            if own is None:
                raise UnavailableError("a copy is not there any more")
            if not own.is_intact:
                self.num_damaged += 1
                self.drop([(kind, name)])
                raise UnavailableError(DAMAGED)
            found.append(own.contents)
        return ReadyReading(found, seconds=time.perf_counter() - start)

    def drop(self, names: Iterable[Name]) -> None:
        """See `Tier.drop`. A page takes the checkpoints along that need it."""
        for kind, name in names:
            if kind == PAGE and name in self._pages:
                for checkpoint in self._refs.checkpoints(name):
                    self._forget(checkpoint)
            elif kind == CHECKPOINT and name in self._checkpoints:
                self._forget(name)

    @property
    def is_empty(self) -> bool:
        """See `Tier.is_empty`."""
        return not self.num_checkpoints

    def note(self, name: Name) -> Note | None:
        """See `Tier.note`."""
        return self._checkpoints[name[1]].note if name[0] == CHECKPOINT and self._has(name[1]) else None

    def used(self, name: Name) -> None:
        """See `Tier.used`."""
        self.num_hits += 1

    def why_missing(self, name: Name) -> str:
        """See `Tier.why_missing`. Nothing is known."""
        return ""

    def clear(self) -> None:
        """See `Tier.clear`."""
        if self.on_change is not None:
            for name, note, num_bytes in [*self.checkpoints()]:
                self.on_change(False, name, note, num_bytes)
        for held in (
            self._pages,
            self._checkpoints,
            self._order,
            self._on_device,
            self._refs,
            self._dropped,
            self._arriving,
        ):
            held.clear()
        self.bytes_used = self.num_checkpoints = 0

    def violations(self) -> list[str]:
        """See `Tier.violations`."""
        wrong = self._refs.violations(self._checkpoints)
        states = [kept.copy for kept in self._checkpoints.values() if kept.copy is not None]
        held = sum(map(len, (*self._pages.values(), *states)))
        if held != self.bytes_used or held > self.num_bytes:
            wrong.append(f"host memory counts {self.bytes_used} bytes of {self.num_bytes} and holds {held}")
        if len(states) != self.num_checkpoints:
            wrong.append(f"host memory counts {self.num_checkpoints} checkpoints and holds {len(states)}")
        if set(self._order) != self._checkpoints.keys():
            wrong.append("a checkpoint in host memory would never be dropped")
        if any(page not in self._refs for page in self._pages):
            wrong.append("host memory has a page that nothing needs")
        if not self._on_device <= self._checkpoints.keys():
            wrong.append("a checkpoint that is not in host memory counts as on the device too")
        return wrong
