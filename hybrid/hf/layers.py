"""The cache layers of transformers: what each stores per token and per sequence, and how it is restored.

A layer is identified by its class, not by its attributes; a class that is not listed here is refused. Attention layers
(full, sliding, indexed, and the attention half of layers that have both) store keys and values per token, and the keys
of an index if they have one. Linear-attention layers store conv windows and recurrent states per sequence.

Tensors of layers are copied to pages and state slots, and back. Pages are page-major: a page holds keys and values of
`page_size` tokens of every attention layer. A state slot holds every state of one sequence. Both are views of the same
bytes, divided into pieces (see `hybrid.memory.arena`). Sliding-window layers are stored in pages like all others, and
the window is cut out when a checkpoint is restored. If the window were part of the state, checkpoints a few chunks
apart would each store most of the same tokens, and models without linear layers would need states as well.

Invariant: a restored layer is bitwise equal to the layer that was saved, and shares no writable memory with the pages
and state slots that it was restored from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from hybrid.errors import NonFiniteError, UnsupportedModelError
from hybrid.memory.arena import PieceLayout
from hybrid.memory.tensors import CacheTensors
from hybrid.spec import HybridSpec, StateTensor, TokenTensor


def _classes(*names: str) -> tuple[Any, ...]:
    """Layer classes of transformers by name; those that the installed version does not have are left out."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


