"""A linear-attention layer's decode step over state slots: convolution and gated delta rule in one pass.

With o = q S' and S' = d S + k u, where u = b (v - k d S): k S and q S are computed together, so that a state is read
once, changed, and written once.
"""

import math

import numpy as np
import torch
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.cpu.tiles import dot
from hybrid.kernels.cpu.vectors import INDEX, KINDS, ZERO, allocate, at, fma, get, numbers, put, release, sigmoid
from hybrid.kernels.reference import delta_rule_step as twins

MIN_SHARED = 1 << 15
"""Elements of states that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)

UNROLLED = 8
"""Rows of a state that are added up while an output is in a register."""

_ONE, _TWENTY, _EPS = np.float32(1), np.float32(20), np.float32(1e-6)


@compiled_inline
def _convolve(x, weight, old, new, y, width, channels, first, last):  # type: ignore[no-untyped-def]
    """Channels `[first, last)` of a token: the convolution with silu, and the window after it. `old` may be `new`."""
    past = width - 1
    for c in range(first, last):
        total = get(x, c) * get(weight, c * width + past)
        for tap in range(past):
            total = fma(get(old, tap * channels + c), get(weight, c * width + tap), total)
        put(y, c, total * sigmoid(total))
    for tap in range(past - 1):
        for c in range(first, last):
            new[tap * channels + c] = old[(tap + 1) * channels + c]
    for c in range(first, last):
        new[(past - 1) * channels + c] = x[c]


@compiled_inline
def _unit(x, y, size, factor):  # type: ignore[no-untyped-def]
    """Write x of length 1, times a factor, to y."""
    scale = factor / np.float32(math.sqrt(dot(x, x, size) + _EPS))
    for i in range(size):
        put(y, i, get(x, i) * scale)


@compiled_inline
def _rule(q, k, v, decay, beta, old, new, y, from_k, from_q, key_dim, value_dim):  # type: ignore[no-untyped-def]
    """The rule of one head. `old` may be `new`."""
    for j in range(value_dim):
        put(from_k, j, ZERO)
        put(from_q, j, ZERO)
    whole = key_dim - key_dim % UNROLLED
    for i in range(0, whole, UNROLLED):
        s = at(old, i * value_dim)
        k0, k1, k2, k3 = get(k, i), get(k, i + 1), get(k, i + 2), get(k, i + 3)
        k4, k5, k6, k7 = get(k, i + 4), get(k, i + 5), get(k, i + 6), get(k, i + 7)
        q0, q1, q2, q3 = get(q, i), get(q, i + 1), get(q, i + 2), get(q, i + 3)
        q4, q5, q6, q7 = get(q, i + 4), get(q, i + 5), get(q, i + 6), get(q, i + 7)
        for j in range(value_dim):
            a, b = get(from_k, j), get(from_q, j)
            s0, s1 = get(s, j), get(s, value_dim + j)
            s2, s3 = get(s, 2 * value_dim + j), get(s, 3 * value_dim + j)
            s4, s5 = get(s, 4 * value_dim + j), get(s, 5 * value_dim + j)
            s6, s7 = get(s, 6 * value_dim + j), get(s, 7 * value_dim + j)
            a = fma(k3, s3, fma(k2, s2, fma(k1, s1, fma(k0, s0, a))))
            b = fma(q3, s3, fma(q2, s2, fma(q1, s1, fma(q0, s0, b))))
            put(from_k, j, fma(k7, s7, fma(k6, s6, fma(k5, s5, fma(k4, s4, a)))))
            put(from_q, j, fma(q7, s7, fma(q6, s6, fma(q5, s5, fma(q4, s4, b)))))
    for i in range(whole, key_dim):
        s, own_k, own_q = at(old, i * value_dim), get(k, i), get(q, i)
        for j in range(value_dim):
            put(from_k, j, fma(own_k, get(s, j), get(from_k, j)))
            put(from_q, j, fma(own_q, get(s, j), get(from_q, j)))
    together = dot(q, k, key_dim)
    for j in range(value_dim):
        added = (get(v, j) - decay * get(from_k, j)) * beta
        put(from_k, j, added)
        put(y, j, fma(together, added, decay * get(from_q, j)))
    for i in range(key_dim):
        s, t, own = at(old, i * value_dim), at(new, i * value_dim), get(k, i)
        for j in range(value_dim):
            put(t, j, fma(own, get(from_k, j), decay * get(s, j)))


@compiled
def _step(args, kind, first, last):  # type: ignore[no-untyped-def]
    """The key heads `[first, last)`, each with the channels and value heads that belong to it, for all tokens."""
    n = numbers(args, INDEX)
    mixed, a, b, weight = numbers(n[0], kind), numbers(n[1], kind), numbers(n[2], kind), numbers(n[3], kind)
    rate, dt_bias, conv = numbers(n[4], ZERO), numbers(n[5], kind), numbers(n[6], kind)
    recurrent, output = numbers(n[7], ZERO), numbers(n[10], kind)
    reads, writes = numbers(n[8], INDEX), numbers(n[9], INDEX)
    of_mixed, of_a, of_b, of_window, of_state = n[11], n[12], n[13], n[14], n[15]
    tokens, key_heads, heads, key_dim, value_dim, width = n[16], n[17], n[18], n[19], n[20], n[21]
    keys, group = key_heads * key_dim, heads // key_heads
    channels, matrix = 2 * keys + heads * value_dim, key_dim * value_dim
    spare_window, spare_state = allocate((width - 1) * channels), allocate(group * matrix)
    own_window, own_state = numbers(spare_window, kind), numbers(spare_state, ZERO)
    scratch = allocate(channels + 2 * key_dim + 2 * value_dim)
    x = numbers(scratch, ZERO)
    rounded = allocate(channels)
    z = numbers(rounded, kind)
    q, k = at(x, channels), at(x, channels + key_dim)
    from_k, from_q = at(x, channels + 2 * key_dim), at(x, channels + 2 * key_dim + value_dim)
    scale = _ONE / np.float32(math.sqrt(np.float32(key_dim)))
    for key_head in range(first, last):  # the states of its value heads stay in the first cache for all tokens
        window, state = own_window, own_state
        for token in range(tokens):
            read, write = reads[token], writes[token]
            old, before = window, state
            if read >= 0:
                old, before = at(conv, read * of_window), at(recurrent, read * of_state + key_head * group * matrix)
            window, state = own_window, own_state
            if write >= 0:
                window = at(conv, write * of_window)
                state = at(recurrent, write * of_state + key_head * group * matrix)
            inputs = at(mixed, token * of_mixed)
            for start, size in ((0, key_dim), (keys, key_dim), (2 * keys, group * value_dim)):
                begin, end = start + key_head * size, start + (key_head + 1) * size
                _convolve(inputs, weight, old, window, z, width, channels, begin, end)
                for c in range(begin, end):
                    put(x, c, get(z, c))  # rounded to the type of the model, as the twin has it
            _unit(at(x, key_head * key_dim), q, key_dim, scale)
            _unit(at(x, keys + key_head * key_dim), k, key_dim, _ONE)
            for head in range(key_head * group, (key_head + 1) * group):
                dt = get(a, token * of_a + head) + get(dt_bias, head)
                soft = dt if dt > _TWENTY else np.float32(math.log1p(np.float32(math.exp(dt))))
                decay = np.float32(math.exp(get(rate, head) * soft))
                beta = sigmoid(get(b, token * of_b + head))
                v, y = at(x, 2 * keys + head * value_dim), at(output, (token * heads + head) * value_dim)
                place = (head - key_head * group) * matrix
                s, t = at(before, place), at(state, place)
                _rule(q, k, v, decay, beta, s, t, y, from_k, from_q, key_dim, value_dim)
    release(spare_window)
    release(spare_state)
    release(scratch)
    release(rounded)


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
    """`reference.gated_delta_step`."""
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
