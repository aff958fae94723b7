"""A bound on hits: no cache has more of them, whatever it places and evicts, and if it knew what will come.

A hit of some length has its pages cached from the last request that had them, and a state at its end from the last
request that came by there: bytes, held for a number of requests. All of them together are no more than the memory
for all requests. Of what requests could hit, the bound takes what needs the least bytes per token, until no memory is
left. It does not ask whether all of it fits at every moment, so real caches stay below it, and the best one may too.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np

from hybrid.doctor.radix import Radix, RadixNode
from hybrid.doctor.request import UNIT, LoggedRequest
from hybrid.doctor.sizes import Sizes


class Used(RadixNode):
    """A node of the tree of all that was served, and the number of the request that came by last."""

    __slots__ = ("last",)

    def __init__(self, parent: Used | None, hashes: array[int], last: int) -> None:
        super().__init__(parent, hashes)
        self.last = last


class Bound:
    """The most tokens that a cache can hit, of pages and states at any multiple of 16 tokens.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        self._page_bytes, self._state_bytes = UNIT * sizes.token_bytes, sizes.state_bytes
        self._tree = Radix(Used(None, array("Q"), 0))
        self._tokens, self._bytes = array("d"), array("d")  # steps: n tokens more for m bytes
        self._num_requests = 0

    def add(self, request: LoggedRequest) -> None:
        """Take a request into account, after those before it."""
        index, tree = self._num_requests, self._tree
        self._num_requests += 1
        hashes = array("Q", request.blocks(UNIT, request.num_tokens))
        limit, num_units = (request.num_prompt - 1) // UNIT, len(hashes)
        points = [(0.0, 0.0)]  # tokens of a hit, and bytes times requests
        pages, at, node = 0.0, 0, tree.root
        while (found := tree.next(hashes, at, num_units)) is not None:
            node, same = found
            usable, age = min(same, max(0, limit - at)), index - node.last
            at += same
            if same < len(node.hashes):
                upper = Used(node.parent, node.hashes[:same], node.last)
                tree.cut(node, upper)
                node = upper
            node.last = index
            if usable:
                pages += float(usable * age * self._page_bytes)
                point = float(UNIT * min(at, limit)), pages + age * self._state_bytes
                # Only what lies on the lower hull is ever chosen.
                while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
                    points.pop()
                points.append(point)
        if at < num_units:
            tree.add(Used(node, hashes[at:], index))
        for (tokens, cost), (more, higher) in pairwise(points):
            self._tokens.append(more - tokens)
            self._bytes.append(higher - cost)

    def hit_tokens(self, memory: int) -> int:
        """The most tokens of prompts that hit with a memory of that many bytes."""
        tokens, cost = np.frombuffer(self._tokens), np.frombuffer(self._bytes)
        if not len(tokens):
            return 0
        order = np.argsort(cost / tokens, kind="stable")
        tokens, spent = np.cumsum(tokens[order]), np.cumsum(cost[order])
        return int(np.interp(memory * float(self._num_requests), np.r_[0.0, spent], np.r_[0.0, tokens]))


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])