LINEAR = _classes(
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Layers that store states per sequence."""

SLIDING = _classes("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
"""Layers that store keys and values of a sliding window only."""

INDEXED = _classes("DynamicIndexedLayer")
"""Layers that store an index over their keys."""

ATTENTION = (*_classes("DynamicLayer", "LinearAttentionAndFullAttentionLayer"), *INDEXED, *SLIDING)
"""Layers that store keys and values per token."""

SUPPORTED = (*ATTENTION, *_classes("LinearAttentionLayer", "DummyLayer"))
"""All supported layers. A `DummyLayer` stores nothing."""

INDEX = ("indexer_keys", "indexer_position_ids")
"""Tensors of an indexed layer besides keys and values: `[batch, tokens, dim]`, `[axes, batch, tokens]`, or None."""

STATE_KINDS = ("conv_states", "recurrent_states")
"""Attributes of a linear-attention layer that hold its states: dictionaries of tensors `[batch, ...]`."""

MAX_PASS_TOKENS = 2048
"""Upper bound of the tokens of one pass: longer passes are not faster, and need more memory."""


@dataclass(frozen=True)
class TokenPart:
    """A tensor that a layer stores per token: keys, values, or those of an index over them.

    Attributes:
        layer: index of the layer.
        name: "keys", "values", or one of `INDEX`.
        heads, head_dim: the shape of one token, as returned by `token_tensor`.
        dtype, device: of the layer's tensor.
        window: size of the sliding window in tokens; None for layers that store all tokens.
    """

    layer: int
    name: str
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None

    @property
    def kept(self) -> TokenTensor:
        """The tensor of a page, `[heads, page_size, head_dim]`."""
        name = f"{self.layer}.{self.name}"
        return TokenTensor(name, (self.heads,), (self.head_dim,), self.dtype, window=self.window)


@dataclass(frozen=True)
class StatePart:
    """A state of a layer, for one sequence.

    Attributes:
        layer: index of the layer.
        kind: one of `STATE_KINDS`.
        index: key of the state in the layer's dictionary of this kind.
        shape: shape without the batch dimension.
        dtype, device: of the layer's tensor.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def kept(self) -> StateTensor:
        """The tensor of a state slot."""
        return StateTensor(f"{self.layer}.{self.kind}.{self.index}", self.shape, self.dtype)


@dataclass(frozen=True)
class Layout:
    """All tensors that the cache of a model stores.

    Attributes:
        tokens: tensors per token.
        states: tensors per sequence.
        has_previous: per linear-attention layer, its `has_previous_state` flags after the first token.
    """

    tokens: tuple[TokenPart, ...]
    states: tuple[StatePart, ...]
    has_previous: dict[int, dict[int, bool]]

    @property
    def has_windows(self) -> bool:
        """Tell whether a layer stores a sliding window only."""
        return any(part.window is not None for part in self.tokens)

    @property
    def can_be_cut(self) -> bool:
        """Tell whether the cache of a prefix can be cut out of the cache: no states and no sliding windows."""
        return not self.states and not self.has_windows

    def max_pass_tokens(self, grid: int) -> int:
        """Upper bound of the tokens of one pass, a multiple of `grid`. After such a pass the sliding windows still hold
        all of its tokens, or the last window before every multiple of `grid`."""
        windows = [part.window - 1 for part in self.tokens if part.window is not None]
        return max(grid, min([MAX_PASS_TOKENS, *windows]) // grid * grid)

    @property
    def spec(self) -> HybridSpec:
        """List what is kept of it, in the same order."""
        return HybridSpec(tuple(part.kept for part in self.tokens), tuple(state.kept for state in self.states))


def refuse_unsupported(layers: Sequence[Any], model_name: str) -> None:
    """Check the classes of the layers of a cache.

    Raises:
        UnsupportedModelError: a layer is of an unsupported class (the message names it), or no layer is attention.
    """
    for index, layer in enumerate(layers):
        if type(layer) not in SUPPORTED:
            raise UnsupportedModelError(
                f"{model_name} has cache layers of class {type(layer).__name__} (layer {index}), which PrefixCache "
                f"cannot save; supported are {', '.join(sorted(cls.__name__ for cls in SUPPORTED))}"
            )
    if not any(isinstance(layer, ATTENTION) for layer in layers):
        raise UnsupportedModelError(f"{model_name} stores nothing per token: none of its layers is attention")


def layout_of(layers: Sequence[Any], model_name: str) -> Layout:
    """The layout of a cache that holds a few tokens of one sequence.

    Raises:
        UnsupportedModelError: a tensor has an unexpected shape.
    """
    tokens: list[TokenPart] = []
    states: list[StatePart] = []
    has_previous: dict[int, dict[int, bool]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, ATTENTION) and layer.keys is not None and layer.keys.numel():
            window = layer.sliding_window if isinstance(layer, SLIDING) else None
            for name in ("keys", "values"):
                tensor = getattr(layer, name)
                if tensor.ndim != 4:
                    raise UnsupportedModelError(
                        f"{model_name}: {name} of layer {index} have the shape {tuple(tensor.shape)}; expected "
                        "[batch, heads, tokens, head_dim]"
                    )
                heads, head_dim = tensor.shape[1], tensor.shape[3]
                tokens.append(TokenPart(index, name, heads, head_dim, tensor.dtype, tensor.device, window))
        for name in INDEX if isinstance(layer, INDEXED) else ():
            tensor = getattr(layer, name, None)  # positions are stored from transformers 5.2x on
            if tensor is not None:
                _, heads, _, head_dim = _shaped(name, tensor).shape
                tokens.append(TokenPart(index, name, heads, head_dim, tensor.dtype, tensor.device, None))
        if isinstance(layer, LINEAR):
            has_previous[index] = dict(layer.has_previous_state)
            for kind in STATE_KINDS:
                for at, tensor in getattr(layer, kind).items():
                    if tensor is not None:
                        shape = tuple(tensor.shape[1:])
                        states.append(StatePart(index, kind, at, shape, tensor.dtype, tensor.device))
    return Layout(tuple(tokens), tuple(states), has_previous)


def token_tensor(layers: Sequence[Any], part: TokenPart) -> Tensor:
    """The tensor of a part, `[batch, heads, tokens, head_dim]`."""
    return _shaped(part.name, getattr(layers[part.layer], part.name))


def _shaped(name: str, tensor: Tensor) -> Tensor:
    """A tensor of a layer as `[batch, heads, tokens, head_dim]`."""
    if name == "indexer_keys":
        return tensor.unsqueeze(1)
    if name == "indexer_position_ids":
        return tensor.transpose(0, 1).unsqueeze(-1)
    return tensor


def fill(
    layers: Sequence[Any], layout: Layout, tokens: Sequence[Tensor], states: Sequence[Tensor], length: int
) -> None:
    """Fill empty layers.

    Args:
        layers: empty layers of the model's cache; they are changed.
        layout: what the layers store.
        tokens: per part of `layout.tokens`, `[batch, heads, tokens, head_dim]`: all tokens, or those of the window.
        states: per part of `layout.states`, `[batch, ...]`; they are copied.
        length: number of tokens that the cache holds afterwards.
    """
    for part, tensor in zip(layout.tokens, tokens, strict=True):
        layer = layers[part.layer]
        if part.name == "keys":
            layer.lazy_initialization(tensor, tensor)
            if part.window is not None:
                layer.cumulative_length = length
        if part.name == "indexer_keys":
            tensor = tensor.squeeze(1)
            layer.lazy_initialization_indexer(tensor)
        elif part.name == "indexer_position_ids":
            tensor = tensor.squeeze(-1).transpose(0, 1)
        setattr(layer, part.name, tensor)
    for state, tensor in zip(layout.states, states, strict=True):
        layer = layers[state.layer]
        layer.lazy_initialization(**{state.kind: tensor, "state_idx": state.index})
        getattr(layer, state.kind)[state.index].copy_(tensor)
    for index, flags in layout.has_previous.items():
        layers[index].has_previous_state = dict(flags)


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Tell whether no tensor has NaN or infinity. Synchronizes once per device."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor.isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in found.values())


def states_of(layers: Sequence[Any], layout: Layout, row: int) -> tuple[Tensor, ...]:
    """The states of one sequence of a batch, per part of `layout.states`: views, which the next pass overwrites."""
    return tuple(getattr(layers[state.layer], state.kind)[state.index][row] for state in layout.states)


def fork_layer(layer: Any) -> Any:
    """An independent copy of a layer. Keys and values are shared: layers replace them and never write them. States are
    written in place, so they are copied."""
    other = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            copies = {key: item.clone() if isinstance(item, Tensor) else item for key, item in value.items()}
            setattr(other, name, copies)
    return other


def stack_left_padded(rows: Sequence[Sequence[Any]], layout: Layout, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """The layers of several sequences as one batch, padded with zeros on the left.

    Args:
        rows: per sequence its layers, each a batch of one.
        layout: what the layers store.
        length: tokens of a row, including its padding.

    Returns:
        The arguments `tokens` and `states` of `fill`.
    """
    tokens = []
    for part in layout.tokens:
        columns = length if part.window is None else min(length, part.window - 1)
        batch = torch.zeros(len(rows), part.heads, columns, part.head_dim, dtype=part.dtype, device=part.device)
        for target, layers in zip(batch, rows, strict=True):
            if getattr(layers[part.layer], part.name) is not None:
                source = token_tensor(layers, part)
                target[:, columns - source.shape[2] :] = source[0]
        tokens.append(batch)
    states = []
    for state in layout.states:
        parts = [getattr(layers[state.layer], state.kind)[state.index] for layers in rows]
        empty = torch.zeros(1, *state.shape, dtype=state.dtype, device=state.device)
        states.append(torch.cat([empty if part is None else part for part in parts]))
    return tokens, states


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
