"""Which rows of logits a step computes, and which tokens are chosen from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hybrid.engine.request import Request
from hybrid.engine.step import Part
from hybrid.speculation.drafts import Drafts


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

    @property
    def most_logprobs(self) -> int | None:
        """Number of log-probabilities that a row has, at most; None: none."""
        return max((n for n in (self.num_logprobs, self.num_prompt_logprobs) if n is not None), default=None)

    def rows(self, end: int) -> list[int]:
        """Its rows among the tokens of the batch, of which its own end at `end`."""
        if self.count == 1:  # the usual case
            return [end - 1]
        first = end - (self.count - self.forks)
        last_known = first + self.before
        return [*range(first, end), *[last_known] * self.forks]

    @classmethod
    def of(cls, part: Part) -> SampledRows:
        """Those of a part."""
        request, samples = part.request, part.samples
        count = request.params.logprobs if samples else None
        if request.params.prompt_logprobs is None and request.completions is None:
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


def tokens_of(
    parts: Sequence[Part], sampled: Sequence[SampledRows]
) -> Iterator[tuple[Request | None, Sequence[int], int]]:
    """For each row of logits the token that is chosen from it: of which request (None: none is wanted), after which
    drafts, as if they are right, and after how many tokens that are not in its history yet."""
    for part, own in zip(parts, sampled, strict=True):
        request, num_unknown = part.request if own.samples else None, part.num_unknown
        for _ in range(own.before):
            yield None, (), 0
        for path in own.drafts.after() if own.drafts is not None else ((),):
            yield request, path, num_unknown
        for fork in part.request.forks if own.forks else ():
            yield fork, (), 0


def targets_of(sampled: tuple[SampledRows, ...]) -> tuple[int, ...] | None:
    """For each row of logits the token whose log-probability is requested, -1 for that which is chosen; None: there are
    no others."""
    if not any(own.targets for own in sampled):
        return None
    return tuple(target for own in sampled for target in (*own.targets, *[-1] * (own.count - len(own.targets))))
