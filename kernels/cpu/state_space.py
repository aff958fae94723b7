"""Mamba-2's layer over state slots: the state space rule of prompts and of decoded tokens, and what comes before and
after it (`hybrid.kernels.cpu.compiled.state_space`). Its convolution is that of `hybrid.kernels.cpu.convolution`.
"""

import torch
from torch import Tensor

from hybrid.kernels.cpu.convolution import causal_conv1d, causal_conv1d_update
from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import Kind
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import bits, by_rows, kind_of, run

__all__ = [
    "add_skip",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_state_space",
    "grouped_gated_norm",
    "state_space_step",
    "time_steps",
]

MIN_SHARED = 1 << 15
"""Elements of values, or of states that are changed, that are worth a thread."""

MIN_SHARED_ROWS = 1 << 12
"""Elements of rows that are worth a thread."""

_scan = Compiled(f"{COMPILED}.state_space", "scan")
_advance = Compiled(f"{COMPILED}.state_space", "advance")
_time_steps = Compiled(f"{COMPILED}.state_space", "time_steps")
_add_skip = Compiled(f"{COMPILED}.state_space", "add_skip")
_grouped_gated_norm = Compiled(f"{COMPILED}.state_space", "grouped_gated_norm")


def chunk_state_space(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    rate: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    chunk_size: int,
) -> Tensor:
    """`reference.state_space.chunk_state_space`."""
    heads, size, dim = state.shape[1:]
    kind, dt, y = _kind(x, dt, b, c, rate, state), by_rows(dt), torch.empty(x.shape, dtype=torch.float32)
    places = tuple(index.contiguous() for index in (cu_seqlens, state_read, state_write, captures))
    addresses = tuple(tensor.data_ptr() for tensor in (x, dt, b, c, rate, state, *places, y))
    strides = tuple(tensor.stride(0) for tensor in (x, dt, b, c, y, state))
    sizes = cu_seqlens.numel() - 1, len(captures), heads // b.shape[1], size, dim, chunk_size
    run(_scan, kind, (*addresses, *strides, *sizes), heads, 1, x.numel() // MIN_SHARED)
    return y


def state_space_step(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """`reference.state_space.state_space_step`; a token that reads `LEFT_OUT` is not computed."""
    heads, size, dim = state.shape[1:]
    kind, dt, y = _kind(x, dt, b, c, rate, state), by_rows(dt), torch.empty(x.shape, dtype=torch.float32)
    places = state_read.contiguous(), state_write.contiguous()
    addresses = tuple(tensor.data_ptr() for tensor in (x, dt, b, c, rate, state, *places, y))
    strides = tuple(tensor.stride(0) for tensor in (x, dt, b, c, y, state))
    args = (*addresses, *strides, x.shape[0], heads // b.shape[1], size, dim)
    run(_advance, kind, args, heads, 1, x.shape[0] * state[0].numel() // MIN_SHARED)
    return y


def time_steps(dt: Tensor, bias: Tensor, limits: tuple[float, float]) -> Tensor:
    """`reference.state_space.time_steps`."""
    kind, dt, bias = kind_of("time_steps", dt, bias), by_rows(dt), bias.contiguous()
    y, (count, size) = torch.empty(dt.shape, dtype=torch.float32), dt.shape
    args = dt.data_ptr(), bias.data_ptr(), y.data_ptr(), dt.stride(0), size, *map(bits, limits)
    run(_time_steps, kind, args, count, 1, dt.numel() // MIN_SHARED_ROWS)
    return y


def add_skip(y: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """`reference.state_space.add_skip`."""
    kind = kind_of("add_skip", x, d, exact=(y,), lies_right=y.shape == x.shape)
    tokens, heads, dim = x.shape
    y, d, x = y.contiguous(), d.contiguous(), x if x.stride()[1:] == (dim, 1) else x.contiguous()
    out = torch.empty(y.shape, dtype=y.dtype)
    args = y.data_ptr(), x.data_ptr(), d.data_ptr(), out.data_ptr(), x.stride(0), heads, dim
    run(_add_skip, kind, args, tokens, 1, x.numel() // MIN_SHARED_ROWS)
    return out


def grouped_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """`reference.state_space.grouped_gated_norm`."""
    kind = kind_of("grouped_gated_norm", gate, weight, exact=(x,), lies_right=x.shape == gate.shape)
    x, weight, gate = x.contiguous(), weight.contiguous(), by_rows(gate)
    y, (count, size) = torch.empty(gate.shape, dtype=gate.dtype), x.shape
    addresses = x.data_ptr(), gate.data_ptr(), weight.data_ptr(), y.data_ptr()
    args = (*addresses, gate.stride(0), groups, size // groups, bits(eps))
    run(_grouped_gated_norm, kind, args, count, 1, x.numel() // MIN_SHARED_ROWS)
    return y


def _kind(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor) -> Kind:
    size, dim = state.shape[2:]
    lies_right = all(tensor.stride()[1:] == (tensor.shape[2], 1) for tensor in (x, b, c))
    lies_right = lies_right and rate.is_contiguous() and state.stride()[1:] == (size * dim, dim, 1)
    return kind_of("state_space", x, b, c, exact=(dt, rate, state), lies_right=lies_right)
