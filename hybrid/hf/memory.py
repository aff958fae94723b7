"""The memory of pages and state slots behind `hybrid.hf`: transformers' tensors as bytes, and back.

Pages are page-major: a page holds keys and values of `page_size` tokens in every attention layer. A state slot holds
every state of one sequence. Both are views of the same bytes, cut into pieces as `hybrid.arena` says.

Sliding-window layers are kept in pages like any other, and the window is cut when a checkpoint is restored. With the
window inside the state, checkpoints a few chunks apart would each hold most of the same tokens, and a model without
linear layers would need states at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hybrid.hf.layers import Layout, fill, tensor_of
from hybrid.memory.arena import PieceLayout
from hybrid.spec import ALIGNMENT


class PageMemory:
    """The memory itself; also the mover of its contents (`hybrid.Mover`).

    Args:
        layout: what a model keeps.
        page_size: tokens per page.
        num_bytes: as much as may be used; the piece of the empty state comes on top.
        device: where the memory lies.
    """

    def __init__(self, layout: Layout, page_size: int, num_bytes: int, device: torch.device) -> None:
        self._layout = layout
        self._page_size = page_size
        pieces = PieceLayout.of(layout.page_bytes(page_size), layout.state_bytes)
        num_pieces = num_bytes // pieces.num_bytes + 1
        memory = torch.empty(num_pieces, pieces.num_bytes, dtype=torch.uint8, device=device)
        self._pages = memory.view(num_pieces * pieces.pages, -1)
        self._slots = memory.view(num_pieces * pieces.states, -1)
        self._tokens: list[Tensor] = []  # per part: [num_pages, heads, page_size, head_dim]
        start = 0
        for part in layout.tokens:
            end = start + part.token_bytes * page_size
            view = self._pages[:, start:end].view(part.dtype)
            self._tokens.append(view.unflatten(1, (part.heads, page_size, part.head_dim)))
            start = -(-end // ALIGNMENT) * ALIGNMENT
        self._states: list[Tensor] = []  # per part: [num_slots, *shape]
        start = 0
        for state in layout.states:
            end = start + state.num_bytes
            self._states.append(self._slots[:, start:end].view(state.dtype).unflatten(1, state.shape))
            start = -(-end // ALIGNMENT) * ALIGNMENT

    def write_pages(self, layers: Sequence[Any], pages: Sequence[int], end: int, *, row: int, num_seen: int) -> None:
        """Write tokens of one sequence of a cache into pages.

        Of a window that is smaller than the pages, only what it holds is written: nothing before it is ever read, since
        every checkpoint lies at an end that was written.

        Args:
            pages: the page ids of tokens `[end - len(pages) * page_size, end)`.
            row: index of the sequence in the batch.
            num_seen: tokens that the cache has seen of it, without padding: `end` of them or more.
        """
        size = self._page_size
        for part, memory in zip(self._layout.tokens, self._tokens, strict=True):
            tensor = tensor_of(layers, part)[row]
            held = num_seen - tensor.shape[1]  # the tensor's first token; negative: padding
            for at, page in enumerate(pages):
                first = end - (len(pages) - at) * size
                start = max(first, held)
                if start < first + size:
                    memory[page, :, start - first :] = tensor[:, start - held : first + size - held]

    def write_state(self, states: Sequence[Tensor], slot: int) -> None:
        """Write the states of one sequence into a slot."""
        for state, memory in zip(states, self._states, strict=True):
            memory[slot] = state

    def restore(self, layers: Sequence[Any], pages: Sequence[int], slot: int, length: int) -> None:
        """Fill fresh layers of one sequence with the tokens of whole pages and a state.

        Args:
            pages: the page ids of tokens `[0, length)`.
            slot: where the state after `length` tokens is.
        """
        tokens = []
        size = self._page_size
        for part, memory in zip(self._layout.tokens, self._tokens, strict=True):
            kept = length if part.window is None else min(length, part.window - 1)
            first = (length - kept) // size  # the first page that holds a token of the window
            tensor = torch.empty(
                1, part.heads, length - first * size, part.head_dim, dtype=part.dtype, device=part.device
            )
            by_page = tensor[0].unflatten(1, (-1, size)).transpose(0, 1)  # [pages, heads, page_size, head_dim]
            for at, start, count in _runs(pages[first:]):
                by_page[at : at + count] = memory[start : start + count]
            tokens.append(tensor[:, :, tensor.shape[2] - kept :])
        states = [memory[slot].unsqueeze(0) for memory in self._states]
        fill(layers, self._layout, tokens, states, length)

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy pages from their old place to a new one."""
        _move(self._pages, moves)

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy state slots likewise."""
        _move(self._slots, moves)


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive page ids as `(place in the list, first id, count)`."""
    runs = []
    for _, group in groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
        members = list(group)
        runs.append((members[0][0], members[0][1], len(members)))
    return runs


def _move(rows: Tensor, moves: dict[int, int]) -> None:
    old, new = (torch.tensor([*indices], device=rows.device) for indices in (moves.keys(), moves.values()))
    rows[new] = rows[old]
