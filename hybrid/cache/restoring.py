"""A restore that is under way."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid.tiers.tier import Contents, Name, Note, Reading, Tier


class Candidate(NamedTuple):
    """A checkpoint in the tiers that a request could use.

    Attributes:
        num_tokens: its position.
        checkpoint: its name.
        names: of the copies to restore, by tier; the checkpoint is among them.
        num_bytes: of them.
        seconds: that restoring them takes, about.
        note: of the checkpoint; None: there is none any more.
    """

    num_tokens: int
    checkpoint: Name
    names: dict[Tier, list[Name]]
    num_bytes: int
    seconds: float
    note: Note | None

    @property
    def label(self) -> str:
        """The labels of the tiers that it is restored from."""
        return " and ".join(tier.label for tier in self.names)

    def refusal(self, why: str) -> str:
        """Say why it is not restored, as a sentence."""
        where = " and ".join(tier.where for tier in self.names)
        return f"the checkpoint at {self.num_tokens} {where} is not restored: {why}"


@dataclass(slots=True, eq=False)
class Restoring:
    """The restore for a lease, which has computed nothing yet.

    Attributes:
        names: of the prefixes of its key, one for each page.
        limit: tokens of its key that may be used.
        candidates: that were not tried yet, the deepest first.
        refused: why one that is deeper than the next is not restored; empty: there was none.
        candidate: what is read now, from `readings`; None: nothing.
        until: when it is too late for that, on the clock `time.monotonic`.
        began: when the lease was opened, on the same clock.
    """

    names: list[bytes]
    limit: int
    candidates: Iterator[Candidate]
    refused: str = ""
    candidate: Candidate | None = None
    readings: Mapping[Tier, Reading] = field(default_factory=dict)
    until: float = 0.0
    began: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed, if it does not fail."""
        return self.candidate.num_tokens if self.candidate is not None else 0

    @property
    def is_due(self) -> bool:
        """Tell whether all was read, or it is too late for that."""
        return all(reading.is_done for reading in self.readings.values()) or time.monotonic() >= self.until

    def wait(self, seconds: float) -> None:
        """Wait until it is due, up to `seconds`."""
        end = min(self.until, time.monotonic() + seconds)
        for reading in self.readings.values():
            reading.wait(max(0.0, end - time.monotonic()))

    def take(self) -> dict[Name, Contents]:
        """Take the contents of all copies.

        Raises:
            UnavailableError: they cannot be had, or not in time.
        """
        assert self.candidate is not None
        contents: dict[Name, Contents] = {}
        for tier, reading in self.readings.items():
            contents.update(zip(self.candidate.names[tier], reading.take(), strict=True))
        return contents

    def drop(self) -> None:
        """Drop what is read: it is not wanted any more."""
        for reading in self.readings.values():
            reading.drop()
        self.readings = {}
