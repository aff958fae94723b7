"""Copies of pages and checkpoints in host memory, by the digests of their prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid.tiers.ranking import Ranking, Worth
from hybrid.tiers.rate import Cost
from hybrid.tiers.tier import CHECKPOINT, Contents, Name, Note, Offer, UnavailableError

COPY = 1e-10
"""Seconds per byte restored that are assumed until they are measured."""


@dataclass(slots=True, eq=False)
class Copy:
    """A copy.

    Attributes:
        contents: its bytes.
        worth: what it may save.
        note: of a checkpoint.
    """

    contents: Contents
    worth: Worth
    note: Note | None = None


class HostTier:
    """Copies in host memory, up to a number of bytes: a `Tier`.

    Args:
        num_bytes: of all copies together.
        passes_on: keep what is dropped for `take_dropped`, which is called after each offer.

    Attributes:
        label, where, cost, wants_ids, bytes_offered, bytes_written: see `Tier`.
        num_hits: copies that were used.
    """

    def __init__(self, num_bytes: int, passes_on: bool = False) -> None:
        self.label: str = "host memory"
        self.where: str = "in host memory"
        self.cost: Cost = Cost(0.0, COPY)
        self.wants_ids: bool = False
        self.bytes_offered: int = 0
        self.bytes_written: int = 0
        self.num_hits: int = 0
        self._passes_on = passes_on
        self._dropped: list[tuple[Name, Copy]] = []
        self._copies: dict[Name, Copy] = {}
        self._ranking: Ranking[Name] = Ranking(num_bytes)
        self._num_checkpoints = 0

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, name: object) -> bool:
        return name in self._copies

    @property
    def num_bytes(self) -> int:
        """Bytes that it may hold."""
        return self._ranking.num_bytes

    @property
    def bytes_used(self) -> int:
        """Bytes of its copies."""
        return self._ranking.bytes_used

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that it holds."""
        return self._num_checkpoints

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        return len(self._copies) - self._num_checkpoints

    def offer(self, offer: Offer) -> bool:
        """See `Tier.offer`. Contents are read only when they are kept."""
        self.bytes_offered += offer.num_bytes
        known = self._copies.get(offer.name)
        if known is not None:
            known.note = offer.note
            self._ranking.touch(offer.name)
            return True
        if offer.worth.seconds <= 0 or offer.num_bytes > self.num_bytes:
            return False
        rank = self._ranking.rank(offer.num_bytes, [offer.worth])
        dropped = self._ranking.make_free(offer.num_bytes, rank)
        if dropped is None:
            return False
        for name in dropped:
            self._let_go(name)
        self._keep(offer, rank)
        return True

    def _keep(self, offer: Offer, rank: float) -> None:
        copy = Copy(offer.read(), offer.worth, offer.note)
        while self.bytes_used + len(copy.contents) > self.num_bytes:  # larger than was said
            lowest = self._ranking.drop_lowest()
            if lowest is None:
                break
            self._let_go(lowest)
        self._copies[offer.name] = copy
        self._ranking.add(offer.name, len(copy.contents), [offer.worth], rank)
        self.bytes_written += len(copy.contents)
        self._num_checkpoints += offer.name[0] == CHECKPOINT

    def _let_go(self, name: Name) -> None:
        """A copy that is not ranked any more is dropped, and may go elsewhere."""
        copy = self._forget(name)
        if self._passes_on:
            self._dropped.append((name, copy))

    def take_dropped(self) -> list[tuple[Name, Copy]]:
        """What was dropped since the last call because others are worth more."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _forget(self, name: Name) -> Copy:
        self._num_checkpoints -= name[0] == CHECKPOINT
        return self._copies.pop(name)

    def names(self) -> Iterable[Name]:
        """Of all copies."""
        return self._copies.keys()

    def get(self, name: Name) -> Copy | None:
        """A copy; None: there is none. Not counted as a use."""
        return self._copies.get(name)

    def fetch(self, names: Sequence[Name], seconds: float) -> list[Contents]:
        """See `Tier.fetch`. Copies nothing, and waits for nothing."""
        if any(name not in self._copies for name in names):
            raise UnavailableError("a copy is not there any more")
        return [self._copies[name].contents for name in names]

    @property
    def is_empty(self) -> bool:
        """See `Tier.is_empty`."""
        return not self._num_checkpoints

    def note(self, name: Name) -> Note | None:
        """See `Tier.note`."""
        copy = self._copies.get(name)
        return copy.note if copy is not None else None

    def used(self, name: Name) -> None:
        """See `Tier.used`."""
        copy = self._copies.get(name)
        self.num_hits += 1
        if copy is not None:
            self._ranking.learn(copy.worth.group, 0, 1)
            self._ranking.touch(name)

    def why_missing(self, name: Name) -> str:
        """See `Tier.why_missing`. Nothing is known."""
        return ""

    def drop(self, name: Name) -> None:
        """See `Tier.drop`."""
        if self._ranking.drop(name):
            self._forget(name)

    def clear(self) -> None:
        """See `Tier.clear`. What was learned stays."""
        self._copies.clear()
        self._ranking.clear()
        self._num_checkpoints = 0

    def violations(self) -> list[str]:
        """See `Tier.violations`."""
        wrong = self._ranking.violations("host memory")
        held = sum(len(copy.contents) for copy in self._copies.values())
        if held != self.bytes_used or held > self.num_bytes:
            wrong.append(f"host memory counts {self.bytes_used} bytes of {self.num_bytes} and holds {held}")
        if sum(kind == CHECKPOINT for kind, _ in self._copies) != self._num_checkpoints:
            wrong.append(f"host memory counts {self._num_checkpoints} checkpoints, which is wrong")
        return wrong
