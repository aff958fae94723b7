"""The drafts of a step: which parts have some, their memory, and what becomes of those that are accepted."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import cast

from hybrid.cache.cache import HybridCache
from hybrid.engine.branches import Branches
from hybrid.engine.build import LoadedModel
from hybrid.engine.capture import capture_for
from hybrid.engine.config import EngineConfig
from hybrid.engine.padding import MAX_CAPTURED_ROWS
from hybrid.engine.predictor import MtpDrafter
from hybrid.engine.request import Request
from hybrid.engine.rounds import MAX_ENDS, MAX_SECONDS, MAX_TOKENS, Followed, Rounds
from hybrid.engine.step import Part, Step
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import History
from hybrid.speculation.drafts import Accepted, Drafts
from hybrid.speculation.pace import BetweenCalls, clock_of
from hybrid.speculation.speculator import DrafterStats, Speculator, make_speculator
from hybrid.units import ceil_div

TIMED_EVERY = 4
"""Of steps without drafts as many take the same time, and one of them is timed."""


class Drafting:
    """Drafts for the parts of one engine's steps.

    Args:
        speculator: has drafts.
        cache: allocates their memory.
        config: limits of the engine.
        deterministic: decoded states are not shared.
        mtp: the drafter that computes in the requests' memory, if there is one.
        clock: seconds, by which passes are timed.
        captures: passes are captured on a CPU: what follows them is computed in their call, and where drafts are chosen
            by what they cost, the most probable path alone of a tree, which is not captured.
        end_tokens: the model's tokens that end an answer.

    Attributes:
        seconds_of_round: of the latest one; infinite: it is not known.
    """

    def __init__(
        self,
        speculator: Speculator,
        cache: HybridCache,
        config: EngineConfig,
        deterministic: bool,
        mtp: MtpDrafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        captures: bool = False,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._end_tokens = end_tokens
        self._clock = clock
        self._chains_alone = captures and speculator.is_adaptive
        self._captures = captures
        self.seconds_of_round: float = inf
        self._began = 0.0
        self._num_plain = 0
        self._between = BetweenCalls()
        self._speculator = speculator
        self._mtp = mtp
        self._cache = cache
        self._deterministic = deterministic
        self._grid = cache.config.grid
        self._most = config.max_num_batched_tokens - config.max_num_seqs - cache.config.chunk_size

    @property
    def stats(self) -> dict[str, DrafterStats]:
        """What each drafter has done, by its name."""
        return self._speculator.stats

    def add(self, decodes: list[Part]) -> Iterator[tuple[Part, Exception]]:
        """Add drafts to the parts of requests whose next token is not known, as far as a step has room for them.

        Yields:
            Parts whose drafts could not be made, with the exception.
        """
        if [part for part in decodes if part.num_unknown]:  # it is launched ahead
            return
        parts: list[Part] = []
        asked: list[tuple[History, int]] = []
        for part in decodes:
            if part.is_alive and part.end == len(part.request.ids):
                part.num_pages = len(part.lease.block_table)
                limit = min(self._limit(part), self._most)
                if limit > 0:
                    parts.append(part)
                    asked.append((part.request.history, limit))
        if self._mtp is not None:
            self._mtp.begin(parts)
        proposed = self._speculator.propose_all(asked, len(decodes))
        left = self._most
        for part, drafts in zip(parts, proposed, strict=True):
            if drafts is None and len(part.lease.block_table) == part.num_pages:  # no pages were taken for drafts
                continue
            try:
                self._add(part, drafts.first(left) if drafts is not None else None)
            except Exception as error:
                yield part, error
            left -= part.num_drafts

    def rounds(self, decodes: Sequence[Part]) -> Rounds | None:
        """What is computed in the call of the pass over these parts, after the tokens that it chooses; None: nothing.
        Called when their drafts are known."""
        has_drafts = any(part.drafts is not None for part in decodes)
        has_chains = self._mtp is not None and all(self._mtp.num_ahead(part.request.history) for part in decodes)
        if not self._captures or not decodes or not (has_drafts or has_chains):
            return None
        if any(part.num_unknown for part in decodes):
            return None
        is_quick = has_drafts and self.seconds_of_round < MAX_SECONDS / 2
        followed, may_continue, first = list[Followed](), is_quick, 0
        for part in decodes:
            own = self._followed(part, first, may_continue)
            if own is None:
                return None
            may_continue = may_continue and own.until > part.end
            followed.append(own)
            first += part.num_rows
        chains = self._mtp.ahead(decodes) if self._mtp is not None and has_chains else None
        if chains is None and not has_drafts:
            return None
        may_continue = may_continue and (chains is not None or any(len(own.source) > 0 for own in followed))
        rounds = Rounds(followed, chains, may_continue, self._cache.config.page_size, self._clock)
        if self._mtp is not None and chains is not None:
            self._mtp.follow(rounds)
        return rounds

    def _followed(self, part: Part, first: int, may_continue: bool) -> Followed | None:
        """A part whose rows begin at `first`; None: which drafts are accepted does not follow from the most likely
        tokens alone.

        Args:
            may_continue: it may have pages for further rounds.
        """
        request, drafts, lease, history = part.request, part.drafts, part.lease, part.request.history
        if request.params.temperature or request.constraints is not None or request.forks or part.branches is not None:
            return None
        end_tokens = request.end_tokens(self._end_tokens)
        if drafts is not None and end_tokens and any(token in end_tokens for token in drafts.tokens):
            return None
        known, beyond = part.write_slot, lease.back
        if known is None or beyond == known:
            return None
        until, source = 0, cast(Sequence[int], ())
        if may_continue and part.samples and len(end_tokens) <= MAX_ENDS and self._says_all(part):
            until = self._until(part)
            if drafts is not None and until:
                source = self._speculator.following(history, drafts, MAX_TOKENS)
        return Followed(
            history,
            first,
            part.num_drafts,
            known,
            beyond if beyond is not None else -1,
            part.boundary - part.end if part.boundary is not None and beyond is not None else -1,
            len(lease.block_table) * self._cache.config.page_size,
            until,
            end_tokens,
            drafts,
            source,
            part.end,
            self._asking(history) if len(source) and self._speculator.is_adaptive else None,
            self._mtp.chains_of(history) if self._mtp is not None else [],
        )

    def _asking(self, history: History) -> Callable[[Sequence[int]], Sequence[int]]:
        """Asks for another source of a request, given the tokens that were chosen since it was asked before."""
        ids: list[array[int]] = []

        def ask(chosen: Sequence[int]) -> Sequence[int]:
            if not ids:
                ids.append(history[:])
            ids[0].extend(chosen)
            return self._speculator.beyond(history, ids[0], MAX_TOKENS)

        return ask

    def _says_all(self, part: Part) -> bool:
        """Whether a round of a part leaves nothing to do before the next one but to know its tokens."""
        request = part.request
        if request.may_end_anywhere or request.params.logprobs is not None or part.captured:
            return False
        return self._speculator.is_adaptive or part.num_drafts == self._speculator.max_drafts

    def _until(self, part: Part) -> int:
        """Number of tokens that a request may have in further rounds, without the one that is chosen last: with pages
        for them, and for what is drafted after them, from memory that is free."""
        request, lease, page_size, grid = part.request, part.lease, self._cache.config.page_size, self._grid
        until = min(request.max_len - 1, part.end + MAX_TOKENS)
        if not self._deterministic:  # the state there is to be kept
            until = min(until, ceil_div(part.end, grid) * grid)
        ahead = self._mtp.num_ahead(request.history) if self._mtp is not None else 0
        if part.drafts is not None:  # what others have is not taken back if nothing is computed there
            self._cache.reserve_from_free(lease, ceil_div(until + ahead, page_size))
        return min(until, len(lease.block_table) * page_size)

    def awaits(self, parts: Sequence[Part]) -> bool:
        """Whether the step after one that was launched waits for its tokens, since it may have drafts.

        Args:
            parts: of the one that was launched.
        """
        if [part for part in parts if part.drafts is not None]:  # how many tokens it yields is not known
            return True
        continued = [part.request for part in parts if part.samples and part.is_alive and part.request.num_left > 2]
        return not self._speculator.has_none([request.history for request in continued])

    def _limit(self, part: Part) -> int:
        """The most drafts that a part may have."""
        request, grid = part.request, self._grid
        limit = min(request.num_left - 1, grid)
        if request.may_end_anywhere and not self._deterministic:
            limit = min(
                limit, ceil_div(part.end, grid) * grid - part.end
            )  # what is after the end must not replace the back
        return limit

    def _add(self, part: Part, drafts: Drafts | None) -> None:
        """Add drafts to a part, and allocate their memory."""
        lease, config = part.lease, self._cache.config
        if drafts is None or not drafts.tokens:
            if self._mtp is not None:
                self._cache.trim(lease, part.num_pages)  # pages in which it has computed
            return
        if not drafts.is_chain and not self._chains_alone:
            part.branches = self._branches(part, drafts)
        if part.branches is None:
            drafts = drafts.first_path()
            longest = len(drafts.tokens)
            if part.end + longest > len(lease.block_table) * config.page_size and not self._cache.reserve(
                lease, part.end + longest
            ):
                drafts = drafts.first(len(lease.block_table) * config.page_size - part.end)
                longest = len(drafts.tokens)
                if not longest:
                    return
        else:
            longest = drafts.depth
        part.drafts = drafts
        count = self._mtp.num_ahead(part.request.history) if self._mtp is not None else 0
        if count and part.end + longest + count > len(lease.block_table) * config.page_size:
            self._cache.reserve(lease, part.end + longest + count)  # what has no page is not drafted
        if not self._deterministic:
            boundary = ceil_div(part.end, self._grid) * self._grid
            if boundary < part.end + longest and self._cache.take_back(lease):
                part.boundary = boundary

    def _branches(self, part: Part, drafts: Drafts) -> Branches | None:
        """The paths of a tree of drafts with the memory for them, which must be free: nothing is evicted for paths of
        which only one is kept. None: it is not, and nothing was allocated."""
        lease, page_size = part.lease, self._cache.config.page_size
        num_pages = max(len(lease.block_table), ceil_div(part.end + drafts.depth, page_size))
        branches = Branches.of(drafts, part.end, page_size, num_pages)
        if branches.places[0] < lease.num_shared or not self._cache.reserve_from_free(lease, branches.num_pages):
            return None
        return branches

    def accept(self, part: Part, accepted: Sequence[Accepted], num_more: int) -> None:
        """After a part `num_more` tokens were computed, that are known now: count these as computed, and free the pages
        of others.

        Args:
            accepted: what became of its drafts, in each round.
        """
        request, lease = part.request, part.lease
        if not (accepted or num_more) or not part.is_alive:
            return
        end, page_size, path = part.end + num_more, self._cache.config.page_size, accepted[0].path if accepted else ()
        if path and part.branches is not None:
            first, own = part.branches.places[0], part.branches.places[part.branches.home[path[-1]]]
            for page in range(ceil_div(end, page_size) - first if own != first else 0):
                self._cache.swap_pages(lease, first + page, own + page)
        boundary = part.boundary_before(end)
        if boundary is not None:
            self._cache.advance(lease, boundary)
            self._cache.swap(lease)
        if num_more:
            self._cache.advance(lease, end)
            request.num_computed = end
        if len(lease.block_table) > part.num_pages:
            self._cache.trim(lease, max(part.num_pages, ceil_div(end, page_size)))
        for drafts, right in accepted:
            request.num_drafted += len(drafts.tokens)
            request.num_accepted += len(right)
            self._speculator.verified(request.history, drafts, right)

    def begin(self) -> None:
        """A step begins."""
        self._began = self._clock()

    def timed(self, step: Step) -> None:
        """A step was computed and delivered. What drafters have computed for it is counted by itself."""
        if step.parts[0].is_prefill:  # those of prompts come first
            return
        num_drafts = sum([part.num_drafts for part in step.parts])
        if not num_drafts:
            self._num_plain += 1
            if self._num_plain % TIMED_EVERY and self._speculator.cost.knows_plain:
                return
        seconds, rounds = self._clock() - self._began - self._speculator.spent, step.rounds
        if rounds is not None and rounds.count:
            self.seconds_of_round = rounds.elapsed / rounds.count
            own, between = self.seconds_of_round - rounds.seconds_of_chains / rounds.count, seconds - rounds.elapsed
            if rounds.chains is not None or len(step.parts) == 1:  # wrong drafts do not end them
                tokens = sum([len(followed.tokens) for followed in rounds.followed])
                between = self._between.share(between, num_drafts, rounds.count, tokens)
            seconds = own + between
        self._speculator.timed(len(step.parts) + num_drafts, seconds, num_drafts)

    def end(self, request: Request) -> None:
        """A request has given its memory back."""
        self._speculator.end(request.history)


def make_drafting(
    speculation: SpeculationConfig | None,
    loaded: LoadedModel,
    cache: HybridCache,
    config: EngineConfig,
    deterministic: bool,
    captures: bool,
) -> Drafting | None:
    """The drafts of an engine; None: it has none.

    Args:
        captures: passes are captured on a CPU.

    Raises:
        ArgumentError: two drafters have the same name, or there is no predictor.
    """
    has_predictor = speculation is not None and speculation.uses_predictor and loaded.model.mtp is not None
    mtp = None
    if has_predictor:
        capture = capture_for(loaded.device) if captures else None
        mtp = MtpDrafter(loaded.model, cache, loaded.device, capture)
    clock = clock_of(loaded.device.type)
    max_rows = MAX_CAPTURED_ROWS if captures else None
    speculator = make_speculator(speculation, cache, loaded.model.config.vocab_size, mtp, clock, max_rows)
    if speculator is None:
        return None
    return Drafting(speculator, cache, config, deterministic, mtp, clock, captures, loaded.end_tokens)
