"""Contents on their way to a GPU, layer by layer, and from it to the host.

What a restore brings back was read and checked on the host. Its copies to the device are begun at once, all of them, in
the order in which the layers of the model compute, and run beside what the device computes: a pass that uses them waits
at each layer for the contents of that layer. The host waits for nothing.

Four rules keep contents that are not there yet from being used:

* they go to pages and to the place of a checkpoint that a lease or the tree owns. Before these are freed, whatever
  the device does next waits for them (`Uploads.wait_if_pending`), so that what is allocated is never on its way;
* a pass of the model waits for the contents of a layer before it computes the layer (`Uploads.wait_for_layer`);
* what else reads, moves or writes contents waits for them first (`wait_if_pending`, `wait_for_all`): a captured pass,
  compaction, copies to tiers and files, digests, the unpacking of a stored checkpoint;
* copies that cannot all be begun are waited for likewise, and the restore has failed.

What leaves the memory of a GPU is copied in a stream of its own:

* a copy waits for all that the GPU was given before, which may have written what is copied;
* what the GPU is given afterwards, which may write there, waits for the copy;
* the host waits for neither. It waits for contents before it reads them (`Downloads.wait`); a restore does not, since
  it is given to the GPU after the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid.spec import HybridSpec, LayerTensors, Place

Contents = bytes | bytearray | memoryview
"""The contents of a page or a checkpoint."""

MIN_BYTES = 512 * 2**10
"""Minimum bytes of a copy: about 10 us at 50 GB/s, and about 10 us for the host to begin it. Both are assumed."""


class Copy(NamedTuple):
    """Bytes that are copied.

    Attributes:
        target: to where.
        source: from where, as large. The one of the two that is on the host is from `Copier.prepare` or
            `Copier.allocate`, or a part of it.
    """

    target: Tensor
    source: Tensor


class Mark(Protocol):
    """The end of copies that were begun."""

    def wait(self) -> None:
        """Have what the device is given from now on wait for them, and for those that were begun before."""
        ...

    @property
    def has_ended(self) -> bool:
        """Tell whether they have ended, as far as is known."""
        ...

    def wait_on_host(self) -> None:
        """Have the host wait for them, and for those that were begun before."""
        ...


class Copier(Protocol):
    """Copies bytes from the host to a device or back, one after the other, beside what the device computes.

    Attributes:
        min_bytes: pages are not copied in smaller parts: to begin a copy takes time, too.
    """

    @property
    def min_bytes(self) -> int: ...

    @property
    def seconds_per_byte(self) -> float:
        """Seconds per byte of copies that have ended; 0: none has, or they take no time after they were begun."""
        ...

    def prepare(self, source: Tensor) -> Tensor:
        """Put the same bytes where they can be copied from. They must not change until they are copied."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory of the host that can be copied to, `[num_bytes]` uint8."""
        ...

    def begin(self) -> None:
        """Have the copies that follow wait for all that the device was given so far: it may use what is overwritten, or
        write what is copied."""
        ...

    def copy(self, copies: Sequence[Copy]) -> Mark:
        """Begin copies. Keeps both ends of them until they end."""
        ...

    def wait(self) -> None:
        """Have what the device is given from now on wait for all copies that were begun, also where `copy` raised."""
        ...


def copier_for(device: torch.device) -> Copier | None:
    """Make what copies to a device beside what it computes. None: contents are written at once."""
    return StreamCopier(device) if device.type == "cuda" else None


