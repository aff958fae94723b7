"""The tensors of a cache: views of its pages, its state slots, and its stored checkpoints.

Pages are page-major: a page holds all layers, so that a run of pages is a contiguous piece of bytes. A state slot is
one contiguous piece of bytes that holds every tensor of one sequence's state. Both are views of bytes; in an arena they
are views of the same bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid.errors import MemoryBudgetError
from hybrid.kernels.codec import StoredLayout, restore, store
from hybrid.kernels.ops import copy_states
from hybrid.memory.arena import PieceLayout
from hybrid.memory.pool import EMPTY_STATE
from hybrid.spec import HybridSpec
from hybrid.units import format_bytes


class StoredCheckpoints:
    """Checkpoints that are stored smaller than states; a `CheckpointStore`.

    Args:
        layout: how a state is packed.
        pieces: `[num_pieces, piece_bytes]` uint8: the memory.
        per_piece: stored checkpoints in a piece.
        state: the tensors of the state slots by name, `[num_slots, *shape]`.
    """

    def __init__(self, layout: StoredLayout, pieces: Tensor, per_piece: int, state: dict[str, Tensor]) -> None:
        self._layout = layout
        self._pieces = pieces
        self._per_piece = per_piece
        self._state = state

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of one stored checkpoint."""
        return self._layout.num_bytes

    def bytes_of(self, place: int) -> Tensor:
        """The bytes of a stored checkpoint, `[checkpoint_bytes]` uint8: a view."""
        piece, index = divmod(place, self._per_piece)
        size = self._layout.num_bytes
        return self._pieces[piece, index * size : (index + 1) * size]

    def store(self, slot: int, place: int) -> None:
        """Pack the state of a slot into the place of a stored checkpoint."""
        store(self._layout, {name: tensor[slot] for name, tensor in self._state.items()}, self.bytes_of(place))

    def restore(self, place: int, slot: int) -> None:
        """Unpack a stored checkpoint into a state slot."""
        restore(self._layout, self.bytes_of(place), {name: tensor[slot] for name, tensor in self._state.items()})

    def move_stored(self, moves: dict[int, int]) -> None:
        """Copy each stored checkpoint (key) to its new place (value)."""
        for old, new in moves.items():
            self.bytes_of(new).copy_(self.bytes_of(old))


class CacheTensors:
    """The tensors of a cache; a `Mover`. Make one with `fixed` or `elastic`.

    Args:
        spec: what the model keeps per token and per sequence.
        page_size: tokens per page.
        pages: `[num_bytes]` uint8.
        states: `[num_slots, stride]` uint8: the bytes of each slot, and the gap to the next.

    Attributes:
        kv: `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; index 2: keys, values.
        state: per name, `[num_slots, *shape]`.
        stored: checkpoints that are stored smaller; None: checkpoints are state slots.
    """

    def __init__(self, spec: HybridSpec, page_size: int, pages: Tensor, states: Tensor) -> None:
        shape = (spec.page_layers, 2, page_size, spec.kv_heads, spec.head_dim)
        self.kv: Tensor = pages.view(spec.kv_dtype).view(-1, *shape)
        self._pages = pages.view(-1, spec.page_bytes(page_size))
        self.state: dict[str, Tensor] = {}
        for tensor, start in zip(spec.state, spec.state_offsets, strict=True):
            part = states[:, start : start + tensor.num_bytes].view(tensor.dtype)
            self.state[tensor.name] = part.unflatten(1, tensor.shape)
        self._states = states[:, : spec.state_bytes]
        self._states[EMPTY_STATE].zero_()
        self.stored: StoredCheckpoints | None = None

    @classmethod
    def fixed(
        cls, spec: HybridSpec, page_size: int, num_pages: int, num_slots: int, device: torch.device
    ) -> CacheTensors:
        """Separate memory for pages and for states."""
        pages = _allocate((num_pages * spec.page_bytes(page_size),), device)
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
        tensors = cls(spec, page_size, memory.view(-1), states)
        if stored is not None:
            tensors.stored = StoredCheckpoints(stored, memory, layout.stored, tensors.state)
        return tensors

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy each page (key) to its new place (value)."""
        _copy(self._pages, moves)

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy each state slot (key) to its new place (value)."""
        _copy(self._states, moves)

    def read_page(self, page: int) -> bytes:
        """The bytes of a page."""
        return _bytes(self._pages[page])

    def read_checkpoint(self, slot: int) -> bytes:
        """The bytes of a checkpoint: of a state slot, or of the place of a stored checkpoint."""
        return _bytes(self._states[slot] if self.stored is None else self.stored.bytes_of(slot))


def _bytes(row: Tensor) -> bytes:
    return row.cpu().numpy().tobytes()


def _copy(rows: Tensor, moves: dict[int, int]) -> None:
    old, new = torch.tensor([[*moves.keys()], [*moves.values()]]).to(rows.device)
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
