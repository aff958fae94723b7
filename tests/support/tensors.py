"""The shared parts of tests of the tensor half: bitwise comparison, poisoned pools, packed batches."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hybrid.memory.tensors import CacheTensors
from hybrid.spec import HybridSpec, StateTensor, TokenTensor

CPU = torch.device("cpu")
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, as integers: NaN equals itself there, and -0.0 is not 0.0."""
    return x.contiguous().view(BITS[x.element_size()])


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def starts_of(lengths: Sequence[int]) -> Tensor:
    """`cu_seqlens` of a packed batch."""
    return ints([0, *accumulate(lengths)])


def rows_of(captures: Sequence[tuple[int, int, int]]) -> Tensor:
    """`[C, 3]` rows of (request, new tokens, slot), also when there are none."""
    return torch.tensor(captures, dtype=torch.int64).view(-1, 3)


def raw_gates(g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `delta_gates` makes gates of, in fp32: a, b, a rate of -1 for each head, and no bias."""
    lost = -g.double()
    a = torch.where(lost > 20, lost, lost.clamp(max=20).expm1().log())
    heads = torch.ones(g.shape[1], device=g.device)
    return a.float(), beta.double().logit().float(), -heads, 0 * heads


def poisoned_pages(
    num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """One layer's pages in the pool of a model with three such layers, so strided as the engine's are, full of NaN."""
    spec = HybridSpec((TokenTensor.kv(3, kv_heads, head_dim, dtype),), ())
    tensors = CacheTensors.fixed(spec, page_size, num_pages, 1, CPU)
    tensors.kv.fill_(float("nan"))
    return tensors.kv[:, 1]


def poisoned_states(num_slots: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """One layer's states in the pool of a model with three such layers, NaN but for the empty state in slot 0."""
    spec = HybridSpec((TokenTensor.kv(1, 1, 1, dtype),), (StateTensor("state", (3, *shape), dtype),))
    state = CacheTensors.fixed(spec, 1, 1, num_slots, CPU).state["state"]
    state[1:] = float("nan")
    return state[:, 1]


def untouched(before: Tensor, after: Tensor, written: Sequence[int]) -> bool:
    """Tell whether every slot but those in `written` holds the bits that it held."""
    others = [slot for slot in range(len(before)) if slot not in set(written)]
    return same_bits(before[others], after[others])
