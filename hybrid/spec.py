"""What a hybrid model keeps: which bytes per token, which per sequence."""

from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT = 64
"""Every tensor of a state slot starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a sequence's state.

    Attributes:
        name: how the model asks for it.
        shape: its shape for one sequence, the layers first.
        dtype: its type.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class HybridSpec:
    """What the cache must know of a model.

    Attributes:
        page_layers: number of full-attention layers.
        kv_heads: key/value heads of such a layer.
        head_dim: their size.
        kv_dtype: type of keys and values.
        state: the tensors of one sequence's state, over all linear layers.
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
        """Where each tensor starts within a slot, in bytes."""
        offsets, end = [], 0
        for tensor in self.state:
            offsets.append(end)
            end += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        return (*offsets,)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot."""
        return sum(-(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT for tensor in self.state)
