"""The twin of the batch-invariant matrix product, in plain torch. It is not batch invariant."""

import torch.nn.functional as F
from torch import Tensor


def batch_invariant_linear(x: Tensor, weight: Tensor, decode_start: int) -> Tensor:
    """`x @ weight.T`; the kernel's rows depend on neither their number nor their place.

    Args:
        x: `[T, in]`.
        weight: `[out, in]`, any strides.
        decode_start: rows before it belong to prompts, rows from it on are one token each.
    """
    return F.linear(x, weight)
