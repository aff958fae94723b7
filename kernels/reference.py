"""The kernels in plain torch: correct on every device, fast enough to be the CPU path, and the truth that faster ones
are held to. Each is the twin of a kernel of the same name and signature; the twins of one request's linear attention,
of single rows and of experts lie in files of their own and are named here too.

Packed batches: the new tokens of all requests lie in one row, `cu_seqlens` `[R + 1]` says where each begins, no
padding. Pools are addressed by page ids (`block_table`) and by state slots (`state_read`, `state_write`, `[R]`); a
request reads one slot and writes another, and the two may be equal only for its own slot.

Results do not depend on what else is in the batch: every request's chunks have a shape of their own.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.reference_delta_rule import (
    causal_conv1d,
    causal_conv1d_update,
    chunk_gated_delta_rule,
    gated_delta_step,
    recurrent_gated_delta_rule,
)
from hybrid.kernels.reference_elementwise import (
    add_rms_norm,
    gated_rms_norm,
    l2norm,
    rms_norm,
    rotate,
    sigmoid,
    sigmoid_and_mul,
    silu,
    silu_and_mul,
    softplus,
)
from hybrid.kernels.reference_experts import combine_experts, expert_linear, route_experts, sort_by_expert

__all__ = [
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "combine_experts",
    "copy_states",
    "expert_linear",
    "gated_delta_step",
    "gated_rms_norm",
    "invariant_linear",
    "l2norm",
    "norm_rotate_store",
    "paged_attention",
    "recurrent_gated_delta_rule",
    "rms_norm",
    "route_experts",
    "sigmoid",
    "sigmoid_and_mul",
    "silu",
    "silu_and_mul",
    "softplus",
    "sort_by_expert",
    "store_kv",
]


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of new tokens to their places in the pages.

    Args:
        key, value: `[T, kv_heads, head_dim]`.
        cache: one layer's pages, `[num_pages, 2, page_size, kv_heads, head_dim]`, any strides; written.
        slot_mapping: `[T]` int64, `page * page_size + offset` per token; -1 writes nothing: the page holds the token
            already.
    """
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    if rows.numel() < slot_mapping.numel():
        key, value, slot_mapping = key[rows], value[rows], slot_mapping[rows]
    page_size = cache.shape[2]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    cache[:, 0].index_put_((page, offset), key)
    cache[:, 1].index_put_((page, offset), value)


def copy_states(rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy state slots, or pages, within their pool.

    Args:
        rows: `[N, num_bytes]` uint8, the innermost contiguous; written.
        source, target: `[M]` indices: row `source[i]` goes to row `target[i]`. No target is a source.
    """
    rows[target] = rows[source]


def norm_rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """What comes between projection and attention: q and k normalised per head and rotated, k and v stored.

    Args:
        q: `[T, heads, head_dim]`.
        k, v: `[T, kv_heads, head_dim]`.
        q_scale, k_scale: `[head_dim]` fp32, for `rms_norm`.
        cos, sin: `[T, rotary_dim]`, for `rotate`.
        cache, slot_mapping: as for `store_kv`.

    Returns:
        q, `[T, heads, head_dim]`.
    """
    k = rotate(rms_norm(k, k_scale, eps), cos, sin)
    store_kv(k, v, cache, slot_mapping)
    return rotate(rms_norm(q, q_scale, eps), cos, sin)


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    scale: float,
    chunk_size: int,
    num_splits: int | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention of new tokens over a cached prefix and over themselves, K and V of both in pages.

    The new tokens are the last of their sequence (right-aligned). Decoding is the case of one new token. Here queries
    are taken in chunks that end at multiples of `chunk_size`, each over exactly the keys that it may see, so that a
    token's output is the same bits however the prompt is cut at such multiples.

    Args:
        query: `[T, heads, head_dim]`; `heads` is a multiple of `kv_heads`, head h reads KV head `h // (heads /
            kv_heads)`.
        cache: one layer's pages, `[num_pages, 2, page_size, kv_heads, head_dim]`, any strides.
        block_table: `[R, max_pages]` page ids of each request in order.
        cu_seqlens: `[R + 1]` where each request's new tokens begin.
        seq_lens: `[R]` tokens of each request, new ones included; 0: the request is none, its output zeros.
        num_splits: the keys of a request are taken in so many pieces, which a GPU does side by side; None: in as many
            as keep it busy, and then the last bits depend on the batch. Here there are no pieces.
        visible: `[T, N]` bool, whether a new token sees the n-th new token of its own request, for drafts that form a
            tree; None: it sees those up to itself. The prefix before them it sees in any case.

    Returns:
        `[T, heads, head_dim]`.
    """
    heads, head_dim = query.shape[1:]
    page_size, kv_heads = cache.shape[2:4]
    group = heads // kv_heads
    output = query.new_empty(query.shape)
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if not length:
            output[start:end] = 0
            continue
        pages = block_table[row, : -(-length // page_size)]
        keys = cache[:, 0][pages].view(-1, kv_heads, head_dim).transpose(0, 1)
        values = cache[:, 1][pages].view(-1, kv_heads, head_dim).transpose(0, 1)
        position = length - (end - start)
        while start < end:
            if visible is None:
                stop = min((position // chunk_size + 1) * chunk_size, length)
                count = stop - position
                mask = _causal(count, stop, query.device) if count > 1 else None
            else:
                stop, count = length, end - start
                mask = torch.ones(count, length, dtype=torch.bool, device=query.device)
                mask[:, position:] = visible[start:end, :count]
            grouped = query[start : start + count].reshape(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
            mixed = F.scaled_dot_product_attention(
                grouped,
                keys[:, None, :stop].expand(-1, group, -1, -1),
                values[:, None, :stop].expand(-1, group, -1, -1),
                attn_mask=mask,
                scale=scale,
            )
            output[start : start + count] = mixed.permute(2, 0, 1, 3).reshape(count, heads, head_dim)
            start, position = start + count, stop
    return output


def invariant_linear(x: Tensor, weight: Tensor, decode_start: int) -> Tensor:
    """`x @ weight.T`; the kernel's rows depend on neither their number nor their place.

    Args:
        x: `[T, in]`.
        weight: `[out, in]`, any strides.
        decode_start: rows before it belong to prompts, rows from it on are one token each.
    """
    return F.linear(x, weight)


def _causal(count: int, length: int, device: torch.device) -> Tensor:
    """`[count, length]`: whether each of the last `count` tokens may see each of `length`. A view of one buffer."""
    rows = 1 << (count - 1).bit_length()
    width = max(1024, 1 << (length - 1).bit_length())
    end = width + count
    return _causal_buffer(rows, width, device)[:count, end - length : end]


@lru_cache(maxsize=4)
def _causal_buffer(rows: int, width: int, device: torch.device) -> Tensor:
    return torch.ones(rows, width + rows, dtype=torch.bool, device=device).tril_(width)
