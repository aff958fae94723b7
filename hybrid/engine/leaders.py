"""Requests that wait for a running one to compute what they share with it."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid.cache.cache import HybridCache
from hybrid.engine.request import Request, Status
from hybrid.key import TOKEN_BYTES, Key, common_prefix


class Leaders:
    """Finds, for a waiting request, a running one that is about to commit more of its prefix than is usable now: its
    leader. The leader commits where they part (`Request.wanted`), and the request starts with a hit afterwards.

    Args:
        cache: what is usable now.
    """

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._grid = cache.config.grid

    def hold(self, request: Request, end: int, running: Iterable[Request]) -> bool:
        """Whether a waiting request waits for a leader.

        Args:
            end: number of its tokens that are its prompt.
            running: requests that may be its leader.
        """
        if request.leader is not None:
            leader, position = request.leader
            if leader.status is Status.RUNNING and leader.num_committed < position:
                return True
            request.leader = None
        key: Key | None = None
        usable, grid = 0, self._grid
        for leader in running:
            if leader.num_committed >= leader.prefill_end or leader.namespace != request.namespace:
                continue
            if leader.ids[:grid] != request.ids[:grid]:
                continue  # most have nothing in common: no key is made for them
            if key is None:
                key = request.key()
                usable = self._cache.tree.peek(key, end - 1).num_tokens
            position = self._shared_len(key, leader, end - 1)
            if position > usable and leader.num_computed < position:
                leader.wanted.add(position)
                request.leader = (leader, position)
                return True
        return False

    def _shared_len(self, key: Key, leader: Request, limit: int) -> int:
        """Number of tokens, on the grid, that the key shares with what the leader computes as prompt."""
        grid = self._grid
        most = min(limit, leader.prefill_end) * TOKEN_BYTES
        shared = common_prefix(key.ids, leader.key().ids, 0, 0, grid * TOKEN_BYTES, most) // TOKEN_BYTES
        return key.whole(shared, grid)
