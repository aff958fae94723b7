"""The cache layers of transformers: what each stores per token and per sequence, and how it is restored.

A layer is identified by its class, not by its attributes; a class that is not listed here is refused. Attention layers
(full, sliding, indexed, and the attention half of layers that have both) store keys and values per token, and the keys
of an index if they have one. Linear-attention layers store conv windows and recurrent states per sequence.

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

from hybrid.errors import UnsupportedModelError
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
        """Whether a layer stores a sliding window only."""
        return any(part.window is not None for part in self.tokens)

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of a prefix can be cut out of the cache: there are no states and no sliding windows."""
        return not self.states and not self.has_windows

    def max_pass_tokens(self, grid: int) -> int:
        """Upper bound of the tokens of one pass, a multiple of `grid`. After such a pass the sliding windows still hold
        all of its tokens, or the last window before every multiple of `grid`."""
        windows = [part.window - 1 for part in self.tokens if part.window is not None]
        return max(grid, min([MAX_PASS_TOKENS, *windows]) // grid * grid)

    @property
    def spec(self) -> HybridSpec:
        """What is kept of it, in the same order."""
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
    """Whether no tensor has NaN or infinity. Synchronizes once per device."""
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