def outward_copier_for(device: torch.device) -> Copier | None:
    """Make what copies from a device, in another stream: neither direction waits for the other, nor counts as its cost.
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


class _Begun(NamedTuple):
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
        self._under_way: deque[_Begun] = deque()
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
        self._under_way.append(_Begun(copies, start, end))
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


class Share(NamedTuple):
    """A range of the bytes of a page, or of a state slot.

    Attributes:
        start: the first byte, in the page or slot.
        source: the first byte in its contents, which have no gaps.
        num_bytes: how many.
    """

    start: int
    source: int
    num_bytes: int


class LayerGroup(NamedTuple):
    """Consecutive layers whose contents arrive together.

    Attributes:
        first: index of the first of them.
        page: their shares of each page.
        state: their shares of a state slot.
    """

    first: int
    page: tuple[Share, ...]
    state: tuple[Share, ...]


def layer_groups(spec: HybridSpec, page_size: int, min_bytes: int) -> tuple[LayerGroup, ...]:
    """Return how the contents of pages and state slots are divided, in the order of the layers. What no layer lists may
    be read by any, and comes with the first.

    Args:
        min_bytes: a group has no share of a page, or one that is at least so large. The last may be smaller.
    """
    pages, states = _by_layer(spec.page_places(page_size)), _by_layer(spec.state_places)
    layers = spec.layers or (LayerTensors(0),)
    own = [(_take(pages, layer.tokens, layer.row), _take(states, layer.state, layer.row)) for layer in layers]
    page, state = [*pages.values()], [*states.values()]
    groups: list[LayerGroup] = []
    first = 0
    for index, (of_page, of_state) in enumerate(own):
        page, state = page + of_page, state + of_state
        if not page or sum(share.num_bytes for share in page) >= min_bytes or index == len(own) - 1:
            groups.append(LayerGroup(first, _joined(page), _joined(state)))
            first, page, state = index + 1, [], []
    return (*groups,)


def shares_of(places: Sequence[Place]) -> tuple[Share, ...]:
    """List all shares of a page or a slot with tensors at these places."""
    return _joined([*_by_layer(places).values()])


def _by_layer(places: Sequence[Place]) -> dict[tuple[str, int], Share]:
    """Find the share of each row of each tensor. One without dimensions has one."""
    shares, source = dict[tuple[str, int], Share](), 0
    for place in places:
        count = place.shape[0] if place.shape else 1
        size = place.num_bytes // max(count, 1)
        for row in range(count):
            shares[place.name, row] = Share(place.start + row * size, source + row * size, size)
        source += place.num_bytes
    return shares


def _take(shares: dict[tuple[str, int], Share], names: Sequence[str], row: int) -> list[Share]:
    return [shares.pop((name, row)) for name in names]


def _joined(shares: Sequence[Share]) -> tuple[Share, ...]:
    """Join shares: the same bytes in as few ranges as there can be."""
    joined: list[Share] = []
    for share in sorted(shares):
        last = joined[-1] if joined else None
        if last is not None and (last.start + last.num_bytes, last.source + last.num_bytes) == share[:2]:
            joined[-1] = last._replace(num_bytes=last.num_bytes + share.num_bytes)
        else:
            joined.append(share)
    return (*joined,)


class Uploads:
    """The contents on their way into the memory of a device.

    Args:
        copier: copies; None: contents are written at once, and nothing is ever on its way.
        groups: the layers whose contents arrive together.
    """

    def __init__(self, copier: Copier | None = None, groups: Sequence[LayerGroup] = ()) -> None:
        self._copier = copier
        self._group_at = {group.first: at for at, group in enumerate(groups)}
        self._marks: list[Mark] = []  # of the latest copies, which end after all before; one for each group
        self._pages: set[int] = set()
        self._checkpoints: set[int] = set()

    @property
    def are_pending(self) -> bool:
        """Tell whether contents may be on their way for which the device's next work does not wait."""
        return bool(self._marks)

    def seconds(self, num_bytes: int) -> float:
        """Estimate the seconds that a copy of `num_bytes` takes."""
        return num_bytes * self._copier.seconds_per_byte if self._copier is not None else 0.0

    def begin(self, copies: Sequence[Sequence[Copy]], pages: Collection[int], checkpoint: int) -> None:
        """Begin to copy the contents of pages and of a checkpoint. When this raises, nothing of them is on its way any
        more as far as the device's next work can see, and they hold anything.

        Args:
            copies: of each group.
            pages: the pages.
            checkpoint: its place, as checkpoints are stored.
        """
        assert self._copier is not None
        self._copier.begin()
        try:
            marks = [self._copier.copy(group) for group in copies]
        except BaseException:
            self._copier.wait()
            self._forget()
            raise
        self._marks = marks
        self._pages.update(pages)
        self._checkpoints.add(checkpoint)

    def wait_for_layer(self, layer: int) -> None:
        """Have what the device is given from now on wait for a layer's contents, and those of layers before it. To be
        called for each, in their order."""
        if self._marks and (group := self._group_at.get(layer)) is not None:
            self._marks[group].wait()

    def wait_for_all(self) -> None:
        """Have what the device is given from now on wait for all contents."""
        if self._marks:
            self._marks[-1].wait()
            self._forget()

    def wait_if_pending(self, pages: Collection[int] = (), checkpoints: Collection[int] = ()) -> None:
        """Have what the device is given from now on wait for all contents, if one of these is on its way: it reads or
        writes them, or they are freed.

        Args:
            checkpoints: places, as checkpoints are stored.
        """
        if self._marks and not (self._pages.isdisjoint(pages) and self._checkpoints.isdisjoint(checkpoints)):
            self.wait_for_all()

    def _forget(self) -> None:
        self._marks = []
        self._pages.clear()
        self._checkpoints.clear()


class Downloads:
    """The contents on their way from the memory of a device to the host.

    Args:
        copier: copies; None: nothing is ever on its way.
    """

    def __init__(self, copier: Copier | None = None) -> None:
        self._copier = copier
        self._under_way: deque[tuple[Contents, Mark]] = deque()

    def begin(self, parts: Sequence[Tensor]) -> Contents:
        """Begin to copy the bytes of parts of the memory, one after the other. The device may write there afterwards.
        When this raises, nothing is on its way.

        Args:
            parts: `[N]` uint8 each.
        """
        assert self._copier is not None
        self._drop_ended()
        sizes = [part.numel() for part in parts]
        target = self._copier.allocate(sum(sizes))
        self._copier.begin()
        try:
            copies = zip(target.split(sizes), parts, strict=True)
            mark = self._copier.copy([Copy(own, part) for own, part in copies])
        finally:
            self._copier.wait()
        contents = memoryview(target.numpy())  # type: ignore[arg-type]
        self._under_way.append((contents, mark))
        return contents

    def wait(self, contents: Contents) -> Contents:
        """Have the host wait for contents that `begin` has returned; others are there. Returns them."""
        self._drop_ended()
        for own, mark in self._under_way:
            if own is contents:
                mark.wait_on_host()
        return contents

    def has_arrived(self, contents: Contents) -> bool:
        """Tell whether the host may read contents without waiting for them."""
        self._drop_ended()
        return all(own is not contents for own, _ in self._under_way)

    def _drop_ended(self) -> None:
        while self._under_way and self._under_way[0][1].has_ended:
            self._under_way.popleft()
