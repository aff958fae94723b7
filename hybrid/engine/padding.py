"""Sizes that steps are padded to, so that few layouts occur and a graph can be captured for each.

What fills a step up writes no page and no state. Decoding requests of padding have one token each, of sequences without
keys. The tokens that fill up the prompts belong to a prompt of padding, without keys too; further prompts of padding
have no tokens. No row reads another one's, so that padding changes no bit where results do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hybrid.engine.sampled_rows import SampledRows
from hybrid.engine.step import Part, Step
from hybrid.units import ceil_div

MIN_WIDTH = 16
"""Columns of the narrowest block table of a padded step, in pages."""

MAX_PROMPT_TOKENS = 512
"""Tokens of prompts in a step beyond which its launches take no longer than its work on a GPU."""

MAX_PROMPTS = 15
"""Prompt parts of a step beyond which it is not padded."""

TOKENS_STEP = 64
"""Tokens of prompts are padded to multiples of this: fewer hardly cost less on a GPU, which reads the same weights."""

MIN_CAPTURES = 4
"""Checkpoints that a padded step with prompts may write at least."""

MIN_ROWS_BESIDE_PROMPTS = 8
"""Decoding requests that a padded step with prompts has at least, if it has any."""

MAX_ROWS_WITH_DRAFTS = 128
"""Decoded tokens and drafts of a step beyond which it is not padded: its graph keeps what its states are computed from,
the inputs of all linear layers."""

MAX_CAPTURED_ROWS = 64
"""Rows of a pass on a CPU beyond which it is not captured: decoded tokens, and drafts. A row costs no less there."""


class Padding(NamedTuple):
    """The sizes that a step is padded to.

    Attributes:
        rows: requests that decode.
        width: columns of block tables.
        tokens: of prompts; 0: the step has none.
        prompts: prompt parts; at least one of them is padding.
        captures: checkpoints that prompts write.
        runs: beside drafts, requests as the linear layers see them: those of padding have several rows, one, or none;
            0: as many as there are.
    """

    rows: int
    width: int
    tokens: int = 0
    prompts: int = 0
    captures: int = 0
    runs: int = 0

    @classmethod
    def of(cls, num_requests: int, num_pages: int) -> Padding:
        """For decoding requests: the next powers of two; rows beyond 16 in steps of 8."""
        rows = _power_from(num_requests) if num_requests <= 16 else ceil_div(num_requests, 8) * 8
        return cls(rows, max(MIN_WIDTH, _power_from(num_pages)))

    @classmethod
    def with_prompts(cls, tokens: int, prompts: int, captures: int, decodes: int, pages: int) -> Padding:
        """For a step with prompts. There are more such layouts, so that what costs little is rounded up further."""
        rows, width, *_ = cls.of(max(decodes, MIN_ROWS_BESIDE_PROMPTS), pages)
        return cls(
            _power_from(rows) if decodes else 0,
            width,
            ceil_div(tokens, TOKENS_STEP) * TOKENS_STEP,
            _power_from(prompts + 1),
            max(MIN_CAPTURES, _power_from(captures)),
        )

    @classmethod
    def with_drafts(cls, decodes: int, drafts: int, pages: int) -> Padding:
        """For decoding requests with drafts, however these are dealt out: powers of two of rows and of requests, and
        every other width, as each graph keeps its log. There are as many runs of padding as requests at least, so that
        none of them is longer than others are on average, and fewer runs than rows."""
        rows, width = _power_from(decodes + drafts), MIN_WIDTH
        while width < pages:
            width *= 4
        return cls(rows - drafts, width, runs=min(2 * _power_from(decodes), rows - 1))


NO_PADDING = Padding(0, 0)


class Rows(NamedTuple):
    """The rows of a batch: those of prompts, padding of prompts, those that decode, and their padding.

    Attributes:
        parts: of each part.
        known: number of rows of prompts, without padding.
        prompts: number of rows of prompts, with padding.
        total: number of all rows.
        idle_prompts: prompts of padding.
        idle_decodes: decoding requests of padding, one row each.
    """

    parts: list[range]
    known: int
    prompts: int
    total: int
    idle_prompts: int
    idle_decodes: int

    @property
    def num_idle(self) -> int:
        """Requests of padding."""
        return self.idle_prompts + self.idle_decodes

    @classmethod
    def of(cls, positions: list[Sequence[int]], num_prompts: int, padding: Padding) -> Rows:
        """The rows of parts, prompts first.

        Args:
            positions: of the tokens of each.
        """
        counts = [*map(len, positions)]
        known = sum(counts[:num_prompts])
        prompts = max(known, padding.tokens)
        starts = [*accumulate(counts[:num_prompts], initial=0)][:num_prompts]
        starts += accumulate(counts[num_prompts:], initial=prompts)
        rows = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
        idle_prompts = max(0, padding.prompts - num_prompts)
        idle_decodes = max(0, padding.rows - (len(positions) - num_prompts))
        return cls(rows, known, prompts, starts[-1] + idle_decodes, idle_prompts, idle_decodes)


def run_starts(decodes: Sequence[Part], idle: int, runs: int) -> list[int]:
    """Where the steps of each request that decodes start, and the end.

    Args:
        idle: rows of padding, which are spread over the runs that are left.
        runs: as in `Padding`.
    """
    starts = [0, *accumulate([1 + sum(map(len, part.paths)) for part in decodes])]
    end, spare = starts[-1], max(0, runs + 1 - len(starts))
    return starts + [end + idle * (index + 1) // spare for index in range(spare)]


def padding_of(step: Step, max_prompt_tokens: int) -> Padding | None:
    """The sizes that a step is padded to; None: no graph is captured of such steps.

    Args:
        max_prompt_tokens: of steps with prompts; 0: no graph is captured of them.
    """
    parts = step.parts
    if [part for part in parts if part.request.media or part.request.adapter or part.branches]:
        return None
    drafts = sum([part.num_drafts for part in parts])
    pages = max([len(part.lease.block_table) for part in parts])
    prompts = [part for part in parts if part.is_prefill]
    if not prompts:
        if not drafts:
            return Padding.of(len(parts), pages)
        is_small = len(parts) + drafts <= MAX_ROWS_WITH_DRAFTS
        return Padding.with_drafts(len(parts), drafts, pages) if is_small else None
    tokens = sum(part.num_rows for part in prompts)
    if tokens > max_prompt_tokens or len(prompts) > MAX_PROMPTS or drafts:
        return None
    if any(SampledRows.of(part).count > 1 for part in prompts):
        return None
    captures = sum(len(part.captured) for part in prompts)
    return Padding.with_prompts(tokens, len(prompts), captures, len(parts) - len(prompts), pages)


def _power_from(count: int) -> int:
    """The power of two from a number on."""
    return 1 << max(count - 1, 0).bit_length()
