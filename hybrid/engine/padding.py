"""Rows of a step, and the sizes they are padded to: few layouts occur, and a graph can be captured for each.

What fills a step up writes no page and no state. Decoding requests of padding have one token each, of sequences without
keys. The tokens that fill up the prompts belong to a prompt of padding, without keys too; further prompts of padding
have no tokens. No row reads another one's, so that padding changes no bit where results do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hybrid.engine.request import Request
from hybrid.engine.step import Part, Step
from hybrid.speculation.drafts import Drafts
from hybrid.units import ceil_div


class SampledRows(NamedTuple):
    """The rows of logits of one part: one for its last known token, and one for each draft after it.

    Attributes:
        samples: the token after its last known one is wanted.
        num_logprobs: number of log-probabilities that are requested; None: none.
        drafts: the drafts.
        count: number of rows.
        num_prompt_logprobs: number of log-probabilities that are requested for tokens of the prompt; None: none.
        targets: the tokens after the first rows, whose log-probabilities are requested.
        forks: number of rows for the first tokens of other answers: the last rows, all of the last known token.
    """

    samples: bool
    num_logprobs: int | None = None
    drafts: Drafts | None = None
    count: int = 1  # type: ignore[assignment]  # hides the method of tuples, which nothing here calls
    num_prompt_logprobs: int | None = None
    targets: tuple[int, ...] = ()
    forks: int = 0

    @property
    def before(self) -> int:
        """Number of rows before that of the last known token."""
        return self.count - 1 - self.forks - (len(self.drafts) if self.drafts is not None else 0)

    def rows(self, end: int) -> list[int]:
        """Its rows among the tokens of the batch, of which its own end at `end`."""
        first = end - (self.count - self.forks)
        last_known = first + self.before
        return [*range(first, end), *[last_known] * self.forks]

    @classmethod
    def of(cls, part: Part) -> SampledRows:
        """Return the rows of a part."""
        request, samples = part.request, part.samples
        count = request.params.logprobs if samples else None
        if request.params.prompt_logprobs is None and request.completions is None:
            if part.drafts is None and count is None:
                return LAST_TOKEN if samples else NOT_SAMPLED
            return cls(samples, count, part.drafts, part.num_drafts + 1)
        targets: tuple[int, ...] = ()
        first = part.end - 1
        if request.hit_limit < request.prompt_len:
            first = max(part.start, min(first, len(request.prompt_logprobs) - 1))
            targets = tuple(request.ids[first + 1 : min(part.end, request.prompt_len - 1) + 1])
        forks = len(request.forks) if samples else 0
        return cls(
            samples,
            count,
            part.drafts,
            part.start + part.num_rows - first + forks,
            request.params.prompt_logprobs if targets else None,
            targets,
            forks,
        )


LAST_TOKEN, NOT_SAMPLED = SampledRows(True), SampledRows(False)
"""The rows of most parts."""


def rows_of(sampled: Sequence[SampledRows], ends: Sequence[int]) -> list[int]:
    """The rows of logits of parts among the tokens of the batch, of which those of each part end at one of `ends`."""
    rows: list[int] = []
    for own, end in zip(sampled, ends, strict=True):
        rows += (end - 1,) if own.count == 1 else own.rows(end)
    return rows


def tokens_of(parts: Sequence[Part], sampled: Sequence[SampledRows]) -> list[tuple[Request | None, Sequence[int], int]]:
    """For each row of logits the token that is chosen from it: of which request (None: none is wanted), after which
    drafts, as if they are right, and after how many tokens that are not in its history yet."""
    tokens: list[tuple[Request | None, Sequence[int], int]] = []
    for part, own in zip(parts, sampled, strict=True):
        request = part.request if own.samples else None
        if own.count > 1:
            tokens += [(None, (), 0)] * own.before
        if own.drafts is None:
            tokens.append((request, (), part.num_unknown))
        else:
            tokens += [(request, path, part.num_unknown) for path in own.drafts.after()]
        if own.forks:
            forks: Sequence[Request | None] = part.request.forks or [None] * own.forks  # None: it has ended since
            tokens += [(fork, (), 0) for fork in forks]
    return tokens


def targets_of(sampled: Sequence[SampledRows]) -> tuple[int, ...] | None:
    """For each row of logits the token whose log-probability is requested, -1 for that which is chosen; None: there are
    no others."""
    if not [own for own in sampled if own.targets]:
        return None
    return tuple(target for own in sampled for target in (*own.targets, *[-1] * (own.count - len(own.targets))))


def most_logprobs(sampled: Sequence[SampledRows]) -> int | None:
    """Number of log-probabilities that a row has, at most; None: none."""
    wanted = [own.num_logprobs for own in sampled if own.num_logprobs is not None]
    wanted += [own.num_prompt_logprobs for own in sampled if own.num_prompt_logprobs is not None]
    return max(wanted, default=None)


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
    """Return where the steps of each request that decodes start, and the end.

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
