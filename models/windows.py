"""Sliding-window attention in the engine: what the window holds is part of a sequence's state.

The keys and values of the last `window` tokens are a ring in the sequence's state slot
(`hybrid.kernels.reference.window`), so that tokens before the window exist nowhere, and a checkpoint is all that a hit
needs. docs/windows.md has the reasons.
"""

from typing import Any

import torch
from torch import Tensor

from hybrid.batch import StateSteps
from hybrid.kernels import ops as kernels
from hybrid.kernels.reference import window as twins
from hybrid.spec import StateTensor

WINDOW = "window"
"""Name of the rings of all window layers among the tensors of a state."""


def rings(layers: int, window: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> StateTensor:
    """The rings of a model: one for each of its window layers."""
    return StateTensor(WINDOW, (layers, 2, window, kv_heads, head_dim), dtype)


def window_attention(query: Tensor, *rest: Any) -> Tensor:
    """`reference.window.window_attention`: that of prompts."""
    compiled: Any = kernels.compiled_for("window", query)
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
    window, count = rings.shape[2], len(positions)
    places = positions % window
    if len(steps.read) == len(steps.starts) - 1:  # the usual case: every token is alone
        pages, table = rings, steps.write.clamp(min=0)
        moved = ((steps.read != steps.write) & (steps.write >= 0)).nonzero().squeeze(1)
        if len(moved):
            rings[steps.write[moved]] = rings[steps.read[moved]]
        kernels.store_kv(key, value, rings, steps.write * window + places)  # negative where the ring is not kept
    else:
        pages, table = _one_by_one(key, value, places, rings, steps), torch.arange(count, device=query.device)
    starts = torch.arange(count + 1, device=query.device)
    lengths = (positions + 1).clamp(max=window)
    # one piece of the keys, whatever the batch: a window is short
    y: Tensor = kernels.paged_attention(query, pages, table.unsqueeze(1), starts, lengths, scale, 1, 1)
    return y


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
