"""The learned eviction for the CPU tier of vLLM's offloading connector: pages and states together.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
      {"cpu_bytes_to_use": 8000000000, "eviction_policy": "LearnedCachePolicy",
       "cache_policy_module_path": "hybrid.vllm.tier"}}'

vLLM gives a policy chunks by their keys: the hash of all tokens up to a chunk's end, and a group of layers. Which
groups are states it does not say. Here the chunks of one hash are a place; a request can resume where a place has a
chunk of every group; and a group that is missing at a place that was passed is one of states.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

from hybrid.tree.lhd import LearnedHitDensity
from hybrid.tree.node import Kind, NodeUsage
from hybrid.tree.policy import Facts

logger: logging.Logger = logging.getLogger("vllm.hybrid")

SAMPLE = 32
"""Places that are compared for one to go."""


class PrefixChunks:
    """The chunks at the end of one prefix.

    Attributes:
        name: the prefix's hash.
        end: its tokens.
        above: the place one chunk before; None: the first, or that one has gone.
        keys: of its chunks that are there, by their group.
        num_below: places that continue from here.
        usage: what is known of its use; None: no request could ever resume here.
        at: its number among those where requests can resume; -1: none can.
    """

    __slots__ = ("above", "at", "end", "keys", "name", "num_below", "usage")

    def __init__(self, name: bytes, end: int, above: PrefixChunks | None, usage: NodeUsage | None) -> None:
        self.name: bytes = name
        self.end: int = end
        self.above: PrefixChunks | None = above
        self.usage: NodeUsage | None = usage
        self.keys: dict[int, bytes] = {}
        self.num_below: int = 0
        self.at: int = -1


class LearnedCachePolicy(LRUCachePolicy):
    """A policy for vLLM's `CPUOffloadingManager`. Whatever raises in what it learns, it is vLLM's LRU from then on.

    Args:
        cache_capacity: chunks of the tier.

    Attributes:
        failure: what has raised; None: nothing has.
        states: the groups that are taken to be of states: those that are absent most often where a request has passed.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.failure: Exception | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._num_evictable = 0
        self._places: dict[bytes, PrefixChunks] = {}
        self._resumable: list[PrefixChunks] = []
        self._loose: dict[PrefixChunks, None] = {}  # those with chunks that save nothing
        self._groups: set[int] = set()
        self._absent: Counter[int] = Counter()  # of each group, places that were passed without it
        self.states: set[int] = set()
        self._gone: OrderedDict[bytes, NodeUsage] = OrderedDict()
        self._policy = LearnedHitDensity()
        self._now = 0
        self._rng = Random(0)

    # What vLLM calls. A chunk that is inserted takes part when its request has ended.

    def clear(self) -> None:
        """Forget all chunks, and what was learned."""
        super().clear()
        self._forget_all()

    def remove(self, key: bytes) -> None:
        """Take out a chunk that could not be stored."""
        super().remove(key)
        self._try(self._lose, key)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """Learn from a request that has ended."""
        super().on_request_finished(key_groups, insertion_only_keys, reused_keys, req_context)
        if self.failure is None:
            self._try(self._learn, req_context._offload_key_positions)

    def mark_evictable(self, key: bytes) -> None:
        """Nothing reads or writes a chunk any more."""
        super().mark_evictable(key)
        self._num_evictable += 1

    def mark_non_evictable(self, key: bytes) -> None:
        """A chunk is read."""
        super().mark_non_evictable(key)
        self._num_evictable -= 1

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        """Let go of n chunks: those first without which nothing is lost, then those that save least.

        Returns:
            The chunks; None: there are not as many, and nothing has changed.
        """
        kept = [chunk for key in protected if (chunk := self.get(key)) is not None and chunk.ref_cnt == 0]
        if n > self._num_evictable - len(kept):
            return None
        taken: dict[bytes, Any] = {}
        self._try(self._choose, n, protected, taken)
        for key in taken:
            super().remove(key)
        rest = super().evict(n - len(taken), protected)  # of requests that run; or all, after a failure
        assert rest is not None
        for key, _ in rest:
            self._try(self._lose, key)
        self._num_evictable -= n
        return [*taken.items(), *rest]

    def check(self) -> list[str]:
        """Every invariant that does not hold, one a line. Changes nothing."""
        wrong, places = [], self._places.values()
        if self._num_evictable != sum(chunk.ref_cnt == 0 for chunk in self.chunks.values()):
            wrong.append("chunks that can go are not all counted")
        if self.failure is not None:
            return wrong
        if not {key for place in places for key in place.keys.values()} <= self.chunks.keys():
            wrong.append("a place has a chunk that is not there")
        below = Counter(id(place.above) for place in places if place.above is not None)
        for place in places:
            if place.num_below != below[id(place)]:
                wrong.append(f"{below[id(place)]} places continue at {place.end}, which counts {place.num_below}")
            if (place.at >= 0) != (self._groups <= place.keys.keys()):
                wrong.append(f"whether a request can resume at {place.end} is not noted")
            if place.at >= 0 and self._resumable[place.at] is not place:
                wrong.append(f"{place.end} is not found where it is noted")
        return wrong

    def _try(self, do: Callable[..., None], *args: Any) -> None:
        if self.failure is None:
            try:
                do(*args)
            except Exception as error:
                self.failure = error
                logger.warning("hybrid: an error in the CPU tier's policy; from here on it is LRU", exc_info=error)

    # What it learns

    def _learn(self, positions: dict[bytes, int]) -> None:
        """Enter what is there of a request's prefixes, and count its use of the longest that could be resumed.

        Args:
            positions: the tokens up to the end of each of its chunks, in all groups.
        """
        self._now += 1
        path: dict[bytes, tuple[int, list[bytes]]] = {}
        for key, end in positions.items():
            path.setdefault(get_offload_block_hash(key), (end, []))[1].append(key)
        known = [*sorted(path.items(), key=lambda one: one[1][0])]
        self._count_use([name for name, _ in known])
        above: PrefixChunks | None = None
        is_new = False  # the place above is of this request
        for name, (end, keys) in known:
            here = {get_offload_group_idx(key): key for key in keys if self.get(key) is not None}
            self._groups.update(here)
            place = self._places.get(name)
            if place is None:
                if not here:
                    above = None
                    continue
                if above is not None and is_new:
                    self._absent.update(self._groups - above.keys.keys())
                is_new = True
                place = self._places[name] = PrefixChunks(name, end, above, self._gone.pop(name, None))
                if above is not None:
                    self._count_below(above, 1)
            else:
                is_new = False
            place.keys.update(here)
            self._settle(place)
            above = place
        most = max(self._absent.values(), default=0)
        self.states = {group for group, number in self._absent.items() if 2 * number >= most}

    def _count_use(self, names: list[bytes]) -> None:
        """Count the use of the longest prefix that could be resumed, and of longer ones that have gone."""
        for name in reversed(names):
            place = self._places.get(name)
            usage = self._gone.get(name) if place is None or place.at < 0 else place.usage
            if usage is None and place is not None:
                usage = place.usage
            if usage is None:
                continue
            end, is_here = (place.end if place is not None else 0), place is not None and place.at >= 0
            (self._policy.hit if is_here else self._policy.missed)(Facts.without_node(usage, self._now, end))
            usage.hits += 1
            usage.used_at = usage.last_used = self._now
            if is_here:
                return

    def _settle(self, place: PrefixChunks) -> None:
        """Note what a place is now: one to resume at, one that is needed by others, or loose."""
        can_resume = self._groups <= place.keys.keys()
        if can_resume and place.at < 0:
            place.at = len(self._resumable)
            self._resumable.append(place)
            if place.usage is None:
                place.usage = NodeUsage(self._now, self._now, 0, Kind.PROMPT_END, self._now)
            place.usage.used_at = self._now
            self._policy.entered(self._facts(place))
        elif not can_resume and place.at >= 0:
            last = self._resumable.pop()
            if last is not place:
                self._resumable[place.at], last.at = last, place.at
            place.at = -1
        if place.at < 0 and self._own(place):
            self._loose[place] = None
        else:
            self._loose.pop(place, None)
        if not place.keys and not place.num_below:
            self._forget(place)

    def _own(self, place: PrefixChunks) -> list[bytes]:
        """The chunks of a place that nothing below it needs."""
        return [key for group, key in place.keys.items() if not place.num_below or group in self.states]

    def _count_below(self, place: PrefixChunks, more: int) -> None:
        """Another place continues from one, or one less."""
        place.num_below += more
        if place.at >= 0 and place.num_below == max(0, more):
            self._policy.changed(self._facts(place))
        self._settle(place)

    def _forget(self, place: PrefixChunks) -> None:
        """Take out a place that has no chunks and nothing below."""
        del self._places[place.name]
        if place.usage is not None:
            self._gone[place.name] = place.usage
            if len(self._gone) > self.cache_capacity:
                self._gone.popitem(last=False)
        above = place.above
        if above is not None:
            self._count_below(above, -1)

    def _lose(self, key: bytes) -> None:
        """A chunk goes."""
        place = self._places.get(get_offload_block_hash(key))
        if place is not None and place.keys.pop(get_offload_group_idx(key), None) is not None:
            self._settle(place)

    def _facts(self, place: PrefixChunks) -> Facts:
        """The facts about a place where requests can resume."""
        assert place.usage is not None
        freed, above = len(self._own(place)), place.above
        is_own = not place.num_below
        while above is not None and above.at < 0:
            is_own = is_own and above.num_below == 1
            freed += len(above.keys) if is_own else 0
            above = above.above
        saved = place.end - (above.end if above is not None else 0)
        return Facts.without_node(place.usage, self._now, place.end, saved, max(1, freed), bool(place.num_below))

    def _choose(self, n: int, protected: set[bytes], taken: dict[bytes, Any]) -> None:
        """Choose up to n chunks."""
        kept: set[PrefixChunks] = set()  # chunks of these are read, or protected
        while len(taken) < n:
            place = next((one for one in self._loose if one not in kept), None) or self._least(kept)
            if place is None:
                return
            kept.add(place)
            for key in self._own(place)[: n - len(taken)]:
                chunk = self.get(key)
                if chunk is not None and chunk.ref_cnt == 0 and key not in protected:
                    taken[key] = chunk
                    self._lose(key)

    def _least(self, kept: set[PrefixChunks]) -> PrefixChunks | None:
        """The place of a sample where least is lost."""
        places = self._resumable
        sample: Iterator[PrefixChunks] = (self._rng.choice(places) for _ in range(SAMPLE if places else 0))
        if len(places) <= SAMPLE:
            sample = iter(places)
        ranked = [(self._policy.rank(self._facts(one)), one.end, one) for one in sample if one not in kept]
        return min(ranked, key=lambda one: one[:2])[2] if ranked else None
