"""The causal convolution over state slots, of prompts and of decoded tokens, with silu or without
(`hybrid.kernels.cpu.compiled.convolution`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import Kind
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import by_rows, kind_of, run

MIN_SHARED = 1 << 15
"""Elements that are worth a thread."""

_convolve = Compiled(f"{COMPILED}.convolution", "convolve")
_convolve_tokens = Compiled(f"{COMPILED}.convolution", "convolve_tokens")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`reference.causal_conv1d`."""
    return _of_prompts(x, weight, state, (cu_seqlens, state_read, state_write, captures), bias, is_activated=True)


def causal_sums(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """`reference.convolution.causal_sums`, in the type of `x`."""
    return _of_prompts(x, weight, state, (cu_seqlens, state_read, state_write, captures), bias, is_activated=False)


def causal_conv1d_update(
    x: Tensor, weight: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`reference.causal_conv1d_update`; a token that reads `LEFT_OUT` is not computed."""
    return _of_tokens(x, weight, state, state_read, state_write, bias, is_activated=True)


def causal_sums_update(
    x: Tensor, weight: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`reference.convolution.causal_sums_update`, in the type of `x`; a token that reads `LEFT_OUT` is not computed."""
    return _of_tokens(x, weight, state, state_read, state_write, bias, is_activated=False)


def _of_prompts(
    x: Tensor, weight: Tensor, state: Tensor, slots: tuple[Tensor, ...], bias: Tensor | None, is_activated: bool
) -> Tensor:
    """`slots`: where tokens of requests begin, the slots that are read and written, and captures."""
    (channels, width), kind = weight.shape, _kind(x, weight, bias, state)
    x, slots = by_rows(x), tuple(each.contiguous() for each in slots)
    y = torch.empty(x.shape, dtype=x.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (x, weight, state, *slots, y))
    sizes = slots[0].numel() - 1, len(slots[-1]), channels, width
    args = (*addresses, x.stride(0), state.stride(0), *sizes, 0 if bias is None else bias.data_ptr(), int(is_activated))
    run(_convolve, kind, args, channels, 16, x.numel() // MIN_SHARED)
    return y


def _of_tokens(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    bias: Tensor | None,
    is_activated: bool,
) -> Tensor:
    (channels, width), kind = weight.shape, _kind(x, weight, bias, state)
    x = by_rows(x)
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (x, weight, state, state_read, state_write, y))
    sizes = x.stride(0), state.stride(0), x.shape[0], channels, width
    args = (*addresses, 0 if bias is None else bias.data_ptr(), *sizes, int(is_activated))
    run(_convolve_tokens, kind, args, channels, 16, x.numel() // MIN_SHARED)
    return y


def _kind(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Kind:
    channels, width = weight.shape
    lies_right = width > 1 and weight.is_contiguous() and state.stride()[1:] == (channels, 1)
    biases = () if bias is None else (bias,)
    return kind_of("causal_conv1d", x, weight, state, *biases, lies_right=lies_right)
