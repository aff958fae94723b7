"""The memory itself: tensors of pages and of state slots.

Pages are page-major: a page holds all layers, so that a run of pages is a contiguous piece of bytes. A state slot is
one contiguous piece of bytes that holds every tensor of one sequence's state. Both are views of bytes; in an arena they
are views of the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.kernels.codec import StoredLayout, restore, store
from hybrid.kernels.ops import copy_states
from hybrid.memory.arena import PieceLayout
from hybrid.memory.pool import EMPTY_STATE
from hybrid.spec import HybridSpec


class CacheTensors:
    """Views of the memory of a cache.

    Args:
        pages: `[num_bytes]` uint8.
        states: `[num_slots, stride]` uint8: a slot's bytes, and what lies between it and the next.
        records: where stored checkpoints lie, when they are stored smaller: `[num_pieces, piece_bytes]` uint8.
        stored: how they are stored.

    Attributes:
        kv: `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; index 2: keys, values.
        state: per name, `[num_slots, *shape]`.
    """

    def __init__(
        self,
        spec: HybridSpec,
        page_size: int,
        pages: Tensor,
        states: Tensor,
        records: Tensor | None = None,
        stored: StoredLayout | None = None,
        per_piece: int = 0,
    ) -> None:
        shape = (spec.page_layers, 2, page_size, spec.kv_heads, spec.head_dim)
        self.kv = pages.view(spec.kv_dtype).view(-1, *shape)
        self._pages = pages.view(-1, spec.page_bytes(page_size))
        self.state: dict[str, Tensor] = {}
        for tensor, start in zip(spec.state, spec.state_offsets, strict=True):
            part = states[:, start : start + tensor.num_bytes].view(tensor.dtype)
            self.state[tensor.name] = part.unflatten(1, tensor.shape)
        self._states = states[:, : spec.state_bytes]
        self._states[EMPTY_STATE].zero_()
        self._records, self._stored, self._per_piece = records, stored, per_piece

    @classmethod
    def fixed(
        cls, spec: HybridSpec, page_size: int, num_pages: int, num_slots: int, device: torch.device
    ) -> CacheTensors:
        """Separate memory for pages and for states."""
        pages = torch.empty(num_pages * spec.page_bytes(page_size), dtype=torch.uint8, device=device)
        states = torch.empty(num_slots, spec.state_bytes, dtype=torch.uint8, device=device)
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
        """One memory for both."""
        memory = torch.empty(num_pieces, layout.num_bytes, dtype=torch.uint8, device=device)
        states = memory.view(num_pieces * layout.states, layout.num_bytes // layout.states)
        return cls(spec, page_size, memory.view(-1), states, memory, stored, layout.records)

    def store(self, slot: int, record: int) -> None:
        """Write the state of a slot into a record, stored smaller."""
        assert self._stored is not None
        store(self._stored, {name: tensor[slot] for name, tensor in self.state.items()}, self._record(record))

    def restore(self, record: int, slot: int) -> None:
        """Write what a record holds into a slot."""
        assert self._stored is not None
        restore(self._stored, self._record(record), {name: tensor[slot] for name, tensor in self.state.items()})

    def _record(self, index: int) -> Tensor:
        assert self._records is not None and self._stored is not None
        piece, at = divmod(index, self._per_piece)
        size = self._stored.num_bytes
        return self._records[piece, at * size : (at + 1) * size]

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy pages from their old place to a new one."""
        self._copy(self._pages, moves)

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy state slots likewise."""
        self._copy(self._states, moves)

    def move_records(self, moves: dict[int, int]) -> None:
        """Copy records of stored checkpoints likewise."""
        for old, new in moves.items():
            self._record(new).copy_(self._record(old))

    @staticmethod
    def _copy(rows: Tensor, moves: dict[int, int]) -> None:
        old, new = torch.tensor([[*moves.keys()], [*moves.values()]]).to(rows.device)
        copy_states(rows, old, new)
