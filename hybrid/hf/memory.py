"""The memory of pages and state slots of `hybrid.hf`: tensors of transformers' cache layers are copied in and out.

Pages are page-major: a page holds keys and values of `page_size` tokens of every attention layer. A state slot holds
every state of one sequence. Both are views of the same bytes, divided into pieces (see `hybrid.memory.arena`).

Sliding-window layers are stored in pages like all others, and the window is cut out when a checkpoint is restored. If
the window were part of the state, checkpoints a few chunks apart would each store most of the same tokens, and models
without linear layers would need states as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import NonFiniteError
from hybrid.hf.layers import Layout, fill, is_finite, token_tensor
from hybrid.memory.arena import PieceLayout
from hybrid.memory.tensors import CacheTensors

MAX_SLICES = 16
"""Runs of consecutive pages up to which they are copied one by one."""


class PageMemory:
    """The tensors of pages and state slots, in which layers of transformers' caches are written and restored.

    Args:
        layout: what the model's cache stores.
        page_size: tokens per page.
        num_bytes: upper bound of the memory; the piece of the empty state is allocated in addition.
        device: device of the memory.

    Attributes:
        layout: what the model's cache stores.
        tensors: the contents; the mover of the bookkeeping.
    """

    def __init__(self, layout: Layout, page_size: int, num_bytes: int, device: torch.device) -> None:
        self.layout = layout
        self._page_size = page_size
        spec = layout.spec
        pieces = PieceLayout.of(spec.page_bytes(page_size), spec.state_bytes)
        self.tensors: CacheTensors = CacheTensors.elastic(
            spec, page_size, num_bytes // pieces.num_bytes + 1, pieces, device, None
        )
        self._tokens = [*self.tensors.tokens.values()]  # per part: [num_pages, heads, page_size, head_dim]
        self._states = [*self.tensors.state.values()]  # per part: [num_slots, *shape]

    def write_pages(self, layers: Sequence[Any], pages: Sequence[int], end: int, *, row: int, num_seen: int) -> None:
        """Copy tokens of one sequence of a cache into pages.

        Of a sliding window that is smaller than the pages, only the tokens in the window are written. Earlier tokens
        are never read, since every checkpoint is at an `end` of some call.

        Args:
            layers: the layers of the cache.
            pages: the page ids of tokens `[end - len(pages) * page_size, end)`.
            end: position after the last token to write.
            row: index of the sequence in the batch.
            num_seen: tokens that the cache holds of the sequence, without padding; at least `end`.

        Raises:
            NonFiniteError: a key or value is NaN or infinite. Nothing was written.
        """
        size = self._page_size
        tensors = [token_tensor(layers, part)[row] for part in self.layout.tokens]
        first = end - len(pages) * size
        helds = [num_seen - tensor.shape[1] for tensor in tensors]  # position of the first token; negative for padding
        written = (tensor[:, max(0, first - held) : end - held] for tensor, held in zip(tensors, helds, strict=True))
        if not is_finite(written):
            raise NonFiniteError("the model computed keys or values with NaN or infinity; nothing of them is cached")
        for tensor, held, memory in zip(tensors, helds, self._tokens, strict=True):
            missing = max(0, held - first)  # tokens that have left the window
            skipped, part = divmod(missing, size)
            for page in pages[: skipped + (part > 0)]:
                memory[page] = 0  # what is read from pages, to files too, is of these tokens or nothing
            if part and skipped < len(pages):  # of the first page in the window, only the last tokens are there
                memory[pages[skipped], :, part:] = tensor[:, : size - part]
                skipped += 1
            if skipped < len(pages):
                start = first + skipped * size - held
                by_page = tensor[:, start : end - held].unflatten(1, (-1, size)).transpose(0, 1)
                _write(memory, pages[skipped:], by_page)

    def write_state(self, states: Sequence[Tensor], slot: int) -> None:
        """Copy the states of one sequence into a slot.

        Raises:
            NonFiniteError: a state has NaN or infinity. Nothing was written.
        """
        if not is_finite(states):
            raise NonFiniteError("the model computed a state with NaN or infinity; it is not cached")
        for state, memory in zip(states, self._states, strict=True):
            memory[slot] = state

    def restore(self, layers: Sequence[Any], pages: Sequence[int], slot: int, length: int) -> None:
        """Fill empty layers of one sequence with the tokens of whole pages and a state.

        Args:
            layers: empty layers of the model's cache; they are changed.
            pages: the page ids of tokens `[0, length)`.
            slot: the slot of the state after `length` tokens.
            length: number of tokens to restore.
        """
        tokens, size = [], self._page_size
        runs_from: dict[int, list[tuple[int, int, int]] | None] = {}
        for part, memory in zip(self.layout.tokens, self._tokens, strict=True):
            kept = length if part.window is None else min(length, part.window - 1)
            first = (length - kept) // size  # the first page that holds a token of the window
            tensor = torch.empty(
                1, part.heads, length - first * size, part.head_dim, dtype=part.dtype, device=part.device
            )
            by_page = tensor[0].unflatten(1, (-1, size)).transpose(0, 1)  # [pages, heads, page_size, head_dim]
            if first not in runs_from:  # the same for most parts
                runs_from[first] = _runs(pages[first:])
            _read(memory, pages[first:], runs_from[first], by_page)
            tokens.append(tensor[:, :, tensor.shape[2] - kept :])
        states = [memory[slot].unsqueeze(0) for memory in self._states]
        fill(layers, self.layout, tokens, states, length)


def _read(memory: Tensor, pages: Sequence[int], runs: list[tuple[int, int, int]] | None, by_page: Tensor) -> None:
    """Copy pages of `memory` to `by_page`, in order: in slices, or by a gather where they would be many."""
    if runs is None:
        by_page.copy_(memory[torch.tensor([*pages], device=memory.device)])
        return
    for at, start, count in runs:
        by_page[at : at + count] = memory[start : start + count]


def _write(memory: Tensor, pages: Sequence[int], by_page: Tensor) -> None:
    """Copy `by_page` to pages of `memory` likewise."""
    runs = _runs(pages)
    if runs is None:
        memory[torch.tensor([*pages], device=memory.device)] = by_page.to(memory.device)
        return
    for at, start, count in runs:
        memory[start : start + count] = by_page[at : at + count]


def _runs(pages: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Runs of consecutive page ids as `(index in the list, first id, count)`; None: more than `MAX_SLICES`."""
    if not pages:
        return []
    count = len(pages)
    if pages[-1] - pages[0] == count - 1 and list(pages) == list(range(pages[0], pages[0] + count)):
        return [(0, pages[0], count)]
    starts = [0]
    for at in range(1, count):
        if pages[at] != pages[at - 1] + 1:
            starts.append(at)
            if len(starts) > MAX_SLICES:
                return None
    return [(at, pages[at], end - at) for at, end in zip(starts, [*starts[1:], count], strict=True)]
