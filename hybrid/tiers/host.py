"""Copies of pages and checkpoints in host memory, by the digests of their prefixes.

What is kept is ordered by checkpoints, each with the pages that only it needs: they are dropped together, the lowest
value per byte first. A page is copied when a checkpoint needs it that is there, and never for itself.

What the device has too is dropped before anything else, since that loses no hit. Of a restored checkpoint that would
not be copied again, because requests continue behind it, the state is dropped at once. Its pages stay as long as there
is room: what continues it needs them when it leaves the device.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from hybrid.tiers.needs import Needs
from hybrid.tiers.rate import Cost
from hybrid.tiers.sampled import Sampled
from hybrid.tiers.tier import CHECKPOINT, PAGE, AtHand, Contents, Name, Note, Offer, UnavailableError

COPY = 1e-10
"""Seconds per byte restored that are assumed until they are measured."""

SAMPLE = 64
"""Checkpoints whose values are compared when something must go."""


@dataclass(slots=True, eq=False)
class Kept:
    """A copy of a checkpoint.

    Attributes:
        name: of its prefix.
        contents: its bytes.
        value, note: see `Offer`.
    """

    name: bytes
    contents: Contents
    value: Callable[[int], float]
    note: Note | None


class Dropped(NamedTuple):
    """A copy that was dropped because others are worth more.

    Attributes:
        name: its name.
        contents: its bytes.
        path: see `Offer`; of a checkpoint, the pages that only it needed and the one before them, of a page that one.
        note: of a checkpoint.
    """

    name: Name
    contents: Contents
    path: tuple[bytes, ...]
    note: Note | None = None


class HostTier:
    """Copies in host memory, up to a number of bytes: a `Tier`.

    Args:
        num_bytes: of all copies together.
        passes_on: keep what is dropped for `take_dropped`, which is called after each offer.

    Attributes:
        label, where, cost, wants_ids, bytes_offered, bytes_written: see `Tier`.
        num_bytes: bytes that it may hold.
        bytes_used: bytes of its copies.
        num_hits: copies that were used.
    """

    def __init__(self, num_bytes: int, passes_on: bool = False) -> None:
        self.label: str = "host memory"
        self.where: str = "in host memory"
        self.cost: Cost = Cost(0.0, COPY)
        self.wants_ids: bool = False
        self.num_bytes: int = num_bytes
        self.bytes_used: int = 0
        self.bytes_offered: int = 0
        self.bytes_written: int = 0
        self.num_hits: int = 0
        self._passes_on = passes_on
        self._dropped: list[Dropped] = []
        self._pages: dict[bytes, Contents] = {}
        self._checkpoints: dict[bytes, Kept] = {}
        rng = Random(0)
        self._all: Sampled[Kept] = Sampled(rng)
        self._on_device: Sampled[Kept] = Sampled(rng)  # those of which the device has the checkpoint too
        self._passed: OrderedDict[bytes, None] = OrderedDict()  # prefixes whose pages alone are left, oldest first
        self._needs = Needs()

    def __len__(self) -> int:
        return len(self._pages) + len(self._checkpoints)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, tuple) and name[1] in (self._pages if name[0] == PAGE else self._checkpoints)

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that it holds."""
        return len(self._checkpoints)

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self._pages)

    # What comes

    def offer(self, offer: Offer) -> bool:
        """See `Tier.offer`. Contents are read only when they are kept."""
        self.bytes_offered += offer.num_bytes
        kind, name = offer.name
        return self._offer_page(name, offer) if kind == PAGE else self._offer_checkpoint(name, offer)

    def _offer_checkpoint(self, name: bytes, offer: Offer) -> bool:
        assert offer.value is not None
        known = self._checkpoints.get(name)
        if known is not None:
            known.note, known.value = offer.note, offer.value
            self._on_device.discard(known)
            return True
        if not offer.is_worth_it or offer.num_bytes > self.num_bytes:
            return False
        self._passed.pop(name, None)
        joined = self._needs.add(offer.path)
        try:
            value = offer.value(self._needs.num_alone(name))
            contents = offer.read() if self._make_free(offer.num_bytes, value) else None
            if contents is None or not self._make_free(len(contents), value):  # it may be larger than was said
                self._give_up(name)
                return False
        except BaseException:
            self._give_up(name)
            raise
        kept = Kept(name, contents, offer.value, offer.note)
        self._checkpoints[name] = kept
        self._all.add(kept)
        self._count(contents)
        if joined is not None and joined in self._passed:  # this one needs its pages
            del self._passed[joined]
            self._needs.remove(joined)
        return True

    def _give_up(self, name: bytes) -> None:
        """A checkpoint is not kept: its pages are not needed for it."""
        for page, _ in self._needs.remove(name):
            self.bytes_used -= len(self._pages.pop(page, b""))

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
            if contents is None and name in self._needs:
                for checkpoint in self._needs.checkpoints(name):
                    self._let_go(checkpoint)
        if contents is None:
            return False
        self._pages[name] = contents
        self._count(contents)
        return True

    def _count(self, contents: Contents) -> None:
        self.bytes_used += len(contents)
        self.bytes_written += len(contents)

    def _make_free_for_page(self, name: bytes, num_bytes: int) -> bool:
        """Drop what has the lowest value until a page fits. False: nothing needs it any more, or never did."""
        while name in self._needs:
            if self.bytes_used + num_bytes <= self.num_bytes:
                return True
            lowest = next(iter(self._lowest_first()), None)
            if lowest is None:
                return False
            self._drop(lowest[1], num_bytes)
        return False

    def _make_free(self, num_bytes: int, value: float) -> bool:
        """Drop checkpoints of lower value, so that `num_bytes` fit. False, and nothing is dropped: they do not
        suffice."""
        missing, dropped = self.bytes_used + num_bytes - self.num_bytes, []
        for lower, name in self._lowest_first() if missing > 0 else ():
            if missing <= 0 or lower >= value:
                break
            dropped.append(name)
            missing -= sum(len(self._pages.get(page, b"")) for page in self._needs.alone(name))
            if name in self._checkpoints:
                missing -= len(self._checkpoints[name].contents)
        if missing > 0:
            return False
        for name in dropped:
            self._drop(name, num_bytes)
        return True

    def _lowest_first(self) -> Iterator[tuple[float, bytes]]:
        """Checkpoints and their values, in the order in which they are dropped: those whose pages alone are left, those
        that the device has too, and a sample of the others. Nothing may change while this is iterated over."""
        for name in self._passed:
            yield -math.inf, name
        for _, kept in self._sample(self._on_device):
            yield -math.inf, kept.name
        for value, kept in self._sample(self._all):
            if kept not in self._on_device:
                yield value, kept.name

    def _sample(self, kept: Sampled[Kept]) -> list[tuple[float, Kept]]:
        """A sample, the lowest value first."""
        return sorted(((self._value(one), one) for one in kept.sample(SAMPLE)), key=lambda one: one[0])

    def _value(self, kept: Kept) -> float:
        return kept.value(self._needs.num_alone(kept.name))

    # What goes

    def restored(self, name: bytes, is_copied_again: bool) -> None:
        """The device has a checkpoint too from now on.

        Args:
            is_copied_again: when it leaves the device; False: its state is of no use here.
        """
        kept = self._checkpoints.get(name)
        if kept is None:
            return
        if is_copied_again:
            self._on_device.add(kept)
        else:
            self._remove(kept)
            self._passed[name] = None

    def _drop(self, name: bytes, num_bytes: int) -> None:
        """A checkpoint goes, so that `num_bytes` fit. Of one that the device has too, first the state, and then the
        pages one by one: what is left need not be copied again when it leaves the device."""
        kept = self._checkpoints.get(name)
        if kept is not None and kept in self._on_device:
            self._remove(kept)
            self._passed[name] = None
        elif kept is not None:
            self._let_go(name)
        while name in self._passed and self.bytes_used + num_bytes > self.num_bytes:
            del self._passed[name]
            shortened = self._needs.shorten(name)
            if shortened is None:
                return
            page, before = shortened
            self.bytes_used -= len(self._pages.pop(page, b""))
            if before is not None:
                name = before
                self._passed[name] = None
                self._passed.move_to_end(name, last=False)

    def _let_go(self, name: bytes) -> None:
        """A checkpoint is dropped, with the pages that only it needs. They may go elsewhere, if the device has not got
        them too: then they will when they leave it."""
        kept = self._checkpoints.get(name)
        passes_on = self._passes_on and kept is not None and kept not in self._on_device
        if kept is not None:
            self._remove(kept)
        self._passed.pop(name, None)
        gone = self._needs.remove(name)
        if passes_on and kept is not None:
            above = [before for _, before in gone if before is not None]
            self._dropped.append(Dropped((CHECKPOINT, name), kept.contents, (name, *above), kept.note))
        for page, before in gone:
            contents = self._pages.pop(page, None)
            if contents is not None:
                self.bytes_used -= len(contents)
                if passes_on:
                    path = () if before is None else (before,)
                    self._dropped.append(Dropped((PAGE, page), contents, path))

    def _remove(self, kept: Kept) -> None:
        del self._checkpoints[kept.name]
        self._all.discard(kept)
        self._on_device.discard(kept)
        self.bytes_used -= len(kept.contents)

    def take_dropped(self) -> list[Dropped]:
        """What was dropped since the last call because others are worth more: each checkpoint before the pages that
        only it needed, of which the last comes first."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def let_all_go(self) -> None:
        """Drop everything, for `take_dropped`."""
        for kept in [*self._all][::-1]:
            self._let_go(kept.name)

    def names(self) -> Iterable[Name]:
        """Of all copies."""
        return [*((CHECKPOINT, name) for name in self._checkpoints), *((PAGE, name) for name in self._pages)]

    def begin(self, names: Sequence[Name]) -> AtHand:
        """See `Tier.begin`. Copies nothing."""
        if any(name not in self for name in names):
            raise UnavailableError("a copy is not there any more")
        return AtHand([self._pages[name] if kind == PAGE else self._checkpoints[name].contents for kind, name in names])

    @property
    def is_empty(self) -> bool:
        """See `Tier.is_empty`."""
        return not self._checkpoints

    def note(self, name: Name) -> Note | None:
        """See `Tier.note`."""
        kept = self._checkpoints.get(name[1]) if name[0] == CHECKPOINT else None
        return kept.note if kept is not None else None

    def used(self, name: Name) -> None:
        """See `Tier.used`."""
        self.num_hits += 1

    def why_missing(self, name: Name) -> str:
        """See `Tier.why_missing`. Nothing is known."""
        return ""

    def clear(self) -> None:
        """See `Tier.clear`."""
        self._pages.clear()
        self._checkpoints.clear()
        self._all.clear()
        self._on_device.clear()
        self._passed.clear()
        self._needs.clear()
        self._dropped.clear()
        self.bytes_used = 0

    def violations(self) -> list[str]:
        """See `Tier.violations`."""
        wrong = self._needs.violations([*self._checkpoints, *self._passed])
        held = sum(map(len, self._pages.values())) + sum(len(kept.contents) for kept in self._checkpoints.values())
        if held != self.bytes_used or held > self.num_bytes:
            wrong.append(f"host memory counts {self.bytes_used} bytes of {self.num_bytes} and holds {held}")
        if {*self._checkpoints.values()} != {*self._all}:
            wrong.append("a checkpoint in host memory would never be dropped")
        if any(page not in self._needs for page in self._pages):
            wrong.append("host memory has a page that nothing needs")
        if not {*self._on_device} <= {*self._all}:
            wrong.append("a checkpoint that is not in host memory counts as on the device too")
        return wrong + self._all.violations(self.label) + self._on_device.violations(self.label)
