"""The results of a pass: its tokens, chosen on the device and sent to the host.

Tokens are chosen as late as that can be without the device waiting: before the next pass is launched, which continues
from them, and after the host has the tokens before them, on which constraints depend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.engine.constraints import Edits
from hybrid.engine.planner import Plan
from hybrid.engine.replay import Replay
from hybrid.engine.request import Request
from hybrid.engine.sampler import (
    NOT_FINITE,
    Logprobs,
    SamplingRows,
    checked,
    choose,
    most_likely,
    token_logprobs,
)
from hybrid.engine.step import Part, SampledRows, tokens_of
from hybrid.kernels.cpu.threads import torch_on_one_thread
from hybrid.memory.contents import WorkerRun
from hybrid.memory.device import HostCopy, on_device
from hybrid.speculation.drafts import accepted


class Verification:
    """The drafts of one pass: which are accepted, and the states after those.

    The pass keeps no state after a draft: the front is valid after the last known token. What the states of the
    accepted drafts were computed from is in the pass's log, and they are computed from it once more, by the same
    operation and so with the same bits, into the front.

    Args:
        parts: of the step, prompt parts first.
        end_tokens: the model's tokens that end an answer.
        replay: computes the states of accepted drafts; None: the pass has done it.
    """

    def __init__(
        self, parts: Sequence[Part], end_tokens: frozenset[int], replay: Callable[[Replay], None] | None
    ) -> None:
        self._parts = parts
        self._end_tokens = end_tokens
        self._replay = replay

    def path(self, index: int, sampled: Sequence[int]) -> list[int]:
        """Return the drafts of a part that are accepted.

        Args:
            sampled: the token after each of its rows; -1: the row is not finite.
        """
        part = self._parts[index]
        if part.drafts is None:
            return []
        return accepted(part.drafts, sampled, lambda token: part.request.is_end(token, self._end_tokens))

    def keep(self, paths: Sequence[list[int]]) -> None:
        """Keep the states after the accepted drafts of each part. The front is after their last known token."""
        if self._replay is None:
            return
        replay, first = Replay([], [0], [], []), 0
        for part, path in zip(self._parts, paths, strict=True):
            if part.is_prefill:
                continue
            if path:
                replay.rows.extend([first + 1 + draft for draft in path])
                replay.starts.append(len(replay.rows))
                replay.read.extend([part.lease.front, *[-1] * (len(path) - 1)])
                replay.write.extend(_writes(part, len(path)))
            first += part.num_rows
        if replay.rows:
            self._replay(replay)


def _writes(part: Part, count: int) -> list[int]:
    """Return where the states after `count` accepted drafts are kept: the last one; and one at a boundary in the front,
    which the scheduler then swaps with the back."""
    writes, boundary = [-1] * count, part.boundary_before(part.end + count)
    writes[-1] = part.lease.front
    if boundary is not None:
        assert part.lease.back is not None
        writes[-1] = part.lease.back
        if boundary > part.end:
            writes[boundary - part.end - 1] = part.lease.front
    return writes


UNSETTLED = -3
"""In the place of a token that is not known before the vocabulary is sorted."""


class Result(NamedTuple):
    """The result of a pass for one part of its step.

    Attributes:
        is_finite: its logits and the checkpoints that it wrote hold no NaN and no infinity.
        tokens: the drafts that were accepted, and the token after them, or `NO_TOKEN`. Empty: the part does not end
            with the last known token.
        logprobs: `{token_id: logprob}` of each token; None unless requested.
        prompt_logprobs: `{token_id: logprob}` of tokens of the prompt after those that have them.
        forks: the first token of each other answer to the prompt, and its `{token_id: logprob}`.
        accepted: which drafts of the part were accepted.
        is_late: the device did not know the token by itself: a pass launched meanwhile wrote nothing for the request.
    """

    is_finite: bool
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None = None
    prompt_logprobs: tuple[dict[int, float], ...] = ()
    forks: tuple[tuple[int, dict[int, float] | None], ...] = ()
    accepted: Sequence[int] = ()
    is_late: bool = False

    @property
    def num_more(self) -> int:
        """Number of tokens that were computed after those of the part: all but the last one."""
        return max(len(self.tokens) - 1, 0)


class ForwardPass:
    """A pass that was given to the model's device: its logits, and the tokens that are chosen from them.

    Args:
        plan: of the pass.
        logits: `[rows, vocab]` fp32. Where the plan is padded the next pass writes them again.
        sampling: how tokens are chosen from them; None: every row takes its most likely one.
        most_likely: `[rows]` int64, as `sampler.most_likely`; None: the pass has not chosen them.
        keep_states: keeps the states after accepted drafts; None: the pass has no log.
        run: other threads compute the pass: the rest is known once it has ended. Its most likely tokens stay valid.

    Attributes:
        logits, keep_states, run: as given.
        verification: which drafts are accepted, and what is done with them; None: there are no drafts.
        finite_checkpoints: `[C]` whether the checkpoints of the plan are finite; None: there are none.
    """

    def __init__(
        self,
        plan: Plan,
        logits: Tensor,
        sampling: SamplingRows | None,
        most_likely: Tensor | None = None,
        keep_states: Callable[[Replay], None] | None = None,
        run: WorkerRun | None = None,
    ) -> None:
        self.keep_states = keep_states
        self.verification: Verification | None = None
        self.finite_checkpoints: Tensor | None = None
        self._plan = plan
        self.logits = logits
        self._sampling = sampling
        self._most_likely = most_likely
        self.run = run
        self._choose_sorted: Callable[[], Tensor] | None = None
        self._tokens: Tensor | None = None
        self._arriving: HostCopy

    def tokens(self) -> Tensor:
        """Return the tokens on the device, `[S]`: the first call chooses them. Negative: there is none, or it is not
        known yet."""
        if self._tokens is None:
            with torch_on_one_thread():
                tokens = self._choose()
            self._tokens = tokens  # last: a signal handler may raise anywhere before
        return self._tokens

    def _choose(self) -> Tensor:
        """Choose the tokens, and send them to the host."""
        edits, likely = self._edits() if not self._plan.is_plain else None, self._most_likely
        more = [self.finite_checkpoints] if self.finite_checkpoints is not None else []
        is_plain = edits is None and self._sampling is None
        if self.run is not None:
            if is_plain and likely is not None and self._plan.num_logprobs is None:
                return self._send(likely, more)
            self.run.wait()
        if self._plan.is_padded and self._sampling is not None:  # they may be needed once more
            self.logits, self._sampling = self.logits.clone(), SamplingRows(*torch.stack(self._sampling))
        if is_plain:
            # of its own: the next pass may be launched before these tokens are read
            return self._send(likely.clone() if likely is not None else most_likely(self.logits), more)
        sampled = choose(self.logits, edits, self._sampling)
        tokens, self._choose_sorted = sampled.tokens, sampled.choose_sorted
        if sampled.is_settled is not None:
            tokens = torch.where(sampled.is_settled, tokens, UNSETTLED)
        return self._send(checked(tokens, self.logits), more)

    @property
    def sources(self) -> Mapping[Request, int]:
        """The row of the token of each request that has one."""
        if self._plan.is_plain:
            return {part.request: row for row, part in enumerate(self._plan.parts) if part.samples}
        rows, start = {}, 0
        for part, own in zip(self._plan.parts, self._plan.sampled, strict=True):
            if own.samples:
                rows[part.request] = start + own.before
            start += own.count
        return rows

    def results(self) -> list[Result]:
        """Return one result per part of the step, once the device has them."""
        self.tokens()
        if self.run is not None:
            self.run.wait()
        tokens, *more = self._arriving.wait()
        if self._plan.is_plain and self.finite_checkpoints is None:
            pairs = zip(self._plan.parts, tokens, strict=True)
            return [Result(token != NOT_FINITE, (token,) if part.samples else ()) for part, token in pairs]
        late = {row for row, token in enumerate(tokens) if token == UNSETTLED}
        checks = more.pop(0) if self.finite_checkpoints is not None else ()
        if late:
            assert self._choose_sorted is not None
            with torch_on_one_thread():
                self._send(checked(self._choose_sorted(), self.logits), [])
            tokens, *more = self._arriving.wait()
        bad = {part for (part, _), is_finite in zip(self._plan.checkpoint_slots, checks, strict=True) if not is_finite}
        return self._results(tokens, more or None, bad, late)

    def _edits(self) -> Edits | None:
        """Return the changes of the logits before tokens are chosen. Nothing for requests that have ended meanwhile."""
        if not [part for part in self._plan.parts if part.request.constraints is not None or part.request.forks]:
            return None
        edits = [
            request.constraints.after(path)
            if request is not None and request.constraints is not None and not request.has_ended
            else None
            for request, path, _ in tokens_of(self._plan.parts, self._plan.sampled)
        ]
        return Edits.of(edits)

    def _send(self, tokens: Tensor, more: list[Tensor]) -> Tensor:
        """Send tokens to the host, with their log-probabilities; returns them as the device knows them."""
        plan = self._plan
        if len(tokens) > plan.num_sampled:  # of padding
            tokens = tokens[: plan.num_sampled]
        logprobs = self._logprobs(tokens, plan.num_logprobs) if plan.num_logprobs is not None else ()
        self._arriving = HostCopy([tokens, *more, *logprobs])
        return tokens

    def _logprobs(self, tokens: Tensor, count: int) -> Logprobs:
        """Return log-probabilities of the `count` most likely tokens of the rows, and of those chosen from them."""
        plan = self._plan
        logits, tokens = self.logits[: len(tokens)], tokens.clamp(min=0)
        if plan.targets is not None:
            targets = on_device(torch.tensor(plan.targets), logits.device)
            tokens = torch.where(targets >= 0, targets, tokens)
        return token_logprobs(logits, tokens, count)

    def _results(self, tokens: list[int], logprobs: list[Any] | None, bad: set[int], late: set[int]) -> list[Result]:
        """Return one result per part, from what has arrived: the tokens of all rows, their log-probabilities (None: not
        requested), the parts with a checkpoint that is not finite, and the rows that were unsettled."""
        results: list[Result] = []
        paths: list[list[int]] = []
        start = 0
        for index, part in enumerate(self._plan.sampled):
            own = tokens[start : start + part.count]
            before = part.before if part.count > 1 else 0
            path = self.verification.path(index, own[before:]) if self.verification is not None else []
            rows = [before, *(before + draft + 1 for draft in path)] if path else [before]
            chosen = tuple(map(own.__getitem__, rows))
            is_finite = index not in bad and NOT_FINITE not in chosen
            paths.append(path if is_finite else [])
            known = None
            if logprobs is not None and part.num_logprobs is not None:
                known = tuple(logprobs_of(logprobs, start + row, own[row], part.num_logprobs) for row in rows)
            is_late = start + before in late
            result = Result(is_finite, chosen if part.samples else (), known, accepted=path, is_late=is_late)
            if part.num_prompt_logprobs is not None or part.forks:
                result = _with_more(result, part, own, start, logprobs)
            results.append(result)
            start += part.count
        if self.verification is not None:
            self.verification.keep(paths)
        return results


def _with_more(result: Result, part: SampledRows, own: list[int], start: int, logprobs: list[Any] | None) -> Result:
    """Return a result with the log-probabilities of the prompt, and the first tokens of other answers."""
    prompt: list[dict[int, float]] = []
    if part.num_prompt_logprobs is not None and logprobs is not None:
        for row, target in enumerate(part.targets):
            prompt.append(logprobs_of(logprobs, start + row, target, part.num_prompt_logprobs))
    first = part.before + 1
    forks: list[tuple[int, dict[int, float] | None]] = []
    for row in range(first, first + part.forks):
        known = None
        if part.num_logprobs is not None and logprobs is not None:
            known = logprobs_of(logprobs, start + row, own[row], part.num_logprobs)
        forks.append((own[row], known))
    return result._replace(prompt_logprobs=tuple(prompt), forks=tuple(forks))


def logprobs_of(logprobs: list[Any], row: int, token: int, count: int) -> dict[int, float]:
    """`{token_id: logprob}` of a row: the `count` most likely tokens, and the chosen one.

    Args:
        logprobs: the lists of `Logprobs`.
    """
    values, most_likely, chosen = logprobs
    known = dict(zip(most_likely[row][:count], values[row][:count], strict=True))
    known.setdefault(token, chosen[row])
    return known
