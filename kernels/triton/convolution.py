"""The causal convolution of prefill: a ragged batch of new tokens, each request continuing from its window.

A program computes the outputs of a tile of tokens, for some channels. The window before a request is read for its first
tile alone, since no window is longer than a tile. So the program of that tile also writes all windows that the request
leaves, once its outputs are computed: a request may write the slot that it reads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.triton.ragged import find_tile, max_tiles, padded_batch

TILE = 16
CHANNELS = 512


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
    """Arguments as for the twin in `hybrid.kernels.reference`; `state` is written.

    The innermost dimension of `x`, `state` and `bias` is contiguous. `weight` may have any strides, and is read fastest
    when it lies in memory as `[width, channels]`.
    """
    tokens, channels = x.shape
    width = weight.shape[1]
    requests = cu_seqlens.numel() - 1
    output = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    block = min(CHANNELS, triton.next_power_of_2(channels))
    _convolution_kernel[(triton.cdiv(channels, block) * max_tiles(tokens, requests, TILE),)](
        x,
        weight,
        weight if bias is None else bias,
        state,
        output,
        cu_seqlens,
        state_read,
        state_write,
        captures,
        requests,
        captures.shape[0],
        channels,
        x.stride(0),
        state.stride(0),
        captures.stride(0),
        captures.stride(1),
        WIDTH=width,
        ROW_STRIDE=state.stride(1),
        CHANNEL_STRIDE=weight.stride(0),
        TAP_STRIDE=weight.stride(1),
        HAS_BIAS=bias is not None,
        REQUESTS=padded_batch(requests),
        CAPTURES=padded_batch(captures.shape[0]) if captures.shape[0] else 0,
        ROWS=triton.next_power_of_2(width - 1),
        TILE=TILE,
        CHANNELS=block,
        num_warps=2,
    )
    return output


@triton.jit(do_not_specialize=["num_requests", "num_captures"])
def _convolution_kernel(
    x,
    weight,
    bias,
    state,
    output,
    cu_seqlens,
    state_read,
    state_write,
    captures,
    num_requests,
    num_captures,
    num_channels,
    x_stride,
    state_stride,
    capture_stride,
    field_stride,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    CHANNEL_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    REQUESTS: tl.constexpr,
    CAPTURES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    blocks = tl.cdiv(num_channels, CHANNELS)
    request, tile = find_tile(cu_seqlens, num_requests, tl.program_id(0) // blocks, TILE, 1, REQUESTS)
    if request < num_requests:
        start = tl.load(cu_seqlens + request).to(tl.int64)
        first = tile * TILE
        left = tl.load(cu_seqlens + request + 1).to(tl.int64) - start - first
        channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
        exists = channel < num_channels
        is_old = channel < tl.where(first == 0, num_channels, 0)  # what comes before this tile lies in the window
        inputs = x + (start + first) * x_stride + channel
        window = state + tl.load(state_read + request).to(tl.int64) * state_stride + channel
        rows = ()
        scales = ()
        for row in tl.static_range(WIDTH - 1):
            old = tl.load(window + row * ROW_STRIDE, mask=is_old, other=0.0)
            new = tl.load(inputs + (row - (WIDTH - 1)) * x_stride, mask=exists & ~is_old, other=0.0)
            rows = rows + (tl.where(is_old, old.to(new.dtype), new),)  # noqa: RUF005 (what Triton compiles)
        for row in tl.static_range(TILE):
            new = tl.load(inputs + row * x_stride, mask=channel < tl.where(row < left, num_channels, 0), other=0.0)
            rows = rows + (new,)  # noqa: RUF005
        tl.debug_barrier()  # keeps the compiler from putting loads off to where they are needed
        for tap in tl.static_range(WIDTH):
            scale = tl.load(weight + channel * CHANNEL_STRIDE + tap * TAP_STRIDE, mask=exists, other=0.0)
            scales = scales + (scale.to(tl.float32),)  # noqa: RUF005
        if HAS_BIAS:
            offset = tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
        target = output + (start + first) * num_channels + channel
        for row in tl.static_range(TILE):
            total = tl.zeros((CHANNELS,), tl.float32)
            for tap in tl.static_range(WIDTH):
                total = tl.fma(rows[row + tap].to(tl.float32), scales[tap], total)
            if HAS_BIAS:
                total += offset
            total = (total / (1 + tl.exp(-total))).to(output.dtype.element_ty)
            tl.store(target + row * num_channels, total, mask=channel < tl.where(row < left, num_channels, 0))
        if tile == 0:
            _keep_windows(
                x,
                state,
                request,
                start,
                channel[None, :],
                state_read,
                state_write,
                cu_seqlens,
                captures,
                num_captures,
                num_channels,
                x_stride,
                state_stride,
                capture_stride,
                field_stride,
                WIDTH,
                ROW_STRIDE,
                ROWS,
                CAPTURES,
            )


@triton.jit
def _keep_windows(
    x,
    state,
    request,
    start,
    channel,
    state_read,
    state_write,
    cu_seqlens,
    captures,
    num_captures,
    num_channels,
    x_stride,
    state_stride,
    capture_stride,
    field_stride,
    WIDTH: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    CAPTURES: tl.constexpr,
):
    """Write all windows of a request's channels, the final one last: the slot may be the one that is read."""
    length = tl.load(cu_seqlens + request + 1).to(tl.int64) - start
    row = tl.arange(0, ROWS)[:, None]
    exists = (row < WIDTH - 1) & (channel < num_channels)
    new = x + start * x_stride + channel
    old = state + tl.load(state_read + request).to(tl.int64) * state_stride + channel
    target = state + row * ROW_STRIDE + channel
    if CAPTURES > 0:
        index = tl.arange(0, CAPTURES)
        of_request = tl.load(captures + index * capture_stride, mask=index < num_captures, other=-1) == request
        at = tl.min(tl.where(of_request, index, CAPTURES), 0)
        while at < CAPTURES:
            count = tl.load(captures + at * capture_stride + field_stride).to(tl.int64)
            slot = tl.load(captures + at * capture_stride + 2 * field_stride).to(tl.int64)
            window = _window(new, old, count + row, exists, x_stride, WIDTH, ROW_STRIDE)
            tl.store(target + slot * state_stride, window.to(state.dtype.element_ty), mask=exists)
            at = tl.min(tl.where(of_request & (index > at), index, CAPTURES), 0)
    window = _window(new, old, length + row, exists, x_stride, WIDTH, ROW_STRIDE)
    tl.debug_barrier()  # the slot may be the one that was read
    slot = tl.load(state_write + request).to(tl.int64)
    if slot >= 0:
        tl.store(target + slot * state_stride, window.to(state.dtype.element_ty), mask=exists)


@triton.jit
def _window(new, old, place, exists, x_stride, WIDTH: tl.constexpr, ROW_STRIDE: tl.constexpr):
    """The rows at `place` of the old window with the new tokens behind it."""
    is_old = place < WIDTH - 1
    window = tl.load(old + place * ROW_STRIDE, mask=exists & is_old, other=0.0).to(tl.float32)
    tokens = tl.load(new + (place - (WIDTH - 1)) * x_stride, mask=exists & (place >= WIDTH - 1), other=0.0)
    return tl.where(is_old, window, tokens.to(tl.float32))
