"""Attention of prompts over sliding windows whose keys and values are state: that of pages, of which one is made for
each request."""

import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels.cpu.attention import DTYPES, attend_in_window
from hybrid.kernels.cpu.sizes import BLOCK
from hybrid.kernels.reference import window as twins


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rings: Tensor,
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    state_read: Tensor,
    state_write: Tensor,
    captures: Tensor,
    scale: float,
    chunk_size: int,
) -> Tensor:
    """`reference.window.window_attention`; a token's bits depend on its position and on what it sees alone, wherever
    the prompt is cut."""
    places = (cu_seqlens, seq_lens, state_read, state_write, captures)
    if query.dtype not in DTYPES or any(each.dtype != query.dtype for each in (key, value, rings)):
        return twins.window_attention(query, key, value, rings, *places, scale, chunk_size)
    window = rings.shape[2]

    def attend(rows: Tensor, both: Tensor, base: int) -> Tensor:
        page = F.pad(both, (0, 0, 0, 0, base % BLOCK, 0))  # blocks end at fixed positions of the sequence
        return attend_in_window(rows, page, scale, window)

    return twins.over_rings(query, key, value, rings, *places, attend)
