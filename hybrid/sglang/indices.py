"""Index tensors as page values of the tree: they stay on their device."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hybrid.tree.pools import PageParts


class IndexPages:
    """Indices of the tokens of consecutive pages, as a sequence of pages.

    A slice is a copy, so that a node that keeps the end of a long prompt does not keep the tensor of all of it.

    Args:
        indices: `[tokens]`, int64; whole pages.
        page_size: tokens per page.
    """

    def __init__(self, indices: torch.Tensor, page_size: int) -> None:
        self._indices = indices
        self._page_size = page_size

    def __len__(self) -> int:
        """Number of pages."""
        return self._indices.numel() // self._page_size

    def __getitem__(self, pages: slice) -> IndexPages:
        start, end, _ = pages.indices(len(self))
        size = self._page_size
        return IndexPages(self._indices[start * size : end * size].clone(), size)

    @property
    def indices(self) -> torch.Tensor:
        """`[tokens]`."""
        return self._indices


def joined(parts: PageParts | Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The indices of all parts in order, `[tokens]`, int64."""
    tensors = [part.indices for part in parts.parts] if isinstance(parts, PageParts) else [*parts]
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64, device=device)
