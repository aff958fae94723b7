"""Kimi delta attention, the selective scan and Griffin's recurrence over state slots, of prompts and of decoded tokens
(`hybrid.kernels.cpu.compiled.recurrences`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import by_rows, kind_of, run

MIN_SHARED = 1 << 15
"""Elements of states that are changed that are worth a thread."""

_delta_tokens = Compiled(f"{COMPILED}.recurrences", "delta_tokens")
_scan_tokens = Compiled(f"{COMPILED}.recurrences", "scan_tokens")
_lru_tokens = Compiled(f"{COMPILED}.recurrences", "lru_tokens")


def chunk_kda(
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
    """`reference.kda.chunk_kda`, token by token."""
    y = torch.empty(v.shape, dtype=torch.float32)
    return delta(q, k, v, g, beta, state, (cu_seqlens, state_read, state_write, captures), y)


def kda_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """`reference.kda.kda_step`; a token that reads `LEFT_OUT` is not computed."""
    y = torch.empty(v.shape, dtype=torch.float32)
    return delta(q, k, v, g, beta, state, (state_read, state_write), y)


def delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: tuple[Tensor, ...], y: Tensor
) -> Tensor:
    """Compute the delta rule token by token.

    Args:
        q, k, v, beta, state: as of `reference.kda.chunk_kda`; heads of the values may share those of the keys.
        g: `[T, heads, key_dim]` or `[T, heads]` fp32, the log of the decay of each channel, or of all.
        slots: where prompts begin, the slots that they read and write, and captures; or the slots of each token.
        y: `[T, heads, value_dim]` fp32 or in the type of `v`; written, and returned.
    """
    heads, key_dim, value_dim = state.shape[1:]
    lies_right = all(each.stride()[1:] == (each.shape[2], 1) for each in (q, k, v))
    lies_right = lies_right and state.stride()[1:] == (key_dim * value_dim, value_dim, 1)
    lies_right = lies_right and (g.dim() == 2 or g.stride(1) == key_dim) and g.stride(-1) == beta.stride(-1) == 1
    kind = kind_of("the delta rule", v, q, k, beta, exact=(state, g), lies_right=lies_right)
    tensors = q, k, v, g, beta, state
    strides = tuple(each.stride(0) for each in tensors)
    sizes = heads, heads // k.shape[1], key_dim, value_dim, int(g.dim() == 3)
    addresses, requests, captures = _addresses(tensors, slots)
    args = (*addresses, y.data_ptr(), int(y.dtype == torch.float32), *strides, len(v), requests, captures, *sizes)
    run(_delta_tokens, kind, args, heads, 1, len(v) * state[0].numel() // MIN_SHARED)
    return y


def selective_scan(
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
) -> Tensor:
    """`reference.selective_scan.selective_scan`."""
    return _scan(x, dt, b, c, rate, state, (cu_seqlens, state_read, state_write, captures))


def selective_step(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor, state_read: Tensor, state_write: Tensor
) -> Tensor:
    """`reference.selective_scan.selective_step`; a token that reads `LEFT_OUT` is not computed."""
    return _scan(x, dt, b, c, rate, state, (state_read, state_write))


def _scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor, state: Tensor, slots: tuple[Tensor, ...]
) -> Tensor:
    size, channels = state.shape[1:]
    lies_right = rate.is_contiguous() and state.stride()[1:] == (channels, 1)
    kind = kind_of("the selective scan", x, b, c, exact=(dt, rate, state), lies_right=lies_right)
    x, dt, b, c = map(by_rows, (x, dt, b, c))
    y = torch.empty(x.shape, dtype=torch.float32)
    strides = tuple(each.stride(0) for each in (x, dt, b, c, state))
    addresses, requests, captures = _addresses((x, dt, b, c, rate, state), slots)
    args = (*addresses, y.data_ptr(), *strides, len(x), requests, captures, channels, size)
    run(_scan_tokens, kind, args, channels, 16, len(x) * state[0].numel() // MIN_SHARED)
    return y


def rg_lru(
    x: Tensor,
    entry: Tensor,
    forget: Tensor,
    positions: Tensor,
    rate: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
) -> Tensor:
    """`reference.rg_lru.rg_lru`."""
    return _recur(x, entry, forget, positions, rate, state, (cu_seqlens, state_read, state_write, captures))


def rg_lru_step(
    x: Tensor,
    entry: Tensor,
    forget: Tensor,
    positions: Tensor,
    rate: Tensor,
    state: Tensor,
    state_read: Tensor,
    state_write: Tensor,
) -> Tensor:
    """`reference.rg_lru.rg_lru_step`; a token that reads `LEFT_OUT` is not computed."""
    return _recur(x, entry, forget, positions, rate, state, (state_read, state_write))


def _recur(
    x: Tensor,
    entry: Tensor,
    forget: Tensor,
    positions: Tensor,
    rate: Tensor,
    state: Tensor,
    slots: tuple[Tensor, ...],
) -> Tensor:
    lies_right = rate.is_contiguous() and state.stride(1) == 1
    kind = kind_of("the linear recurrence", x, entry, forget, exact=(rate, state), lies_right=lies_right)
    x, entry, forget = map(by_rows, (x, entry, forget))
    y, positions = torch.empty(x.shape, dtype=x.dtype), positions.contiguous()
    strides = tuple(each.stride(0) for each in (x, entry, forget, state))
    addresses, requests, captures = _addresses((x, entry, forget, positions, rate, state), slots)
    args = (*addresses, y.data_ptr(), *strides, len(x), requests, captures, x.shape[1])
    run(_lru_tokens, kind, args, x.shape[1], 16, x.numel() // MIN_SHARED)
    return y


def _addresses(tensors: tuple[Tensor, ...], slots: tuple[Tensor, ...]) -> tuple[tuple[int, ...], int, int]:
    """Addresses of tensors and of slots, and the numbers of prompts and of captures: none of decoded tokens."""
    slots = tuple(each.contiguous() for each in slots)
    own = tuple(each.data_ptr() for each in tensors)
    if len(slots) == 2:
        return (*own, 0, slots[0].data_ptr(), slots[1].data_ptr(), 0), 0, 0
    return (*own, *(each.data_ptr() for each in slots)), slots[0].numel() - 1, len(slots[3])
