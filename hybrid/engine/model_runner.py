"""The pass of a step: from its plan to tokens, on the model's device.

`launch` gives work to the device and returns; on a GPU the next step is scheduled while it computes. `Pending.wait` is
the only place that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid.cache.cache import HybridCache
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.planner import Padding, Plan, plan
from hybrid.engine.sampler import Logprobs, sample, sample_edited, token_logprobs
from hybrid.engine.scheduler import Step

NOT_FINITE = -2
"""In the place of the token of a row of logits with NaN or infinity."""


class Result(NamedTuple):
    """What a pass computed for one part of its step.

    Attributes:
        is_finite: its logits and the checkpoints that it wrote hold no NaN and no infinity.
        token: the next token, or `NO_TOKEN`; None: the part does not end with the last known token.
        logprobs: `{token_id: logprob}`; None unless requested.
    """

    is_finite: bool
    token: int | None
    logprobs: dict[int, float] | None


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
class PendingTokens:
    """A pass on the model's device, of S parts that write C checkpoints.

    Attributes:
        tokens: `[S]` the next token of every part, or `NO_TOKEN`.
        finite: `[S]` whether the logits of a part are finite.
        samples: `[S]` whether the token of a part is wanted.
        num_logprobs: `[S]` the number of log-probabilities requested for each part; None: none.
        logprobs: of all parts; None: not requested.
        writers: `[C]` the parts that write the checkpoints.
        finite_checkpoints: `[C]` whether the checkpoints are finite; None: there are none.
    """

    tokens: Tensor
    finite: Tensor
    samples: Sequence[bool]
    num_logprobs: Sequence[int | None]
    logprobs: Logprobs | None = None
    writers: Sequence[int] = ()
    finite_checkpoints: Tensor | None = None

    def wait(self) -> list[Result]:
        """One result per part of the step, once the device has them."""
        tokens = torch.where(self.finite, self.tokens, NOT_FINITE).tolist()
        bad = {row for row, token in enumerate(tokens) if token == NOT_FINITE}
        if self.finite_checkpoints is not None:
            checks = zip(self.writers, self.finite_checkpoints.tolist(), strict=True)
            bad |= {row for row, is_finite in checks if not is_finite}
        rows = zip(tokens, self.samples, self._logprobs(tokens), strict=True)
        return [
            Result(row not in bad, token if samples else None, known)
            for row, (token, samples, known) in enumerate(rows)
        ]

    def _logprobs(self, tokens: list[int]) -> list[dict[int, float] | None]:
        if self.logprobs is None:
            return [None] * len(tokens)
        values, most_likely, chosen = (part.tolist() for part in self.logprobs)
        found: list[dict[int, float] | None] = []
        for row, (token, count) in enumerate(zip(tokens, self.num_logprobs, strict=True)):
            if count is None:
                found.append(None)
                continue
            known = dict(zip(most_likely[row][:count], values[row][:count], strict=True))
            known.setdefault(token, chosen[row])
            found.append(known)
        return found


class ModelRunner:
    """Computes the steps of one engine with its model.

    Args:
        model: computes a batch.
        cache: the memory that the model reads and writes.
        device: of the model.
        deterministic: results must not depend on the rest of the batch.
        graphs: CUDA graphs for steps without prompt parts; None: every step is launched kernel by kernel.
    """

    def __init__(
        self, model: Any, cache: HybridCache, device: torch.device, deterministic: bool, graphs: DecodeGraphs | None
    ) -> None:
        self.model: Any = model
        self.graphs = graphs
        self._cache = cache
        self._device = device
        self._deterministic = deterministic

    def plan(self, step: Step) -> Plan:
        """Build the plan of a step whose memory has been allocated. Steps that a graph can compute are padded."""
        padding = None
        if self.graphs is not None and not any(
            part.is_prefill or part.request.media or part.request.adapter for part in step.parts
        ):
            padding = Padding.of(len(step.parts), max(len(part.lease.block_table) for part in step.parts))
        config, on_gpu = self._cache.config, self._device.type == "cuda"
        return plan(step, config.page_size, config.chunk_size, self._deterministic, padding, pin=on_gpu)

    def launch(self, plan: Plan) -> PendingTokens:
        """Give a plan to the device, without waiting for the results."""
        if self.graphs is not None and plan.is_padded:
            logits, sampling = self.graphs.run(plan)
        else:
            batch, sampling = plan.on(self._device)
            logits = self.model(batch, self._cache.kv, self._cache.state_tensors)
        finite = logits.sum(-1).isfinite()  # NaN and infinity remain in a sum
        tokens = sample(logits, sampling) if plan.edits is None else sample_edited(logits, plan.edits, sampling)
        num_parts = len(plan.samples)
        most = max((count for count in plan.num_logprobs if count is not None), default=None)
        checkpoints = plan.checkpoint_slots
        return PendingTokens(
            tokens[:num_parts],
            finite[:num_parts],
            plan.samples,
            plan.num_logprobs,
            logprobs=None
            if most is None
            else token_logprobs(logits[:num_parts], tokens[:num_parts].clamp(min=0), most),
            writers=[row for row, _ in checkpoints],
            finite_checkpoints=self._are_finite([slot for _, slot in checkpoints]) if checkpoints else None,
        )

    def _are_finite(self, slots: list[int]) -> Tensor:
        """`[C]` whether the states in these slots are finite."""
        tensors = self._cache.state_tensors.values()
        sums = [torch.stack([tensor[slot].sum(dtype=torch.float32) for tensor in tensors]) for slot in slots]
        return torch.stack(sums).isfinite().all(-1)
