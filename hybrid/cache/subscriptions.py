"""Those who follow what a cache has: what the tree takes and gives up goes to their feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import WeakMethod

from hybrid.cache.names import name_at
from hybrid.events.change import CHECKPOINT, EVERYTHING, NAME_BYTES, PAGES, Change
from hybrid.events.feed import Feed
from hybrid.key import TOKEN_BYTES
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.tier import of_namespace
from hybrid.tree.node import Node, Root
from hybrid.tree.tree import Tree


class Subscriptions:
    """The feeds of a cache. While there is one it watches the tree (`hybrid.tree.pools.Watcher`), else nothing does.

    Args:
        memory: whose pages and checkpoints have sizes.
        check: a method of the cache, which raises in a thread that may not use it.

    Attributes:
        feeds: that are open.
    """

    def __init__(self, memory: CacheMemory, check: Callable[[], None]) -> None:
        self.feeds: tuple[Feed, ...] = ()
        self._owner = WeakMethod(check)  # without a circle: a cache that is dropped is freed at once
        sizes = memory.sizes
        self._page_bytes, self._checkpoint_bytes = (sizes.page, sizes.checkpoint) if sizes else (0, 0)
        self._tree: Tree | None = None

    def follow(self, tree: Tree) -> None:
        """Watch this tree from now on; what the one before had has gone."""
        if self._tree is not None:
            self._add(Change(False, EVERYTHING, b"", 0))
        self._tree = tree
        tree.watcher = self if self.feeds else None

    def subscribe(self, limit: int) -> Feed:
        """Open a feed that remembers up to `limit` changes."""
        assert self._tree is not None
        feed = Feed(self._all, self._close, limit)
        self.feeds = (*self.feeds, feed)
        self._tree.watcher = self
        return feed

    def _check(self) -> None:
        check = self._owner()
        if check is not None:
            check()

    def _close(self, feed: Feed) -> None:
        self._check()
        self.feeds = tuple(other for other in self.feeds if other is not feed)
        if not self.feeds and self._tree is not None:
            self._tree.watcher = None

    def _add(self, change: Change) -> None:
        for feed in self.feeds:
            feed.add(change)

    # What the tree does

    def inserted(self, node: Node, num_existing: int, adopted: bool) -> None:
        """A node has got the pages after the first `num_existing` tokens, and, if `adopted`, a checkpoint."""
        if num_existing < node.end:
            self._add(self._pages(node, num_existing))
        if adopted:
            self._add(self._checkpoint(node))

    def checkpoint(self, node: Node) -> None:
        """The checkpoint of a node is about to be evicted."""
        self._add(Change(False, CHECKPOINT, name_at(node, node.end), node.end))

    def pages(self, node: Node, num_kept: int) -> None:
        """The pages of a node after the first `num_kept` are about to be evicted."""
        start = node.start + num_kept * node.run.page_size
        self._add(Change(False, PAGES, _names(node, start), node.end))

    # What the tree has

    def _pages(self, node: Node, start: int) -> Change:
        run = node.run
        names = _names(node, start)
        if start > run.start:
            at = (start - run.start) // run.page_size * NAME_BYTES
            parent = bytes(run.names[at - NAME_BYTES : at])
        else:
            above = run.nodes[0].parent
            assert above is not None
            parent = of_namespace(above.namespace) if isinstance(above, Root) else name_at(above, start)
        ids = bytes(run.ids[(start - run.start) * TOKEN_BYTES : (node.end - run.start) * TOKEN_BYTES])
        return Change(True, PAGES, names, node.end, num_bytes=self._page_bytes, parent=parent, ids=ids)

    def _checkpoint(self, node: Node) -> Change:
        assert self._tree is not None
        value = self._tree.candidates.value(node)
        name = name_at(node, node.end)
        return Change(True, CHECKPOINT, name, node.end, num_bytes=self._checkpoint_bytes, value=value)

    def _all(self) -> Iterator[Change]:
        assert self._tree is not None
        self._check()
        for _, node in self._tree.nodes():
            yield self._pages(node, node.start)
            if node.slot is not None:
                yield self._checkpoint(node)


def _names(node: Node, start: int) -> bytes:
    """The names of the pages of a node's edge from `start` on."""
    run = node.run
    first, last = (start - run.start) // run.page_size, (node.end - run.start) // run.page_size
    if len(run.names) < last * NAME_BYTES:
        name_at(node, node.end)
    return bytes(run.names[first * NAME_BYTES : last * NAME_BYTES])
