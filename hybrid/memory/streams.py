"""Copies from pinned memory to a GPU, in a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.memory.arrivals import Copier, Copy

MIN_BYTES = 512 * 2**10
"""Of a copy: about 10 us at 50 GB/s, and about 10 us for the host to begin it. Both are assumed."""


def copier_for(device: torch.device) -> Copier | None:
    """What copies to a device beside what it computes; None: contents are written at once."""
    return StreamCopier(device) if device.type == "cuda" else None


class StreamMark:
    """The end of copies, as an event of their stream: a `Mark`."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        """See `Mark.wait`."""
        torch.cuda.current_stream(self._device).wait_event(self._event)


class UnderWay(NamedTuple):
    """Copies that were begun.

    Attributes:
        copies: them; their sources must live until they end.
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
        """Let go of the sources of copies that have ended, and note how long they took."""
        while self._under_way and self._under_way[0].end.query():
            copies, start, end = self._under_way.popleft()
            self._seconds += start.elapsed_time(end) / 1000
            self._num_bytes += sum(copy.target.numel() for copy in copies)


def read_pinned(parts: Sequence[Tensor]) -> memoryview:
    """The bytes of parts of a GPU's memory, one after the other, in pinned memory. They are copied after the work that
    the GPU was given before, which may have written them.

    Args:
        parts: `[N]` uint8 each.
    """
    sizes = [part.numel() for part in parts]
    contents = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, own in zip(parts, contents.split(sizes), strict=True):
        own.copy_(part, non_blocking=True)
    if parts:
        torch.cuda.current_stream(parts[0].device).synchronize()
    data: Any = contents.numpy()
    return memoryview(data)
