"""Who computes what in the next step.

Continuous batching: each step takes one token of every request that decodes and a share of the prompts, within a budget
of tokens. A share ends at a multiple of the chunk, or at the end of its prompt (partial prefill).

* Requests are served in the order in which they came. One that cannot have its memory waits, and those behind it with
  it.
* When pages run out, the youngest request is retracted: it gives its memory back and is resumed later.
* A waiting request whose prefix a running one is about to compute waits for it, and nobody else waits for that.
* In deterministic mode what a finished request has decoded is replayed as whole chunks, after everybody else's share.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from hybrid.cache import placement
from hybrid.cache.cache import HybridCache
from hybrid.cache.lease import Lease
from hybrid.engine.request import Request, Status
from hybrid.errors import MemoryBudgetError
from hybrid.key import TOKEN_BYTES, Key, common_prefix


@dataclass(slots=True)
class Part:
    """A request's part in a step: tokens `[start, end)`.

    Attributes:
        lease: the request's lease when the step was planned; the step's result belongs to it alone.
        is_prefill: the tokens are computed as prompt.
        swaps: the pass reads the front and writes the back, so that the state before it is kept.
    """

    request: Request
    lease: Lease
    start: int
    end: int
    is_prefill: bool
    swaps: bool = False


@dataclass(slots=True)
class Step:
    """What one forward pass computes: prompt parts first, then single tokens."""

    parts: list[Part]

    def sampled(self) -> list[Part]:
        """The parts whose last token's logits are wanted, in order."""
        return [part for part in self.parts if not part.request.is_replay and part.end == len(part.request.ids)]


