"""Latent attention (MLA; DeepSeek-AI, "DeepSeek-V2", 2024): pages hold one short row for each token, which all heads
share, and of which keys and values are products.

The products are moved to the queries and to what is seen: queries are compared with the rows, and the rows are summed.
So the same kernels serve as for other attention, with one head of keys whose values are the keys themselves.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.kernels import ops as kernels
from hybrid.kernels.ops import linear
from hybrid.models.attention import attend_to_pages, copy_keys_and_values
from hybrid.models.layers import Linear, RMSNorm, Rotary, rotate, weight
from hybrid.models.mixers import Context, Mixer
from hybrid.models.weights import Layouts, Source
from hybrid.spec import TokenTensor


class LatentAttention(Mixer):
    """A full-attention layer; what keys and values are made of is in pages.

    Args:
        scale: of the products of queries and keys; None: one over the root of a key's size.
        gated: what a head gives has a gate.

    Attributes:
        key_up, value_up: what makes keys and values of a token's row, without the part that is rotated,
            `[heads * size, kv_lora_rank]`. Adapters do not change them.
    """

    def __init__(self, config: Any, scale: float | None = None, gated: bool = False) -> None:
        super().__init__()
        self.heads: int = config.num_attention_heads
        self.rank: int = config.kv_lora_rank
        self.sizes: tuple[int, int] = (config.qk_nope_head_dim, config.qk_rope_head_dim)
        self.scale: float = sum(self.sizes) ** -0.5 if scale is None else scale
        size, bias, queries = config.hidden_size, config.attention_bias, self.heads * sum(self.sizes)
        short: int | None = getattr(config, "q_lora_rank", None)
        if short is None:
            self.q_proj = Linear(size, queries)
        else:
            self.q_a_proj = Linear(size, short, bias)
            self.q_a_layernorm = RMSNorm(short, 1e-6)
            self.q_b_proj = Linear(short, queries)
        self.is_short: bool = short is not None
        self.kv_a_proj_with_mqa = Linear(size, self.rank + self.sizes[1], bias)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6)
        self.key_up = weight(self.heads * self.sizes[0], self.rank)
        self.value_up = weight(self.heads * config.v_head_dim, self.rank)
        self.o_proj = Linear(self.heads * config.v_head_dim, size, bias)
        self.g_proj: Linear | None = Linear(size, self.heads) if gated else None
        self.turned_key_up: Tensor | None = None

    def kept(self, dtype: torch.dtype) -> tuple[TokenTensor]:
        """Return the rows of tokens."""
        return (TokenTensor("kv", (1, 1), (1, self.rank + self.sizes[1]), dtype),)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; writes the rows of its tokens to the slots of the batch."""
        batch, rotary, kv = context.batch, context.rotary, context.kv
        plain, turned = self._queries(x, batch).unflatten(-1, (self.heads, -1)).split(self.sizes, dim=-1)
        row, turned_row = self.kv_a_proj_with_mqa(x, batch).split((self.rank, self.sizes[1]), dim=-1)
        turned, turned_row = _rotated(turned, rotary), _rotated(turned_row.unsqueeze(1), rotary)
        rows = torch.cat((self.kv_a_layernorm(row), turned_row.flatten(1)), dim=-1).unsqueeze(1)
        parts = zip(_by_head(plain, self._key_up(), batch), turned.unbind(1), strict=True)
        q = torch.cat([part for both in parts for part in both], dim=-1).unflatten(-1, (self.heads, -1))
        pages = kv[:, self.row].expand(-1, 2, *kv.shape[3:])  # values lie where keys do
        q = _stored(q, rows, pages, batch)
        seen = attend_to_pages(q, pages, batch, self.scale, context.chunk_size)[..., : self.rank]
        y = torch.cat(_by_head(seen, self.value_up.unflatten(0, (self.heads, -1)), batch), dim=-1)
        if self.g_proj is not None:
            heads = y.unflatten(-1, (self.heads, -1)).flatten(0, 1)
            y = _gated(heads, self.g_proj(x, batch).flatten()).view(y.shape)
        return self.o_proj(y, batch)

    def _queries(self, x: Tensor, batch: Batch) -> Tensor:
        if not self.is_short:
            return self.q_proj(x, batch)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x, batch)), batch)

    def _key_up(self) -> Tensor:
        """`[heads, kv_lora_rank, size]`, made once."""
        if self.turned_key_up is None:
            self.turned_key_up = self.key_up.detach().unflatten(0, (self.heads, -1)).transpose(1, 2).contiguous()
        return self.turned_key_up


def _by_head(x: Tensor, weight: Tensor, batch: Batch) -> list[Tensor]:
    """The products `[T, out]` of rows `[T, heads, in]` with the matrices of their heads, `[heads, out, in]`."""
    return [linear(own, matrix, batch.decode_start) for own, matrix in zip(x.unbind(1), weight, strict=True)]


def _stored(q: Tensor, rows: Tensor, pages: Tensor, batch: Batch) -> Tensor:
    """Write rows `[T, 1, size]` to the slots of the batch. Returns the queries."""
    compiled: Any = kernels.compiled_for("elementwise", q)
    if compiled is not None:
        none = q.new_empty(len(q), 0)
        q = compiled.rotate_store(q, rows, rows, none, none, pages, batch.slot_mapping)
    else:
        kernels.store_kv(rows, rows, pages, batch.slot_mapping)
    copy_keys_and_values(pages, batch.copies)
    return q


def _gated(x: Tensor, gate: Tensor) -> Tensor:
    """Rows times the logistic function of their gate, `[rows]`."""
    compiled: Any = kernels.compiled_for("elementwise", x)
    if compiled is not None:
        y: Tensor = compiled.gate_rows(x, gate)
        return y
    return kernels.sigmoid_and_mul(x, gate.unsqueeze(1).expand(x.shape).contiguous())


def _rotated(x: Tensor, rotary: Rotary) -> Tensor:
    """Heads `[T, heads, size]`, whose pairs of numbers are rotated, if the model has angles; then the first ones of all
    pairs come before the second ones."""
    if not rotary.cos.shape[-1]:
        return x
    compiled: Any = kernels.compiled_for("elementwise", x)
    if compiled is not None:
        y: Tensor = compiled.rotate_pairs(x, rotary.cos, rotary.sin)
        return y
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), rotary.cos, rotary.sin)


def latent_layouts(parameter: str, config: Any) -> Layouts | None:
    """The layout of a parameter that is stored as a part of another one; None: it is not."""
    prefix, _, name = parameter.rpartition(".")
    if name not in ("key_up", "value_up"):
        return None
    sizes = config.qk_nope_head_dim, config.v_head_dim
    rows = torch.arange(config.num_attention_heads * sum(sizes), device="cpu").view(-1, sum(sizes))
    own = rows.split(sizes, dim=1)[name == "value_up"]
    return ((Source(f"{prefix}.kv_b_proj.weight", rows=own.flatten()),),)
