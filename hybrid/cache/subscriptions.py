"""Those who follow what a cache has: what the tree, host memory and the disk take and give up goes to their feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakMethod

from hybrid.events.change import CHECKPOINT, DEVICE, DISK, EVERYTHING, HOST, PAGES, Change
from hybrid.events.feed import Feed
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.disk import DiskTier
from hybrid.tiers.host import HostTier
from hybrid.tiers.tier import Note
from hybrid.tree.names import ids_between
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree


class Subscriptions:
    """The feeds of a cache. While there is one it watches the tree (`hybrid.tree.values.Watcher`), else nothing does.

    Args:
        memory: whose pages and checkpoints have sizes.
        host, disk: whose copies are seen, too; None: there are none.
        check: a method of the cache, which raises in a thread that may not use it.

    Attributes:
        feeds: that are open.
    """

    def __init__(
        self, memory: CacheMemory, host: HostTier | None, disk: DiskTier | None, check: Callable[[], None]
    ) -> None:
        self.feeds: tuple[Feed, ...] = ()
        self._owner = WeakMethod(check)  # without a circle: a cache that is dropped is freed at once
        sizes = memory.sizes
        self._page_bytes, self._checkpoint_bytes = (sizes.page, sizes.checkpoint) if sizes else (0, 0)
        self._host, self._disk = host, disk
        self._with_values = False
        self._tree: Tree | None = None

    def follow(self, tree: Tree) -> None:
        """Watch this tree from now on; what the one before had has gone."""
        if self._tree is not None:
            self._add(Change(False, EVERYTHING, b"", 0))
            for change in self._host_copies():
                self._add(change)
            if self._disk is not None:
                self._disk.tell_all()
        self._tree = tree
        tree.watcher = self if self.feeds else None

    def subscribe(self, limit: int, with_values: bool) -> Feed:
        """Open a feed that remembers up to `limit` changes."""
        assert self._tree is not None
        feed = Feed(self._all, self._close, limit, with_values)
        self.feeds = (*self.feeds, feed)
        self._with_values = any(one.with_values for one in self.feeds)
        self._tree.watcher = self
        if self._host is not None:
            self._host.on_change = partial(self.copy, HOST)
        if self._disk is not None:
            self._disk.on_change = partial(self.copy, DISK)
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
            if self._host is not None:
                self._host.on_change = None
            if self._disk is not None:
                self._disk.on_change = None

    def _add(self, change: Change) -> None:
        for feed in self.feeds:
            feed.add(change)

    # What the tree does

    def inserted(self, node: Node, num_existing: int, adopted: bool) -> None:
        """Record that a node has got the pages after the first `num_existing` tokens, and, if `adopted`, a
        checkpoint."""
        if num_existing < node.end:
            self._add(self._pages(node, num_existing))
        if adopted:
            self._add(self._checkpoint(node))

    def checkpoint(self, node: Node) -> None:
        """Record that the checkpoint of a node is about to be evicted."""
        assert self._tree is not None
        self._add(Change(False, CHECKPOINT, self._tree.names.at(node, node.end), node.end))

    def pages(self, node: Node, num_kept: int) -> None:
        """Record that the pages of a node after the first `num_kept` are about to be evicted."""
        self._add(Change(False, PAGES, self._names(node, node.start + num_kept * node.run.page_size), node.end))

    def copy(self, tier: str, born: bool, name: bytes, note: Note | None, num_bytes: int) -> None:
        """Record that a copy of a checkpoint has come to a tier, or goes."""
        self._add(_copy(tier, born, name, note, num_bytes if born else 0))

    # What there is

    def _pages(self, node: Node, start: int) -> Change:
        assert self._tree is not None
        names, parent = self._names(node, start), self._tree.names.at(node, start)
        ids = ids_between(node.run, start, node.end)
        return Change(True, PAGES, names, node.end, DEVICE, self._page_bytes, None, parent, ids)

    def _names(self, node: Node, start: int) -> bytes:
        """The names at the ends of a node's pages after `start` tokens."""
        assert self._tree is not None
        return b"".join(self._tree.names.between(node, start, node.end, self._tree.page_size))

    def _checkpoint(self, node: Node) -> Change:
        assert self._tree is not None
        value = self._tree.candidates.value(node) if self._with_values else None
        name = self._tree.names.at(node, node.end)
        return Change(True, CHECKPOINT, name, node.end, DEVICE, self._checkpoint_bytes, value)

    def _all(self) -> Iterator[Change]:
        assert self._tree is not None
        self._check()
        for _, node in self._tree.nodes():
            yield self._pages(node, node.start)
            if node.slot is not None:
                yield self._checkpoint(node)
        yield from self._host_copies()
        if self._disk is not None:
            yield from (_copy(DISK, True, *one) for one in self._disk.checkpoints())

    def _host_copies(self) -> Iterator[Change]:
        if self._host is not None:
            yield from (_copy(HOST, True, *one) for one in self._host.checkpoints())


def _copy(tier: str, born: bool, name: bytes, note: Note | None, num_bytes: int) -> Change:
    """Describe the birth of a copy of a checkpoint, or its death."""
    return Change(born, CHECKPOINT, name, note.end if note is not None else 0, tier, num_bytes)
