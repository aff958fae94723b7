"""The causal convolution over state slots, of prompts and of decoded tokens, with silu or without: all channels of a
token before the next one."""

from hybrid.kernels.cpu.compiled.build import compiled_inline
from hybrid.kernels.cpu.compiled.vectors import INDEX, ZERO, allocate, at, fma, get, numbers, put, release, sigmoid
from hybrid.kernels.cpu.kinds import LEFT_OUT


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


@compiled_inline
def _turn(weight, taps, channels, width, first, last):
    """The weight tap by tap: for all channels numbers that lie side by side."""
    for tap in range(width):
        for c in range(first, last):
            put(taps, tap * channels + c, get(weight, c * width + tap))


@compiled_inline
def _add_tap(source, factors, total, tap, first, last):
    """Add the product of an input with the tap; the first one begins the sum."""
    if tap == 0:
        for c in range(first, last):
            put(total, c, get(source, c) * get(factors, c))
    else:
        for c in range(first, last):
            put(total, c, fma(get(source, c), get(factors, c), get(total, c)))


@compiled_inline
def _finish(total, bias, has_bias, is_activated, target, first, last):
    """Write the sums, to which a bias is added if there is one, or silu of them."""
    if has_bias:
        for c in range(first, last):
            put(total, c, get(total, c) + get(bias, c))
    if is_activated:
        for c in range(first, last):
            z = get(total, c)
            put(target, c, z * sigmoid(z))
    else:
        for c in range(first, last):
            put(target, c, get(total, c))


def convolve(args, kind, first, last):
    """Channels `[first, last)` of all requests. The address of the bias is 0 where there is none."""
    a = numbers(args, INDEX)
    x, weight, state, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[7], kind)
    starts, reads, writes = numbers(a[3], INDEX), numbers(a[4], INDEX), numbers(a[5], INDEX)
    captures = numbers(a[6], INDEX)
    stride, of_slot = a[8], a[9]
    requests, num_captures, channels, width = a[10], a[11], a[12], a[13]
    bias, has_bias, is_activated = numbers(a[14], kind), a[14] != 0, a[15] != 0
    past = width - 1
    memory = allocate(width * channels)
    taps = numbers(memory, ZERO)
    _turn(weight, taps, channels, width, first, last)
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
                _add_tap(source, at(taps, tap * channels), total, tap, first, last)
            _finish(total, bias, has_bias, is_activated, at(out, token * channels), first, last)
        if writes[request] >= 0:
            _store_window(own, window, at(state, writes[request] * of_slot), count, past, stride, channels, first, last)
        for i in range(num_captures):
            if captures[3 * i] == request:
                slot = at(state, captures[3 * i + 2] * of_slot)
                _store_window(own, window, slot, captures[3 * i + 1], past, stride, channels, first, last)
    release(memory)
    release(copied)
    release(sums)


def convolve_tokens(args, kind, first, last):
    """Channels `[first, last)` of tokens one after another, each of which continues from a slot, or from the token
    before it. One that reads `LEFT_OUT` is not computed."""
    a = numbers(args, INDEX)
    x, weight, state, y = numbers(a[0], kind), numbers(a[1], kind), numbers(a[2], kind), numbers(a[5], kind)
    reads, writes = numbers(a[3], INDEX), numbers(a[4], INDEX)
    bias, has_bias, is_activated = numbers(a[6], kind), a[6] != 0, a[12] != 0
    stride, of_slot = a[7], a[8]
    tokens, channels, width = a[9], a[10], a[11]
    past = width - 1
    memory = allocate(width * channels)
    taps = numbers(memory, ZERO)
    _turn(weight, taps, channels, width, first, last)
    copied, sums = allocate(width * channels), allocate(channels)
    window, total = numbers(copied, kind), numbers(sums, ZERO)
    for token in range(tokens):
        read, write = reads[token], writes[token]
        if read == LEFT_OUT:
            continue
        own = at(x, token * stride)
        for row in range(past):
            before = at(state, read * of_slot + row * channels) if read >= 0 else at(window, (row + 1) * channels)
            for c in range(first, last):
                window[row * channels + c] = before[c]
        for c in range(first, last):
            window[past * channels + c] = own[c]
        for tap in range(width):
            _add_tap(at(window, tap * channels), at(taps, tap * channels), total, tap, first, last)
        _finish(total, bias, has_bias, is_activated, at(y, token * channels), first, last)
        if write >= 0:
            slot = at(state, write * of_slot)
            for row in range(past):
                for c in range(first, last):
                    slot[row * channels + c] = window[(row + 1) * channels + c]
    release(memory)
    release(copied)
    release(sums)
