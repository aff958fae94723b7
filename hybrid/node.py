"""What a tree is made of, and what it answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid.eviction import Usage

MAX_LOST = 4096
"""A node remembers at most so many evicted children: they serve explanations only."""


class Node:
    """An edge, its pages, and perhaps the checkpoint at its end.

    Attributes:
        parent: None for the root of a namespace, and for a node that was removed.
        edge: the bytes of the edge's token ids.
        pages: page ids of the edge, one per page.
        end: tokens from the root to this node's end.
        slot: state slot of the checkpoint at `end`; None for a tombstone.
        lost_checkpoint: it had a checkpoint, which was evicted.
        lost_children: hashes of the first pages of children, or of own tails, that were evicted.
    """

    __slots__ = (
        "children",
        "edge",
        "end",
        "lost_checkpoint",
        "lost_children",
        "page_locks",
        "pages",
        "parent",
        "slot",
        "state_locks",
        "usage",
    )  # fmt: skip

    def __init__(self, parent: Node | None, edge: bytes, pages: array[int], end: int, usage: Usage) -> None:
        self.parent = parent
        self.edge = edge
        self.pages = pages
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.slot: int | None = None
        self.page_locks = 0
        self.state_locks = 0
        self.usage = usage
        self.lost_checkpoint = False
        self.lost_children: set[int] = set()

    def remember_lost(self, first_page: bytes) -> None:
        """Remember that what went on with this page was evicted."""
        if len(self.lost_children) >= MAX_LOST:
            self.lost_children.pop()
        self.lost_children.add(hash(first_page))


class Match(NamedTuple):
    """What the tree has of a key.

    Attributes:
        num_tokens: the usable hit: there is a checkpoint at this length (0: the empty prefix).
        num_page_tokens: the page hit, at least `num_tokens`.
        branching_len: the deepest position on the grid, beyond `num_tokens`, that has pages and no checkpoint; None if
            there is none.
        checkpoint: the node whose checkpoint it is; None for the empty prefix.
        deepest: the node of the last matched page; None when no page matched. Its edge may go on beyond the match.
    """

    num_tokens: int
    num_page_tokens: int
    branching_len: int | None
    checkpoint: Node | None
    deepest: Node | None


class Checkpoint(NamedTuple):
    """A state slot, and the number of tokens after which it was captured.

    Attributes:
        spare: put there only because memory was free: the first to go until somebody has used it.
    """

    slot: int
    num_tokens: int
    spare: bool = False


class Inserted(NamedTuple):
    """The outcome of an insert.

    Attributes:
        node: the node that ends at the inserted length.
        num_existing: tokens whose pages the tree had already; the pages offered for them stay the caller's.
        adopted: the tree now owns the checkpoint's slot. Otherwise the slot stays the caller's.
    """

    node: Node
    num_existing: int
    adopted: bool


class Root(Node):
    """The empty prefix of a namespace. Owns nothing."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str, usage: Usage) -> None:
        super().__init__(None, b"", array("i"), 0, usage)
        self.namespace = namespace


@dataclass(slots=True)
class Released:
    """What the tree let go of. The caller owns it now."""

    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class Lock:
    """Keeps pages, or a checkpoint, from eviction until it is released, once."""

    __slots__ = ("node", "owner")

    def __init__(self, owner: object, node: Node) -> None:
        self.owner = owner
        self.node: Node | None = node


class PageLock(Lock):
    """Keeps the pages of a node, and of every node above it."""

    __slots__ = ()


class StateLock(Lock):
    """Keeps the checkpoint of one node, and its pages with it."""

    __slots__ = ()
