"""The causal convolution of prompts over state slots (`hybrid.kernels.cpu.compiled.convolution`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.reference import convolution as twins

MIN_SHARED = 1 << 15
"""Elements that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_convolve = Compiled(f"{COMPILED}.convolution", "convolve")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """`reference.causal_conv1d`."""
    channels, width = weight.shape
    is_known = x.dtype in DTYPES and weight.dtype == state.dtype == x.dtype and width > 1
    if not is_known or not weight.is_contiguous() or state.stride()[1:] != (channels, 1):
        return twins.causal_conv1d(x, weight, state, cu_seqlens, state_read, state_write, captures)
    x, captures = x if x.stride(-1) == 1 else x.contiguous(), captures.contiguous()
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    tensors = (x, weight, state, cu_seqlens, state_read, state_write, captures, y)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    sizes = cu_seqlens.numel() - 1, len(captures), channels, width
    args = (*addresses, x.stride(0), state.stride(0), *sizes)
    run(_convolve, KINDS[x.dtype], args, channels, 16, x.numel() // MIN_SHARED)
    return y
