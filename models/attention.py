"""Attention as the model families share it: full attention, whose keys and values are in pages, and sliding windows,
whose keys and values are part of a sequence's state.

The keys and values of the last `window` tokens are a ring in the sequence's state slot
(`hybrid.kernels.reference.attention`), so that tokens before the window exist nowhere, and a checkpoint is all that a
hit needs. docs/windows.md has the reasons.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid.batch import Batch, StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.packed_kv import is_packed
from hybrid.kernels.reference import attention as twins
from hybrid.models.layers import Linear, Projections, RMSNorm, Rotary, norm_eps, rotate
from hybrid.models.mixers import Context, Mixer, StateMixer, joined
from hybrid.spec import StateTensor, TokenTensor

WINDOW = "window"
"""Name of the rings of all window layers among the tensors of a state."""


class Heads(Mixer):
    """The parts of every kind of attention: projections, and a norm of queries and keys per head.

    Args:
        query_parts: what the projection of queries gives for each head, in sizes of a head.
        first: tokens of a sequence before this one are not seen.

    Attributes:
        scale: of the products of queries and keys.
    """

    def __init__(self, config: Any, query_parts: int = 1, first: int = 0) -> None:
        super().__init__()
        head_dim = head_dim_of(config)
        self.first: int = first
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = head_dim
        self.scale: float = head_dim**-0.5
        size, bias = config.hidden_size, bool(getattr(config, "attention_bias", False))
        self.q_proj = Linear(size, query_parts * self.heads * head_dim, bias)
        self.k_proj = Linear(size, self.kv_heads * head_dim, bias)
        self.v_proj = Linear(size, self.kv_heads * head_dim, bias)
        self.o_proj = Linear(self.heads * head_dim, size, bias)
        self.inputs = Projections(self.q_proj, self.k_proj, self.v_proj)
        self.add_norms(config)

    def add_norms(self, config: Any) -> None:
        """Make the norms of queries and keys."""
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, offset=1.0)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, offset=1.0)

    def of_heads(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Keys or values `[T, kv_heads * head_dim]` as `[T, kv_heads, head_dim]`."""
        return tuple(part.unflatten(-1, (self.kv_heads, self.head_dim)) for part in parts)


class Attention(Heads):
    """A full-attention layer; keys and values are in pages."""

    def kept(self, dtype: torch.dtype) -> tuple[TokenTensor]:
        """Return the keys and values."""
        return (TokenTensor.kv(1, self.kv_heads, self.head_dim, dtype),)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; writes its keys and values to the slots of the batch."""
        q, k, v = self.inputs(x, context.batch)
        q = self.store(q.unflatten(-1, (self.heads, -1)), k, v, context)
        return self.o_proj(self.attend(q, context).flatten(1), context.batch)

    def store(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Write keys and values to the slots of the batch.

        Args:
            q: `[T, heads, head_dim]`.
            k, v: `[T, kv_heads * head_dim]`.

        Returns:
            The queries, normalised and rotated.
        """
        norms = (self.q_norm.factor(), self.k_norm.factor(), self.q_norm.eps)
        batch, rotary, pages, heads = context.batch, context.rotary, self.pages(context), self.of_heads(k, v)
        q = kernels.norm_rotate_store(q, *heads, *norms, rotary.cos, rotary.sin, pages, batch.slot_mapping)
        copy_keys_and_values(pages, batch.copies)
        return q

    def attend(self, q: Tensor, context: Context) -> Tensor:
        """Attention of queries, `[T, heads, head_dim]`."""
        return attend_to_pages(q, self.pages(context), context.batch, self.scale, context.chunk_size, self.first)

    def pages(self, context: Context) -> Tensor:
        """The pages of this layer, `[num_pages, 2, page_size, kv_heads, head_dim]`."""
        return context.kv[:, self.row]


def attend_to_pages(q: Tensor, pages: Tensor, batch: Batch, scale: float, chunk_size: int, first: int = 0) -> Tensor:
    """Attention of queries, `[T, heads, head_dim]`. Prompts and decoded tokens have different kernels on a GPU: a tile
    of queries, or splits of the keys in parallel.

    Args:
        pages: of one layer.
        scale: of the products of queries and keys.
        first: tokens of a sequence before this one are not seen.
    """
    parts = []
    for part in batch.groups:
        places = (part.block_table, part.cu_seqlens, part.seq_lens, scale, chunk_size, part.num_splits)
        parts.append(kernels.paged_attention(q[part.rows], pages, *places, first))
    return joined(parts)


