"""The sizes of a hybrid model's cache: bytes per token, and bytes per sequence."""

from dataclasses import dataclass
from math import prod

import torch

from hybrid.units import ceil_div

ALIGNMENT = 64
"""Every tensor of a state slot starts at a multiple of this number of bytes."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a sequence's state.

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


@dataclass(frozen=True)
class HybridSpec:
    """What the cache needs to know about a model.

    Attributes:
        page_layers: number of full-attention layers.
        kv_heads: key/value heads of each of them.
        head_dim: size of a head.
        kv_dtype: type of keys and values.
        state: the tensors of one sequence's state, over all linear-attention layers.
    """

    page_layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    state: tuple[StateTensor, ...]

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: K and V of `page_size` tokens in every full-attention layer."""
        return self.page_layers * 2 * page_size * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """Offset of each tensor within a slot, in bytes."""
        offsets, end = [], 0
        for tensor in self.state:
            offsets.append(end)
            end += ceil_div(tensor.num_bytes, ALIGNMENT) * ALIGNMENT
        return (*offsets,)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot."""
        return sum(ceil_div(tensor.num_bytes, ALIGNMENT) * ALIGNMENT for tensor in self.state)
