"""Drafts from the cache: what came next where the same tokens were before."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.speculation.drafter import Drafter, History
from hybrid.tree.tree import Tree


class CacheDrafter(Drafter):
    """Continues a history as the tree does.

    Args:
        tree: of the cache.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "cache"

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        """The continuation of the whole history in its namespace."""
        return (), ()
