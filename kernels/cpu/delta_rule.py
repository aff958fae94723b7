"""The gated delta rule of prompts over state slots, and its gates (`hybrid.kernels.cpu.compiled.delta_rule`,
`hybrid.kernels.cpu.compiled.gates`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.dtypes import KINDS
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.reference import delta_rule as twins

MIN_SHARED = 1 << 15
"""Elements of values that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

MIN_SHARED_GATES = 1 << 12
"""Gates that are worth a thread."""

_rule = Compiled(f"{COMPILED}.delta_rule", "rule")
_delta_gates = Compiled(f"{COMPILED}.gates", "delta_gates")


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.delta_gates`, as the decode step has them."""
    is_known = a.dtype in DTYPES and a.dtype == b.dtype == dt_bias.dtype and rate.dtype == torch.float32
    if not is_known or a.dim() != 2:
        return twins.delta_gates(a, b, rate, dt_bias)
    a, b = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (a, b))
    rate, dt_bias = rate.contiguous(), dt_bias.contiguous()
    g, beta = torch.empty(a.shape, dtype=torch.float32), torch.empty(b.shape, dtype=b.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (a, b, rate, dt_bias, g, beta))
    args = (*addresses, a.stride(0), b.stride(0), a.shape[1])
    run(_delta_gates, KINDS[a.dtype], args, a.shape[0], 1, a.numel() // MIN_SHARED_GATES)
    return g, beta


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rate: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    chunk_size: int,
) -> Tensor:
    """`reference.chunk_gated_delta_rule`."""
    heads, key_dim, value_dim = state.shape[1:]
    is_known = v.dtype in DTYPES and q.dtype == k.dtype == b.dtype == v.dtype and state.dtype == torch.float32
    lies_right = all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in (q, k, v))
    if not is_known or not lies_right or state.stride()[1:] != (key_dim * value_dim, value_dim, 1):
        return twins.chunk_gated_delta_rule(
            q, k, v, a, b, rate, dt_bias, state, cu_seqlens, state_read, state_write, captures, chunk_size
        )
    g, beta = (gate.contiguous() for gate in delta_gates(a, b, rate, dt_bias))
    captures, y = captures.contiguous(), torch.empty(v.shape, dtype=v.dtype)
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    tensors = (q, k, v, g, beta, state, cu_seqlens, state_read, state_write, captures, y)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    strides = tuple(tensor.stride(0) for tensor in (q, k, v, g, beta, y))
    sizes = cu_seqlens.numel() - 1, len(captures), heads // k.shape[1], key_dim, value_dim, chunk_size
    args = (*addresses, *strides, *sizes, state.stride(0))
    run(_rule, KINDS[v.dtype], args, heads, 1, v.numel() // MIN_SHARED)
    return y
