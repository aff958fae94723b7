"""SGLang's keys, indices and pools, as keys, page values and prices of the tree.

Token ids of SGLang have 64 bits, and stand-ins for images use them all; ids of the tree have 32. So a token of SGLang
is `WORDS` ids of the tree, and every position there is that many times as large. Nothing is looked at token by token.
Index tensors are kept as they are, on their device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from hybrid.key import TOKEN_BYTES, Key
from hybrid.mirror.page_parts import PageParts
from hybrid.tree.node import Node
from hybrid.units import Prices

WORDS = array("q").itemsize // TOKEN_BYTES
"""Ids of the tree per token of SGLang."""

SMALL = 16
"""A slice is copied when what it is a part of is more than this many times as long: 128 bytes of indices per token at
most, where a token has tens of thousands of bytes of KV."""


def key_of(key: Any, page_size: int) -> Key:
    """The key of the whole pages of one of SGLang's `RadixKey`.

    Args:
        key: its ids, up to its limit, in the namespace of its extra key and its salt.
        page_size: tokens per page.
    """
    return key_of_ids(key.token_ids, len(key), page_size, key.extra_key, key.cache_salt)


def key_of_ids(
    ids: Sequence[int], num_tokens: int, page_size: int, extra_key: str | None, cache_salt: str | None
) -> Key:
    """The key of the whole pages of the first `num_tokens` ids."""
    if not (isinstance(ids, array) and ids.typecode == "q"):
        ids = array("q", ids)
    view = memoryview(ids)[: num_tokens - num_tokens % page_size]
    return Key(view.tobytes(), namespace_of(extra_key, cache_salt))


def namespace_of(extra_key: str | None, cache_salt: str | None) -> str:
    """One name for both, which no other pair has."""
    if not cache_salt:
        return "" if extra_key is None else f"+{extra_key}"
    return f"{'' if extra_key is None else len(extra_key)}:{extra_key or ''}{cache_salt}"


class IndexPages:
    """Indices of the tokens of consecutive pages, as a sequence of pages.

    A slice that is a small part of a tensor is a copy, so that a node that keeps the end of a long prompt does not keep
    the tensor of all of it. Larger ones share the memory, which is never written, and cut nothing until they are read.

    Args:
        indices: `[tokens]`, int64; whole pages.
        page_size: tokens per page.
        first, end: the pages of `indices` that are meant; None: all.
    """

    __slots__ = ("_end", "_first", "_indices", "_num_kept", "_page_size")

    def __init__(self, indices: torch.Tensor, page_size: int, first: int = 0, end: int | None = None) -> None:
        self._indices = indices
        self._page_size = page_size
        self._num_kept = indices.numel() // page_size  # pages whose indices are in memory for these
        self._first = first
        self._end = self._num_kept if end is None else end

    def __len__(self) -> int:
        """Number of pages."""
        return self._end - self._first

    def __getitem__(self, pages: slice) -> IndexPages:
        start, end, _ = pages.indices(self._end - self._first)
        if SMALL * (end - start) < self._num_kept:
            return IndexPages(self.view(start, end).clone(), self._page_size)
        return IndexPages(self._indices, self._page_size, self._first + start, self._first + end)

    def view(self, start: int, end: int) -> torch.Tensor:
        """The indices of pages `[start, end)`, `[tokens]`, without a copy: to be read and not kept."""
        if end - start == self._num_kept:
            return self._indices
        size, first = self._page_size, self._first
        return self._indices[(first + start) * size : (first + end) * size]


class FreedIndices:
    """Receives what a tree lets go of (`hybrid.tree.node.Released`), as the tensors to be freed: views, since the
    memory of these is not kept.

    Attributes:
        tensors: the indices, each `[tokens]`.
    """

    __slots__ = ("_num_pages", "tensors")

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._num_pages = 0

    def __len__(self) -> int:
        """Number of pages."""
        return self._num_pages

    def extend(self, pages: PageParts) -> None:
        """Receive pages."""
        self.take(pages.parts, 0)

    def take(self, parts: list[IndexPages], start: int) -> None:
        """Receive the pages of parts, without the first `start` pages of the first part."""
        views, num_pages = [], 0
        for part in parts:
            end = len(part)
            views.append(part.view(start, end))
            num_pages += end - start
            start = 0
        self.tensors += views
        self._num_pages += num_pages


def between(start: int, node: Node | None, device: torch.device) -> torch.Tensor:
    """The indices from a position on the path of a node, in tokens of the tree, to the node's end, `[tokens]`."""
    tensors: list[torch.Tensor] = []
    while node is not None and node.parent is not None and node.end > start:
        run = node.run
        first, size = run.start, run.page_size
        overlaps = run.pages.overlaps((max(start, first) - first) // size, (node.end - first) // size)
        tensors[:0] = [part.view(low, high) for part, low, high in overlaps]
        node = run.parent
    return joined(tensors, device)


def joined(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Indices one after the other, `[tokens]`, int64."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.int64, device=device)


def prices_of(params: Any, anchors: bool) -> Prices:
    """Bytes of a page and of a state, and of all of them where paths are to have anchors.

    Args:
        params: SGLang's `CacheInitParams`, with its pools.
    """
    allocator = params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    kv_bytes = pool.get_kv_size_bytes()
    total = sum(kv_bytes) if isinstance(kv_bytes, tuple) else kv_bytes
    states = params.req_to_token_pool.mamba_pool
    page = max(1, int(total) * params.page_size // max(1, pool.size))
    state = max(1, int(states.get_kv_size_bytes()) // max(1, states.size))
    are_apart = allocator.mamba_full_cache_donor() is None
    memory = int(total) + are_apart * state * states.size
    return Prices(page, state, anchors * memory, are_apart)
