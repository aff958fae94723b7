"""The one list of what a model keeps: every tensor per token, and every tensor per sequence.

Code that moves contents (memory, compaction, digests, files) iterates this list; there is no other. A tensor that
is not on it is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch

from hybrid.errors import ArgumentError
from hybrid.kernels.packed_kv import KV_DTYPES, row_size
from hybrid.units import ceil_div

ALIGNMENT = 64
"""Every tensor of a state slot starts at a multiple of this number of bytes; so does every tensor of a page that has
several."""


@dataclass(frozen=True)
class TokenTensor:
    """A tensor that is kept per token, in pages.

    Attributes:
        name: the name under which the model reads and writes it.
        outer: dimensions before the tokens: layers first.
        inner: dimensions after the tokens.
        dtype: type of its elements.
        block: tokens that share one row, as in an index over blocks of keys. A page holds whole blocks.
        window: size of a sliding window: tokens before it are never read. None: all tokens are.
    """

    name: str
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    dtype: torch.dtype
    block: int = 1
    window: int | None = None

    @classmethod
    def kv(cls, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> TokenTensor:
        """Keys and values of layers with full attention: "kv", `[layers, 2, tokens, heads, head_dim]`."""
        return cls("kv", (layers, 2), (heads, head_dim), dtype)

    def packed(self, kv_dtype: str) -> TokenTensor:
        """Keys and values in a byte per element: rows with their scales, as `hybrid.kernels.packed_kv` has them."""
        *heads, head_dim = self.inner
        return replace(self, inner=(*heads, row_size(head_dim)), dtype=KV_DTYPES[kv_dtype])

    def shape(self, page_size: int) -> tuple[int, ...]:
        """Its shape in a page."""
        return (*self.outer, page_size // self.block, *self.inner)

    def num_bytes(self, page_size: int) -> int:
        """Bytes in a page."""
        return prod(self.shape(page_size)) * self.dtype.itemsize


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a sequence's state: a window of a convolution, a recurrent state, a history of token ids.

    Attributes:
        name: the name under which the model reads and writes it.
        shape: shape for one sequence, layers first.
        dtype: type of its elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes for one sequence."""
        return prod(self.shape) * self.dtype.itemsize


class LayerTensors(NamedTuple):
    """The tensors that one layer of a model keeps: its row in tensors whose first dimension is layers.

    Attributes:
        row: of the layer, in each of these tensors.
        tokens: names of tensors per token.
        state: names of tensors per sequence.
    """

    row: int
    tokens: tuple[str, ...] = ()
    state: tuple[str, ...] = ()


class Place(NamedTuple):
    """The place of a tensor in a page, or in a state slot.

    Attributes:
        name, shape, dtype: of the tensor.
        start: its first byte.
        num_bytes: its size.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    num_bytes: int


@dataclass(frozen=True)
class HybridSpec:
    """The tensors that a model keeps.

    Attributes:
        tokens: the tensors per token, over all layers that keep any.
        state: the tensors of one sequence's state, over all linear-attention layers.
        layers: of each layer, in the order in which they compute, what it alone reads and writes. What none of them
            lists may be used by all. A model that has them waits for contents layer by layer
            (`hybrid.batch.Arriving`); empty: it waits for nothing.

    Raises:
        ArgumentError: two tensors have one name, or two layers list the same, or one lists what there is not.
    """

    tokens: tuple[TokenTensor, ...]
    state: tuple[StateTensor, ...]
    layers: tuple[LayerTensors, ...] = ()

    def __post_init__(self) -> None:
        for names in ([tensor.name for tensor in self.tokens], [tensor.name for tensor in self.state]):
            twice = [name for name in names if names.count(name) > 1]
            if twice:
                raise ArgumentError(f"HybridSpec: two tensors are named {twice[0]!r}; give each its own name")
        tokens = {(tensor.name, row) for tensor in self.tokens for row in range(prod(tensor.outer[:1]))}
        state = {(tensor.name, row) for tensor in self.state for row in range(prod(tensor.shape[:1]))}
        for layer in self.layers:
            for there, listed in ((tokens, layer.tokens), (state, layer.state)):
                for name in listed:
                    if (name, layer.row) not in there:
                        raise ArgumentError(
                            f"HybridSpec: a layer lists row {layer.row} of {name!r}, which another layer lists too, or "
                            "which is not there; each layer lists what it alone reads and writes"
                        )
                    there.remove((name, layer.row))

    def with_kv_dtype(self, kv_dtype: str) -> HybridSpec:
        """The same, with the keys and values of full attention kept as `CacheConfig.kv_dtype` says."""
        if kv_dtype == "auto":
            return self
        tokens = (tensor.packed(kv_dtype) if tensor.name == "kv" else tensor for tensor in self.tokens)
        return replace(self, tokens=(*tokens,))

    def page_places(self, page_size: int) -> tuple[Place, ...]:
        """Return where each tensor per token is in a page.

        Raises:
            ArgumentError: a page would end inside a block of a tensor.
        """
        places, end = [], 0
        for tensor in self.tokens:
            if page_size % tensor.block:
                raise ArgumentError(
                    f"{tensor.name!r} keeps a row for every {tensor.block} tokens, and a page of {page_size} tokens "
                    f"would end inside one; choose a page_size that is a multiple of {tensor.block}"
                )
            num_bytes = tensor.num_bytes(page_size)
            places.append(Place(tensor.name, tensor.shape(page_size), tensor.dtype, end, num_bytes))
            end = _aligned(end + num_bytes)
        return (*places,)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page. A tensor that is alone fills its page. A model that keeps nothing per token has empty
        pages, so that the same bookkeeping serves it."""
        places = self.page_places(page_size)
        end = places[-1].start + places[-1].num_bytes
        return (_aligned(end) if len(places) > 1 else end) or ALIGNMENT

    @property
    def state_places(self) -> tuple[Place, ...]:
        """The place of each tensor per sequence in a state slot."""
        places, end = [], 0
        for tensor in self.state:
            places.append(Place(tensor.name, tensor.shape, tensor.dtype, end, tensor.num_bytes))
            end = _aligned(end + tensor.num_bytes)
        return (*places,)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot. A model without states has empty slots, so that the same bookkeeping serves it."""
        return sum(_aligned(tensor.num_bytes) for tensor in self.state) or ALIGNMENT


def _aligned(num_bytes: int) -> int:
    return ceil_div(num_bytes, ALIGNMENT) * ALIGNMENT