class PlainAttention(Attention):
    """A full-attention layer without norms; keys and values are in pages.

    Args:
        scale: of the products of queries and keys; None: one over the root of a head's size.
    """

    def __init__(self, config: Any, scale: float | None = None) -> None:
        super().__init__(config)
        if scale is not None:
            self.scale = scale

    def add_norms(self, config: Any) -> None:
        """Make none."""

    def store(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Write keys and values to the slots of the batch. Returns the queries. Where the model has angles, queries and
        keys are rotated."""
        batch, rotary, pages, (k, v) = context.batch, context.rotary, self.pages(context), self.of_heads(k, v)
        compiled: Any = kernels.compiled_for("elementwise", q)
        if compiled is not None:
            q = compiled.rotate_store(q, k, v, rotary.cos, rotary.sin, pages, batch.slot_mapping)
        else:
            if rotary.cos.shape[-1]:
                q, k = (rotate(each, rotary.cos, rotary.sin) for each in (q, k))
            kernels.store_kv(k, v, pages, batch.slot_mapping)
        copy_keys_and_values(pages, batch.copies)
        return q


class NormedAttention(Attention):
    """A full-attention layer whose queries and keys have norms with plain weights."""

    def add_norms(self, config: Any) -> None:
        """Make the norms of queries and keys."""
        self.q_norm = RMSNorm(self.head_dim, norm_eps(config))
        self.k_norm = RMSNorm(self.head_dim, norm_eps(config))


def head_dim_of(config: Any) -> int:
    """Size of an attention head: as the configuration has it, else as many as fit a row."""
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


class WindowAttention(Heads, StateMixer):
    """A layer with a sliding window; the keys and values in it are in state slots.

    Args:
        window: its size in tokens.
    """

    def __init__(self, config: Any, window: int) -> None:
        super().__init__(config)
        self.window = window

    def kept(self, dtype: torch.dtype) -> tuple[StateTensor]:
        """Return the ring of keys and values."""
        return (StateTensor(WINDOW, (1, 2, self.window, self.kv_heads, self.head_dim), dtype),)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Run the layer on `[T, hidden_size]`; reads and writes the state slots of the batch."""
        batch, rotary = context.batch, context.rotary
        q, k, v = self.inputs(x, batch)
        q, (k, v) = q.unflatten(-1, (self.heads, -1)), self.of_heads(k, v)
        q, k = self.turned(q, k, rotary.windows or rotary)
        return self.o_proj(self.mix((q, k, v, batch.positions), context).flatten(1), batch)

    def turned(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalised and rotated."""
        normed = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(each, rotary.cos, rotary.sin) for each in normed)
        return q, k

    def attend(self, *args: Any) -> Tensor:
        """Attention of prompts. The arguments are those of `window_attention`, the scale aside."""
        return window_attention(*args[:-1], self.scale, args[-1])

    def prefill(self, inputs: tuple[Tensor, ...], context: Context) -> Tensor:
        """Attention of prompts: `inputs` are their queries, keys, values and positions."""
        prompts, (starts, *slots) = context.batch.prefills, context.batch.prompt_slots
        assert prompts is not None
        rings = self.rings(context.state)
        return self.attend(*inputs[:3], rings, starts, prompts.seq_lens, *slots, context.chunk_size)

    def step(self, inputs: tuple[Tensor, ...], steps: StateSteps, state: dict[str, Tensor]) -> Tensor:
        """The same for decoded tokens."""
        q, k, v, positions = inputs
        return decode_windows(q, k, v, positions, self.rings(state), steps, self.scale)

    def rings(self, state: dict[str, Tensor]) -> Tensor:
        """The rings of this layer, `[slots, 2, window, kv_heads, head_dim]`."""
        return state[WINDOW][:, self.row]


class PlainWindowAttention(WindowAttention):
    """A layer with a sliding window and without norms."""

    def add_norms(self, config: Any) -> None:
        """Make none."""

    def turned(self, q: Tensor, k: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated."""
        return rotate(q, rotary.cos, rotary.sin), rotate(k, rotary.cos, rotary.sin)


def copy_keys_and_values(pages: Tensor, copies: Tensor | None) -> None:
    """Copy keys and values of one layer from slots to others.

    Args:
        pages: `[num_pages, 2, page_size, kv_heads, head_dim]`; written.
        copies: `Batch.copies`.
    """
    if copies is None:
        return
    if is_packed(pages):
        pages = pages.view(torch.uint8)  # rows are copied as they are
    (source, target), page_size = copies, pages.shape[2]
    kept = pages[source // page_size, :, source % page_size]
    kernels.store_kv(kept[:, 0], kept[:, 1], pages, target)


def window_attention(query: Tensor, *rest: Any) -> Tensor:
    """`reference.attention.window_attention`: that of prompts."""
    compiled: Any = kernels.compiled_for("attention", query)
    y: Tensor = (compiled or twins).window_attention(query, *rest)
    return y


def decode_windows(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, rings: Tensor, steps: StateSteps, scale: float
) -> Tensor:
    """Attention of decoded tokens, each over the last `window` tokens up to itself.

    A ring is a page of `window` tokens: attention over pages takes its places from the first to the last, those of the
    tokens that there are. A token gets the same bits as a draft and alone.

    Args:
        query: `[N, heads, head_dim]`.
        key, value: `[N, kv_heads, head_dim]`.
        positions: `[N]`.
        rings: one layer's rings, `[slots, 2, window, kv_heads, head_dim]`; written.
        steps: where the rings of tokens are read and written. A token that is no draft and whose ring is not kept is
            none that was asked for, and its output is anything.

    Returns:
        `[N, heads, head_dim]`.
    """
    compiled: Any = kernels.compiled_for("attention", query)
    if compiled is not None:
        found: Tensor = compiled.decode_windows(query, key, value, positions, rings, *steps, scale)
        return found
    # one piece of the keys, whatever the batch: a window is short
    y: Tensor = kernels.paged_attention(query, *ring_pages(key, value, positions, rings, steps), scale, 1, 1)
    return y


def ring_pages(
    key: Tensor, value: Tensor, positions: Tensor, rings: Tensor, steps: StateSteps
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keep the keys and values of decoded tokens, as `decode_windows` does.

    Returns:
        The rings as pages, and the table, starts and lengths of the sequences of which each token is one, as for
        `reference.paged_attention`.
    """
    window, count = rings.shape[2], len(positions)
    places = positions % window
    if len(steps.read) == len(steps.starts) - 1:  # the usual case: every token is alone
        pages, table = rings, steps.write.clamp(min=0)
        moved = ((steps.read != steps.write) & (steps.write >= 0)).nonzero().squeeze(1)
        if len(moved):
            rings[steps.write[moved]] = rings[steps.read[moved]]
        kernels.store_kv(key, value, rings, steps.write * window + places)  # negative where the ring is not kept
    else:
        pages, table = _one_by_one(key, value, places, rings, steps), torch.arange(count, device=key.device)
    starts = torch.arange(count + 1, device=key.device)
    return pages, table.unsqueeze(1), starts, (positions + 1).clamp(max=window)


def _one_by_one(key: Tensor, value: Tensor, places: Tensor, rings: Tensor, steps: StateSteps) -> Tensor:
    """The rings after each of several tokens of a sequence, `[N, 2, window, kv_heads, head_dim]`, most of which are not
    kept. A slot that is read may be one that a token before wrote."""
    each = rings.new_empty((len(places), *rings.shape[1:]))
    written: dict[int, int] = {}
    places_, reads, writes = places.tolist(), steps.read.tolist(), steps.write.tolist()
    for token, (place, read, write) in enumerate(zip(places_, reads, writes, strict=True)):
        if read < 0:
            each[token] = each[token - 1]
        else:
            each[token] = each[written[read]] if read in written else rings[read]
        each[token, 0, place], each[token, 1, place] = key[token], value[token]
        if write >= 0:
            written[write] = token
    for slot, token in written.items():
        rings[slot] = each[token]
    return each
