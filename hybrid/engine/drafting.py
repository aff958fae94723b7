"""Drafts of a step: the parts that have some, their memory, and what becomes of those that are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from hybrid.cache.cache import HybridCache
from hybrid.engine.branches import TreePart
from hybrid.engine.build import LoadedModel
from hybrid.engine.capture import capture_for
from hybrid.engine.config import EngineConfig
from hybrid.engine.padding import MAX_CAPTURED_ROWS
from hybrid.engine.predictor import MtpDrafter
from hybrid.engine.request import Request
from hybrid.engine.step import Part, Step
from hybrid.errors import ArgumentError
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import History
from hybrid.speculation.drafts import Drafts
from hybrid.speculation.speculator import DrafterStats, Speculator, clock_of, make_speculator
from hybrid.units import ceil_div

TIMED_EVERY = 4
"""Steps without drafts of which one is timed: all take the same time."""


class Drafting:
    """Drafts for the parts of one engine's steps.

    Args:
        speculator: has drafts.
        cache: allocates their memory.
        config: limits of the engine.
        deterministic: decoded states are not shared.
        mtp: the drafter that computes in the requests' memory, if there is one.
        clock: seconds, by which passes are timed.
        captures: passes are captured on a CPU. Where drafts are chosen by what they cost, the most probable path alone
            of a tree is computed, which is not captured.
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
    ) -> None:
        self._clock = clock
        self._chains_alone = captures and speculator.is_adaptive
        self._began = 0.0
        self._num_plain = 0
        self._speculator = speculator
        self._mtp = mtp
        self._cache = cache
        self._deterministic = deterministic
        self._grid = cache.config.grid
        self._most = config.max_num_batched_tokens - config.max_num_seqs - cache.config.chunk_size

    @property
    def stats(self) -> dict[str, DrafterStats]:
        """Counts of each drafter, by its name."""
        return self._speculator.stats

    def add(self, decodes: list[Part]) -> Iterator[tuple[Part, Exception]]:
        """Add drafts to the parts of requests whose next token is not known, as far as a step has room for them. Parts
        whose drafts form trees are replaced in the list.

        Yields:
            Parts whose drafts could not be made, with the exception.
        """
        if [part for part in decodes if part.num_unknown]:  # it is launched ahead
            return
        parts: list[Part] = []
        asked: list[tuple[History, int]] = []
        for part in decodes:
            if part.is_alive and part.end == len(part.request.ids) and part.request.may_draft:
                part.num_pages = len(part.lease.block_table)
                limit = min(self._limit(part), self._most)
                if limit > 0:
                    parts.append(part)
                    asked.append((part.request.history, limit))
        if self._mtp is not None:
            self._mtp.take_parts(parts)
        proposed = self._speculator.propose_all(asked, len(decodes))
        left, places = self._most, {id(part): at for at, part in enumerate(decodes)}
        for part, drafts in zip(parts, proposed, strict=True):
            if drafts is None and len(part.lease.block_table) == part.num_pages:  # no pages were taken for drafts
                continue
            try:
                drafted = self._add(part, drafts.first(left) if drafts is not None else None)
                decodes[places[id(part)]] = drafted
                left -= drafted.num_drafts
            except Exception as error:
                yield part, error

    def awaits(self, parts: Sequence[Part]) -> bool:
        """Return whether the step after one that was launched waits for its tokens, since it may have drafts.

        Args:
            parts: of the one that was launched.
        """
        if [part for part in parts if part.drafts is not None]:  # how many tokens it yields is not known
            return True
        continued = [part.request for part in parts if part.samples and part.is_alive and part.request.num_left > 2]
        return not self._speculator.has_none([request.history for request in continued])

    def _limit(self, part: Part) -> int:
        """Return the most drafts that a part may have."""
        request, grid = part.request, self._grid
        limit = min(request.num_left - 1, grid)
        if request.may_end_anywhere and not self._deterministic:
            limit = min(
                limit, ceil_div(part.end, grid) * grid - part.end
            )  # what is after the end must not replace the back
        return limit

    def _add(self, part: Part, drafts: Drafts | None) -> Part:
        """Add drafts to a part, and allocate their memory. Returns the part, or another one where they form a tree."""
        lease, page_size = part.lease, self._cache.config.page_size
        if drafts is None or not drafts.tokens:
            if self._mtp is not None:
                self._cache.trim(lease, part.num_pages)  # pages in which it has computed
            return part
        tree = None
        if not drafts.is_chain and not self._chains_alone:
            tree = TreePart.of(part, drafts, self._cache)
        if tree is not None:
            part, longest = tree, drafts.depth
        else:
            drafts = drafts.first_path()
            end = part.end + len(drafts.tokens)
            if end > len(lease.block_table) * page_size and not self._cache.reserve(lease, end):
                drafts = drafts.first(len(lease.block_table) * page_size - part.end)
                if not drafts.tokens:
                    return part
            part.drafts, longest = drafts, len(drafts.tokens)
        if not self._deterministic:
            boundary = ceil_div(part.end, self._grid) * self._grid
            if boundary < part.end + longest and self._cache.take_back(lease):
                part.boundary = boundary
        return part

    def accept(self, part: Part, path: Sequence[int]) -> None:
        """Accept these drafts of a part: count them as computed, and free the pages of the others."""
        request, lease, drafts = part.request, part.lease, part.drafts
        if drafts is None or not part.is_alive:
            return
        end, page_size = part.end + len(path), self._cache.config.page_size
        if isinstance(part, TreePart):
            part.keep(path, self._cache)
        boundary = part.boundary_before(end)
        if boundary is not None:
            self._cache.advance(lease, boundary)
            self._cache.swap(lease)
        if path:
            self._cache.advance(lease, end)
        if len(lease.block_table) > part.num_pages:
            self._cache.trim(lease, max(part.num_pages, ceil_div(end, page_size)))
        request.num_drafted += len(drafts.tokens)
        request.num_accepted += len(path)
        self._speculator.verified(request.history, drafts, path)

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._began = self._clock()

    def end_step(self, step: Step) -> None:
        """Record that a step was computed and delivered, and what it took. What drafters have computed for it is
        counted by itself."""
        if step.parts[0].is_prefill:  # those of prompts come first
            return
        num_drafts = sum([part.num_drafts for part in step.parts])
        if not num_drafts:
            self._num_plain += 1
            if self._num_plain % TIMED_EVERY and self._speculator.times.knows_plain:
                return
        seconds = self._clock() - self._began - self._speculator.spent
        self._speculator.timed(len(step.parts) + num_drafts, seconds, num_drafts)

    def forget(self, request: Request) -> None:
        """Record that a request has given its memory back."""
        self._speculator.end(request.history)


def make_drafting(
    speculation: SpeculationConfig | None,
    loaded: LoadedModel,
    cache: HybridCache,
    config: EngineConfig,
    deterministic: bool,
    captures: bool,
) -> Drafting | None:
    """Make the drafts of an engine; None: it has none.

    Args:
        captures: passes are captured on a CPU.

    Raises:
        ArgumentError: two drafters have the same name, or there is no predictor, or transformers' layers compute, which
            keep no states between the drafts of a pass.
    """
    if speculation is not None and not loaded.model.takes_drafts:
        raise ArgumentError(
            f"drafts need a family of this package, and {loaded.name} runs by transformers' layers: leave speculation "
            "out, or use hybrid.hf.PrefixCache"
        )
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
    return Drafting(speculator, cache, config, deterministic, mtp, clock, captures)
