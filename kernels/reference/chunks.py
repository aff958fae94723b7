"""How the tokens of a packed batch are laid out in chunks, for the chunked rules."""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class ChunkLayout(NamedTuple):
    """How packed tokens lie in chunks.

    Attributes:
        spans: chunk indices `[first, last)` of each request.
        rows: for every place of every chunk its token, or T for none; None when the chunks are just the tokens.
        tokens: for every token its place; None likewise.
    """

    spans: tuple[tuple[int, int], ...]
    rows: Tensor | None
    tokens: Tensor | None


@lru_cache(maxsize=32)  # every layer of a step asks for the same one
def chunk_layout(starts: tuple[int, ...], chunk_size: int) -> ChunkLayout:
    """Where the tokens of requests that begin at `starts` lie in chunks; the last start is the end."""
    spans: list[tuple[int, int]] = []
    rows: list[int] = []
    tokens: list[int] = []
    first = 0
    for start, end in pairwise(starts):
        count = -(-(end - start) // chunk_size)
        spans.append((first, first + count))
        rows += [*range(start, end)] + [starts[-1]] * (count * chunk_size - (end - start))
        tokens += range(first * chunk_size, first * chunk_size + end - start)
        first += count
    if len(rows) == starts[-1]:
        return ChunkLayout(tuple(spans), None, None)
    return ChunkLayout(tuple(spans), torch.tensor(rows), torch.tensor(tokens))


@lru_cache(maxsize=256)
def above_diagonal(size: int, device: torch.device) -> Tensor:
    """`[size, size]` bool, true where the column is larger than the row."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu_(1)
