"""Copies from pinned memory to a GPU and back, in a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.memory.arrivals import Copier, Copy

MIN_BYTES = 512 * 2**10
"""Of a copy: about 10 us at 50 GB/s, and about 10 us for the host to begin it. Both are assumed."""


def copier_for(device: torch.device) -> Copier | None:
    """What copies to a device beside what it computes; None: contents are written at once."""
    return StreamCopier(device) if device.type == "cuda" else None


def outward_copier_for(device: torch.device) -> Copier | None:
    """What copies from a device, in another stream: neither direction waits for the other, nor counts as its cost.
    None: contents are read at once."""
    return copier_for(device)


class StreamMark:
    """The end of copies, as an event of their stream: a `Mark`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """See `Mark.wait`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    @property
    def has_ended(self) -> bool:
        """See `Mark.has_ended`."""
        ended: bool = self._event.query()
        return ended

    def wait_on_host(self) -> None:
        """See `Mark.wait_on_host`."""
        self._event.synchronize()


class UnderWay(NamedTuple):
    """Copies that were begun.

    Attributes:
        copies: them; both ends must live until they end.
        start, end: events of their stream before and after them.
    """

    copies: Sequence[Copy]
    start: torch.cuda.Event
    end: torch.cuda.Event


class StreamCopier:
    """Copies in a stream of its own: a `Copier`. The device copies by itself only from memory that is pinned.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)
        self._under_way: deque[UnderWay] = deque()
        self._seconds = 0.0
        self._num_bytes = 0

    @property
    def min_bytes(self) -> int:
        """See `Copier.min_bytes`."""
        return MIN_BYTES

    @property
    def seconds_per_byte(self) -> float:
        """See `Copier.seconds_per_byte`."""
        self._drop_ended()
        return self._seconds / self._num_bytes if self._num_bytes else 0.0

    def prepare(self, source: Tensor) -> Tensor:
        """See `Copier.prepare`."""
        return source if source.is_pinned() else source.pin_memory()

    def allocate(self, num_bytes: int) -> Tensor:
        """See `Copier.allocate`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        """See `Copier.begin`."""
        self._drop_ended()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, copies: Sequence[Copy]) -> StreamMark:
        """See `Copier.copy`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        self._under_way.append(UnderWay(copies, start, end))
        try:
            with torch.cuda.stream(self._stream):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
        finally:
            end.record(self._stream)
        return StreamMark(end, self._device)

    def wait(self) -> None:
        """See `Copier.wait`."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _drop_ended(self) -> None:
        """Let go of copies that have ended, and note how long they took."""
        while self._under_way and self._under_way[0].end.query():
            copies, start, end = self._under_way.popleft()
            self._seconds += start.elapsed_time(end) / 1000
            self._num_bytes += sum(copy.target.numel() for copy in copies)
