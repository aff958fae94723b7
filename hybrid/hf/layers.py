"""The cache layers of transformers: what each keeps per token and per sequence, and how it is filled again.

A layer is told by its class, not by what attributes it happens to have: a class that is not named here is refused. Of
attention layers (full, sliding, indexed, and the attention half of layers that have both) keys and values are kept per
token, and with them what an index over them keeps; of linear-attention layers the conv windows and recurrent states are
kept per sequence.

What must stay true: a layer that was filled holds, bit for bit, what it held when it was saved, and shares no memory
that anybody writes with the place it was filled from.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from hybrid.errors import UnsupportedModelError
from hybrid.spec import ALIGNMENT


def _classes(*names: str) -> tuple[Any, ...]:
    """Layers of transformers by name, as far as the installed version has them."""
    return tuple(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))


LINEAR = _classes(
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
"""Layers that keep states per sequence."""

SLIDING = _classes("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
"""Layers that keep keys and values of a window only."""

INDEXED = _classes("DynamicIndexedLayer")
"""Layers that keep an index over their keys."""

ATTENTION = (*_classes("DynamicLayer", "LinearAttentionAndFullAttentionLayer"), *INDEXED, *SLIDING)
"""Layers that keep keys and values per token."""

SUPPORTED = (*ATTENTION, *_classes("LinearAttentionLayer", "DummyLayer"))
"""A `DummyLayer` keeps nothing."""

INDEX = ("indexer_keys", "indexer_position_ids")
"""What an indexed layer keeps beside keys and values: `[batch, tokens, dim]`, `[axes, batch, tokens]`, or None."""

KINDS = ("conv_states", "recurrent_states")
"""Where a linear-attention layer keeps its states: dictionaries of tensors `[batch, ...]`."""


LONGEST_PASS = 2048
"""Tokens that are computed at once at most: longer passes are no faster, and need more memory."""


@dataclass(frozen=True)
class TokenPart:
    """Keys or values of a layer, or what an index over them keeps.

    Attributes:
        layer: index of the layer.
        name: "keys", "values", or one of `INDEX`.
        heads, head_dim: the shape of one token, as `tensor_of` gives it.
        dtype, device: of the layer's tensor.
        window: tokens that the layer keeps; None: all.
    """

    layer: int
    name: str
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    window: int | None

    @property
    def token_bytes(self) -> int:
        return self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class StatePart:
    """A state of a layer, for one sequence.

    Attributes:
        layer: index of the layer.
        kind: `KINDS`.
        index: which of the layer's states of this kind.
        shape: without the batch.
    """

    layer: int
    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """What the cache of a model keeps.

    Attributes:
        tokens: per token.
        states: per sequence.
        has_previous: per linear-attention layer, which of its states count as set once there is a token.
    """

    tokens: tuple[TokenPart, ...]
    states: tuple[StatePart, ...]
    has_previous: dict[int, dict[int, bool]]

    @property
    def has_windows(self) -> bool:
        """Whether a layer keeps the tokens of a window only."""
        return any(part.window is not None for part in self.tokens)

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of a prefix is a part of the cache: no states, and no windows."""
        return not self.states and not self.has_windows

    def longest_pass(self, grid: int) -> int:
        """Tokens that may be computed at once so that all of them, or those of the last window before every multiple of
        `grid`, are still there to be kept."""
        windows = [part.window - 1 for part in self.tokens if part.window is not None]
        return max(grid, min([LONGEST_PASS, *windows]) // grid * grid)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page, a multiple of `ALIGNMENT`."""
        return sum(_aligned(part.token_bytes * page_size) for part in self.tokens)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state slot. A model without states has slots that hold nothing, so that the books are the same."""
        return sum(_aligned(part.num_bytes) for part in self.states) or ALIGNMENT


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def refuse_unsupported(layers: Sequence[Any], model_name: str) -> None:
    """Look at the classes of the layers of a cache.

    Raises:
        UnsupportedModelError: one of them is not supported, and is named; or none of them is attention.
    """
    for index, layer in enumerate(layers):
        if type(layer) not in SUPPORTED:
            raise UnsupportedModelError(
                f"{model_name} has cache layers of class {type(layer).__name__} (layer {index}), which PrefixCache "
                f"cannot save; it knows {', '.join(sorted(cls.__name__ for cls in SUPPORTED))}"
            )
    if not any(isinstance(layer, ATTENTION) for layer in layers):
        raise UnsupportedModelError(f"{model_name} keeps nothing per token: no layer of it is attention")


def layout_of(layers: Sequence[Any], model_name: str) -> Layout:
    """The layout of a cache that has seen some tokens, of one sequence.

    Raises:
        UnsupportedModelError: a tensor has a shape that is not expected.
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
            tensor = getattr(layer, name)
            if tensor is not None:
                _, heads, _, head_dim = _shaped(name, tensor).shape
                tokens.append(TokenPart(index, name, heads, head_dim, tensor.dtype, tensor.device, None))
        if isinstance(layer, LINEAR):
            has_previous[index] = dict(layer.has_previous_state)
            for kind in KINDS:
                for at, tensor in getattr(layer, kind).items():
                    if tensor is not None:
                        shape = tuple(tensor.shape[1:])
                        states.append(StatePart(index, kind, at, shape, tensor.dtype, tensor.device))
    return Layout(tuple(tokens), tuple(states), has_previous)


def tensor_of(layers: Sequence[Any], part: TokenPart) -> Tensor:
    """What a layer keeps per token, `[batch, heads, tokens, head_dim]`."""
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
    """Fill fresh layers.

    Args:
        tokens: per `layout.tokens`, `[batch, heads, tokens, head_dim]`: all of them, or those of the window.
        states: per `layout.states`, `[batch, ...]`; copied.
        length: tokens seen.
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


def states_of(layers: Sequence[Any], layout: Layout, row: int) -> tuple[Tensor, ...]:
    """The states of one sequence of a batch, per `layout.states`: views, which the next pass writes."""
    return tuple(getattr(layers[state.layer], state.kind)[state.index][row] for state in layout.states)


def copy_of(layer: Any) -> Any:
    """A layer that goes on by itself. Keys and values are shared: layers replace them, and never write them; states are
    written in place, so they are copied."""
    other = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            copies = {key: item.clone() if isinstance(item, Tensor) else item for key, item in value.items()}
            setattr(other, name, copies)
    return other


def stacked(rows: Sequence[Sequence[Any]], layout: Layout, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """The layers of several sequences as one batch, padded with zeros on the left.

    Args:
        rows: per sequence its layers, of a batch of one.
        length: tokens of a row, with its padding.

    Returns:
        As `fill` takes them.
    """
    tokens = []
    for part in layout.tokens:
        columns = length if part.window is None else min(length, part.window - 1)
        batch = torch.zeros(len(rows), part.heads, columns, part.head_dim, dtype=part.dtype, device=part.device)
        for target, layers in zip(batch, rows, strict=True):
            if getattr(layers[part.layer], part.name) is not None:
                source = tensor_of(layers, part)
                target[:, columns - source.shape[2] :] = source[0]
        tokens.append(batch)
    states = []
    for state in layout.states:
        parts = [getattr(layers[state.layer], state.kind)[state.index] for layers in rows]
        empty = torch.zeros(1, *state.shape, dtype=state.dtype, device=state.device)
        states.append(torch.cat([empty if part is None else part for part in parts]))
    return tokens, states
