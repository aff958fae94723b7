"""The causal convolution over state slots, of prompts and of decoded tokens
(`hybrid.kernels.cpu.compiled.convolution`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.reference import convolution as twins
from hybrid.kernels.reference import state_space as biased_twins

MIN_SHARED = 1 << 15
"""Elements that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_convolve = Compiled(f"{COMPILED}.convolution", "convolve")
_convolve_tokens = Compiled(f"{COMPILED}.convolution", "convolve_tokens")


def _are_known(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> bool:
    """Whether the types and the places of numbers are those that are compiled."""
    channels, width = weight.shape
    of_one_type = (weight, state) if bias is None else (weight, state, bias)
    is_known = x.dtype in DTYPES and all(tensor.dtype == x.dtype for tensor in of_one_type) and width > 1
    is_bias_known = bias is None or bias.is_contiguous()
    return is_known and is_bias_known and weight.is_contiguous() and state.stride()[1:] == (channels, 1)


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
    if not _are_known(x, weight, None, state):
        return twins.causal_conv1d(x, weight, state, cu_seqlens, state_read, state_write, captures)
    return _of_prompts(x, weight, None, state, cu_seqlens, state_read, state_write, captures)


def biased_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """`reference.state_space.biased_causal_conv1d`."""
    if not _are_known(x, weight, bias, state):
        return biased_twins.biased_causal_conv1d(x, weight, bias, state, cu_seqlens, state_read, state_write, captures)
    return _of_prompts(x, weight, bias, state, cu_seqlens, state_read, state_write, captures)


def biased_causal_conv1d_update(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """`reference.state_space.biased_causal_conv1d_update`; a token that reads `LEFT_OUT` is not computed, where this is
    compiled."""
    if not _are_known(x, weight, bias, state):
        return biased_twins.biased_causal_conv1d_update(x, weight, bias, state, state_read, state_write)
    channels, width = weight.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (x, weight, state, state_read, state_write, y))
    args = (*addresses, _address(bias), x.stride(0), state.stride(0), x.shape[0], channels, width)
    run(_convolve_tokens, KINDS[x.dtype], args, channels, 16, x.numel() // MIN_SHARED)
    return y


def _of_prompts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    channels, width = weight.shape
    x, captures = x if x.stride(-1) == 1 else x.contiguous(), captures.contiguous()
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    tensors = (x, weight, state, cu_seqlens, state_read, state_write, captures, y)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    sizes = cu_seqlens.numel() - 1, len(captures), channels, width
    args = (*addresses, x.stride(0), state.stride(0), *sizes, _address(bias))
    run(_convolve, KINDS[x.dtype], args, channels, 16, x.numel() // MIN_SHARED)
    return y


def _address(bias: Tensor | None) -> int:
    return 0 if bias is None else bias.data_ptr()
