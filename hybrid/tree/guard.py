"""The guard: is LRU ahead of the policy?

Beside a tree whose policy learns, a *shadow* follows which checkpoints the same tree would have under LRU: no tokens,
no pages, only the usages of checkpoints, which the tree keeps at their places and among its ghosts, in the order of
their use there. While its hits are ahead of those that the tree has, the tree is to evict by LRU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter

from hybrid.tree.node import Match, Node, NodeUsage
from hybrid.units import Prices

log: logging.Logger = logging.getLogger(__name__)

WINDOW = 512
"""Requests that are compared: what came before them fades."""

BOUND = 0.01
"""The part of the tokens asked for by which LRU has to be ahead over a window."""

HOLD, MAX_HOLD = 256, 4096
"""Requests for which LRU is held: at first, and at most where the policy falls behind again and again."""

MAX_REFUSED = 1024
"""Checkpoints that were not admitted, and whose pages the tree does not have yet."""

MAX_LOOKED_AT = 32
"""Nodes below one that are looked at for what continues from it."""


class ShadowCheckpoint:
    """A checkpoint that the tree would have under LRU, or a place where paths part that such checkpoints are on.

    Attributes:
        end: number of tokens from the start of the prompt.
        parent: the one above it; None: the root.
        children: those below it.
        usage: of the tree's checkpoint at that place; None: the root.
        is_there: there is a checkpoint. If not, paths part.
    """

    __slots__ = ("children", "end", "is_there", "parent", "usage")

    def __init__(self, end: int, parent: ShadowCheckpoint | None, usage: NodeUsage | None) -> None:
        self.end: int = end
        self.parent: ShadowCheckpoint | None = parent
        self.children: dict[ShadowCheckpoint, None] = {}
        self.usage: NodeUsage | None = usage
        self.is_there: bool = False


class Shadow:
    """What a tree would have under LRU, with the same placement and the same anchors.

    Args:
        page_size: tokens of a page.
        prices: of its pages and checkpoints.

    Attributes:
        spacing: tokens between anchors; 0: there are none.
        num_bytes: of the pages and checkpoints in it.
    """

    def __init__(self, page_size: int, prices: Prices) -> None:
        self._page_size = page_size
        self._prices = prices
        self.spacing: int = prices.anchor_spacing * page_size
        self._root = ShadowCheckpoint(0, None, None)
        self._order: OrderedDict[ShadowCheckpoint, None] = OrderedDict()  # without anchors that are kept
        self.num_bytes: int = 0

    def use(self, usage: NodeUsage) -> bool:
        """Return whether a checkpoint is there: then a request resumes from it."""
        entry = usage.shadow
        if entry is None or not entry.is_there:
            return False
        self._order[entry] = None
        self._order.move_to_end(entry)
        return True

    def put(self, node: Node) -> None:
        """The checkpoint of a node is there, used just now; one that is spare is the first to go."""
        usage = node.usage
        entry = usage.shadow or self._enter(node)
        entry.usage = usage
        if not entry.is_there:
            entry.is_there = True
            self.num_bytes += self._prices.checkpoint
        self._order[entry] = None
        self._order.move_to_end(entry, last=usage.last_used > 0)

    def _enter(self, node: Node) -> ShadowCheckpoint:
        above, parent = node.parent, self._root
        while above is not None and above.parent is not None:
            if above.usage.shadow is None and len(above.children) > 1 and self._any_below(above):
                self._enter(above)  # paths part here, and both have pages before it
            if above.usage.shadow is not None:
                parent = above.usage.shadow
                break
            above = above.parent
        entry = node.usage.shadow = ShadowCheckpoint(node.end, parent, node.usage)
        self.num_bytes += self._bytes_between(parent, entry)
        for below in self._below(node, parent):
            del parent.children[below]
            self.num_bytes -= self._bytes_between(parent, entry)
            below.parent = entry
            entry.children[below] = None
        parent.children[entry] = None
        self._look_again(parent)
        return entry

    def trim(self, limit: int) -> None:
        """Evict until at most as many bytes are used."""
        order = self._order
        while self.num_bytes > limit and order:
            entry, _ = order.popitem(last=False)
            if not self._is_anchor(entry):
                self._evict(entry)

    def _evict(self, entry: ShadowCheckpoint) -> None:
        entry.is_there = False
        self.num_bytes -= self._prices.checkpoint
        while (parent := entry.parent) is not None and not entry.is_there and len(entry.children) < 2:
            assert entry.usage is not None
            entry.usage.shadow = None
            del parent.children[entry]
            if entry.children:
                for below in entry.children:
                    below.parent = parent
                    parent.children[below] = None
                return
            self.num_bytes -= self._bytes_between(parent, entry)
            self._look_again(parent)
            entry = parent

    def _look_again(self, entry: ShadowCheckpoint) -> None:
        """Have a checkpoint be the next to go where it was kept as an anchor, which it may not be now, or is the end of
        its path now, as old as what has gone."""
        if entry.is_there and (entry not in self._order or not entry.children):
            self._order[entry] = None
            self._order.move_to_end(entry, last=False)

    def _is_anchor(self, entry: ShadowCheckpoint) -> bool:
        if not self.spacing or len(entry.children) != 1:
            return False
        above = entry.parent
        while above is not None and not above.is_there:
            above = above.parent
        (below,) = entry.children
        return below.end - (above.end if above is not None else 0) > self.spacing

    def _bytes_between(self, above: ShadowCheckpoint, below: ShadowCheckpoint) -> int:
        return (below.end - above.end) // self._page_size * self._prices.page

    def _below(self, node: Node, parent: ShadowCheckpoint) -> Iterable[ShadowCheckpoint]:
        """Those next below a node that hang from what is above it."""
        return [entry for entry in self._any_below(node) if entry.parent is parent]

    def _any_below(self, node: Node) -> list[ShadowCheckpoint]:
        """Those next below a node."""
        nodes, found = [*node.children.values()], []
        for _ in range(MAX_LOOKED_AT):
            if not nodes:
                break
            below = nodes.pop()
            if below.usage.shadow is None:
                nodes.extend(below.children.values())
            else:
                found.append(below.usage.shadow)
        return found


class Guard:
    """Compares the hits of a tree with those of its shadow under LRU.

    Args:
        page_size: tokens of a page.
        prices: of its pages and checkpoints.

    Attributes:
        is_on: LRU is ahead: the tree evicts by LRU.
        switches: how often it became so, and ended.
        asked, hits, lru_hits: tokens of prompts that could have been found, that were found, and that LRU would have
            found.
    """

    def __init__(self, page_size: int, prices: Prices) -> None:
        self._prices = prices
        self._shadow = Shadow(page_size, prices)
        self._limit: int | None = None  # bytes that evictions have left to the tree, and not to the shadow yet
        self._refused: dict[int, NodeUsage] = {}
        self._now = 0
        self._asked = self._ahead = 0.0  # of a window: tokens, and by how many of them LRU is ahead
        self._hold, self._until = HOLD // 2, 0
        self._prioritized = -WINDOW  # number of the last request that has given a priority
        self.is_on: bool = False
        self.switches: int = 0
        self.asked: int = 0
        self.hits: int = 0
        self.lru_hits: int = 0

    def refused(self, usage: NodeUsage) -> None:
        """A checkpoint was not admitted, which under LRU all are. `lost` reports its place in the tree."""
        if len(self._refused) == MAX_REFUSED:
            self._refused.clear()
        self._refused[id(usage)] = usage

    def lost(self, node: Node) -> None:
        """A node has the usage of a checkpoint that was evicted, or was not admitted there."""
        if self._refused.pop(id(node.usage), None) is not None:
            self.stored(node)

    def stored(self, node: Node) -> None:
        """A checkpoint was stored at the end of a node."""
        if node.usage.priority:
            self._prioritized = self._now
        self._trim()
        self._shadow.put(node)

    def evicted(self, num_pages: int, num_checkpoints: int) -> None:
        """The tree had to evict, and has these pages and checkpoints left: LRU would have to evict as well."""
        left = num_pages * self._prices.page + num_checkpoints * self._prices.checkpoint
        self._limit = left if self._limit is None else min(self._limit, left)

    def _trim(self) -> None:
        """Have the shadow evict. Not at once: a request has had the tree evict before it is looked up here."""
        if self._limit is not None:
            self._shadow.trim(self._limit)
            self._limit = None

    def requested(self, now: int, match: Match, gone: list[tuple[NodeUsage, int]], limit: int) -> bool:
        """A request has come. Returns whether `is_on` has changed.

        Args:
            now: its number: one that has come before is not counted again.
            match: what the tree has of it.
            gone: usages of the checkpoints on its path that the tree does not have, and where they are.
            limit: tokens that it could have found.
        """
        if now == self._now:
            return False
        self._now = now
        found = self._found(match, gone)
        self._trim()
        self.asked += limit
        self.hits += match.num_tokens
        self.lru_hits += found
        fade = 1 - 1 / WINDOW
        self._asked = self._asked * fade + limit
        self._ahead = self._ahead * fade + found - match.num_tokens
        if now - self._prioritized < WINDOW:  # hits do not say what is preferred
            self._ahead, self._until = 0.0, min(self._until, now)
        return self._decide(now)

    def _found(self, match: Match, gone: list[tuple[NodeUsage, int]]) -> int:
        """The tokens that LRU would have found, which count as used."""
        use = self._shadow.use
        for usage, end in sorted(gone, key=itemgetter(1), reverse=True):
            if use(usage):
                return end
        node, missed = match.deepest, []
        while node is not None and node.parent is not None:
            if node.end <= match.num_page_tokens and (node.slot is not None or node.lost_checkpoint):
                if use(node.usage):
                    break
                missed.append(node)
            node = node.parent
        found = node.end if node is not None else 0
        self._place(found, missed[::-1])
        return found

    def _place(self, found: int, missed: list[Node]) -> None:
        """Place what LRU would have to compute again where paths part, and anchors: at places where the tree has, or
        had, checkpoints that LRU would not have."""
        spacing = self._shadow.spacing
        for node, after in pairwise(missed):
            if len(node.children) > 1 or (spacing and after.end - found > spacing):
                self._shadow.put(node)
                found = node.end

    def _decide(self, now: int) -> bool:
        fade = 1 - 1 / WINDOW
        mean = self._asked * (1 - fade) / (1 - fade ** min(now, 100 * WINDOW))
        if self.is_on:
            if now < self._until:
                return False
        elif self._ahead <= BOUND * WINDOW * mean:
            return False
        elif now - self._until > 4 * self._hold:  # it was well for long
            self._hold = HOLD
        else:
            self._hold = min(MAX_HOLD, 2 * self._hold)
        self.is_on = not self.is_on
        self.switches += 1
        if self.is_on:
            self._until = now + self._hold
            log.info(
                "LRU takes over for %d requests: of the last %d it would have hit %.1f points more",
                self._hold,
                WINDOW,
                100 * self._ahead / max(1, self._asked),
            )
        else:
            self._ahead = 0.0
            log.info("the policy is back")
        return True
