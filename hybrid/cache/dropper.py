"""Dropping prefixes from which passes gave NaN or infinity, here and in all tiers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from hybrid.cache.allocator import Allocator
from hybrid.cache.pins import Pins
from hybrid.cache.tiers import Tiers
from hybrid.key import TOKEN_BYTES, Key, names_of
from hybrid.memory.digests import ContentReader
from hybrid.memory.memory import CacheMemory
from hybrid.tiers.tier import CHECKPOINT, PAGE, Name
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree

log: logging.Logger = logging.getLogger(__name__)


class Dropper:
    """Drops what requests should not resume from any more. Copies of it are dropped, too, and none are made.

    What a running request holds stays until it gives it back; pins of what is dropped end.

    Args:
        tree: what is cached.
        memory: the contents.
        allocator: frees what the tree gives up.
        pins: those of the cache.
        tiers: have copies; None: there are none.
    """

    def __init__(self, tree: Tree, memory: CacheMemory, allocator: Allocator, pins: Pins, tiers: Tiers | None) -> None:
        self._tree = tree
        self._memory = memory
        self._allocator = allocator
        self._pins = pins
        self._tiers = tiers

    def find_damaged(self, key: Key, num_tokens: int) -> int | Node | None:
        """The number of pages before the first one of a prefix that holds NaN or infinity, or else the node of its
        checkpoint, if that does; None: neither does."""
        found = self._tree.peek(key, num_tokens)
        reader = self._memory.mover
        if found.deepest is None or not isinstance(reader, ContentReader):
            return None
        for at, page in enumerate(self._tree.pages(found.deepest, found.num_page_tokens)):
            if not self._is_sound(reader, page=page):
                return at
        node = found.checkpoint
        if node is None or self._is_sound(reader, slot=node.slot):
            return None
        return node

    def drop_damaged(self, key: Key, num_tokens: int) -> bool:
        """See `HybridCache.drop_damaged`."""
        found = self.find_damaged(key, num_tokens)
        if isinstance(found, Node):
            self._unpin([found])
            with self._without_copies():
                self._allocator.evict(partial(self._tree.evict_checkpoint, found))
            self._drop_copies([(CHECKPOINT, self._names(key, found.end)[-1])])
        elif found is not None:
            self.drop(key, num_tokens, key.whole(found * self._tree.page_size, self._tree.page_size))
        return found is not None

    def drop(self, key: Key, num_tokens: int, num_kept: int = 0) -> None:
        """Drop the pages and checkpoints of a key up to `num_tokens`, but for those of its first `num_kept` tokens
        (whole units of it), and whatever continues from them."""
        nodes = self._tree.nodes_beyond(key, num_tokens, num_kept)
        self._unpin(nodes)
        with self._without_copies():
            self._allocator.evict(partial(self._tree.evict_nodes, nodes, num_kept))
        names = self._names(key, num_tokens)[num_kept // self._tree.page_size :]
        self._drop_copies((kind, name) for name in names for kind in (PAGE, CHECKPOINT))

    def _is_sound(self, reader: ContentReader, *, page: int | None = None, slot: int | None = None) -> bool:
        """Whether a page, or the checkpoint in a slot, holds finite numbers. What cannot be read does not."""
        try:
            pages = [] if page is None else [reader.read_page(page)]
            return self._memory.are_finite(pages, None if slot is None else reader.read_checkpoint(slot))
        except Exception:
            log.warning("what a pass with NaN or infinity resumed from cannot be read, and is dropped", exc_info=True)
            return False

    def _unpin(self, nodes: list[Node]) -> None:
        gone = set(nodes)
        for pin in [pin for pin, lock in self._pins.locks.items() if lock.node in gone]:
            self._pins.remove(pin)

    def _names(self, key: Key, num_tokens: int) -> list[bytes]:
        return names_of(key.ids[: num_tokens * TOKEN_BYTES], key.namespace, self._tree.page_size * TOKEN_BYTES)

    def _drop_copies(self, names: Iterable[Name]) -> None:
        if self._tiers is not None:
            self._tiers.drop(names)

    @contextmanager
    def _without_copies(self) -> Iterator[None]:
        """Make no copies of what is evicted meanwhile."""
        if self._tiers is None:
            yield
            return
        self._tiers.offloader.discard(True)
        try:
            yield
        finally:
            self._tiers.offloader.discard(False)
