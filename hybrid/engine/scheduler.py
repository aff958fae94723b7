"""Chooses which tokens the next step computes.

Continuous batching: each step computes one token of every request that decodes and a share of the prompts, within a
budget of tokens. A share ends at a multiple of the chunk, or at the end of its prompt (partial prefill).

* Waiting requests start in the order of `WaitingQueue`. One that cannot have its memory waits, and those after it too.
* When pages run out, the youngest request is retracted: it gives its memory back and is resumed later. It starts again
  only with the memory for all its tokens, and is not retracted for lack of pages again.
* A request computes nothing until what it needs from disk is read (`RestoringRequests`), or until a form that was late
  says what may follow its answer (`hybrid.engine.forms`); others do meanwhile.
* A waiting request whose prefix a running one is about to compute waits for it; those after it do not.
* In deterministic mode the answer of a finished request is replayed as whole chunks, after all prompts of a step.
* What raises while one request is scheduled is the failure of that request (`Scheduler.at_hand`).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from hybrid.cache.cache import HybridCache
from hybrid.cache.explain import LEFT_OUT, Explanation
from hybrid.engine.config import EngineConfig
from hybrid.engine.drafting import Drafting
from hybrid.engine.request import Request
from hybrid.engine.step import Part, Step
from hybrid.engine.waiting import WaitingQueue
from hybrid.errors import MemoryBudgetError
from hybrid.hints import NO_HINTS
from hybrid.key import TOKEN_BYTES, Key, common_prefix

log: logging.Logger = logging.getLogger(__name__)


class Leaders:
    """Finds, for a waiting request, a running one that is about to commit more of its prefix than is usable now: its
    leader. The leader commits where they part (`Request.wanted`), and the request starts with a hit afterwards.

    Args:
        cache: what is usable now.
    """

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._grid = cache.config.grid

    def must_wait(self, request: Request, limit: int, running: Iterable[Request]) -> bool:
        """Tell whether a waiting request waits for a leader, and choose its leader.

        Args:
            limit: number of its tokens that it may take from the cache.
            running: requests that may be its leader.
        """
        if request.leader is not None:
            leader, position = request.leader
            if leader.lease is not None and leader.num_confirmed < position:
                return True
            request.leader = None
        key: Key | None = None
        usable, grid = 0, self._grid
        for leader in running:
            if leader.is_cold or leader.num_confirmed >= leader.prefill_end or leader.namespace != request.namespace:
                continue
            if leader.ids[:grid] != request.ids[:grid]:
                continue  # most have nothing in common: no key is made for them
            if key is None:
                key = request.key()
                usable = self._cache.tree.peek(key, limit).num_tokens
            position = self._shared_len(key, leader, limit)
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


class RestoringRequests:
    """Requests of which something may have to be read from disk.

    What a request that is queued will need is read ahead, in the order in which requests came, while there are buffers
    for it. A request that has its memory, and of which not all was read, computes nothing until it is (`proceed`); it
    waits for that as long as computing would take at most.

    Args:
        cache: where requests get their memory.
    """

    def __init__(self, cache: HybridCache) -> None:
        self._cache = cache
        self._queued: dict[Request, int] = {}  # of which nothing was read ahead yet, with what may be cached
        self._running: dict[Request, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, request: object) -> bool:
        return request in self._running

    def queue(self, request: Request, limit: int) -> None:
        """Record that a request waits from now on.

        Args:
            limit: the number of its tokens that may be cached.
        """
        if self._cache.restores is not None:
            self._queued[request] = limit
            self.read_ahead()

    def read_ahead(self) -> None:
        """Begin to read for requests that wait, while there are buffers."""
        restores = self._cache.restores
        while self._queued and restores is not None and restores.reads_ahead:
            request, limit = next(iter(self._queued.items()))
            del self._queued[request]
            request.ahead = restores.read_ahead(request.key(), limit)

    def start(self, request: Request) -> bool:
        """Record that a request has its memory: what was read ahead is its lease's, or not needed. Returns whether it
        can compute at once."""
        self._end_queue(request)
        if request.lease is None or request.lease.restoring is None:
            return True
        self._running[request] = None
        return False

    def forget(self, request: Request) -> None:
        """Record that a request gives its memory back, or waits no more."""
        self._running.pop(request, None)
        self._end_queue(request)

    def _end_queue(self, request: Request) -> None:
        self._queued.pop(request, None)
        if request.ahead is not None:
            request.ahead.drop()
            request.ahead = None

    @property
    def running(self) -> list[Request]:
        """Those that have their memory."""
        return list(self._running)

    def proceed(self, request: Request) -> bool:
        """Give a request what was read for it meanwhile. Returns whether it can compute now."""
        assert request.lease is not None
        if not self._cache.proceed(request.lease):
            return False
        del self._running[request]
        return True

    def wait(self, seconds: float) -> None:
        """Wait until all is read for the first request that needs it, up to `seconds`."""
        for request in self._running:
            if request.lease is not None and request.lease.restoring is not None:
                request.lease.restoring.wait(seconds)
            return


def _limited(hit: Explanation, limit: int, grid: int) -> Explanation:
    """The explanation of a hit, where no more than `limit` tokens might be taken from the cache."""
    if limit >= hit.asked or hit.usable_hit != limit // grid * grid:
        return hit
    return replace(hit, reason=f"all up to token {limit}: from there on log-probabilities are computed")


MAX_LOGIT_ROWS = 128
"""Tokens of a prompt part whose log-probabilities are wanted, at most, unless a chunk is larger."""

MAX_REPLAYS = 256
"""Answers that wait for their replay, at most: while requests fill every step none is replayed. The oldest is given up
for one more."""


class Scheduler:
    """Requests that wait and run, and the memory that they hold.

    Args:
        cache: where requests get their memory.
        config: limits of the engine.
        deterministic: share only what was computed in whole chunks of a prompt.
        drafting: drafts tokens; None: nothing is drafted.

    Attributes:
        waiting: requests without memory.
        running: requests with memory, in the order in which they started.
        restoring: of those, the ones that compute nothing until copies are read for them.
        drafting: as given.
        num_retractions: since the engine was made.
        at_hand: the request that is being scheduled, or whose results are taken: what is raised then is its failure.
        completed: requests of which it is known now that their forms end their answers, to be taken by who ends them.
    """

    def __init__(
        self, cache: HybridCache, config: EngineConfig, deterministic: bool, drafting: Drafting | None = None
    ) -> None:
        self.cache = cache
        cache.use_clock(time.monotonic)
        self.drafting = drafting
        self.config = config
        self.deterministic = deterministic
        self.waiting: WaitingQueue = WaitingQueue(config.weight_of if config.tenants else None)
        self.running: list[Request] = []
        self._grid = cache.config.grid
        self._leaders = Leaders(cache)
        self.at_hand: Request | None = None
        self.completed: list[Request] = []
        self._expected: Set[Request] = frozenset()
        self.restoring: RestoringRequests = RestoringRequests(cache)
        self.num_retractions: int = 0

    @property
    def has_work(self) -> bool:
        """Tell whether a request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def room(self) -> int | None:
        """The number of requests that can be queued now: as many as have a slot free, and `EngineConfig.max_waiting`
        others. Negative: more were. None: any number."""
        limit, config = self.config.max_waiting, self.config
        if limit is None:
            return None
        num_running = sum(not request.is_replay for request in self.running)
        return limit + max(0, config.max_num_seqs - num_running) - self.waiting.num_requests

    @property
    def may_prefill(self) -> bool:
        """Tell whether the next step may have prompts."""
        starts = self.waiting and len(self.running) < self.config.max_num_seqs
        return bool(starts) or any(request.is_prefilling for request in self.running)

    def add(self, request: Request) -> None:
        """Queue a request that has not run yet."""
        self.waiting.add(request)
        self.restoring.queue(request, self.cacheable(request))

    def schedule(self, only: Set[Request] | None = None, expected: Set[Request] = frozenset()) -> Step:
        """Choose what the next step computes, and allocate the memory for it.

        It may be called while the tokens of the last step are still being computed: of a request whose known tokens
        have all been computed one more is expected, unless that will be its last.

        Args:
            only: compute no other requests; None: all.
            expected: requests whose next token is chosen by a pass under way.
        """
        self._expected = expected
        if self.cache.restores is not None:
            self._proceed()
        decodes = self._decode_parts(only)
        self.at_hand = None
        num_rows = len(decodes)
        if self.drafting is not None:
            for part, error in self.drafting.add(decodes):
                self.at_hand = part.request
                raise error
            num_rows = len(decodes) + sum([part.num_drafts for part in decodes])
        budget = self.config.max_num_batched_tokens - num_rows
        if self.waiting:
            self._admit(budget, only)
        parts = self._prefill_parts(budget, only) + decodes if len(decodes) < len(self.running) else decodes
        self.at_hand = None
        return Step(parts)

    def advance(self, step: Step) -> None:
        """Record that the pass of a step was launched: count its tokens as computed. Parts whose requests did not keep
        their memory are dropped."""
        served: dict[str, int] = {}
        for part in step.parts:
            request = part.request
            if not part.is_alive:
                part.is_dropped = True
                continue
            if part.swaps:
                self.cache.swap(part.lease)
            self.cache.advance(part.lease, part.end)
            served[request.tenant] = served.get(request.tenant, 0) + (not part.is_prefill)
        for tenant, num_tokens in served.items():
            self.waiting.serve(tenant, num_tokens)

    def retreat(self, part: Part) -> None:
        """Record that the pass of a part wrote nothing: its last token was not known to the device. It is computed
        again."""
        if part.is_alive:
            self.cache.undo_advance(part.lease, part.start, part.swaps)

    def commit(self, part: Part, computed: int) -> None:
        """Share the finished chunks of a part that was computed, with the drafts after it up to `computed` tokens. In
        deterministic mode only those of prompts. What a later pass has computed is not known to be finite yet."""
        request, lease, config = part.request, part.lease, self.cache.config
        end = min(computed, len(request.ids))
        computed = min(end, request.prefill_end) if self.deterministic else end
        whole = computed // self._grid * self._grid
        written = lease.captured and any(checkpoint.num_tokens <= whole for checkpoint in lease.captured)
        if not request.is_cold and (whole > lease.num_shared * config.page_size or written):
            self.cache.commit(lease, request.key(), whole)
            if lease.num_written <= request.prompt_len:
                request.num_written = lease.num_written
            self._keep_breakpoints(request, whole)
        request.num_confirmed = end
        if request.is_replay and part.end == len(request.ids):
            self._pin(request)
            self.discard(request)

    def start_cold(self, part: Part) -> bool:
        """A pass gave NaN or infinity: if its request reads what is cached, drop that, and have the request start again
        without the cache, once. It keeps the tokens that it has given. Returns whether it starts again."""
        request, lease = part.request, part.lease
        num_tokens = max(lease.num_hit_tokens, lease.num_shared * self.cache.config.page_size)
        if request.is_cold or not num_tokens:
            return False
        request.is_cold = True
        if request.lease is not None:
            self.retract(request, "its pass gave NaN or infinity")
        self.cache.drop(lease.key, num_tokens)
        log.warning(
            "%s read %d cached tokens and got NaN or infinity: they are dropped, and it is computed without them",
            request.request_id,
            num_tokens,
        )
        return True

    def finish(self, request: Request) -> None:
        """Record that a request has its answer: what it computed goes to the tree, or is replayed first. One that was
        retracted while its last token was computed does not share that token."""
        lease, config = request.lease, self.cache.config
        keeps_turns = "turn_end" in config.placement
        if lease is not None:
            if not self.deterministic and not request.is_cold:
                kept = min(request.kept_len, request.num_confirmed)
                if keeps_turns:
                    self.cache.donate_states(lease, kept)
                self.cache.commit(lease, request.key(), kept // config.page_size * config.page_size)
            if keeps_turns:
                self.cache.end_turn(lease, request.kept_len)
        self._pin(request)
        self.discard(request)
        if request.params.session is not None or request.params.hints is not None:
            hints = request.params.hints or NO_HINTS
            self.cache.hint(request.key(), hints, session=request.params.session, tenant=request.tenant)
        whole = request.kept_len // self._grid * self._grid
        replays = self.deterministic and keeps_turns and self.cache.enabled
        if replays and whole > request.prompt_len // self._grid * self._grid:
            self.waiting.add(request.replay(whole))
            if self.waiting.num_replays > MAX_REPLAYS:
                self.discard(self.waiting.oldest_replay)

    def retract(self, request: Request, why: str) -> None:
        """Take a running request off its memory, to be resumed first. A replay is given up."""
        if not request.is_replay:
            log.info("%s is retracted: %s", request.request_id, why)
            self.num_retractions += 1
            request.num_confirmed = 0
            self.waiting.return_first(request)
        self._give_back(request)

    def retract_all(self, why: str) -> None:
        """Retract all that run."""
        for request in self.running[::-1]:
            self.retract(request, why)

    def discard(self, request: Request) -> None:
        """Forget a request, whether it waits, runs, or failed in between; its memory comes back."""
        self.waiting.remove(request)
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        lease, request.lease = request.lease, None
        if request in self.running:
            self.running.remove(request)
        self.restoring.forget(request)
        if request.is_replay:
            request.finish_reason = "length"  # it is not resumed
        if lease is not None:
            self.cache.close(lease)
        if self.drafting is not None:
            self.drafting.forget(request)

    def _keep_breakpoints(self, request: Request, num_tokens: int) -> None:
        """Pin the breakpoints of a prompt that are among its first `num_tokens` tokens, which are cached."""
        if not request.breakpoints:
            return
        key, left = request.key(), []
        for one in request.breakpoints:
            position = key.whole(one.num_tokens, self._grid)
            if position > num_tokens:
                left.append(one)
            elif position:
                self.cache.keep_breakpoint(key, position, one.ttl, request.tenant)
        request.breakpoints = tuple(left)

    def _pin(self, request: Request) -> None:
        """Keep what a request has computed, if it asked for that."""
        if request.params.pin_for is None:
            return
        key = request.key()
        try:
            if request.pin is None:
                request.pin = self.cache.pin(key, request.params.pin_for)
            else:
                self.cache.extend_pin(request.pin, key)
        except MemoryBudgetError as error:
            warnings.warn(f"{request.request_id} is not pinned: {error}", stacklevel=2)

    def wait(self, seconds: float) -> bool:
        """Wait for what a request needs, up to `seconds`, where nothing can be computed now. Returns whether one needs
        something."""
        if self.restoring:
            self.restoring.wait(seconds)
            return True
        held = next((request for request in self.running if request.is_held(False)), None)
        if held is not None and held.constraints is not None:
            held.constraints.wait_for_form(seconds)
        return held is not None

    # The part of one request

    def _proceed(self) -> None:
        """Resume requests for which all was read that they need; where others compute, one at most."""
        only_one = len(self.running) > len(self.restoring)
        self.restoring.read_ahead()
        for request in self.restoring.running:
            self.at_hand = request
            if self.restoring.proceed(request):
                self._resume(request)
                if only_one:
                    return

    def _decode_parts(self, only: Set[Request] | None) -> list[Part]:
        """A token of every request whose prompt has been computed."""
        before, parts = self.num_retractions, list[Part]()
        for request in list(self.running):
            if request.is_prefilling or (only is not None and request not in only):
                continue
            if request.constraints is not None:
                if request.is_held(request in self._expected):
                    continue
                if request.is_complete or request.is_full:
                    self.completed.append(request)
                    continue
            self.at_hand = request
            part = self._decode_part(request)
            if part is not None:
                parts.append(part)
        return parts if self.num_retractions == before else [part for part in parts if part.is_alive]

    def _decode_part(self, request: Request) -> Part | None:
        lease, start, page_size = request.lease, request.num_computed, self.cache.config.page_size
        if lease is None:  # it was retracted for one before it
            return None
        num_unknown = max(0, start + 1 - len(request.ids))
        if num_unknown and request.ends_with_next_token:
            return None
        while start >= len(lease.block_table) * page_size and not self.cache.reserve(lease, start + 1):
            victim = self._youngest()
            self.retract(victim, "pages ran out")
            victim.keeps_memory = True
            if victim is request:
                return None
        on_grid = start % self._grid == 0
        swaps = on_grid and not self.deterministic and self.cache.take_back(lease)
        return Part(request, lease, start, start + 1, False, self._samples(request, start + 1), swaps, num_unknown)

    def _prefill_parts(self, budget: int, only: Set[Request] | None) -> list[Part]:
        """Shares of the prompts: equal ones for each tenant, in order within a tenant. Replays get the rest."""
        groups: dict[str, list[Request]] = {}
        replays = []
        for request in self.running:
            if self._is_prefilling(request) and (only is None or request in only):
                if request.is_replay:
                    replays.append(request)
                else:
                    groups.setdefault(request.tenant, []).append(request)
        parts: list[Part] = []
        chunk = self.cache.config.chunk_size
        names = sorted(groups, key=self.waiting.num_served)[: max(1, budget // chunk)]
        names.sort(key=lambda name: sum(request.prefill_end - request.num_computed for request in groups[name]))
        for place, name in enumerate(names):
            share = budget // (len(names) - place)
            budget -= share - self._share_out(groups[name], share, parts)
        self._share_out(replays, budget, parts)
        return parts

    def _share_out(self, requests: list[Request], budget: int, parts: list[Part]) -> int:
        """Add parts of up to `budget` tokens in all; returns what is left of it."""
        for request in requests:
            self.at_hand = request
            part = self._prefill_part(request, budget)
            if part is not None:
                parts.append(part)
                budget -= part.end - part.start
        return budget

    def _prefill_part(self, request: Request, budget: int) -> Part | None:
        lease, start, config = request.lease, request.num_computed, self.cache.config
        if lease is None:
            return None
        end = request.prefill_end
        if request.hit_limit < request.prompt_len:  # from there on logits of all rows are computed, which are large
            without = request.hit_limit // config.chunk_size * config.chunk_size - start
            rows = max(config.chunk_size, MAX_LOGIT_ROWS // config.chunk_size * config.chunk_size)
            budget = min(budget, without if without > 0 else rows)
        if end - start > budget:
            end = (start + budget) // config.chunk_size * config.chunk_size
            if end <= start:
                return None
        declared = () if request.is_replay else request.declared
        self.cache.capture_along(
            lease, end, request.prefill_end, shared=request.wanted, declared=declared, is_replay=request.is_replay
        )
        return Part(request, lease, start, end, True, self._samples(request, end))

    def _samples(self, request: Request, end: int) -> bool:
        """Tell whether the token after a part that ends there is not known yet, and wanted."""
        return not request.is_replay and end == len(request.ids) + (request in self._expected)

    # Starting

    def _admit(self, budget: int, only: Set[Request] | None) -> None:
        """Start waiting requests while there is memory and they would have a share of the budget. A tenant with no
        prompt in progress always has one."""
        prefilling = [request for request in self.running if self._is_prefilling(request)]
        budget -= sum(request.prefill_end - request.num_computed for request in prefilling)
        busy = {request.tenant for request in prefilling if not request.is_replay}
        skipped = set(busy) if budget <= 0 else set()
        counts = Counter(request.tenant for request in self.running) if self.config.tenants else Counter[str]()
        skipped |= {name for name, count in counts.items() if self._is_full(name, count)}
        for request in self.waiting.in_turn(skipped):
            if len(self.running) >= self.config.max_num_seqs:
                return
            if budget <= 0 and (request.is_replay or request.tenant in busy):
                return
            if only is not None and request not in only:
                continue
            self.at_hand = request
            if not request.is_cold and self._leaders.must_wait(request, self.cacheable(request), self.running):
                continue
            if not self._start_at_any_cost(request):
                return
            if request in self.restoring:
                continue
            counts[request.tenant] += 1
            if self._is_full(request.tenant, counts[request.tenant]):
                skipped.add(request.tenant)
            busy.add(request.tenant)
            budget -= request.prefill_end - request.num_computed
            if budget <= 0:
                skipped |= busy

    def _is_full(self, tenant: str, num_running: int) -> bool:
        """Tell whether as many requests of a tenant run as may."""
        own = self.config.tenants.get(tenant)
        return own is not None and own.max_running is not None and num_running >= own.max_running

    def _start_at_any_cost(self, request: Request) -> bool:
        """Start a request. If that needs more memory, first give up replays, and when nothing runs, what is cached: so
        that every request starts that fits into an empty cache."""
        if self._start(request) or self._start_after(self._drop_replays, request):
            return True
        return not self.running and self._start_after(self._empty_cache, request)

    def _start(self, request: Request) -> bool:
        end = self._prompt_end(request)
        lease = self.cache.begin(
            request.key(),
            self.cacheable(request),
            request.max_len if request.keeps_memory else end,
            request.params.priority,
            request.tenant,
        )
        if lease is None:
            return False
        request.lease = lease
        request.started_at = request.started_at or time.perf_counter()
        request.prefill_end = end
        request.leader = None
        request.num_confirmed = lease.num_hit_tokens
        self.running.append(request)
        self.waiting.started(request, end - lease.num_expected)
        if self.restoring.start(request):
            self._resume(request)
        return True

    def _resume(self, request: Request) -> None:
        """Have a request that has its memory compute from its hit on."""
        assert request.lease is not None
        request.num_confirmed = request.lease.num_hit_tokens
        if request.num_confirmed:
            self.cache.breakpoints.use(request.lease.key, request.num_confirmed)
            self._keep_breakpoints(request, request.num_confirmed)
        if request.explanation is None:
            request.explanation = _limited(request.lease.explanation, request.hit_limit, self._grid)
            if not request.is_replay:
                self.cache.record(request.explanation)
        elif request.is_cold:
            request.explanation = replace(request.lease.explanation, reason=LEFT_OUT)

    def _prompt_end(self, request: Request) -> int:
        """The number of tokens that a request computes as prompt when it starts."""
        return request.prompt_len if self.deterministic else len(request.ids)

    def cacheable(self, request: Request) -> int:
        """The number of its tokens that may be cached: one is left to compute."""
        return min(self._prompt_end(request) - 1, request.hit_limit) if not request.is_cold else 0

    def _is_prefilling(self, request: Request) -> bool:
        """Tell whether a request that runs has tokens of its prompt to compute now."""
        return request.is_prefilling and request not in self.restoring and not request.is_held(False)

    def fork(self, request: Request, fork: Request) -> None:
        """Start another answer to the prompt of a request, whose first tokens have just been sampled: with a copy of
        its state, or if there is no memory for that, as a request that was retracted."""
        fork.explanation, fork.is_cold = request.explanation, request.is_cold
        self.waiting.return_first(fork)
        if request.lease is None or len(self.running) >= self.config.max_num_seqs:
            return
        lease = self.cache.fork(request.lease)
        if lease is None:
            return
        self.waiting.remove(fork)
        fork.lease, fork.started_at = lease, request.started_at
        fork.prefill_end = lease.front_tokens
        fork.num_confirmed = request.num_confirmed
        self.running.append(fork)

    def _start_after(self, give_way: Callable[[], bool], request: Request) -> bool:
        """Start a request once others give way, as long as there are any."""
        while give_way():
            if self._start(request):
                return True
        return False

    # Giving way

    def _youngest(self) -> Request:
        """The request that gives way when pages run out: a replay, or else the last one that started and does not
        keep its memory."""
        replay = next((request for request in self.running if request.is_replay), None)
        return replay or next(request for request in reversed(self.running) if not request.keeps_memory)

    def _drop_replays(self) -> bool:
        replays = [request for request in self.running if request.is_replay]
        for request in replays:
            self.retract(request, "a request needs its memory")
        return bool(replays)

    def _empty_cache(self) -> bool:
        """Evict all that is not pinned, and if there is nothing, end a pin. False when nothing is cached."""
        num_pages, num_checkpoints = self.cache.tree.num_pages, self.cache.tree.num_checkpoints
        self.cache.allocator.evict(self.cache.tree.evict_all)  # copies in tiers stay
        emptied = self.cache.tree.num_pages < num_pages or self.cache.tree.num_checkpoints < num_checkpoints
        return emptied or self.cache.expire_next_pin()
