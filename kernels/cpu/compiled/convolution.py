"""The causal convolution of prompts over state slots: all channels of a token before the next one."""

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, allocate, at, fma, get, numbers, put, release, sigmoid


@compiled_inline
def _input(x, window, token, past, stride, channels):
    """The inputs `past` and fewer tokens before a request's first one are in its window."""
    return at(x, token * stride) if token >= 0 else at(window, (past + token) * channels)


@compiled_inline
def _store_window(x, window, slot, end, past, stride, channels, first, last):
    """Write the window after `end` tokens of a request to a slot."""
    for row in range(past):
        source = _input(x, window, end - past + row, past, stride, channels)
        for c in range(first, last):
            slot[row * channels + c] = source[c]


def convolve(args, kind, first, last):
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