class Scheduler:
    """Requests that wait and run, and the memory they hold.

    Args:
        max_num_seqs: at most so many requests run at once.
        max_num_batched_tokens: at most so many tokens in a step.
        deterministic: share nothing that was not computed in whole chunks of a prompt.
    """

    def __init__(self, cache: HybridCache, max_num_seqs: int, max_num_batched_tokens: int, deterministic: bool) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.deterministic = deterministic
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_retractions = 0
        self._in_flight: Step | None = None
        self._aborted: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def schedule(self) -> Step:
        """Plan the next step, and take the memory for it.

        It may be planned while the last one's tokens are still being computed: of a request that has all its tokens
        computed one more is expected, unless that will be its last.
        """
        decodes = [part for request in list(self.running) if (part := self._decode_part(request)) is not None]
        budget = self.max_num_batched_tokens - len(decodes)
        self._admit(budget)
        prefills = []
        for request in sorted(self.running, key=lambda request: request.is_replay):
            part = self._prefill_part(request, budget)
            if part is not None:
                prefills.append(part)
                budget -= part.end - part.start
        return Step(prefills + decodes)

    def depart(self, step: Step) -> Step:
        """The step's pass begins: returns what is left of it. Requests that ended since it was scheduled are not."""
        step = Step([part for part in step.parts if part.request.lease is part.lease])
        self._in_flight = step if step.parts else None
        return step

    def commit(self, step: Step) -> list[Part]:
        """The step is computed: move states and finished chunks on. Returns the parts whose requests still want the
        result.

        A request that was aborted meanwhile gives back its memory now: the pass may have written to it until here.
        """
        self._land()
        alive = [part for part in step.parts if part.request.lease is part.lease]
        for part in alive:
            request, lease = part.request, part.lease
            if part.swaps:
                self.cache.swap(lease)
            self.cache.advance(lease, part.end)
            request.num_computed = part.end
            self._commit_chunks(request)
            if request.is_replay and request.num_computed == len(request.ids):
                self._pin(request)
                self._leave(request)
        return alive

    def roll_back(self, *steps: Step) -> None:
        """The step under way, if there is one, failed or was interrupted, and so did those given: their requests start
        again from what was committed."""
        flying = self._land()
        for step in (flying, *steps):
            for part in reversed(step.parts if step is not None else []):
                if part.request.lease is part.lease:
                    self._retract(part.request)

    def finish(self, request: Request) -> None:
        """The request has its answer: what it computed goes to the tree, or is replayed first. It may have been
        retracted while its last token was computed: then that much is lost."""
        lease, config = request.lease, self.cache.config
        keeps_turns = "turn_end" in config.placement
        if lease is not None:
            if not self.deterministic:
                kept = min(request.kept_len, request.num_computed)
                if keeps_turns:
                    self.cache.donate_states(lease, kept)
                self.cache.commit(lease, request.key(), kept // config.page_size * config.page_size)
            if keeps_turns:
                self.cache.end_turn(lease, request.kept_len)
        self._pin(request)
        self._leave(request)
        whole = request.kept_len // config.grid * config.grid
        replays = self.deterministic and keeps_turns and self.cache.enabled
        if replays and whole > request.prompt_len // config.grid * config.grid:
            self.waiting.append(Request.replay(request, whole))

    def _pin(self, request: Request) -> None:
        """Keep what a request has computed, if it asked for that."""
        if request.pin_for is None:
            return
        key = request.key()
        try:
            if request.pin is None:
                request.pin = self.cache.pin(key, request.pin_for)
            else:
                self.cache.extend_pin(request.pin, key)
        except MemoryBudgetError as error:
            warnings.warn(f"{request.request_id} is not pinned: {error}", stacklevel=2)

    def abort(self, request: Request) -> None:
        """Stop a request at once; its memory comes back at once, or when the step under way has been computed."""
        request.finish_reason = "abort"
        if self._in_flight is not None and any(part.request is request for part in self._in_flight.parts):
            self._aborted.append(request)
        else:
            self._leave(request)

    def _land(self) -> Step | None:
        """The pass writes no more: returns its step, and what was aborted meanwhile gives back its memory."""
        step, self._in_flight = self._in_flight, None
        for request in self._aborted:
            self._leave(request)
        self._aborted.clear()
        return step

    # One request's part

    def _decode_part(self, request: Request) -> Part | None:
        lease, start = request.lease, request.num_computed
        if lease is None or request.is_prefilling:  # without a lease: retracted for one before it
            return None
        if start == len(request.ids) and request.ends_with_next_token:
            return None
        while not self.cache.reserve(lease, start + 1):
            victim = self._youngest()
            self._retract(victim)
            if victim is request:
                return None
        on_grid = start % self.cache.config.grid == 0
        swaps = on_grid and not self.deterministic and self.cache.take_back(lease)
        return Part(request, lease, start, start + 1, is_prefill=False, swaps=swaps)

    def _prefill_part(self, request: Request, budget: int) -> Part | None:
        lease, start, chunk = request.lease, request.num_computed, self.cache.config.chunk_size
        if lease is None or not request.is_prefilling:
            return None
        end = request.prefill_end
        if end - start > budget:
            end = (start + budget) // chunk * chunk
            if end <= start:
                return None
        for position, kind in self._wanted(request).items():
            if start < position <= end:
                self.cache.capture(lease, position, kind)
        config = self.cache.config
        if "geometric" in config.placement and not request.is_replay:
            taken = {checkpoint.num_tokens for checkpoint in lease.captured}
            for position in placement.spare(start, end, config.grid, self.cache.spare_share):
                if position not in taken and self.cache.capture_spare(lease, position) is None:
                    break
        return Part(request, lease, start, end, is_prefill=True)

    def _wanted(self, request: Request) -> dict[int, str]:
        """Positions of a prompt at which a checkpoint is worth evicting another for, and why."""
        assert request.lease is not None
        return placement.of_prompt(
            self.cache.config.placement,
            request.prefill_end,
            self.cache.config.grid,
            branching_len=request.lease.branching_len,
            shared=request.wanted,
            declared=request.params.checkpoint_at if request.params is not None else (),
            is_replay=request.is_replay,
        )

    def _commit_chunks(self, request: Request) -> None:
        """Share what is finished: whole chunks, and in deterministic mode only those of the prompt."""
        assert request.lease is not None
        grid, page_size = self.cache.config.grid, self.cache.config.page_size
        computed = min(request.num_computed, request.prefill_end) if self.deterministic else request.num_computed
        whole = computed // grid * grid
        if whole > request.lease.num_shared * page_size or request.lease.captured:
            self.cache.commit(request.lease, request.key(), whole)

    # Coming and going

    def _admit(self, budget: int) -> None:
        """Start waiting requests, oldest first, replays last, while there is room and they would have a share of the
        budget."""
        budget -= sum(request.prefill_end - request.num_computed for request in self.running if request.is_prefilling)
        waiting = tuple(self.waiting)
        for request in chain((r for r in waiting if not r.is_replay), (r for r in waiting if r.is_replay)):
            if budget <= 0 or len(self.running) >= self.max_num_seqs:
                return
            if self._is_held(request):
                continue
            if not (self._start(request) or self._start_after(self._drop_replays, request)) and (
                self.running or not self._start_after(self.cache.give_up_a_pin, request)
            ):
                return
            self.waiting.remove(request)
            self.running.append(request)
            budget -= request.prefill_end - request.num_computed

    def _start(self, request: Request) -> bool:
        end = request.prompt_len if self.deterministic else len(request.ids)
        key = request.key()
        lease = self.cache.open(key, end - 1, end, request.priority)
        if lease is None:
            return False
        if request.explanation is None:
            request.explanation = lease.explanation
            if not request.is_replay:
                self.cache.record(lease.explanation)
        request.lease, request.status = lease, Status.RUNNING
        request.num_computed, request.prefill_end = lease.num_hit_tokens, end
        request.leader = None
        return True

    def _start_after(self, give_way: Callable[[], bool], request: Request) -> bool:
        """Start a request once others give way, as long as there are any."""
        while give_way():
            if self._start(request):
                return True
        return False

    def _is_held(self, request: Request) -> bool:
        """Whether a running request is about to compute more of this one's prefix than is usable now."""
        if request.leader is not None:
            leader, position = request.leader
            if leader.status is Status.RUNNING and leader.num_computed < position:
                return True
            request.leader = None
        end = request.prompt_len if self.deterministic else len(request.ids)
        key: Key | None = None
        usable, grid = 0, self.cache.config.grid
        for leader in self.running:
            if not leader.is_prefilling or leader.namespace != request.namespace:
                continue
            if leader.ids[:grid] != request.ids[:grid]:
                continue  # most have nothing in common: no key is made for them
            if key is None:
                key = request.key()
                usable = self.cache.tree.peek(key, end - 1).num_tokens
            position = self._shared_len(key, leader, end - 1)
            if position > usable and leader.num_computed < position:
                leader.wanted.add(position)
                request.leader = (leader, position)
                return True
        return False

    def _shared_len(self, key: Key, leader: Request, limit: int) -> int:
        """How many tokens, on the grid, the key shares with what the leader computes as prompt."""
        grid = self.cache.config.grid
        most = min(limit, leader.prefill_end) * TOKEN_BYTES
        shared = common_prefix(key.ids, leader.key().ids, 0, 0, grid * TOKEN_BYTES, most) // TOKEN_BYTES
        return key.whole(shared, grid)

    def _youngest(self) -> Request:
        """Who gives way when pages run out: replays first, then who came last."""
        return next((request for request in self.running if request.is_replay), self.running[-1])

    def _drop_replays(self) -> bool:
        replays = [request for request in self.running if request.is_replay]
        for request in replays:
            self._retract(request)
        return bool(replays)

    def _retract(self, request: Request) -> None:
        """Take a request off its memory, to be resumed first. A replay is given up."""
        assert request.lease is not None
        if not request.is_replay:
            self.num_retractions += 1
        self._release(request)
        if not request.is_replay:
            request.status = Status.WAITING
            self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        if request.lease is not None:
            self._release(request)
        request.status = Status.FINISHED

    def _release(self, request: Request) -> None:
        assert request.lease is not None
        self.cache.close(request.lease)
        request.lease = None
        request.num_computed = 0
        request.status = Status.FINISHED
        self.running.remove(request)
