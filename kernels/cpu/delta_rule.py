"""The gated delta rule over state slots, of prompts and of decoded tokens, and its gates
(`hybrid.kernels.cpu.compiled.delta_rule`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.recurrences import delta
from hybrid.kernels.cpu.tasks import by_rows, kind_of, run

MIN_SHARED = 1 << 15
"""Elements of values, or of states that are changed, that are worth a thread."""

MIN_SHARED_GATES = 1 << 12
"""Gates that are worth a thread."""

_rule = Compiled(f"{COMPILED}.delta_rule", "rule")
_delta_gates = Compiled(f"{COMPILED}.delta_rule", "delta_gates")
_step = Compiled(f"{COMPILED}.delta_rule", "step")


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.delta_gates`, as the decode step has them."""
    kind = kind_of("delta_gates", a, b, dt_bias, exact=(rate,))
    a, b = by_rows(a), by_rows(b)
    rate, dt_bias = rate.contiguous(), dt_bias.contiguous()
    g, beta = torch.empty(a.shape, dtype=torch.float32), torch.empty(b.shape, dtype=b.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (a, b, rate, dt_bias, g, beta))
    args = (*addresses, a.stride(0), b.stride(0), a.shape[1])
    run(_delta_gates, kind, args, a.shape[0], 1, a.numel() // MIN_SHARED_GATES)
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
    g, beta = delta_gates(a, b, rate, dt_bias)
    return chunk_delta_rule(q, k, v, g, beta, state, cu_seqlens, state_read, state_write, captures, chunk_size)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    chunk_size: int,
) -> Tensor:
    """`reference.delta_rule.chunk_delta_rule`."""
    heads, key_dim, value_dim = state.shape[1:]
    lies_right = all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in (q, k, v))
    lies_right = lies_right and state.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    kind = kind_of("chunk_gated_delta_rule", v, q, k, beta, exact=(state, g), lies_right=lies_right)
    captures, y = captures.contiguous(), torch.empty(v.shape, dtype=v.dtype)
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    tensors = (q, k, v, g, beta, state, cu_seqlens, state_read, state_write, captures, y)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    strides = tuple(tensor.stride(0) for tensor in (q, k, v, g, beta, y))
    sizes = cu_seqlens.numel() - 1, len(captures), heads // k.shape[1], key_dim, value_dim, chunk_size
    run(_rule, kind, (*addresses, *strides, *sizes, state.stride(0)), heads, 1, v.numel() // MIN_SHARED)
    return y


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """`reference.delta_rule.recurrent_gated_delta_rule`; a token that reads `LEFT_OUT` is not computed."""
    return delta(q, k, v, g, beta, state, (state_read, state_write), torch.empty(v.shape, dtype=v.dtype))


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
    """`reference.gated_delta_step`; a token that reads `LEFT_OUT` is not computed."""
    heads, key_dim, value_dim = recurrent.shape[1:]
    channels, width = weight.shape
    lies_right = width > 1 and weight.is_contiguous() and conv.stride()[1:] == (channels, 1)
    lies_right = lies_right and recurrent.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    of_one_type, exact = (a, b, weight, dt_bias, conv), (rate, recurrent)
    kind = kind_of("gated_delta_step", mixed, *of_one_type, exact=exact, lies_right=lies_right)
    mixed, a, b = map(by_rows, (mixed, a, b))
    state_read, state_write = state_read.contiguous(), state_write.contiguous()
    tokens, key_heads = mixed.shape[0], (channels - heads * value_dim) // (2 * key_dim)
    output = torch.empty(tokens, heads, value_dim, dtype=mixed.dtype)
    tensors = (mixed, a, b, weight, rate, dt_bias, conv, recurrent, state_read, state_write, output)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    strides = tuple(tensor.stride(0) for tensor in (mixed, a, b, conv, recurrent))
    sizes = tokens, key_heads, heads, key_dim, value_dim, width
    run(_step, kind, (*addresses, *strides, *sizes), key_heads, 1, tokens * recurrent[0].numel() // MIN_SHARED)
    return output
