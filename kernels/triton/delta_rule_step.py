"""The decode of a linear-attention layer in one launch: causal convolution, gates and gated delta rule, on state slots.

A program has some columns of one value head's state, for all tokens of one request, tile by tile. The rule never mixes
columns, so a tile goes from slot to slot through registers and meets no other. Every program convolves the q and k
that its columns need; all programs of a key head do the same convolution.

What must stay true:
* q's and k's windows are read by all programs of a key head, and a request usually writes the slot that it reads. So
  none writes them before all have read: each program counts itself in when it has, and the last to do so writes
  them. No program waits. v's windows and the state's columns belong to one program.
* A program writes no window before it has read all that its tokens need. Where the inputs before a token lie is
  therefore looked up as of before the launch: in `mixed` where a token of the launch wrote the slot, else in the slot.
* A tile's shape and arithmetic do not depend on the batch, only how many of them a program has. So a request's bits do
  not depend on it either.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.triton.common.gates import log_decay, replaced

COLUMNS = 32
WARPS = 2
ENOUGH_PROGRAMS = 4096
"""Programs that keep a large GPU busy to the end; with more to do, a program has several tiles of a single token."""


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
    """Arguments as for the twin in `hybrid.kernels.reference`; `conv` and `recurrent` are written.

    A request whose first token reads no slot is not computed: its rows of the result are not written. As many requests
    as tokens have one each. `conv` has the type of `mixed`. The innermost dimension of `mixed`, `a`, `b`, `conv` and
    `recurrent` is contiguous; `weight` may have any strides, and is read fastest when it lies in memory as
    `[width, channels]`.

    Raises:
        RuntimeError: the first call with these pools comes while a CUDA graph is captured.
    """
    tokens, channels = mixed.shape
    requests = cu_seqlens.numel() - 1
    slots, value_heads, key_dim, value_dim = recurrent.shape
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    output = mixed.new_empty(tokens, value_heads, value_dim)
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    tiles = triton.cdiv(value_dim, columns)
    tiles_each, programs = 1, requests * value_heads * tiles if tokens == requests else 0  # some may have no token
    while tiles % (2 * tiles_each) == 0 and programs >= 2 * tiles_each * ENOUGH_PROGRAMS:
        tiles_each *= 2
    _step_kernel[(value_heads * tiles // tiles_each, requests)](
        mixed,
        a,
        b,
        weight,
        rate,
        dt_bias,
        conv,
        recurrent,
        output,
        cu_seqlens,
        state_read,
        state_write,
        _arrivals(mixed.device, conv.untyped_storage().data_ptr(), slots * key_heads),
        mixed.stride(0),
        a.stride(0),
        b.stride(0),
        conv.stride(0),
        recurrent.stride(0),
        CHANNEL_STRIDE=weight.stride(0),
        TAP_STRIDE=weight.stride(1),
        ROW_STRIDE=conv.stride(1),
        HEAD_STRIDE=recurrent.stride(1),
        KEY_STRIDE=recurrent.stride(2),
        KEY_HEADS=key_heads,
        GROUP=value_heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        WIDTH=weight.shape[1],
        ONE_TOKEN=tokens == requests,
        KEYS=triton.next_power_of_2(key_dim),
        COLUMNS=columns,
        TILES=tiles,
        TILES_EACH=tiles_each,
        ROWS=triton.next_power_of_2(weight.shape[1] - 1),
        num_warps=WARPS,
        enable_fp_fusion=False,  # what is fused is said: the compiler would choose otherwise for other batches
    )
    return output


@cache  # never let go: captured graphs hold the address
def _arrivals(device: torch.device, pool: int, count: int) -> Tensor:
    """Zeros, one per slot and key head: how many programs have read the windows that continue in the slot. Every launch
    leaves zeros. Each pool has its own, so that launches which may run side by side share none."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("gated_delta_step must run once with these pools before a CUDA graph captures it")
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def _step_kernel(
    mixed,
    a,
    b,
    weight,
    rate,
    dt_bias,
    conv,
    recurrent,
    output,
    cu_seqlens,
    state_read,
    state_write,
    arrivals,
    mixed_stride,
    a_stride,
    b_stride,
    conv_stride,
    recurrent_stride,
    CHANNEL_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    TILES_EACH: tl.constexpr,
    ROWS: tl.constexpr,
):
    PARTS: tl.constexpr = TILES // TILES_EACH
    request = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // PARTS
    first_column = tl.program_id(0) % PARTS * (TILES_EACH * COLUMNS)
    key_head = head // GROUP
    if ONE_TOKEN:
        start = request
        count = 1
    else:
        start = tl.load(cu_seqlens + request).to(tl.int64)
        count = tl.load(cu_seqlens + request + 1).to(tl.int32) - start.to(tl.int32)
        if count == 0:
            return
    slot = tl.load(state_read + start).to(tl.int64)
    if not ONE_TOKEN:  # noqa: SIM102 (decided when compiled)
        if slot < 0:
            return

    key = tl.arange(0, KEYS)
    column = tl.arange(0, COLUMNS)
    is_key = key < KEY_DIM
    q_channel = key_head * KEY_DIM + key
    k_channel = q_channel + KEY_HEADS * KEY_DIM
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    heads = recurrent + head.to(tl.int64) * HEAD_STRIDE + key[:, None] * KEY_STRIDE
    bias = tl.load(dt_bias + head).to(tl.float32)
    decay_rate = tl.load(rate + head).to(tl.float32)

    at_column = first_column + column
    is_column = at_column < VALUE_DIM
    is_tile = is_key[:, None] & is_column[None, :]
    state = tl.load(heads + slot * recurrent_stride + at_column[None, :], mask=is_tile, other=0.0)
    tl.debug_barrier()  # keeps the compiler from putting the load off to where it is needed
    kept = tl.full((), -1, tl.int64)
    is_last = False
    if ONE_TOKEN:
        kept = tl.load(state_write + start).to(tl.int64)
        inputs = _inputs(
            start, start, slot, mixed, conv, state_read, state_write, mixed_stride, conv_stride, ROW_STRIDE, WIDTH, True
        )
        decay, beta = _gates(a + start * a_stride + head, b + start * b_stride + head, decay_rate, bias)
        q = _convolve(inputs, weight, q_channel, is_key, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)
        k = _convolve(inputs, weight, k_channel, is_key, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)
        v = _convolve(inputs, weight, v_channel + at_column, is_column, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * KEY_DIM**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        q_by_k = tl.sum(q * k, 0)
        is_last = _arrive(arrivals + kept * KEY_HEADS + key_head, kept >= 0, GROUP * PARTS)

    for part in range(TILES_EACH):
        for at in range(count):
            token = start + at
            write = kept
            if not ONE_TOKEN:
                read = tl.load(state_read + token).to(tl.int64)
                write = tl.load(state_write + token).to(tl.int64)
                kept = tl.maximum(kept, write)
                if (at > 0) & (read >= 0):
                    tl.debug_barrier()  # an earlier token may have written the slot
                    state = tl.load(heads + read * recurrent_stride + at_column[None, :], mask=is_tile, other=0.0)
                inputs = _inputs(
                    token,
                    start,
                    read,
                    mixed,
                    conv,
                    state_read,
                    state_write,
                    mixed_stride,
                    conv_stride,
                    ROW_STRIDE,
                    WIDTH,
                    False,
                )
                decay, beta = _gates(a + token * a_stride + head, b + token * b_stride + head, decay_rate, bias)
                q = _convolve(inputs, weight, q_channel, is_key, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)
                k = _convolve(inputs, weight, k_channel, is_key, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)
                v = _convolve(inputs, weight, v_channel + at_column, is_column, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)
                q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * KEY_DIM**-0.5
                k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                q_by_k = tl.sum(q * k, 0)
            # one sweep over the old state serves the value that k finds and the result
            by_k = tl.sum(k[:, None] * state, 0)
            by_q = tl.sum(q[:, None] * state, 0)
            added = beta * tl.fma(-by_k, decay, v)
            result = tl.fma(by_q, decay, q_by_k * added)
            state = tl.fma(k[:, None], added[None, :], state * decay)
            place = output + (token * (KEY_HEADS * GROUP) + head) * VALUE_DIM + at_column
            tl.store(place, result.to(output.dtype.element_ty), mask=is_column)
            if write >= 0:
                tl.store(heads + write * recurrent_stride + at_column[None, :], state, mask=is_tile)
        if part + 1 < TILES_EACH:
            at_column += COLUMNS
            is_column = at_column < VALUE_DIM
            is_tile = is_key[:, None] & is_column[None, :]
            state = tl.load(heads + slot * recurrent_stride + at_column[None, :], mask=is_tile, other=0.0)
            if ONE_TOKEN:
                v = _convolve(inputs, weight, v_channel + at_column, is_column, CHANNEL_STRIDE, TAP_STRIDE, WIDTH)

    if not ONE_TOKEN:
        is_last = _arrive(arrivals + kept * KEY_HEADS + key_head, kept >= 0, GROUP * PARTS)
    if kept >= 0:
        row = tl.arange(0, ROWS)
        own_column = first_column + tl.arange(0, TILES_EACH * COLUMNS)
        _keep_windows(
            v_channel + own_column,
            own_column < VALUE_DIM,
            row,
            start,
            count,
            mixed,
            conv,
            state_read,
            state_write,
            mixed_stride,
            conv_stride,
            ROW_STRIDE,
            WIDTH,
        )
    if is_last:
        row = tl.arange(0, ROWS)
        for part in range(2):
            _keep_windows(
                q_channel + part * (KEY_HEADS * KEY_DIM),
                is_key,
                row,
                start,
                count,
                mixed,
                conv,
                state_read,
                state_write,
                mixed_stride,
                conv_stride,
                ROW_STRIDE,
                WIDTH,
            )


@triton.jit
def _inputs(
    token,
    start,
    read,
    mixed,
    conv,
    state_read,
    state_write,
    mixed_stride,
    conv_stride,
    ROW_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """Where the input of a token that reads slot `read` lies, and those before it, newest first."""
    inputs = (mixed + token * mixed_stride,)
    slot = read
    row = WIDTH - 1  # of the window, once it is reached
    for back in tl.static_range(1, WIDTH):
        if ONE_TOKEN:
            before = conv + slot * conv_stride + (WIDTH - 1 - back) * ROW_STRIDE
        else:
            if token >= start:
                slot = tl.load(state_read + token).to(tl.int64)
                token -= 1
                if slot >= 0:
                    while tl.load(state_write + token, mask=token >= start, other=slot).to(tl.int64) != slot:
                        token -= 1
            row -= (token < start).to(tl.int32)
            window = conv + slot * conv_stride + row * ROW_STRIDE
            before = tl.where(token >= start, mixed + token * mixed_stride, window)
        inputs = inputs + (before,)  # noqa: RUF005 (what Triton compiles)
    return inputs


@triton.jit
def _convolve(
    inputs, weight, channel, exists, CHANNEL_STRIDE: tl.constexpr, TAP_STRIDE: tl.constexpr, WIDTH: tl.constexpr
):
    """Silu of the convolution of some channels, rounded as if it were stored."""
    y = tl.zeros(channel.shape, tl.float32)
    for back in tl.static_range(WIDTH):
        taps = weight + channel * CHANNEL_STRIDE + (WIDTH - 1 - back) * TAP_STRIDE
        x = tl.load(inputs[back] + channel, mask=exists, other=0.0)
        y = tl.fma(x.to(tl.float32), tl.load(taps, mask=exists, other=0.0).to(tl.float32), y)
    return (y / (1 + tl.exp(-y))).to(x.dtype).to(tl.float32)


@triton.jit
def _gates(a, b, rate, bias):
    """What remains of the state, and how much of the old value is replaced."""
    return tl.exp(log_decay(tl.load(a).to(tl.float32) + bias, rate)), replaced(tl.load(b)).to(tl.float32)


@triton.jit
def _arrive(counter, is_kept, PROGRAMS: tl.constexpr):
    """Count this program in, if its request keeps anything; whether it is the last. The counter is zero then."""
    is_last = is_kept
    if PROGRAMS > 1:  # noqa: SIM102 (decided when compiled)
        if is_kept:
            tl.debug_barrier()  # all threads have read
            is_last = tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1
            if is_last:
                tl.store(counter, 0)
    return is_last


@triton.jit
def _keep_windows(
    channel,
    exists,
    row,
    start,
    count,
    mixed,
    conv,
    state_read,
    state_write,
    mixed_stride,
    conv_stride,
    ROW_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write some channels of the windows that are kept, in the order of the tokens.

    A window is the end of a row of inputs: those of the window in `slot`, then the new tokens from `since` on, none of
    which was kept before.
    """
    is_row = (row < WIDTH - 1)[:, None] & exists[None, :]
    slot = tl.full((), 0, tl.int64)
    since = start
    for at in range(count):
        token = start + at
        read = tl.load(state_read + token).to(tl.int64)
        write = tl.load(state_write + token).to(tl.int64)
        if read >= 0:
            slot = read
            since = token
        if write >= 0:
            place = token - since + 1 + row
            old = conv + slot * conv_stride + place * ROW_STRIDE
            new = mixed + (since + place - (WIDTH - 1)) * mixed_stride
            window = tl.load(tl.where(place < WIDTH - 1, old, new)[:, None] + channel[None, :], mask=is_row, other=0.0)
            tl.debug_barrier()  # the slot may be the one that was read
            tl.store(conv + write * conv_stride + row[:, None] * ROW_STRIDE + channel[None, :], window, mask=is_row)
            tl.debug_barrier()
            slot = write
            since = token + 1
