"""The offer of evicted units to the tiers: each checkpoint, and each page that such a checkpoint needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hybrid.cache.restorer import Boundary
from hybrid.cache.stats import CacheStats
from hybrid.key import Key
from hybrid.memory.memory import CacheMemory, UnitSizes
from hybrid.tiers.disk import DiskTier
from hybrid.tiers.host import HostTier
from hybrid.tiers.tier import CHECKPOINT, PAGE, Contents, Name, Note, Offer, Tier, clear_inconsistent
from hybrid.tiers.value import Reuse, Savings
from hybrid.tree.names import Names
from hybrid.tree.node import Node, NodeUsage, Root
from hybrid.tree.tree import Tree

MAX_HITS = 3
"""Checkpoints with more hits than this count as equal."""

MAX_WATCHED = 1 << 16
"""Checkpoints that left and are watched; beyond this many the one that left first is forgotten."""


class UnreadableError(Exception):
    """Contents could not be read from the device. Nothing was changed."""


class EvictedUnit(NamedTuple):
    """An evicted page or checkpoint of the device, or of a tier, as it is offered to a tier.

    Attributes:
        name: of its copy.
        num_bytes: of its contents.
        read: reads them. They may be on their way to the host then (`CacheMemory.downloads`).
        path: makes `Offer.path`.
        note: of a checkpoint: see `Offer`.
        is_asked: a copy was asked for, however likely it is to be wanted.
        checksum: see `Offer`.
    """

    name: Name
    num_bytes: int
    read: Callable[[], Contents]
    path: Callable[[], Iterator[bytes]]
    note: Note | None = None
    is_asked: bool = False
    checksum: int | None = None


class ReuseTracker:
    """The checkpoints that left the device, of which it counts those that a request wanted afterwards, whether they
    were kept elsewhere or not. A group has the kind, whether anything continues from it, and the hits.

    Args:
        reuse: counts them by groups.
    """

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse
        self._watched: dict[int, tuple[NodeUsage, str]] = {}  # by the identity of the usage
        self._order: deque[int] = deque()

    @staticmethod
    def group(usage: NodeUsage, has_below: bool) -> str:
        """Name the group of a checkpoint, from which others continue or not."""
        spare = " spare" if usage.last_used == 0 else ""
        return f"{usage.kind.value} {'inner' if has_below else 'last'} {min(usage.hits, MAX_HITS)}{spare}"

    def count_evicted(self, usage: NodeUsage, group: str) -> None:
        """Watch a checkpoint that leaves the device."""
        self._reuse.count_evicted(group)
        if id(usage) not in self._watched:
            self._order.append(id(usage))
        self._watched[id(usage)] = usage, group
        while len(self._watched) > MAX_WATCHED:
            self._watched.pop(self._order.popleft(), None)

    def count_requested(self, usage: NodeUsage) -> None:
        """Count a checkpoint from which a request would resume, and which is not on the device."""
        watched = self._watched.pop(id(usage), None)
        if watched is not None:
            self._reuse.count_requested(watched[1])


class Offloader:
    """The way of what the tree evicts to the tiers (`Leaving` of the tree), and of what host memory drops to the disk.

    Args:
        host, disk: the tiers; None: there is none.
        savings: what copies are likely to save.
        memory: its mover reads contents that leave.
        sizes: bytes of a page and of a checkpoint.
        page_size: tokens per page.
        stats: counts copies that raise.

    Attributes:
        reuse: how often what left was wanted again.
    """

    def __init__(
        self,
        host: HostTier | None,
        disk: DiskTier | None,
        savings: Savings,
        memory: CacheMemory,
        sizes: UnitSizes,
        page_size: int,
        stats: CacheStats,
    ) -> None:
        self.reuse: ReuseTracker = ReuseTracker(savings.reuse)
        self._host = host
        self._disk = disk
        self._tiers: list[Tier] = [tier for tier in (host, disk) if tier is not None]
        self._wants_ids = any(tier.wants_ids for tier in self._tiers)
        self._savings = savings
        self._memory = memory
        self._sizes = sizes
        self._page_size = page_size
        self._stats = stats
        self._names = Names(page_size)
        self._tree: Tree | None = None
        self._is_discarding = False
        self._is_ending = False

    def follow(self, tree: Tree) -> None:
        """Offer what this tree evicts."""
        self._tree = tree

    def discard(self, is_discarding: bool) -> None:
        """Say whether what is evicted from now on is to be forgotten."""
        self._is_discarding = is_discarding

    def end(self) -> None:
        """Say that whatever a later process may use is worth writing from now on."""
        self._is_ending = True

    # What the tree evicts

    def checkpoint(self, node: Node) -> None:
        """Offer the checkpoint of a node, which is about to be evicted."""
        if self._is_discarding or node.slot is None:
            return
        try:
            above, slot, usage = node.checkpoint_above(), node.slot, node.usage
            num_tokens = node.end - (above.end if above is not None else 0)
            group = self.reuse.group(usage, bool(node.children or node.page_locks))
            note = Note(usage.kind.value, usage.turn, usage.priority, num_tokens, node.end, group, usage)
            if self._wants_ids:
                path = _path(node)
                note = replace(note, namespace=path.namespace, ids=path.ids)
            self.reuse.count_evicted(usage, group)
            self._offer(
                EvictedUnit(
                    name=(CHECKPOINT, self._names.at(node, node.end)),
                    num_bytes=self._sizes.checkpoint,
                    read=partial(_read, self._memory.contents.fetch_checkpoint, slot),
                    path=partial(self._names.upward, node, node.end),
                    note=note,
                )
            )
        except Exception as error:  # it is evicted without a copy
            self._failed(error)

    def pages(self, node: Node, num_kept: int) -> None:
        """Offer the pages of a node after the first `num_kept`, which are about to be evicted."""
        if self._is_discarding:
            return
        try:
            fetch, size, end, pages = self._memory.contents.fetch_page, self._page_size, node.end, node.pages
            for page in reversed(pages[num_kept:]):
                name, path = (PAGE, self._names.at(node, end)), partial(self._names.upward, node, end - size)
                self._offer(EvictedUnit(name, self._sizes.page, partial(_read, fetch, page), path))
                end -= size
        except Exception as error:  # they are evicted without a copy
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Count a copy that raised. An exception that is not of the device may have come between any two lines of a
        tier's bookkeeping."""
        self._stats.tier_failures += 1
        if not isinstance(error, UnreadableError):
            clear_inconsistent(self._tiers)

    # What is offered

    def _offer(self, unit: EvictedUnit) -> bool:
        """Offer what leaves the device to the tiers, until one has it. What host memory drops for it goes to the disk
        before the unit itself does: the disk takes pages of checkpoints that it has."""
        for tier in self._tiers:
            kept = tier.offer(self._for(tier, unit))
            if tier is self._host and self._disk is not None:
                self._pass_on(self._host, self._disk)
            if kept:
                return True
        return False

    def _for(self, tier: Tier, unit: EvictedUnit) -> Offer:
        is_certain = self._is_ending or unit.is_asked
        is_worth_it, value = True, None
        if unit.note is not None:
            is_worth_it = self._savings.is_worth_copying(unit.note, tier.cost, is_certain)
            value = partial(self._savings.value, unit.note, tier.cost)
        read = unit.read if tier is self._host else partial(self._whole, unit.read)
        return Offer(unit.name, unit.num_bytes, read, unit.note, is_worth_it, value, unit.path(), unit.checksum)

    def _whole(self, read: Callable[[], Contents]) -> bytes:
        """Contents that the host may read: host memory keeps them while they are on their way, a disk cannot."""
        return bytes(self._memory.downloads.wait(read()))

    def would_copy(self, usage: NodeUsage, num_tokens: int, has_below: bool = False) -> bool:
        """Tell whether a checkpoint would be copied if it left the device.

        Args:
            num_tokens: tokens that a hit saves.
            has_below: others continue from it then.
        """
        note = Note(usage.kind.value, usage.turn, 0, num_tokens, group=self.reuse.group(usage, has_below))
        return any(self._savings.is_worth_copying(note, tier.cost, self._is_ending) for tier in self._tiers)

    # What a tier drops, or a file brings

    def _pass_on(self, host: HostTier, disk: DiskTier) -> None:
        """Offer to the disk what host memory dropped."""
        for name, copy, path, note in host.take_dropped():
            read = partial(self._memory.downloads.wait, copy.contents)
            unit = EvictedUnit(name, len(copy), read, partial(iter, path), note, checksum=copy.checksum)
            disk.offer(self._for(disk, unit))

    def flush_to_disk(self) -> None:
        """Move to disk what host memory holds and is worth it."""
        if self._host is not None and self._disk is not None:
            self._host.drop_all()
            self._pass_on(self._host, self._disk)

    def keep(self, boundary: Boundary, num_tokens: int) -> bool:
        """Keep copies of a boundary that the device has no memory for. False: not all of it is kept.

        Args:
            num_tokens: tokens that a hit saves.
        """
        assert self._tree is not None
        key, end = boundary.key, boundary.num_tokens // self._page_size
        found = self._tree.peek(key, boundary.num_tokens)
        names = self._names.of(key, boundary.num_tokens, found.deepest, found.num_page_tokens)
        usage = boundary.past or self._tree.new_usage(boundary.kind, boundary.turn)
        kind, group = boundary.kind.value, f"{boundary.kind.value} last 0"
        note = Note(kind, boundary.turn, boundary.priority, num_tokens, boundary.num_tokens, group, usage)
        if self._wants_ids:
            note = replace(note, namespace=key.namespace, ids=key.ids)
        checkpoint = EvictedUnit(
            name=(CHECKPOINT, names[end - 1]),
            num_bytes=len(boundary.checkpoint),
            read=partial(bytes, boundary.checkpoint),
            path=partial(_upward, names, end),
            note=note,
            is_asked=True,
        )
        return self._offer(checkpoint) and all(
            self._offer(EvictedUnit((PAGE, names[at]), len(page), partial(bytes, page), partial(_upward, names, at)))
            for at, page in zip(range(end - 1, -1, -1), reversed(boundary.pages), strict=False)
        )


def _read(fetch: Callable[[int], Contents], unit: int) -> Contents:
    try:
        return fetch(unit)
    except Exception as error:
        raise UnreadableError from error


def _upward(names: Sequence[bytes], end: int) -> Iterator[bytes]:
    """Yield the first `end` names, the last first."""
    return reversed(names[:end])


def _path(node: Node) -> Key:
    """Make the key of all tokens from the root to a node's end."""
    edges, above = [], node
    while above.parent is not None:
        edges.append(above.edge)
        above = above.parent
    assert isinstance(above, Root)
    return Key(b"".join(reversed(edges)), above.namespace)
