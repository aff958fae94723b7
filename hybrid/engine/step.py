"""A step: what one forward pass computes, request by request, and the rows of logits that tokens are chosen from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybrid.cache.lease import Lease
from hybrid.engine.request import Request
from hybrid.speculation.drafts import Drafts
from hybrid.tree.node import Checkpoint


@dataclass(slots=True)
class Part:
    """A request's part in a step: tokens `[start, end)`, and a chain of drafts after them.

    Attributes:
        lease: the request's lease when the step was scheduled; the step's results belong to it alone.
        is_prefill: the tokens are computed as prompt.
        samples: the token after the part is not known yet, and wanted.
        swaps: the pass reads the front and writes the back, so that the state before it is kept.
        num_unknown: number of its tokens that the host does not know: 1 when the pass before it samples its last token.
        drafts: computed after the tokens, for the case that they are what comes next.
        boundary: a position on the grid among the drafts: if they are accepted beyond it, its state is kept in the
            back. None: there is none.
        num_pages: pages that the lease needs without the drafts.
        is_dropped: its result is not taken.
    """

    request: Request
    lease: Lease
    start: int
    end: int
    is_prefill: bool
    samples: bool = False
    swaps: bool = False
    num_unknown: int = 0
    drafts: Drafts | None = None
    boundary: int | None = None
    num_pages: int = 0
    is_dropped: bool = False

    def boundary_before(self, end: int) -> int | None:
        """Return the boundary, if it is before this position."""
        return self.boundary if self.boundary is not None and self.boundary < end else None

    @property
    def num_drafts(self) -> int:
        """Number of drafts that are computed."""
        return len(self.drafts.tokens) if self.drafts is not None else 0

    @property
    def num_rows(self) -> int:
        """Number of tokens that are computed."""
        return self.end - self.start + self.num_drafts

    @property
    def paths(self) -> Sequence[Sequence[int]]:
        """The paths that its drafts form, as their indices: one, since each follows the one before."""
        return (range(self.num_drafts),)

    @property
    def draft_positions(self) -> Sequence[int]:
        """The position of each draft."""
        return range(self.end, self.end + self.num_drafts)

    def draft_slots(self, page_size: int) -> list[int]:
        """Return the slot of the K and V of each draft."""
        table = self.lease.block_table
        return [table[at // page_size] * page_size + at % page_size for at in self.draft_positions]

    @property
    def captured(self) -> list[Checkpoint]:
        """The checkpoints that the pass writes."""
        return [each for each in self.lease.captured if self.start < each.num_tokens <= self.end]

    @property
    def write_slot(self) -> int | None:
        """The slot in which the pass keeps the state after its tokens, without drafts."""
        return self.lease.back if self.swaps else self.lease.front

    @property
    def is_alive(self) -> bool:
        """Tell whether the request still runs on the memory that the part was scheduled for."""
        return self.request.lease is self.lease


@dataclass(slots=True)
class Step:
    """The parts that one forward pass computes: prompt parts first, then single tokens with their drafts."""

    parts: list[Part]

    @property
    def num_prompts(self) -> int:
        """Number of prompt parts."""
        for at, part in enumerate(self.parts):
            if not part.is_prefill:
                return at
        return len(self.parts)

    @property
    def is_plain(self) -> bool:
        """Tell whether there are no drafts, and all requests are plain."""
        for part in self.parts:  # noqa: SIM110 - a generator would cost more than what is asked
            if part.drafts is not None or not part.request.is_plain:
                return False
        return True


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
        """Return its rows among the tokens of the batch, of which its own end at `end`."""
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
    """Return the rows of logits of parts among the tokens of the batch, where those of each part end at one of
    `ends`."""
    rows: list[int] = []
    for own, end in zip(sampled, ends, strict=True):
        rows += (end - 1,) if own.count == 1 else own.rows(end)
    return rows


def tokens_of(parts: Sequence[Part], sampled: Sequence[SampledRows]) -> list[tuple[Request | None, Sequence[int], int]]:
    """Return for each row of logits which token is chosen from it: of which request (None: none is wanted), after which
    drafts, as if they were right, and after how many tokens that are not in its history yet."""
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
    """Return for each row of logits the token whose log-probability is requested, -1 for that which is chosen. None if
    there are no others."""
    if not [own for own in sampled if own.targets]:
        return None
    return tuple(target for own in sampled for target in (*own.targets, *[-1] * (own.count - len(own.targets))))


def most_logprobs(sampled: Sequence[SampledRows]) -> int | None:
    """Return the number of log-probabilities that a row has, at most. None if none are requested."""
    wanted = [own.num_logprobs for own in sampled if own.num_logprobs is not None]
    wanted += [own.num_prompt_logprobs for own in sampled if own.num_prompt_logprobs is not None]
    return max(wanted, default=None)
