"""The products of experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.kernels.cpu.matmul import can_multiply, multiply_into
from hybrid.kernels.reference import experts as twins


def expert_linear(
    x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int, sizes: Sequence[int]
) -> Tensor:
    """`reference.expert_linear`; pairs are not cut, since each has its bits by itself."""
    if not can_multiply(weight, x.dtype):
        return twins.expert_linear(x, weight, order, ends, top_k, num_prompt, sizes)
    if top_k:
        x = x[order // top_k]
    output = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    start = 0
    for at, end in enumerate(ends.flatten().tolist()):
        if start < end:
            multiply_into(output[start:end], x[start:end], weight[at % len(weight)])
            start = end
    return output
