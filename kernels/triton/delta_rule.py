"""The gated delta rule over a packed batch, in chunks: the prefill of a linear-attention layer in two launches.

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
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybrid.kernels.triton.common.gates import log_decay, replaced
from hybrid.kernels.triton.common.ragged import find_tile, max_tiles, padded_batch
from hybrid.kernels.triton.common.split import dot_halves, dot_narrow, dot_wide, halves

GATES = 256
"""Gates that a program computes."""

MIN_CHUNK = 16
"""Tokens of the smallest chunk: tensor cores multiply no less."""


class Tiles(NamedTuple):
    """How the kernels cut their work.

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
