"""The data of a picture of the prefix tree, taken at one moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

MAX_IDS = 24
"""Token ids of an edge that are kept."""

Decode = Callable[[list[int]], str]
"""Turns token ids into text."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the tree.

    Attributes:
        parent: place of the parent in `Snapshot.nodes`; -1 at the top of a namespace.
        namespace: the namespace that it belongs to.
        start, end: tokens from the start of the prompt to where its edge begins and ends.
        num_pages: pages of the edge.
        has_checkpoint: a checkpoint is stored at `end`.
        kind: why the checkpoint was put there; "pages" where there never was one.
        hits: requests that resumed from it.
        idle: requests since its last use.
        stored_at: number of requests that had come when the checkpoint was stored.
        priority: the highest that a request gave it.
        value: rank that the eviction policy gives to the checkpoint: the lowest is evicted first. None without a
            checkpoint, or where the policy has no rank for it.
        page_locks, state_locks: locks on its pages and on its checkpoint.
        tiers: names of the tiers that have the checkpoint at its end, as in `Snapshot.tiers`.
        ids: token ids of the edge from where it differs from its siblings; from its beginning where it has none.
        text: their text, where it was decoded.
    """

    parent: int
    namespace: str
    start: int
    end: int
    num_pages: int
    has_checkpoint: bool
    kind: str
    hits: int
    idle: int
    stored_at: int
    priority: int
    value: float | None
    page_locks: int
    state_locks: int
    tiers: tuple[str, ...]
    ids: tuple[int, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """One checkpoint that was evicted. Times are numbers of requests that had come.

    Attributes:
        start, end: tokens from the start of the prompt to where its edge began and ended.
        kind: why it was put there.
        hits: requests that resumed from it.
        stored_at, used_at, evicted_at: when it was stored, used last, and evicted.
    """

    start: int
    end: int
    kind: str
    hits: int
    stored_at: int
    used_at: int
    evicted_at: int


@dataclass(frozen=True, slots=True)
class TierView:
    """A place for pages and checkpoints.

    Attributes:
        name: "device", "host memory", "disk".
        num_pages, num_checkpoints: that it holds, of the tree's nodes and of what has left the tree.
        num_bytes: of these.
    """

    name: str
    num_pages: int
    num_checkpoints: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A prefix tree at one moment.

    Attributes:
        nodes: parents before their children.
        lives: the checkpoints that were evicted most recently, oldest first.
        page_size: tokens per page.
        page_bytes, checkpoint_bytes: bytes of a page and of a checkpoint; 0 where the cache does not know them.
        now: number of requests so far.
        totals: pages and state slots by owner, by name.
        tiers: fastest first; the first is the device.
    """

    nodes: tuple[NodeView, ...]
    lives: tuple[Life, ...]
    page_size: int
    page_bytes: int
    checkpoint_bytes: int
    now: int
    totals: dict[str, int]
    tiers: tuple[TierView, ...]

    def with_text(self, decode: Decode) -> Snapshot:
        """The same with the text of each node's beginning. Ids that are not tokens, those of images and of the
        beginnings of segments (`hybrid.hf`), are left out."""
        texts = (decode([token for token in node.ids if token >= 0]) for node in self.nodes)
        return replace(
            self, nodes=tuple(replace(node, text=text) for node, text in zip(self.nodes, texts, strict=True))
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, in types of JSON."""
        return asdict(self)
