"""The pool of pages: keys and values of full attention."""

import torch

from hybrid.pool import IndexPool
from hybrid.spec import HybridSpec


class PagePool(IndexPool):
    """Pages of K and V, page-major: a page holds all layers, so that a run of pages is a contiguous piece of bytes.

    Args:
        num_pages: how many.
        page_size: tokens per page.

    Attributes:
        kv: `[num_pages, layers, 2, page_size, kv_heads, head_dim]`; index 2: keys, values.
    """

    def __init__(self, spec: HybridSpec, num_pages: int, page_size: int, device: torch.device) -> None:
        super().__init__(num_pages, 0, "page")
        self.page_size = page_size
        shape = (num_pages, spec.page_layers, 2, page_size, spec.kv_heads, spec.head_dim)
        self.kv = torch.empty(shape, dtype=spec.kv_dtype, device=device)

    def layer(self, index: int) -> torch.Tensor:
        """One layer's `[num_pages, 2, page_size, kv_heads, head_dim]`, a view."""
        return self.kv[:, index]
