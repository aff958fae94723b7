"""Tiers: places for copies of what leaves the device, by the digests of their prefixes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hybrid.errors import HybridError
from hybrid.tiers.cost import Cost
from hybrid.units import format_bytes

Name = tuple[str, bytes]
"""The name of a copy: "page" or "checkpoint", and the name of its prefix (`hybrid.key`)."""

PAGE, CHECKPOINT = "page", "checkpoint"

Contents = bytes | bytearray | memoryview
"""The contents of a page or a checkpoint."""


def checksum_of(contents: Contents) -> int:
    """Sum contents as 64-bit words, modulo 2**64: no change of a single word leaves it as it was. It finds memory that
    went bad, not malice, and is about as fast as the memory."""
    whole = len(contents) - len(contents) % 8
    words = np.frombuffer(contents, np.uint64, whole // 8)
    return (int(words.sum()) + int.from_bytes(memoryview(contents)[whole:], "little")) % 2**64


@dataclass(slots=True, eq=False)
class HeldCopy:
    """Contents that are kept in memory, with the checksum that they came with.

    Attributes:
        contents: the bytes.
        checksum: see `checksum_of`; None: they were on their way when it would have been taken.
    """

    contents: Contents
    checksum: int | None = None

    def __len__(self) -> int:
        return len(self.contents)

    @property
    def is_intact(self) -> bool:
        """Tell whether the contents are those that came."""
        return self.checksum is None or self.checksum == checksum_of(self.contents)


DAMAGED = "a copy is not what was copied, and is dropped"
"""Why contents that have another checksum are not restored."""


class UnavailableError(HybridError):
    """Copies cannot be had now: the request computes. The message says why."""


@dataclass(frozen=True, slots=True)
class Note:
    """The facts known of a checkpoint besides its contents.

    Attributes:
        kind: why it was put there.
        turn: number of turn ends before it on its path.
        priority: the highest that a request gave it.
        num_tokens: tokens that a hit saves: those from the checkpoint above it.
        end: tokens of its prefix.
        group: checkpoints of a group are equally likely to be wanted again (`Reuse`).
        usage: how it was used in this process; None: it is from an earlier one.
        namespace, ids: of its prefix, where a tier asks for them (`Tier.wants_ids`).
    """

    kind: str
    turn: int
    priority: int
    num_tokens: int
    end: int = 0
    group: str = ""
    usage: Any = None
    namespace: str = ""
    ids: bytes = b""


OnChange = Callable[[bool, bytes, Note | None, int], None]
"""Sees a copy of a checkpoint come or go: whether it comes, its name, its note, and the bytes of its contents."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A copy that leaves another place, as offered to a tier.

    Attributes:
        name: of the copy.
        num_bytes: of its contents, about.
        read: reads them.
        note: of a checkpoint; None: a page, which saves what the checkpoints save that need it.
        is_worth_it: a checkpoint is likely enough to save as much time as copying it and its pages takes.
        value: of a checkpoint (`Savings.value`): its argument is how many pages only it needs.
        path: names of the pages before its end, the last first; of a page, those before it. Can be read once.
        checksum: of its contents, where they were summed before; None: they come from the device.
    """

    name: Name
    num_bytes: int
    read: Callable[[], Contents]
    note: Note | None = None
    is_worth_it: bool = True
    value: Callable[[int], float] | None = None
    path: Iterator[bytes] = field(default_factory=lambda: iter(()))
    checksum: int | None = None


class Reading(Protocol):
    """Copies that are read for one user, who ends it with `drop`."""

    @property
    def is_done(self) -> bool:
        """Tell whether `take` has an answer."""
        ...

    @property
    def seconds(self) -> float:
        """That reading has taken, without what it waited for others."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, up to `seconds`. Returns whether it is."""
        ...

    def take(self) -> Sequence[Contents]:
        """The contents, in the order of the names.

        Raises:
            UnavailableError: they cannot be had, or it is not done: it took too long.
        """
        ...

    def drop(self) -> None:
        """They are not wanted any more. Another `drop` does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyReading:
    """Copies that need not be read: a `Reading` that is done.

    Attributes:
        contents: of the copies.
    """

    contents: Sequence[Contents]
    is_done: bool = True
    seconds: float = 0.0

    def wait(self, seconds: float) -> bool:
        """See `Reading.wait`."""
        return True

    def take(self) -> Sequence[Contents]:
        """See `Reading.take`."""
        return self.contents

    def drop(self) -> None:
        """See `Reading.drop`."""


class Tier(Protocol):
    """A place for copies. One thread calls it, that of the cache.

    Attributes:
        label, where: for explanations: "host memory" and "in host memory", "disk" and "on disk".
        cost: of a restore.
        wants_ids: notes of checkpoints are to hold the token ids of their prefixes.
        bytes_offered, bytes_written: of what left the places before it, and of what was copied of it.
    """

    label: str
    where: str
    cost: Cost
    wants_ids: bool
    bytes_offered: int
    bytes_written: int

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""
        ...

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints that it holds."""
        ...

    @property
    def bytes_used(self) -> int:
        """Bytes of its copies."""
        ...

    @property
    def is_empty(self) -> bool:
        """Tell whether it has nothing to restore, and nothing to report of that."""
        ...

    def __contains__(self, name: object) -> bool: ...

    def offer(self, offer: Offer) -> bool:
        """Keep a copy: of a checkpoint, if it is worth it; of a page, if a
        checkpoint needs it that is there. One that is there is not written again. Returns whether there is a copy
        now."""
        ...

    def begin(self, names: Sequence[Name]) -> Reading:
        """Begin to read copies that are there. Waits for nothing; not counted as a use.

        Raises:
            UnavailableError: they cannot be had now.
        """
        ...

    def note(self, name: Name) -> Note | None:
        """The note of a copy; None: there is none, or it has none."""
        ...

    def used(self, name: Name) -> None:
        """A copy was used: it is worth more, and so are others of its group."""
        ...

    def why_missing(self, name: Name) -> str:
        """Why a copy is not there, where that is known: it is of another model; else empty."""
        ...

    def drop(self, names: Iterable[Name]) -> None:
        """Forget copies that are of no use to any request, if they are there."""
        ...

    def clear(self) -> None:
        """Forget all copies."""
        ...

    def violations(self) -> list[str]:
        """Return what is wrong with its bookkeeping, for the audit."""
        ...


@dataclass(frozen=True, slots=True)
class Restored:
    """The contents that a request got from the tiers.

    Attributes:
        tier: where it came from: "host memory", "disk", "host memory and disk".
        num_tokens: tokens that are not computed because of it.
        num_bytes: that were copied to the device.
        seconds: that it took to read and write them.
        waited: seconds that the request waited until they were read: less, where they were read while it was queued.
        refused: why something deeper was not restored; empty: there was nothing deeper.
    """

    tier: str
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    refused: str = ""

    def __str__(self) -> str:
        parts = []
        if self.num_tokens:
            size, time = format_bytes(self.num_bytes), 1000 * self.seconds
            waited = f", waited {1000 * self.waited:.1f} ms" if self.waited >= 1e-4 else ""
            parts.append(f"{self.num_tokens} tokens restored from {self.tier}, {size} in {time:.1f} ms{waited}")
        if self.refused:
            parts.append(self.refused)
        return "; ".join(parts)


def clear_inconsistent(tiers: Iterable[Tier]) -> None:
    """After an unexpected exception: tiers whose bookkeeping is inconsistent forget their copies."""
    for tier in tiers:
        if tier.violations():
            tier.clear()
