"""The causal convolution of prompts over state slots."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.cpu.vectors import INDEX, KINDS, ZERO, allocate, at, fma, get, numbers, put, release, sigmoid
from hybrid.kernels.reference import convolution as twins

MIN_SHARED = 1 << 15
"""Elements that are worth a thread."""

DTYPES = (torch.float32, torch.bfloat16)


@compiled_inline
def _input(x, window, token, past, stride, channels):  # type: ignore[no-untyped-def]
    """The inputs `past` and fewer tokens before a request's first one are in its window."""
    return at(x, token * stride) if token >= 0 else at(window, (past + token) * channels)


@compiled_inline
def _store_window(x, window, slot, end, past, stride, channels, first, last):  # type: ignore[no-untyped-def]
    """Write the window after `end` tokens of a request to a slot."""
    for row in range(past):
        source = _input(x, window, end - past + row, past, stride, channels)
        for c in range(first, last):
            slot[row * channels + c] = source[c]


@compiled
def _convolve(args, kind, first, last):  # type: ignore[no-untyped-def]
    """Channels `[first, last)` of all requests."""
    a = numbers(args, INDEX)
    x, weight, state, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[7], kind)
    starts, reads, writes = numbers(a[3], INDEX), numbers(a[4], INDEX), numbers(a[5], INDEX)
    captures = numbers(a[6], INDEX)
    stride, of_slot = a[8], a[9]
    requests, num_captures, channels, width = a[10], a[11], a[12], a[13]
    past = width - 1
    memory = allocate(width * channels)
    taps = numbers(memory, ZERO)
    for tap in range(width):
        for c in range(first, last):
            put(taps, tap * channels + c, get(weight, c * width + tap))
    copied, sums = allocate(past * channels), allocate(channels)
    window, total = numbers(copied, kind), numbers(sums, ZERO)
    for request in range(requests):
        start, count = starts[request], starts[request + 1] - starts[request]
        own, out = at(x, start * stride), at(y, start * channels)
        before = at(state, reads[request] * of_slot)
        for row in range(past):
            for c in range(first, last):
                window[row * channels + c] = before[row * channels + c]
        for token in range(count):
            for tap in range(width):
                source = _input(own, window, token - past + tap, past, stride, channels)
                factors = at(taps, tap * channels)
                if tap == 0:
                    for c in range(first, last):
                        put(total, c, get(source, c) * get(factors, c))
                else:
                    for c in range(first, last):
                        put(total, c, fma(get(source, c), get(factors, c), get(total, c)))
            target = at(out, token * channels)
            for c in range(first, last):
                z = get(total, c)
                put(target, c, z * sigmoid(z))
        if writes[request] >= 0:
            _store_window(own, window, at(state, writes[request] * of_slot), count, past, stride, channels, first, last)
        for i in range(num_captures):
            if captures[3 * i] == request:
                slot = at(state, captures[3 * i + 2] * of_slot)
                _store_window(own, window, slot, captures[3 * i + 1], past, stride, channels, first, last)
    release(memory)
    release(copied)
    release(sums)


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
