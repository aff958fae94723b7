"""What a tree is made of, and what it answers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid.tree.policy import BRANCH, Usage


class Node:
    """An edge, its pages, and perhaps the checkpoint at its end.

    Attributes:
        parent: None for the root of a namespace, and for a node that was removed.
        was_below: the parent of a node that was removed.
        edge: the bytes of the edge's token ids.
        pages: page ids of the edge, one per page.
        end: tokens from the root to this node's end.
        newest: the child that came last, if it is still there: on a long way of single children the one to try first.
        slot: state slot of the checkpoint at `end`; None for a tombstone.
        lost_checkpoint: it had a checkpoint, which was evicted or not admitted; `usage` is that checkpoint's.
        chain: hash of the way from the root, once somebody has asked for it (`hybrid.ghosts`).
    """

    __slots__ = (
        "chain",
        "children",
        "edge",
        "end",
        "lost_checkpoint",
        "newest",
        "page_locks",
        "pages",
        "parent",
        "slot",
        "state_locks",
        "usage",
        "was_below",
    )  # fmt: skip

    def __init__(self, parent: Node | None, edge: bytes, pages: array[int], end: int, usage: Usage) -> None:
        self.parent = parent
        self.was_below: Node | None = None
        self.edge = edge
        self.pages = pages
        self.end = end
        self.children: dict[bytes, Node] = {}
        self.newest: Node | None = None
        self.slot: int | None = None
        self.page_locks = 0
        self.state_locks = 0
        self.usage = usage
        self.lost_checkpoint = False
        self.chain: tuple[int, bytes] | None = None


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


class Past(NamedTuple):
    """What was once known of a key.

    Attributes:
        num_tokens: it was known to here: at least the page hit.
        turn: turn ends before its own on its way.
        gone: the use of evicted checkpoints beyond the page hit, by their tokens.
    """

    num_tokens: int
    turn: int
    gone: dict[int, Usage]


class Checkpoint(NamedTuple):
    """A state slot, and the number of tokens after which it was captured.

    Attributes:
        kind: why it was put there: "branch", "turn_end", "prompt_end", "user"; "interval" for a spare one, put there
            only because memory was free, and the first to go until somebody has used it.
        priority: how much its request matters, for policies that ask.
        turn: turn ends before it on its way.
    """

    slot: int
    num_tokens: int
    kind: str = BRANCH
    priority: int = 0
    turn: int = 0


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
