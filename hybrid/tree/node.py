"""The data types of the tree: its nodes, its locks, and the results of its calls."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """Why a checkpoint was put where it is; `PAGES` for a node that never had one.

    A spare checkpoint (`INTERVAL`) was put there only because memory was free: until a request has used it, it is
    evicted before all others.
    """

    BRANCH = "branch"
    TURN_END = "turn_end"
    PROMPT_END = "prompt_end"
    INTERVAL = "interval"
    USER = "user"
    PAGES = "pages"


@dataclass(slots=True)
class NodeUsage:
    """How a node has been used.

    Attributes:
        created: tick at which it was inserted.
        last_used: tick of its last use; 0 for a spare checkpoint that no request has used yet.
        hits: number of requests that resumed from its checkpoint.
        kind: why its checkpoint was put there.
        used_at: number of requests that had come when it was last used.
        priority: the highest that a request gave it.
        turn: number of turn ends before it on its path.
        notes: the policy's own data.
    """

    created: int
    last_used: int
    hits: int = 0
    kind: Kind = Kind.BRANCH
    used_at: int = 0
    priority: int = 0
    turn: int = 0
    notes: Any = None


class Node:
    """An edge, its pages, and perhaps the checkpoint at its end.

    Attributes:
        parent: None for the root of a namespace, and for a node that was removed.
        former_parent: the parent of a node that was removed.
        edge: the bytes of the edge's token ids.
        pages: page ids of the edge, one per page.
        end: tokens from the root to this node's end.
        newest: the child inserted last, if it is still there: the first one to try on a long path of single children.
        slot: state slot of the checkpoint at `end`; None for a tombstone.
        page_locks, state_locks: locks on this node.
        holds: page locks on it, plus its children with a positive count: see `hybrid.tree.locks`.
        lost_checkpoint: it had a checkpoint, which was evicted or not admitted; `usage` is that checkpoint's.
        chain: hash of the path from the root, cached by `hybrid.tree.ghosts`; None until it is needed.
    """

    __slots__ = (
        "chain",
        "children",
        "edge",
        "end",
        "former_parent",
        "holds",
        "lost_checkpoint",
        "newest",
        "page_locks",
        "pages",
        "parent",
        "slot",
        "state_locks",
        "usage",
    )  # fmt: skip

    def __init__(self, parent: Node | None, edge: bytes, pages: array[int], end: int, usage: NodeUsage) -> None:
        self.parent: Node | None = parent
        self.former_parent: Node | None = None
        self.edge: bytes = edge
        self.pages: array[int] = pages
        self.end: int = end
        self.children: dict[bytes, Node] = {}
        self.newest: Node | None = None
        self.slot: int | None = None
        self.page_locks: int = 0
        self.holds: int = 0
        self.state_locks: int = 0
        self.usage: NodeUsage = usage
        self.lost_checkpoint: bool = False
        self.chain: tuple[bytes, bytes] | None = None


class Match(NamedTuple):
    """How much of a key the tree has.

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


class History(NamedTuple):
    """How much of a key the tree has had, what was evicted included.

    Attributes:
        num_tokens: length of the known prefix, at least the page hit.
        turn: number of turn ends on the path before the key's own.
        gone: usage of the evicted checkpoints beyond the usable hit, by their number of tokens.
    """

    num_tokens: int
    turn: int
    gone: dict[int, NodeUsage]


class Checkpoint(NamedTuple):
    """A state slot, and the number of tokens after which it was captured.

    Attributes:
        kind: why it was put there.
        priority: priority of its request, for policies that use it.
        turn: number of turn ends before it on its path.
    """

    slot: int
    num_tokens: int
    kind: Kind = Kind.BRANCH
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

    def __init__(self, namespace: str, usage: NodeUsage) -> None:
        super().__init__(None, b"", array("i"), 0, usage)
        self.namespace: str = namespace


@dataclass(slots=True)
class Released:
    """What the tree let go of. The caller owns it now."""

    pages: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class Lock:
    """Protects pages, or a checkpoint, from eviction until it is released, once.

    Attributes:
        owner: who made it, and releases it.
        node: what it is on; None once it was released.
        is_pin: it is counted among what is pinned.
    """

    __slots__ = ("is_pin", "node", "owner")

    def __init__(self, owner: object, node: Node) -> None:
        self.owner: object = owner
        self.node: Node | None = node
        self.is_pin: bool = False


class PageLock(Lock):
    """Protects the pages of a node, and of every node above it."""

    __slots__ = ()


class StateLock(Lock):
    """Protects the checkpoint of one node, and its pages with it."""

    __slots__ = ()
