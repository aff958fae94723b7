"""The data types of the tree: its nodes, its locks, and the results of its calls."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple

from hybrid.key import NAME_BYTES, TOKEN_BYTES
from hybrid.tree.values import PageValues, SlotValue, move_end, page_ids


class Kind(StrEnum):
    """Why a checkpoint was put where it is; `PAGES` for a node that never had one."""

    BRANCH = "branch"
    TURN_END = "turn_end"
    PROMPT_END = "prompt_end"
    ANCHOR = "anchor"
    INTERVAL = "interval"
    USER = "user"
    PAGES = "pages"

    __hash__ = str.__hash__  # that of an enumeration is slow, and classes of checkpoints are looked up by it


@dataclass(slots=True, weakref_slot=True, eq=False)
class Tenant:
    """A sender of requests, whose priorities weigh among its own checkpoints.

    Attributes:
        number: unique in its tree.
        has_priorities: a request of it gave a priority other than 0.
        num_pages, num_checkpoints: what the nodes have that count for it.
    """

    number: int
    has_priorities: bool = False
    num_pages: int = 0
    num_checkpoints: int = 0


NO_TENANT = Tenant(0)
"""The owner of roots, which have nothing."""


@dataclass(slots=True)
class NodeUsage:
    """The uses of a node.

    Attributes:
        created: tick at which it was inserted.
        last_used: tick of its last use; 0 for a spare checkpoint that no request has used yet.
        hits: number of requests that resumed from its checkpoint.
        kind: why its checkpoint was put there.
        used_at: number of requests that had come when it was last used.
        stored_at: number of requests that had come when its checkpoint was stored.
        priority: the highest that a request of its tenant gave it.
        tenant: whose request stored it; None: none has stored a checkpoint.
        turn: number of turn ends before it on its path.
        notes: the policy's own data.
        reported_below: whether something continued from it by the last report to the policy; None: there was none, or
            something else has changed since.
        shadow: what the tree's guard knows of its checkpoint; None: nothing.
        expected_at: number of requests that will have come when it is used next, as its client has said; 0: it has not.
        path: of the request that left it (`hybrid.tree.paths.Path`), or that left what has gone after it; None: not
            known.
    """

    created: int
    last_used: int
    hits: int = 0
    kind: Kind = Kind.BRANCH
    used_at: int = 0
    stored_at: int = 0
    priority: int = 0
    turn: int = 0
    notes: Any = None
    tenant: Tenant | None = None
    reported_below: bool | None = None
    shadow: Any = None
    expected_at: int = 0
    path: Any = None

    def stored_for(self, tenant: Tenant, priority: int) -> None:
        """Record that a request of a tenant stores the checkpoint, with a priority: what another tenant gave ends."""
        if self.tenant is not tenant:
            self.tenant, self.priority = tenant, priority
        elif priority > self.priority:
            self.priority = priority
        tenant.has_priorities |= priority != 0


class Run:
    """Consecutive nodes, each but the first the child of the one before, with the ids and pages of all their edges.

    A run grows and shrinks at its end only. Cutting an edge in two, or joining two edges of a run, therefore moves no
    ids and no pages, and a path of many nodes is compared with a key in one step.

    Attributes:
        start: tokens from the root to where the run begins.
        page_size: tokens per page.
        name_step: tokens between two positions with names.
        ids: bytes of the token ids of all edges; immutable until the run grows or is cut.
        pages: values of the pages of all edges.
        nodes: the nodes in order.
        stored: those of the nodes that own a checkpoint, in order.
        names: of the path at the multiples of `name_step` after `start`, as far as they were needed
            (`hybrid.tree.names`).
        joined: the run that took over this one's nodes; None while it has its own.
    """

    __slots__ = ("ids", "joined", "name_step", "names", "nodes", "page_size", "pages", "start", "stored")

    def __init__(self, start: int, page_size: int, name_step: int, ids: bytes, pages: PageValues) -> None:
        self.start: int = start
        self.page_size: int = page_size
        self.name_step: int = name_step
        self.ids: bytes | bytearray = ids
        self.pages: PageValues = pages
        self.nodes: list[Node] = []
        self.stored: list[Node] = []
        self.names: bytearray = bytearray()
        self.joined: Run | None = None

    def append(self, ids: bytes | bytearray, pages: PageValues) -> None:
        """Add ids and pages at the end: all of them, or none when it raises."""
        mutable, num_pages = self.ids, len(self.pages)
        if type(mutable) is not bytearray:
            mutable = self.ids = bytearray(mutable)
        try:
            self.pages.extend(pages)
            mutable += ids
        except BaseException:
            del self.pages[num_pages:]
            raise

    @property
    def parent(self) -> Node:
        """The node that it continues."""
        parent = self.nodes[0].parent
        assert parent is not None
        return parent

    def num_names(self, num_tokens: int) -> int:
        """Return the number of names up to a position."""
        return num_tokens // self.name_step - self.start // self.name_step

    def take_over(self, below: Run) -> None:
        """Append the run that continues this one's last node; its nodes are this one's from now on."""
        num_bytes = len(self.names)
        try:
            self.names += below.names  # if there are any, this run has all of its own
            self.append(below.ids, below.pages)
        except BaseException:
            del self.names[num_bytes:]
            raise
        # Nothing can fail from here on.
        self.nodes += below.nodes
        self.stored += below.stored
        for node in below.nodes:
            node.run = self
        below.joined = self
        below.nodes, below.stored = [], []

    def cut(self, num_pages: int, into: PageValues) -> None:
        """Remove the last `num_pages` pages with their ids, and append the pages to `into`: all of it, or nothing when
        it raises."""
        pages, num_kept = self.pages, len(self.pages) - num_pages
        if self.names:  # also where this raises: they are made again
            del self.names[self.num_names(self.start + num_kept * self.page_size) * NAME_BYTES :]
        if not num_kept:
            empty = pages[:0]
            into.extend(pages)
            self.pages, self.ids = empty, b""
            return
        ids, end = self.ids, num_kept * self.page_size * TOKEN_BYTES
        if type(ids) is not bytearray:
            ids = bytearray(memoryview(ids)[:end])
        move_end(pages, num_kept, into)
        del ids[end:]
        self.ids = ids

    @property
    def current(self) -> Run:
        """The run that has this one's nodes now."""
        run = self
        while run.joined is not None:
            run = run.joined
        return run

    @property
    def first_page(self) -> int:
        """The first page of the path that the run is part of."""
        run = self.current
        while run.start:
            run = run.parent.run
        page: int = run.pages[0]
        return page

    def move_page(self, place: int, to: int) -> None:
        """Replace the id of a page, by the number of pages before it on its path."""
        run = self.current
        run.pages[place - run.start // run.page_size] = to

    def index(self, node: Node) -> int:
        """Return the place of a node among the nodes."""
        return len(self.nodes) - 1 if self.nodes[-1] is node else bisect_left(self.nodes, node.end, key=end_of)


class Node:
    """An edge with its pages, and possibly the checkpoint at its end.

    Attributes:
        parent: None for the root of a namespace, and for a node that was removed.
        run: holds the edge's ids and pages.
        start, end: tokens from the root to where the edge begins and ends.
        children: by the bytes of the first page of their edges.
        slot: state slot of the checkpoint at `end`; None for a tombstone.
        lost_checkpoint: its checkpoint was evicted or not admitted; `usage` is that checkpoint's.
        page_locks: locks on the pages from the root to `end`, those of `state_locks` included.
        state_locks: locks on the checkpoint.
        owner: the tenant that it counts for: whose request stored its checkpoint last, or else inserted its pages.
    """

    __slots__ = (
        "children",
        "end",
        "lost_checkpoint",
        "owner",
        "page_locks",
        "parent",
        "run",
        "slot",
        "start",
        "state_locks",
        "usage",
    )  # fmt: skip

    def __init__(
        self, parent: Node | None, run: Run, start: int, end: int, usage: NodeUsage, owner: Tenant = NO_TENANT
    ) -> None:
        self.parent: Node | None = parent
        self.run: Run = run
        self.start: int = start
        self.end: int = end
        self.children: dict[bytes, Node] = {}
        self.slot: SlotValue | None = None
        self.page_locks: int = 0
        self.state_locks: int = 0
        self.usage: NodeUsage = usage
        self.lost_checkpoint: bool = False
        self.owner: Tenant = owner

    @property
    def edge(self) -> bytes:
        """The bytes of the edge's token ids."""
        first = self.run.start
        return bytes(self.run.ids[(self.start - first) * TOKEN_BYTES : (self.end - first) * TOKEN_BYTES])

    @property
    def pages(self) -> PageValues:
        """Values of the pages of the edge: a copy."""
        first, page_size = self.run.start, self.run.page_size
        return self.run.pages[(self.start - first) // page_size : (self.end - first) // page_size]

    @property
    def num_pages(self) -> int:
        """Number of pages of the edge."""
        return (self.end - self.start) // self.run.page_size

    def checkpoint_above(self) -> Node | None:
        """Find the nearest node above this one that owns a checkpoint. None if none does."""
        node: Node | None = self
        end = self.end
        while node is not None and node.parent is not None:
            stored = node.run.stored
            if stored and stored[0].end < end:
                last = stored[-1]
                return last if last.end < end else stored[bisect_left(stored, end, key=end_of) - 1]
            node = node.run.parent
            end = node.end + 1  # from here on its own checkpoint counts
        return None


end_of: Callable[[Node], int] = attrgetter("end")


class Match(NamedTuple):
    """The part of a key that the tree has.

    Attributes:
        num_tokens: the usable hit: there is a checkpoint at this length (0: the empty prefix).
        num_page_tokens: the page hit, at least `num_tokens`.
        branching_len: the deepest position on the grid, beyond `num_tokens`, that has pages and no checkpoint; None if
            there is none.
        checkpoint: the node whose checkpoint it is; None for the empty prefix.
        deepest: the node of the last matched page; None when no page matched. Its edge may continue beyond the match.
    """

    num_tokens: int
    num_page_tokens: int
    branching_len: int | None
    checkpoint: Node | None
    deepest: Node | None


NO_MATCH = Match(0, 0, None, None, None)


class PrefixHistory(NamedTuple):
    """The part of a key that the tree has had, what was evicted included.

    Attributes:
        num_tokens: length of the known prefix, at least the page hit.
        was_evicted: what follows the page hit was cached, and has been evicted.
        turn: number of turn ends on the path before the key's own.
        gone: usage of the evicted checkpoints beyond the usable hit, by their number of tokens.
        nearest: usage of the deepest checkpoint that is or was on the path; None: there was none.
    """

    num_tokens: int
    was_evicted: bool
    turn: int
    gone: dict[int, NodeUsage]
    nearest: NodeUsage | None


class Checkpoint(NamedTuple):
    """A state slot, and the number of tokens after which it was captured.

    Attributes:
        kind: why it was put there.
        priority: priority of its request, for policies that use it.
        turn: number of turn ends before it on its path.
        is_spare: it was put there only because memory was free: until a request has used it, it is evicted before all
            others.
        tenant: name of the sender of its request; None: its namespace.
    """

    slot: SlotValue
    num_tokens: int
    kind: Kind = Kind.BRANCH
    priority: int = 0
    turn: int = 0
    is_spare: bool = False
    tenant: str | None = None


class Inserted(NamedTuple):
    """The outcome of an insert.

    Attributes:
        node: the node of the last inserted token. It ends there, unless all pages were there and no checkpoint came.
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
        super().__init__(None, Run(0, 1, 1, b"", array("i")), 0, 0, usage)
        self.namespace: str = namespace


class EvictedCheckpoint(NamedTuple):
    """A checkpoint that was evicted. Times are numbers of requests that had come.

    Attributes:
        start, end: of the edge that it was at the end of.
        kind: why it was put there.
        hits: number of requests that resumed from it.
        stored_at, used_at, evicted_at: when it was stored, used last, and evicted.
    """

    start: int
    end: int
    kind: Kind
    hits: int
    stored_at: int
    used_at: int
    evicted_at: int


@dataclass(slots=True)
class Released:
    """Pages and checkpoints that the tree let go of. The caller owns them now.

    Attributes:
        pages: values of pages, in a container like the tree's own.
        slots: slots of checkpoints.
    """

    pages: PageValues = field(default_factory=page_ids)
    slots: list[SlotValue] = field(default_factory=list)


class Lock:
    """Protects pages, or a checkpoint, from eviction until it is released, once.

    Attributes:
        owner: who made it, and releases it.
        node: what it is on; None once it was released.
    """

    __slots__ = ("node", "owner")

    def __init__(self, owner: object, node: Node) -> None:
        self.owner: object = owner
        self.node: Node | None = node


class PageLock(Lock):
    """Protects the pages of a node, and of every node above it."""

    __slots__ = ()


class StateLock(Lock):
    """Protects the checkpoint of one node, and its pages with it."""

    __slots__ = ()
