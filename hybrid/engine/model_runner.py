"""The pass of a step: from its plan to tokens, on the model's device.

`launch` gives work to the device and returns; on a GPU the next step is scheduled while it computes. `Pending.wait` is
the only place that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid.batch import StateSteps
from hybrid.cache.cache import HybridCache
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.planner import Padding, Plan, SampledRows, plan
from hybrid.engine.sampler import Logprobs, choose, token_logprobs
from hybrid.engine.step import Step
from hybrid.engine.verification import Replay, Verification
from hybrid.memory.device import on_device

MAX_CAPTURED_ROWS = 32
"""Rows of a decode step on a CPU from which on its launches do not matter."""

NOT_FINITE = -2
"""In the place of the token of a row of logits with NaN or infinity."""


class Result(NamedTuple):
    """What a pass computed for one part of its step.

    Attributes:
        is_finite: its logits and the checkpoints that it wrote hold no NaN and no infinity.
        tokens: the drafts that were accepted, and the token after them, or `NO_TOKEN`; empty: the part does not end
            with the last known token.
        logprobs: `{token_id: logprob}` of each token; None unless requested.
        prompt_logprobs: `{token_id: logprob}` of tokens of the prompt after those that have them.
        forks: the first token of each other answer to the prompt, and its `{token_id: logprob}`.
        path: indices of the drafts that were accepted.
    """

    is_finite: bool
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None = None
    prompt_logprobs: tuple[dict[int, float], ...] = ()
    forks: tuple[tuple[int, dict[int, float] | None], ...] = ()
    path: tuple[int, ...] = ()


class Pending(Protocol):
    """A pass that was launched."""

    def wait(self) -> list[Result]:
        """One result per part of the step, once the device has them."""
        ...


class Runner(Protocol):
    """Computes the steps of an engine."""

    def plan(self, step: Step) -> Any:
        """Build the plan of a step whose memory has been allocated."""
        ...

    def launch(self, plan: Any) -> Pending:
        """Give the plan to the device, without waiting for the results."""
        ...


@dataclass(frozen=True)
class Unsettled:
    """Tokens that are chosen once it is known that they have to be: by sorting the vocabulary.

    Attributes:
        is_settled: `[S]` bool: the others are to be chosen.
        settle: chooses all of them; and the log-probabilities of what is chosen then.
    """

    is_settled: Tensor
    settle: Callable[[], tuple[Tensor, Logprobs | None]]


@dataclass(frozen=True)
class PendingTokens:
    """A pass on the model's device, of parts with S rows of logits that write C checkpoints.

    Attributes:
        tokens: `[S]` the token after every row, or `NO_TOKEN`.
        finite: `[S]` whether the logits of a row are finite.
        parts: the rows of each part.
        verification: which drafts are accepted, and what is done with them; None: there are no drafts.
        logprobs: of all rows; None: not requested.
        writers: `[C]` the parts that write the checkpoints.
        finite_checkpoints: `[C]` whether the checkpoints are finite; None: there are none.
        unsettled: tokens that may have to be chosen in another way; None: there are none.
    """

    tokens: Tensor
    finite: Tensor
    parts: Sequence[SampledRows]
    verification: Verification | None = None
    logprobs: Logprobs | None = None
    writers: Sequence[int] = ()
    finite_checkpoints: Tensor | None = None
    unsettled: Unsettled | None = None

    def wait(self) -> list[Result]:
        """One result per part of the step, once the device has them."""
        sampled, known_logprobs = self.tokens, self.logprobs
        if self.unsettled is not None and bool((self.finite & ~self.unsettled.is_settled).any()):
            sampled, known_logprobs = self.unsettled.settle()
        tokens = torch.where(self.finite, sampled, NOT_FINITE).tolist()
        bad: set[int] = set()
        if self.finite_checkpoints is not None:
            checks = zip(self.writers, self.finite_checkpoints.tolist(), strict=True)
            bad = {part for part, is_finite in checks if not is_finite}
        logprobs = [values.tolist() for values in known_logprobs] if known_logprobs is not None else None
        results: list[Result] = []
        paths: list[list[int]] = []
        start = 0
        for index, part in enumerate(self.parts):
            own = tokens[start : start + part.count]
            before = part.before if part.count > 1 else 0
            path = self.verification.path(index, own[before:]) if self.verification is not None else []
            rows = [before, *(before + draft + 1 for draft in path)]
            chosen = tuple([own[row] for row in rows])
            is_finite = index not in bad and NOT_FINITE not in chosen
            paths.append(path if is_finite else [])
            known = None
            if logprobs is not None and part.num_logprobs is not None:
                known = tuple(_logprobs_of(logprobs, start + row, own[row], part.num_logprobs) for row in rows)
            result = Result(is_finite, chosen if part.samples else (), known, path=tuple(path))
            if part.num_prompt_logprobs is not None or part.forks:
                result = _with_more(result, part, own, start, logprobs)
            results.append(result)
            start += part.count
        if self.verification is not None:
            self.verification.keep(paths)
        return results


def _with_more(result: Result, part: SampledRows, own: list[int], start: int, logprobs: list[Any] | None) -> Result:
    """A result with the log-probabilities of the prompt, and the first tokens of other answers."""
    prompt: list[dict[int, float]] = []
    if part.num_prompt_logprobs is not None and logprobs is not None:
        for row, target in enumerate(part.targets):
            prompt.append(_logprobs_of(logprobs, start + row, target, part.num_prompt_logprobs))
    first = part.before + 1
    forks: list[tuple[int, dict[int, float] | None]] = []
    for row in range(first, first + part.forks):
        known = None
        if part.num_logprobs is not None and logprobs is not None:
            known = _logprobs_of(logprobs, start + row, own[row], part.num_logprobs)
        forks.append((own[row], known))
    return result._replace(prompt_logprobs=tuple(prompt), forks=tuple(forks))


def _logprobs_of(logprobs: list[Any], row: int, token: int, count: int) -> dict[int, float]:
    """`{token_id: logprob}` of a row."""
    values, most_likely, chosen = logprobs
    known = dict(zip(most_likely[row][:count], values[row][:count], strict=True))
    known.setdefault(token, chosen[row])
    return known


class ModelRunner:
    """Computes the steps of one engine with its model.

    Args:
        model: computes a batch.
        cache: the memory that the model reads and writes.
        device: of the model.
        deterministic: results must not depend on the rest of the batch.
        graphs: CUDA graphs for steps without prompt parts; None: every step is launched kernel by kernel.
        end_tokens: the model's tokens that end an answer.
    """

    def __init__(
        self,
        model: Any,
        cache: HybridCache,
        device: torch.device,
        deterministic: bool,
        graphs: DecodeGraphs | None,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self.model: Any = model
        self.graphs = graphs
        self._cache = cache
        self._device = device
        self._deterministic = deterministic
        self._end_tokens = end_tokens

    def plan(self, step: Step) -> Plan:
        """Build the plan of a step whose memory has been allocated. Steps that a graph can compute are padded."""
        padding, on_gpu = None, self._device.type == "cuda"
        needs_launches = step.has_drafts or any(
            part.is_prefill or part.request.media or part.request.adapter for part in step.parts
        )
        most = MAX_CAPTURED_ROWS if not on_gpu else len(step.parts)
        if self.graphs is not None and not needs_launches and len(step.parts) <= most and not self.graphs.is_hooked:
            padding = Padding.of(len(step.parts), max(len(part.lease.block_table) for part in step.parts))
            if not on_gpu:
                padding = padding._replace(rows=len(step.parts))  # rows of padding would be computed one by one
        config = self._cache.config
        return plan(step, config.page_size, config.chunk_size, self._deterministic, padding, pin=on_gpu)

    def launch(self, plan: Plan) -> PendingTokens:
        """Give a plan to the device, without waiting for the results."""
        verification = None
        if self.graphs is not None and plan.is_padded:
            logits, sampling = self.graphs.run(plan)
        else:
            batch, sampling = plan.on(self._device)
            logits = self.model(batch, self._cache.kv, self._cache.state_tensors)
            if batch.log is not None:
                verification = Verification(plan.parts, self._end_tokens, partial(self._replay, batch.log))
        finite = logits.sum(-1).isfinite()  # NaN and infinity remain in a sum
        sampled = choose(logits, plan.edits, sampling)
        rows = slice(sum(part.count for part in plan.sampled))
        checkpoints, unsettled = plan.checkpoint_slots, None
        if sampled.is_settled is not None:

            def settle() -> tuple[Tensor, Logprobs | None]:
                tokens = sampled.settle()[rows]
                return tokens, self._logprobs(logits[rows], tokens, plan)

            unsettled = Unsettled(sampled.is_settled[rows], settle)
        return PendingTokens(
            sampled.tokens[rows],
            finite[rows],
            plan.sampled,
            verification,
            logprobs=self._logprobs(logits[rows], sampled.tokens[rows], plan),
            writers=[row for row, _ in checkpoints],
            finite_checkpoints=self._are_finite([slot for _, slot in checkpoints]) if checkpoints else None,
            unsettled=unsettled,
        )

    def _logprobs(self, logits: Tensor, tokens: Tensor, plan: Plan) -> Logprobs | None:
        """Log-probabilities of a plan's rows, and of the tokens chosen from them; None: they are not requested."""
        most = max((part.most_logprobs for part in plan.sampled if part.most_logprobs is not None), default=None)
        if most is None:
            return None
        tokens = tokens.clamp(min=0)
        if plan.targets is not None:
            targets = on_device(torch.tensor(plan.targets), self._device)
            tokens = torch.where(targets >= 0, targets, tokens)
        return token_logprobs(logits, tokens, most)

    def _replay(self, log: list[tuple[Tensor, ...]], replay: Replay) -> None:
        """Keep the states after drafts that were accepted."""
        rows, *steps = (on_device(torch.tensor(numbers), self._device) for numbers in replay)
        self.model.replay(log, rows, StateSteps(*steps), self._cache.state_tensors)

    def _are_finite(self, slots: list[int]) -> Tensor:
        """`[C]` whether the states in these slots are finite."""
        tensors = self._cache.state_tensors.values()
        sums = [torch.stack([tensor[slot].sum(dtype=torch.float32) for tensor in tensors]) for slot in slots]
        return torch.stack(sums).isfinite().all(-1)
