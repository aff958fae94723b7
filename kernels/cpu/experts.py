"""The products of experts."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.matmul import multiply_into


def expert_linear(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int) -> Tensor:
    """`reference.expert_linear`."""
    if top_k:
        x = x[order // top_k]
    output = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    start = 0
    for at, end in enumerate(ends.flatten().tolist()):
        if start < end:
            multiply_into(output[start:end], x[start:end], weight[at % len(weight)])
            start = end
    return output
