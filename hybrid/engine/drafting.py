"""The drafts of a step: which parts have some, their memory, and what becomes of those that are accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid.cache.cache import HybridCache
from hybrid.cache.paths import exchange, extend
from hybrid.engine.branches import Branches
from hybrid.engine.config import EngineConfig
from hybrid.engine.request import Request
from hybrid.engine.step import Part, Step
from hybrid.speculation.drafts import Drafts
from hybrid.speculation.speculator import DrafterStats, Speculator
from hybrid.units import ceil_div


class Drafting:
    """Drafts for the parts of one engine's steps.

    Args:
        speculator: has drafts.
        cache: allocates their memory.
        config: limits of the engine.
        deterministic: decoded states are not shared.
    """

    def __init__(self, speculator: Speculator, cache: HybridCache, config: EngineConfig, deterministic: bool) -> None:
        self._speculator = speculator
        self._cache = cache
        self._deterministic = deterministic
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
        rows = len(decodes)
        for part in decodes:
            if not part.is_alive or part.end != len(part.request.ids):
                continue
            try:
                self._add(part, self._most - (rows - len(decodes)), rows)
            except Exception as error:
                yield part, error
            rows += part.num_drafts

    def _add(self, part: Part, limit: int, rows: int) -> None:
        """Add up to `limit` drafts to a part, and allocate their memory, in a pass that has `rows` rows already."""
        request, lease, config = part.request, part.lease, self._cache.config
        boundary = ceil_div(part.end, config.grid) * config.grid
        limit = min(limit, request.num_left - 1, config.grid)
        if request.may_end_anywhere and not self._deterministic:
            limit = min(limit, boundary - part.end)  # what comes after the end must not replace the back
        drafts = self._speculator.propose(request.history, limit, rows) if limit > 0 else None
        if drafts is None:
            return
        part.num_pages = len(lease.block_table)
        if not drafts.is_chain:
            part.branches = self._branches(part, drafts)
        if part.branches is None:
            drafts = drafts.first_path()
            if not self._cache.reserve(lease, part.end + len(drafts)):
                drafts = drafts.first(part.num_pages * config.page_size - part.end)
                if not len(drafts):
                    return
        part.drafts = drafts
        if not self._deterministic and boundary < part.end + max(drafts.depths) and self._cache.take_back(lease):
            part.boundary = boundary

    def _branches(self, part: Part, drafts: Drafts) -> Branches | None:
        """The paths of a tree of drafts with the memory for them, which must be free: nothing is evicted for paths of
        which only one is kept. None: it is not, and nothing was allocated."""
        lease, page_size = part.lease, self._cache.config.page_size
        num_pages = max(len(lease.block_table), ceil_div(part.end + max(drafts.depths), page_size))
        branches = Branches.of(drafts, part.end, page_size, num_pages)
        if branches.places[0] < lease.num_shared or not extend(self._cache, lease, branches.num_pages):
            return None
        return branches

    def accept(self, part: Part, path: Sequence[int]) -> None:
        """The drafts of a part were computed, and those of `path` are what comes next: count these as computed, and
        free the pages of the others."""
        request, lease, drafts = part.request, part.lease, part.drafts
        if drafts is None or not part.is_alive:
            return
        end, page_size = part.end + len(path), self._cache.config.page_size
        if path and part.branches is not None:
            first, own = part.branches.places[0], part.branches.places[part.branches.home[path[-1]]]
            for page in range(ceil_div(end, page_size) - first if own != first else 0):
                exchange(self._cache, lease, first + page, own + page)
        boundary = part.boundary_before(end)
        if boundary is not None:
            self._cache.advance(lease, boundary)
            self._cache.swap(lease)
        self._cache.advance(lease, end)
        self._cache.trim(lease, max(part.num_pages, ceil_div(end, page_size)))
        request.num_computed = end
        request.num_drafted += len(drafts)
        request.num_accepted += len(path)
        self._speculator.verified(request.history, drafts, path)

    def timed(self, step: Step, seconds: float) -> None:
        """A step was computed, in this time."""
        if not any(part.is_prefill for part in step.parts):
            self._speculator.timed(sum(part.num_rows for part in step.parts), seconds)

    def end(self, request: Request) -> None:
        """A request has given its memory back."""
        self._speculator.end(request.history)
