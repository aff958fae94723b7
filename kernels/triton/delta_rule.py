"""The gated delta rule on state slots: the prefill of a linear-attention layer in two launches, over a packed batch in
chunks, and its decode in one, with the causal convolution and the gates.

# Prefill

Within a chunk of C tokens, with S the state before it, K and Q the normalised keys and queries, and d the sum of g from
the chunk's start to each token, the rule is (Yang et al., "Gated Delta Networks", 2024)

    new  = M (V - exp(d) K S)                      M = (I + A)^-1 beta
    out  = exp(d) Q S + N new                      A = beta (K K^T) exp(d_i - d_j) below the diagonal, else 0
    S   <- exp(d_C) S + (exp(d_C - d) K)^T new     N = (Q K^T) exp(d_i - d_j) on and below the diagonal, else 0

M and N do not depend on S. The first launch makes them for all chunks side by side, from the projections of the gates;
the second walks through the chunks of a request, a program per tile of a value head's columns, which the rule never
mixes. It keeps its tile of S in registers and writes it where a capture, or the end, asks for it.

What must stay true:
* S is fp32 from slot to slot, never rounded on the way. So a prompt cut at a multiple of the chunk gives the same bits
  as in one piece.
* Tiles depend on the shapes of a token and of a chunk and on the type, never on the batch; so a request's bits do not
  depend on the batch either.
* No matrix product loses what its operands have. Keys and queries come into it as they are in memory, and their norms
  are multiplied in afterwards. With bfloat16 inputs fp32 operands go as sums of two bfloat16 numbers, which hold 16
  bits, where rounding them to one would hold 8. With other inputs all products are fp32, in small tiles: exact, not
  fast.
* Decays are exponentials of differences that are at most 0, masked before exp, so that nothing overflows.

# Decode

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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.triton.ragged import find_tile, max_tiles, padded_batch

GATES = 256
"""Gates that a program computes."""

MIN_CHUNK = 16
"""Tokens of the smallest chunk: tensor cores multiply no less."""


class Tiles(NamedTuple):
    """The tiles into which the kernels cut their work.

    Attributes:
        chunk: tokens of a chunk at most; a power of two.
        columns: of a state that a program walks with, at most.
        num_warps, num_stages: of the walk.
        split: fp32 operands of products go as sums of two bfloat16 numbers; the inputs are bfloat16.
    """

    chunk: int
    columns: int
    num_warps: int
    num_stages: int
    split: bool


TILES = {torch.bfloat16: Tiles(chunk=64, columns=32, num_warps=4, num_stages=2, split=True)}
FP32_TILES = Tiles(chunk=16, columns=16, num_warps=8, num_stages=1, split=False)
"""For all other types: larger ones do not fit into registers where products are not the tensor cores'."""


