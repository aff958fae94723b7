"""A linear-attention layer's decode step over state slots (`hybrid.kernels.cpu.compiled.delta_rule_step`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.reference import delta_rule_step as twins

MIN_SHARED = 1 << 15
"""Elements of states that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

_step = Compiled(f"{COMPILED}.delta_rule_step", "step")


def gated_delta_step(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weight: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    conv: Tensor,
    recurrent: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
) -> Tensor:
    """`reference.gated_delta_step`; a token that reads `LEFT_OUT` is not computed, where this is compiled."""
    of_one_type = (mixed, a, b, weight, dt_bias, conv)
    is_known = mixed.dtype in DTYPES and all(tensor.dtype == mixed.dtype for tensor in of_one_type)
    heads, key_dim, value_dim = recurrent.shape[1:]
    channels, width = weight.shape
    lies_right = weight.is_contiguous() and conv.stride()[1:] == (channels, 1)
    lies_right = lies_right and recurrent.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    if not is_known or not lies_right or width < 2 or recurrent.dtype != torch.float32:
        return twins.gated_delta_step(
            mixed, a, b, weight, rate, dt_bias, conv, recurrent, cu_seqlens, state_read, state_write
        )
    mixed, a, b = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (mixed, a, b))
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    tokens, key_heads = mixed.shape[0], (channels - heads * value_dim) // (2 * key_dim)
    output = torch.empty(tokens, heads, value_dim, dtype=mixed.dtype)
    tensors = (mixed, a, b, weight, rate, dt_bias, conv, recurrent, state_read, state_write, output)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    strides = tuple(tensor.stride(0) for tensor in (mixed, a, b, conv, recurrent))
    sizes = tokens, key_heads, heads, key_dim, value_dim, width
    work = tokens * recurrent[0].numel() // MIN_SHARED
    run(_step, KINDS[mixed.dtype], (*addresses, *strides, *sizes), key_heads, 1, work)
    return output
