"""The sizes that steps are padded to: few layouts occur, and a graph can be captured for each.

What fills a step up writes no page and no state. Decoding requests of padding have one token each, of sequences without
keys. The tokens that fill up the prompts belong to a prompt of padding, without keys too; further prompts of padding
have no tokens. No row reads another one's, so that padding changes no bit where results do not depend on the batch.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hybrid.engine.branches import TreePart
from hybrid.engine.step import SampledRows, Step
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
        runs: requests that linear layers see in a step with drafts. Those of padding share its rows of padding: each
            has several, one, or none. 0: as many as the step has.
    """

    rows: int
    width: int
    tokens: int = 0
    prompts: int = 0
    captures: int = 0
    runs: int = 0

    @classmethod
    @lru_cache(1024)
    def of(cls, num_requests: int, num_pages: int) -> Padding:
        """Return the sizes for decoding requests: the next powers of two; rows beyond 16 in steps of 8."""
        rows = _power_from(num_requests) if num_requests <= 16 else ceil_div(num_requests, 8) * 8
        return cls(rows, max(MIN_WIDTH, _power_from(num_pages)))

    @classmethod
    def with_prompts(cls, tokens: int, prompts: int, captures: int, decodes: int, pages: int) -> Padding:
        """Return the sizes for a step with prompts. There are more such layouts, so that what costs little is rounded
        up further."""
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
        """Return the sizes for drafts, however requests share them: powers of two of rows and of requests, and
        every other width, as each graph keeps its log. There are as many runs of padding as requests at least, so that
        none of them is longer than others are on average, and fewer runs than rows."""
        rows, width = _power_from(decodes + drafts), MIN_WIDTH
        while width < pages:
            width *= 4
        return cls(rows - drafts, width, runs=min(2 * _power_from(decodes), rows - 1))


NO_PADDING = Padding(0, 0)


def padding_of(step: Step, max_prompt_tokens: int, on_gpu: bool = True) -> Padding | None:
    """Return the sizes that a step is padded to; None: no pass is captured of such steps.

    Args:
        max_prompt_tokens: of steps with prompts; 0: no pass is captured of them.
        on_gpu: passes are captured as CUDA graphs are. On a CPU rows of padding would be computed one by one, so that
            decode steps are padded in width alone.
    """
    parts, num_prompts, num_drafts = step.parts, step.num_prompts, 0
    if not step.is_plain:
        if [part for part in parts if part.request.media or part.request.adapter or isinstance(part, TreePart)]:
            return None
        num_drafts = sum([part.num_drafts for part in parts])
    num_pages = max([len(part.lease.block_table) for part in parts])
    if num_prompts:
        return _with_prompts(step, num_drafts, num_pages, max_prompt_tokens)
    num_rows = len(parts) + num_drafts
    if num_drafts:
        if num_rows > MAX_ROWS_WITH_DRAFTS:
            return None
        padding = Padding.with_drafts(len(parts), num_drafts, num_pages)
    else:
        padding = Padding.of(num_rows, num_pages)
    if on_gpu:
        return padding
    return Padding(len(parts), padding.width) if num_rows <= MAX_CAPTURED_ROWS else None


def _with_prompts(step: Step, num_drafts: int, num_pages: int, max_prompt_tokens: int) -> Padding | None:
    """Return the sizes that a step with prompts is padded to."""
    prompts = step.parts[: step.num_prompts]
    num_tokens = sum(part.num_rows for part in prompts)
    if num_tokens > max_prompt_tokens or len(prompts) > MAX_PROMPTS or num_drafts:
        return None
    if any(SampledRows.of(part).count > 1 for part in prompts):
        return None
    num_captures = sum(len(part.captured) for part in prompts)
    return Padding.with_prompts(num_tokens, len(prompts), num_captures, len(step.parts) - len(prompts), num_pages)


def _power_from(count: int) -> int:
    """Return the smallest power of two that is not less than a number."""
    return 1 << max(count - 1, 0).bit_length()