def delta_gates(a: Tensor, b: Tensor, rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gates by themselves, for a rule that takes them. Arguments as for the twin in `hybrid.kernels.reference`. The
    innermost dimension of `a` and `b` is contiguous, as are `rate` and `dt_bias`."""
    tokens, heads = a.shape
    g, beta = a.new_empty(tokens, heads, dtype=torch.float32), b.new_empty(tokens, heads)
    _gates_kernel[(triton.cdiv(tokens * heads, GATES),)](
        a, b, rate, dt_bias, g, beta, tokens * heads, a.stride(0), b.stride(0), HEADS=heads, BLOCK=GATES, num_warps=2
    )
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
    """Arguments as for the twin in `hybrid.kernels.reference`; `state` is written.

    The innermost dimension of `q`, `k`, `v`, `a`, `b` and `state` is contiguous, other strides are free; those of
    tokens in `q`, `k` and `v` are compiled in. `state_write[r]` may equal `state_read[r]`; no other slot is both read
    and written.

    Raises:
        ValueError: `chunk_size` is not a multiple of 16.
    """
    tiles = TILES.get(q.dtype, FP32_TILES)
    chunk = min(chunk_size & -chunk_size, tiles.chunk)  # the largest power of two that divides it
    if chunk < MIN_CHUNK:
        raise ValueError(
            f"chunk_size must be a multiple of {MIN_CHUNK}, got {chunk_size}; use 64, or set "
            "HYBRID_KERNELS=reference for chunks of any size"
        )
    tokens, value_heads, value_dim = v.shape
    key_heads, key_dim = k.shape[1:]
    requests, num_captures = cu_seqlens.numel() - 1, captures.shape[0]
    chunks = max_tiles(tokens, requests, chunk)
    kept = torch.bfloat16 if tiles.split else torch.float32
    matrices = v.new_empty(chunks, value_heads, 2, 2 if tiles.split else 1, chunk, chunk, dtype=kept)
    scales = v.new_empty(chunks, value_heads, 4, chunk, dtype=torch.float32)
    slots = v.new_empty(chunks, dtype=torch.int64)
    output = v.new_empty(v.shape)
    columns = max(min(triton.next_power_of_2(value_dim), tiles.columns), 16)
    common = {
        "VALUE_HEADS": value_heads,
        "GROUP": value_heads // key_heads,
        "KEY_DIM": key_dim,
        "KEYS": max(triton.next_power_of_2(key_dim), 16),
        "CHUNK": chunk,
        "REQUESTS": padded_batch(requests),
        "SPLIT": tiles.split,
    }
    _within_chunks[(chunks * value_heads,)](
        q,
        k,
        a,
        b,
        rate,
        dt_bias,
        matrices,
        scales,
        slots,
        cu_seqlens,
        requests,
        captures,
        num_captures,
        key_dim**-0.5,
        *q.stride()[:2],
        *k.stride()[:2],
        a.stride(0),
        b.stride(0),
        *captures.stride(),
        CAPTURES=padded_batch(num_captures),
        **common,
        num_warps=4,
    )
    _across_chunks[(requests * value_heads * triton.cdiv(value_dim, columns),)](
        q,
        k,
        v,
        matrices,
        scales,
        slots,
        state,
        output,
        cu_seqlens,
        state_read,
        state_write,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *state.stride()[:3],
        VALUE_DIM=value_dim,
        COLUMNS=columns,
        **common,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return output


@triton.jit(do_not_specialize=["num_gates"])
def _gates_kernel(
    a, b, rate, dt_bias, g, beta, num_gates, a_stride, b_stride, HEADS: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = index < num_gates
    token = (index // HEADS).to(tl.int64)
    head = index % HEADS
    x = tl.load(a + token * a_stride + head, mask=exists, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + head, mask=exists, other=0.0).to(tl.float32)
    y = tl.load(b + token * b_stride + head, mask=exists, other=0.0)
    tl.store(g + index, log_decay(x, tl.load(rate + head, mask=exists, other=0.0)), mask=exists)
    tl.store(beta + index, replaced(y), mask=exists)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """The inverse of I + `lower`, `[CHUNK, CHUNK]` fp32 and zero on and above the diagonal.

    Blocks of 16 on the diagonal by substitution, all at once; then pairs of inverted blocks T, U with L below the one
    and left of the other are merged, the new block there being -U L T.
    """
    BLOCK: tl.constexpr = 16
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    block = tl.arange(0, BLOCKS)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    by_block = tl.reshape(lower, [BLOCKS, BLOCK, BLOCKS, BLOCK])
    diagonal = tl.sum(tl.where(same, by_block, 0.0), 2)
    place = tl.arange(0, BLOCK)
    row = place[None, :, None]
    column = place[None, None, :]
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(diagonal)
    for step in tl.static_range(BLOCK - 1):
        # row `step` is done: take it out of the rows below
        factor = tl.sum(tl.where(column == step, diagonal, 0.0), 2)
        done = tl.sum(tl.where(row == step, inverse, 0.0), 1)
        inverse -= factor[:, :, None] * done[:, None, :]
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    at = tl.arange(0, CHUNK)
    for doubling in tl.static_range(2):
        if (BLOCK << doubling) < CHUNK:
            below = at[:, None] // (BLOCK << doubling) == at[None, :] // (BLOCK << doubling) + 1
            below = below & (at[:, None] // (BLOCK << doubling) % 2 == 1)
            right = dot_wide(tl.where(below, lower, 0.0), inverse, SPLIT)
            inverse -= dot_wide(inverse, right, SPLIT)
    return inverse


@triton.jit
def _keep(matrix, tile, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """Write an fp32 tile `[CHUNK, CHUNK]` to memory, or its halves one after the other."""
    at = tl.arange(0, CHUNK)
    place = matrix + at[:, None] * CHUNK + at[None, :]
    if SPLIT:
        high, low = halves(tile)
        tl.store(place, high)
        tl.store(place + CHUNK * CHUNK, low)
    else:
        tl.store(place, tile)


@triton.jit
def _times(matrix, y, CHUNK: tl.constexpr, SPLIT: tl.constexpr):
    """The product of a tile that `_keep` wrote and an fp32 tile."""
    at = tl.arange(0, CHUNK)
    place = matrix + at[:, None] * CHUNK + at[None, :]
    if SPLIT:
        return dot_halves(tl.load(place), tl.load(place + CHUNK * CHUNK), y)
    else:
        return tl.dot(tl.load(place), y, input_precision="ieee")


@triton.jit(do_not_specialize=["num_requests", "num_captures"])
def _within_chunks(
    q,
    k,
    a,
    b,
    rate,
    dt_bias,
    matrices,
    scales,
    slots,
    cu_seqlens,
    num_requests,
    captures,
    num_captures,
    scale,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    a_stride,
    b_stride,
    capture_stride,
    capture_field_stride,
    VALUE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    REQUESTS: tl.constexpr,
    CAPTURES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """M, N and the factors of rows of one chunk and value head, and the slot that captures the state after the chunk.

    matrices: `[chunks, VALUE_HEADS, 2, halves, CHUNK, CHUNK]`, M and N.
    scales: `[chunks, VALUE_HEADS, 4, CHUNK]`, by what rows are multiplied: of K S, of Q S, of K before it meets `new`;
    and S itself (first number).
    slots: `[chunks]`, -1: none.
    """
    index = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    request, tile = find_tile(cu_seqlens, num_requests, index, CHUNK, 1, REQUESTS)
    if request >= num_requests:
        return
    start = tl.load(cu_seqlens + request).to(tl.int64) + tile * CHUNK
    left = tl.load(cu_seqlens + request + 1) - start
    at = tl.arange(0, CHUNK)
    exists = at < left
    if head == 0:
        capture = tl.arange(0, CAPTURES)
        known = capture < num_captures
        field = captures + capture * capture_stride
        here = tl.load(field, mask=known, other=-1) == request
        here = here & (tl.load(field + capture_field_stride, mask=known, other=-1) == (tile + 1) * CHUNK)
        slot = tl.load(field + 2 * capture_field_stride, mask=known, other=-1)
        tl.store(slots + index, tl.max(tl.where(here, slot, -1), 0).to(tl.int64))

    keys = tl.arange(0, KEYS)
    mask = exists[:, None] & (keys < KEY_DIM)[None, :]
    k_place = k + start * k_stride + head // GROUP * k_head_stride + at[:, None] * k_stride + keys[None, :]
    q_place = q + start * q_stride + head // GROUP * q_head_stride + at[:, None] * q_stride + keys[None, :]
    k_tile = tl.load(k_place, mask=mask, other=0.0)
    q_tile = tl.load(q_place, mask=mask, other=0.0)
    x = tl.load(a + (start + at) * a_stride + head, mask=exists, other=0.0).to(tl.float32)
    lost = log_decay(x + tl.load(dt_bias + head).to(tl.float32), tl.load(rate + head))
    decay = tl.cumsum(tl.where(exists, lost, 0.0), 0)
    k_wide = k_tile.to(tl.float32)
    q_wide = q_tile.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k_wide * k_wide, 1) + 1e-6)
    q_norm = tl.rsqrt(tl.sum(q_wide * q_wide, 1) + 1e-6) * scale
    last = tl.sum(tl.where(at == CHUNK - 1, decay, 0.0), 0)
    ratio = tl.exp(tl.where(at[:, None] >= at[None, :], decay[:, None] - decay[None, :], float("-inf")))
    ratio = ratio * k_norm[None, :]

    place = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = CHUNK * CHUNK * (2 if SPLIT else 1)
    scales += place * 4 * CHUNK
    grown = tl.exp(decay)
    tl.store(scales + at, grown * k_norm)
    tl.store(scales + CHUNK + at, grown * q_norm)
    tl.store(scales + 2 * CHUNK + at, tl.exp(last - decay) * k_norm)
    tl.store(scales + 3 * CHUNK, tl.exp(last))

    attended = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * ratio * q_norm[:, None]
    _keep(matrices + (place * 2 + 1) * SIZE, attended, CHUNK, SPLIT)

    beta = replaced(tl.load(b + (start + at) * b_stride + head, mask=exists, other=0.0)).to(tl.float32)
    beta = tl.where(exists, beta, 0.0)
    lower = tl.dot(k_tile, tl.trans(k_tile), input_precision="ieee") * ratio * (beta * k_norm)[:, None]
    lower = tl.where(at[:, None] > at[None, :], lower, 0.0)
    solved = _inverse(lower, CHUNK, SPLIT) * beta[None, :]
    _keep(matrices + place * 2 * SIZE, solved, CHUNK, SPLIT)


@triton.jit
def _across_chunks(
    q,
    k,
    v,
    matrices,
    scales,
    slots,
    state,
    output,
    cu_seqlens,
    state_read,
    state_write,
    q_stride: tl.constexpr,
    q_head_stride,
    k_stride: tl.constexpr,
    k_head_stride,
    v_stride: tl.constexpr,
    v_head_stride,
    state_stride,
    state_head_stride,
    state_key_stride,
    VALUE_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    REQUESTS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The chunks of one request, one after another, for COLUMNS columns of one value head."""
    COLUMN_TILES: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    column = tl.program_id(0) % COLUMN_TILES * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(0) // COLUMN_TILES % VALUE_HEADS
    request = tl.program_id(0) // COLUMN_TILES // VALUE_HEADS
    other = tl.arange(0, REQUESTS)
    earlier = other < request
    lengths = tl.load(cu_seqlens + other + 1, mask=earlier, other=0) - tl.load(
        cu_seqlens + other, mask=earlier, other=0
    )
    first = tl.sum((lengths + CHUNK - 1) // CHUNK, 0).to(tl.int64)
    start = tl.load(cu_seqlens + request).to(tl.int64)
    length = (tl.load(cu_seqlens + request + 1) - start).to(tl.int32)

    at = tl.arange(0, CHUNK)
    key = tl.arange(0, KEYS)
    key_exists = (key < KEY_DIM)[None, :]
    column_exists = (column < VALUE_DIM)[None, :]
    SIZE: tl.constexpr = CHUNK * CHUNK * (2 if SPLIT else 1)
    q += head // GROUP * q_head_stride
    k += head // GROUP * k_head_stride
    v += head * v_head_stride
    state += head * state_head_stride
    place_in_state = key[:, None] * state_key_stride + column[None, :]
    in_state = (key < KEY_DIM)[:, None] & column_exists

    slot = tl.load(state_read + request).to(tl.int64)
    current = tl.load(state + slot * state_stride + place_in_state, mask=in_state, other=0.0)
    for chunk in range((length + CHUNK - 1) // CHUNK):
        place = (first + chunk) * VALUE_HEADS + head
        token = start + chunk * CHUNK
        exists = (at < length - chunk * CHUNK)[:, None]
        k_place = k + token * k_stride + at[:, None] * k_stride + key[None, :]
        v_place = v + token * v_stride + at[:, None] * v_stride + column[None, :]
        q_place = q + token * q_stride + at[:, None] * q_stride + key[None, :]
        k_tile = tl.load(k_place, mask=exists & key_exists, other=0.0)
        v_tile = tl.load(v_place, mask=exists & column_exists, other=0.0)
        q_tile = tl.load(q_place, mask=exists & key_exists, other=0.0)
        k_seen = tl.load(scales + place * 4 * CHUNK + at)
        q_seen = tl.load(scales + place * 4 * CHUNK + CHUNK + at)
        k_kept = tl.load(scales + place * 4 * CHUNK + 2 * CHUNK + at)
        kept = tl.load(scales + place * 4 * CHUNK + 3 * CHUNK)

        wanted = v_tile.to(tl.float32) - dot_narrow(k_tile, current, SPLIT) * k_seen[:, None]
        new = _times(matrices + place * 2 * SIZE, wanted, CHUNK, SPLIT)
        mixed = dot_narrow(q_tile, current, SPLIT) * q_seen[:, None]
        mixed += _times(matrices + (place * 2 + 1) * SIZE, new, CHUNK, SPLIT)
        written = output + (token * VALUE_HEADS + head) * VALUE_DIM + at[:, None] * VALUE_HEADS * VALUE_DIM
        tl.store(written + column[None, :], mixed.to(output.dtype.element_ty), mask=exists & column_exists)
        current = current * kept + dot_narrow(tl.trans(k_tile), new * k_kept[:, None], SPLIT)
        slot = tl.load(slots + first + chunk)
        if slot >= 0:
            tl.store(state + slot * state_stride + place_in_state, current, mask=in_state)
    slot = tl.load(state_write + request).to(tl.int64)
    if slot >= 0:
        tl.store(state + slot * state_stride + place_in_state, current, mask=in_state)


# Gates


@triton.jit
def log_decay(x, rate):
    """`rate * softplus(x)`: the log of what remains of the state. x: fp32, with its bias."""
    grown = tl.exp(x)
    total = 1 + grown
    # log(1 + grown) to the last bits: the rounding of the sum cancels in the quotient, which is 1 next to 1
    softplus = tl.where(total == 1, grown, tl.log(total) * (grown / (total - 1)))
    return rate * tl.where(x > 20, x, softplus)


@triton.jit
def replaced(y):
    """`sigmoid(y)` in the type of `y`: how much of the old value is replaced."""
    return (1 / (1 + tl.exp(-y.to(tl.float32)))).to(y.dtype)


# Products of fp32 tiles on tensor cores for bfloat16: an fp32 number goes as the sum of two bfloat16 numbers. Two of
# them hold 16 bits of a number, and the tensor cores add up their products in fp32, so that about 2**-16 of a product
# is lost, where rounding an operand to bfloat16 loses 2**-9. Without `SPLIT` the products are fp32 as they are.


@triton.jit
def halves(x):
    """An fp32 tile as the sum of two of bfloat16: what its upper 16 bits say, and the rest, rounded."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _side_by_side(x):
    """`[M, N]` fp32 as `[M, 2 * N]` bfloat16, the halves of a number next to each other: one product takes both, and
    no number leaves its thread."""
    high, low = halves(x)
    return tl.reshape(tl.join(high, low), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def _summed(y):
    """`[M, 2 * N]` to `[M, N]`: neighbours added."""
    high, low = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
    return high + low


@triton.jit
def dot_narrow(x, y, SPLIT: tl.constexpr):
    """The product of a tile of the type of the inputs, bfloat16 where they are SPLIT, and an fp32 tile."""
    if SPLIT:
        return _summed(tl.dot(x, _side_by_side(y)))
    else:
        return tl.dot(x.to(tl.float32), y, input_precision="ieee")


@triton.jit
def dot_halves(high, low, y):
    """The product of `high + low`, both bfloat16, and an fp32 tile."""
    both = _side_by_side(y)
    return _summed(tl.dot(high, both, tl.dot(low, both)))


@triton.jit
def dot_wide(x, y, SPLIT: tl.constexpr):
    """The product of two fp32 tiles."""
    if SPLIT:
        x_high, x_low = halves(x)
        y_high, y_low = halves(y)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    else:
        return tl.dot(x, y, input_precision="ieee")


# Decode

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
    """Return where the input of a token that reads slot `read` lies, and those before it, newest first."""
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
    """Return the fraction of the state that remains, and that of the old value that is replaced."""
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
