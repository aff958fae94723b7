"""What leaves the device: each checkpoint that is evicted is offered to the tiers, and each page that such a
checkpoint needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hybrid.cache.chances import Chances
from hybrid.cache.names import name_at, names_upward
from hybrid.cache.restorer import Boundary
from hybrid.key import TOKEN_BYTES, Key
from hybrid.memory.memory import CacheMemory, UnitSizes
from hybrid.tiers.chain import chain
from hybrid.tiers.disk import DiskTier
from hybrid.tiers.host import HostTier
from hybrid.tiers.tier import CHECKPOINT, PAGE, Contents, Name, Note, Offer, Tier, clear_inconsistent
from hybrid.tiers.value import Savings
from hybrid.tree.node import Node, NodeUsage, Root
from hybrid.tree.tree import Tree


class UnreadableError(Exception):
    """Contents could not be read from the device. Nothing was changed."""


class Leaver(NamedTuple):
    """What leaves the device, or a tier: what must be known to offer it to a tier.

    Attributes:
        name: of its copy.
        num_bytes: of its contents.
        read: reads them. They may be on their way to the host then (`CacheMemory.downloads`).
        path: makes `Offer.path`.
        note: of a checkpoint: see `Offer`.
        is_asked: a copy was asked for, however likely it is to be wanted.
    """

    name: Name
    num_bytes: int
    read: Callable[[], Contents]
    path: Callable[[], Iterator[bytes]]
    note: Note | None = None
    is_asked: bool = False


class Departures:
    """Offers to tiers what the tree evicts (`Leaving` of the tree). What host memory drops is offered to the disk.

    Args:
        host, disk: the tiers; None: there is none.
        savings: what copies are likely to save.
        memory: its mover reads contents that leave.
        sizes: bytes of a page and of a checkpoint.
        page_size: tokens per page.

    Attributes:
        chances: of what left to be wanted again.
        num_failures: copies that raised.
    """

    def __init__(
        self,
        host: HostTier | None,
        disk: DiskTier | None,
        savings: Savings,
        memory: CacheMemory,
        sizes: UnitSizes,
        page_size: int,
    ) -> None:
        self.num_failures: int = 0
        self.chances: Chances = Chances(savings.reuse)
        self._host = host
        self._disk = disk
        self._tiers: list[Tier] = [tier for tier in (host, disk) if tier is not None]
        self._wants_ids = any(tier.wants_ids for tier in self._tiers)
        self._savings = savings
        self._memory = memory
        self._sizes = sizes
        self._page_size = page_size
        self._tree: Tree | None = None
        self._is_discarding = False
        self._is_ending = False

    def follow(self, tree: Tree) -> None:
        """Offer what this tree evicts."""
        self._tree = tree

    def discard(self, is_discarding: bool) -> None:
        """Whether what is evicted from now on is to be forgotten."""
        self._is_discarding = is_discarding

    def end(self) -> None:
        """Whatever may be used by a later process is worth writing from now on."""
        self._is_ending = True

    # What the tree evicts

    def checkpoint(self, node: Node) -> None:
        """The checkpoint of a node is about to be evicted."""
        if self._is_discarding or node.slot is None:
            return
        try:
            above, slot, usage = node.checkpoint_above(), node.slot, node.usage
            num_tokens = node.end - (above.end if above is not None else 0)
            group = self.chances.group(usage, bool(node.children or node.page_locks))
            note = Note(usage.kind.value, usage.turn, usage.priority, num_tokens, node.end, group, usage)
            if self._wants_ids:
                path = _path(node)
                note = replace(note, namespace=path.namespace, ids=path.ids)
            self.chances.left(usage, group)
            self._offer(
                Leaver(
                    name=(CHECKPOINT, name_at(node, node.end)),
                    num_bytes=self._sizes.checkpoint,
                    read=partial(_read, self._memory.fetch_checkpoint, slot),
                    path=partial(names_upward, node, node.end),
                    note=note,
                )
            )
        except Exception as error:  # it is evicted without a copy
            self._failed(error)

    def pages(self, node: Node, num_kept: int) -> None:
        """The pages of a node after the first `num_kept` are about to be evicted."""
        if self._is_discarding:
            return
        try:
            fetch, size, end, pages = self._memory.fetch_page, self._page_size, node.end, node.pages
            for page in reversed(pages[num_kept:]):
                name, path = (PAGE, name_at(node, end)), partial(names_upward, node, end - size)
                self._offer(Leaver(name, self._sizes.page, partial(_read, fetch, page), path))
                end -= size
        except Exception as error:  # they are evicted without a copy
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        """An exception that is not of the device may have come between any two lines of a tier's bookkeeping."""
        self.num_failures += 1
        if not isinstance(error, UnreadableError):
            clear_inconsistent(self._tiers)

    # What is offered

    def _offer(self, leaver: Leaver) -> bool:
        """Offer what leaves the device to the tiers, until one has it."""
        kept = any(tier.offer(self._for(tier, leaver)) for tier in self._tiers)
        if self._host is not None and self._disk is not None:
            self._pass_on(self._host, self._disk)
        return kept

    def _for(self, tier: Tier, leaver: Leaver) -> Offer:
        is_certain = self._is_ending or leaver.is_asked
        is_worth_it, value = True, None
        if leaver.note is not None:
            is_worth_it = self._savings.is_worth_copying(leaver.note, tier.cost, is_certain)
            value = partial(self._savings.value, leaver.note, tier.cost)
        read = leaver.read if tier is self._host else partial(self._whole, leaver.read)
        return Offer(leaver.name, leaver.num_bytes, read, leaver.note, is_worth_it, value, leaver.path())

    def _whole(self, read: Callable[[], Contents]) -> bytes:
        """Contents that the host may read: host memory keeps them while they are on their way, a disk cannot."""
        return bytes(self._memory.downloads.wait(read()))

    def would_copy(self, usage: NodeUsage, num_tokens: int, has_below: bool = False) -> bool:
        """Whether a checkpoint would be copied if it left the device.

        Args:
            num_tokens: tokens that a hit saves.
            has_below: others continue from it then.
        """
        note = Note(usage.kind.value, usage.turn, 0, num_tokens, group=self.chances.group(usage, has_below))
        return any(self._savings.is_worth_copying(note, tier.cost, self._is_ending) for tier in self._tiers)

    # What a tier drops, or a file brings

    def _pass_on(self, host: HostTier, disk: DiskTier) -> None:
        """What host memory dropped is offered to the disk."""
        for name, contents, path, note in host.take_dropped():
            read = partial(self._memory.downloads.wait, contents)
            leaver = Leaver(name, len(contents), read, partial(iter, path), note)
            disk.offer(self._for(disk, leaver))

    def let_all_go(self) -> None:
        """What host memory holds goes to disk, where it is worth it."""
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
        names = chain(key.ids[: boundary.num_tokens * TOKEN_BYTES], key.namespace, self._page_size * TOKEN_BYTES)
        usage = boundary.past or self._tree.new_usage(boundary.kind, boundary.turn, key.namespace)
        kind, group = boundary.kind.value, f"{boundary.kind.value} last 0"
        note = Note(kind, boundary.turn, boundary.priority, num_tokens, boundary.num_tokens, group, usage)
        if self._wants_ids:
            note = replace(note, namespace=key.namespace, ids=key.ids)
        checkpoint = Leaver(
            name=(CHECKPOINT, names[end - 1]),
            num_bytes=len(boundary.checkpoint),
            read=partial(bytes, boundary.checkpoint),
            path=partial(_upward, names, end),
            note=note,
            is_asked=True,
        )
        return self._offer(checkpoint) and all(
            self._offer(Leaver((PAGE, names[at]), len(page), partial(bytes, page), partial(_upward, names, at)))
            for at, page in zip(range(end - 1, -1, -1), reversed(boundary.pages), strict=False)
        )


def _read(fetch: Callable[[int], Contents], unit: int) -> Contents:
    try:
        return fetch(unit)
    except Exception as error:
        raise UnreadableError from error


def _upward(names: Sequence[bytes], end: int) -> Iterator[bytes]:
    """The first `end` names, the last first."""
    return reversed(names[:end])


def _path(node: Node) -> Key:
    """The key of all tokens from the root to a node's end."""
    edges, above = [], node
    while above.parent is not None:
        edges.append(above.edge)
        above = above.parent
    assert isinstance(above, Root)
    return Key(b"".join(reversed(edges)), above.namespace)
