"""The tensors of a cache: views of its pages, its state slots, and its stored checkpoints.

Pages are page-major: a page holds all layers, so that a run of pages is a contiguous piece of bytes. A state slot is
one contiguous piece of bytes that holds every tensor of one sequence's state. Both are views of bytes; in an arena they
are views of the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hybrid.errors import MemoryBudgetError, OwnershipError
from hybrid.kernels.codec import StoredLayout, restore, store
from hybrid.kernels.cpu.kinds import SCALE_BYTES
from hybrid.kernels.ops import copy_states
from hybrid.kernels.packed_kv import KV_DTYPES
from hybrid.memory.arena import PieceLayout
from hybrid.memory.contents import UnitContents
from hybrid.memory.copies import (
    Contents,
    Copier,
    Copy,
    Downloads,
    Share,
    Uploads,
    copier_for,
    layer_groups,
    outward_copier_for,
    shares_of,
)
from hybrid.memory.device import on_device
from hybrid.memory.pool import EMPTY_STATE
from hybrid.spec import HybridSpec, Place
from hybrid.units import format_bytes

FP8_NAN = 0x7F
"""The code of NaN of e4m3, without its sign."""


class StoredCheckpoints:
    """The places of checkpoints that are stored smaller than states.

    Args:
        layout: how a state is packed.
        pieces: `[num_pieces, piece_bytes]` uint8: the memory.
        per_piece: stored checkpoints in a piece.

    Attributes:
        layout: as given.
        places: where each tensor of the state is in a stored checkpoint, and its scales if it has any.
    """

    def __init__(self, layout: StoredLayout, pieces: Tensor, per_piece: int) -> None:
        self.layout: StoredLayout = layout
        self.places: tuple[Place, ...] = _stored_places(layout)
        self._pieces = pieces
        self._per_piece = per_piece

    def bytes_of(self, place: int) -> Tensor:
        """View the bytes of a stored checkpoint, `[layout.num_bytes]` uint8."""
        piece, index = divmod(place, self._per_piece)
        size = self.layout.num_bytes
        return self._pieces[piece, index * size : (index + 1) * size]


class CacheTensors(UnitContents):
    """The tensors of a cache. Make one with `fixed` or `elastic`.

    Every tensor of the spec has its place in a page or in a state slot. Contents are moved as whole pages and slots,
    and read and written tensor by tensor in the order of the spec, without the gaps between them.

    Args:
        spec: what the model keeps per token and per sequence.
        page_size: tokens per page.
        pages: `[num_pages, page_bytes]` uint8.
        states: `[num_slots, stride]` uint8: the bytes of each slot, and the gap to the next.
        stored: checkpoints that are stored smaller; None: checkpoints are state slots.

    Methods wait for `uploads` and `in_flight` where they must. Who reads or writes the tensors below calls
    `Uploads.wait_for_all` or `Uploads.wait_for_layer`, and `InFlight.wait_for_pass`, before.

    Attributes:
        tokens: per name, `[num_pages, *outer, page_size / block, *inner]`.
        state: per name, `[num_slots, *shape]`.
        stored: as given.
    """

    def __init__(
        self,
        spec: HybridSpec,
        page_size: int,
        pages: Tensor,
        states: Tensor,
        stored: StoredCheckpoints | None = None,
    ) -> None:
        super().__init__()
        self.can_read = self.can_write = True
        self._page_places = spec.page_places(page_size)
        self._state_places = spec.state_places
        self._pages = pages
        self._states = states[:, : spec.state_bytes]
        self._states[EMPTY_STATE].zero_()
        self.tokens: dict[str, Tensor] = _views(pages, self._page_places)
        self.state: dict[str, Tensor] = _views(states, self._state_places)
        self.stored: StoredCheckpoints | None = stored
        self._checkpoint_places = stored.places if stored is not None else self._state_places
        self.num_bytes = _size(self._page_places), _size(self._checkpoint_places)
        self._copier: Copier | None = copier_for(pages.device)
        groups = layer_groups(spec, page_size, self._copier.min_bytes if self._copier is not None else 0)
        self._groups = groups
        self.uploads = Uploads(self._copier, groups)
        self.downloads = Downloads(outward_copier_for(pages.device))

    def page_layout(self) -> str:
        """Describe what a page holds: the tensors, in order."""
        return _described(self._page_places)

    def checkpoint_layout(self) -> str:
        """Describe what a checkpoint holds, as it is stored."""
        return _described(self._checkpoint_places)

    def are_finite(self, pages: Iterable[Contents], checkpoint: Contents | None) -> bool:
        """See `UnitContents.are_finite`. Reads them once, which takes less time than copying them."""
        sums = [*_sums(checkpoint, self._checkpoint_places, of_page=False)] if checkpoint is not None else []
        sums += (one for page in pages for one in _sums(page, self._page_places, of_page=True))
        return not sums or bool(torch.stack(sums).isfinite().all())

    @property
    def kv(self) -> Tensor:
        """Keys and values, `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; index 2: keys, values.
        Where they are kept in a byte per element, the last dimension is that of packed rows."""
        return self.tokens["kv"]

    @classmethod
    def fixed(
        cls, spec: HybridSpec, page_size: int, num_pages: int, num_slots: int, device: torch.device
    ) -> CacheTensors:
        """Separate memory for pages and for states."""
        pages = _allocate((num_pages, spec.page_bytes(page_size)), device)
        states = _allocate((num_slots, spec.state_bytes), device)
        return cls(spec, page_size, pages, states)

    @classmethod
    def elastic(
        cls,
        spec: HybridSpec,
        page_size: int,
        num_pieces: int,
        layout: PieceLayout,
        device: torch.device,
        stored: StoredLayout | None,
    ) -> CacheTensors:
        """One memory for pages and states.

        Args:
            layout: how a piece is divided.
            stored: how checkpoints are packed; None: they are state slots.
        """
        memory = _allocate((num_pieces, layout.num_bytes), device)
        states = memory.view(num_pieces * layout.states, layout.num_bytes // layout.states)
        packed = StoredCheckpoints(stored, memory, layout.stored) if stored is not None else None
        return cls(spec, page_size, memory.view(num_pieces * layout.pages, -1), states, packed)

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy each page (key) to its new place (value)."""
        self.in_flight.wait_for_pass()
        self.uploads.wait_if_pending(pages=moves)
        _copy(self._pages, moves)

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy each state slot (key) to its new place (value)."""
        self.in_flight.wait_for_pass()
        if self.stored is None:
            self.uploads.wait_if_pending(checkpoints=moves)
        _copy(self._states, moves)

    def move_stored(self, moves: dict[int, int]) -> None:
        """Copy each stored checkpoint (key) to its new place (value)."""
        assert self.stored is not None
        self.in_flight.wait_for_pass()
        self.uploads.wait_if_pending(checkpoints=moves)
        for old, new in moves.items():
            self.stored.bytes_of(new).copy_(self.stored.bytes_of(old))

    def store(self, slot: int, place: int) -> None:
        """Pack the state of a slot into the place of a stored checkpoint."""
        assert self.stored is not None
        self.in_flight.wait_for_pass()
        tensors = {name: tensor[slot] for name, tensor in self.state.items()}
        store(self.stored.layout, tensors, self.stored.bytes_of(place))

    def restore(self, place: int, slot: int) -> None:
        """Unpack a stored checkpoint into a state slot."""
        assert self.stored is not None
        self.in_flight.wait_for_pass()
        self.uploads.wait_for_layer(0)  # it arrives with the first layer
        tensors = {name: tensor[slot] for name, tensor in self.state.items()}
        restore(self.stored.layout, self.stored.bytes_of(place), tensors)

    def read_page(self, page: int) -> Contents:
        """Read the bytes of a page: of every tensor per token, one after the other."""
        return self.downloads.wait(self.fetch_page(page))

    def read_checkpoint(self, place: int) -> Contents:
        """Read the bytes of a checkpoint: of every tensor of a state slot, or of the place of a stored checkpoint."""
        return self.downloads.wait(self.fetch_checkpoint(place))

    def fetch_page(self, page: int) -> Contents:
        """Read a page; on a GPU its contents are on their way to the host (`downloads`), and it may be written."""
        self.uploads.wait_if_pending(pages=[page])
        return self._read(self._pages[page], self._page_places)

    def fetch_checkpoint(self, place: int) -> Contents:
        """Read a checkpoint, likewise."""
        self.uploads.wait_if_pending(checkpoints=[place])
        return self._read(self._checkpoint(place), self._checkpoint_places)

    def _read(self, row: Tensor, places: Sequence[Place]) -> Contents:
        """Read the bytes of every tensor in a row, without the gaps, which hold what was there before."""
        self.in_flight.wait_for_pass()
        if self._copier is not None:
            return self.downloads.begin([row[place.start : place.start + place.num_bytes] for place in places])
        data = row.numpy()
        return bytearray().join([data[place.start : place.start + place.num_bytes].data for place in places])

    def write_page(self, page: int, contents: Contents) -> None:
        """Write what `read_page` has read."""
        self.in_flight.wait_for_pass()
        _write(self._pages[page], self._page_places, contents)

    def write_checkpoint(self, place: int, contents: Contents) -> None:
        """Write what `read_checkpoint` has read."""
        self.in_flight.wait_for_pass()
        _write(self._checkpoint(place), self._checkpoint_places, contents)

    def write(self, pages: Sequence[int], contents: Sequence[Contents], place: int, checkpoint: Contents) -> None:
        """Write pages and a checkpoint: on a GPU they are on their way afterwards (`uploads`). When this raises, they
        hold anything."""
        if self._copier is None:
            super().write(pages, contents, place, checkpoint)
            return
        rows = [
            (self._pages[page], self._copier.prepare(_on_host(held, self._page_places)))
            for page, held in zip(pages, contents, strict=True)
        ]
        row = self._checkpoint(place)
        source = self._copier.prepare(_on_host(checkpoint, self._checkpoint_places))
        copies = [[copy for each in rows for copy in _copies(*each, group.page)] for group in self._groups]
        for at, group in enumerate(self._groups):
            if self.stored is None:
                copies[at] += _copies(row, source, group.state)
            elif not at:  # it is unpacked whole, for all layers
                copies[at] += _copies(row, source, shares_of(self._checkpoint_places))
        self.uploads.begin(copies, pages, place)

    def _checkpoint(self, place: int) -> Tensor:
        """View the bytes of a checkpoint."""
        return self.stored.bytes_of(place) if self.stored is not None else self._states[place]


def _size(places: Sequence[Place]) -> int:
    return sum(place.num_bytes for place in places)


def _stored_places(layout: StoredLayout) -> tuple[Place, ...]:
    places = []
    for part in layout.tensors:
        num_bytes = math.prod(part.shape) * part.stored_dtype.itemsize
        places.append(Place(part.name, part.shape, part.stored_dtype, part.offset, num_bytes))
        if part.scales_offset is not None:
            num_scales = math.prod(part.shape[:-1])
            name = f"{part.name} scales"
            places.append(Place(name, part.shape[:-1], torch.float32, part.scales_offset, 4 * num_scales))
    return (*places,)


def _described(places: Sequence[Place]) -> str:
    return "; ".join(f"{place.name} {place.dtype} {[*place.shape]}".replace("torch.", "") for place in places)


def _views(rows: Tensor, places: Sequence[Place]) -> dict[str, Tensor]:
    """View the tensors in rows of bytes, by name: `[len(rows), *shape]`."""
    return {
        place.name: rows[:, place.start : place.start + place.num_bytes].view(place.dtype).unflatten(1, place.shape)
        for place in places
    }


def _write(row: Tensor, places: Sequence[Place], contents: Contents) -> None:
    source, start = _on_host(contents, places), 0
    for place in places:
        row[place.start : place.start + place.num_bytes].copy_(source[start : start + place.num_bytes])
        start += place.num_bytes


def _sums(contents: Contents, places: Sequence[Place], *, of_page: bool) -> Iterator[Tensor]:
    """Sum the tensors of contents whose elements may be NaN or infinity, which remain in a sum. Of a page's
    rows in a byte per element those of their scales, which are NaN or infinite where the values were that were packed;
    a code of fp8 that is NaN counts too, since there is nothing in it that would be packed as such."""
    source, start = _on_host(contents, places), 0
    for place in places:
        own = source[start : start + place.num_bytes]
        if of_page and place.dtype in KV_DTYPES.values() and place.num_bytes:
            rows = own.view(-1, place.shape[-1])
            yield rows[:, -SCALE_BYTES:].contiguous().view(torch.float32).sum()
            if place.dtype.is_floating_point and bool(((rows[:, :-SCALE_BYTES] & 0x7F) == FP8_NAN).any()):
                yield torch.tensor(torch.nan)
        elif place.dtype.is_floating_point and place.num_bytes:
            yield (own.clone() if start % place.dtype.itemsize else own).view(place.dtype).sum(dtype=torch.float32)
        start += place.num_bytes


def _on_host(contents: Contents, places: Sequence[Place]) -> Tensor:
    """Contents as a tensor: without a copy, where they could be written to."""
    expected = _size(places)
    if len(contents) != expected:
        raise OwnershipError(f"{len(contents)} bytes are to be written where {expected} belong")
    if not expected:  # a model without states
        return torch.empty(0, dtype=torch.uint8)
    is_writable = not memoryview(contents).readonly
    return torch.frombuffer(contents if is_writable else bytearray(contents), dtype=torch.uint8)


def _copies(row: Tensor, source: Tensor, shares: Sequence[Share]) -> list[Copy]:
    """Copies of shares of a page or a slot."""
    return [
        Copy(row[start : start + num_bytes], source[first : first + num_bytes]) for start, first, num_bytes in shares
    ]


def _copy(rows: Tensor, moves: dict[int, int]) -> None:
    old, new = on_device(torch.tensor([[*moves.keys()], [*moves.values()]]), rows.device)
    copy_states(rows, old, new)


def _allocate(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Bytes, as they are found.

    Raises:
        MemoryBudgetError: the system refuses them.
    """
    try:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    except (MemoryError, RuntimeError) as error:  # of PyTorch's allocators
        raise MemoryBudgetError(
            f"the system refuses {format_bytes(math.prod(shape))} on {device} for the cache's memory: {error!s:.300}; "
            "choose a smaller memory (CacheConfig(memory=...)), or end what else uses it"
        ) from error
