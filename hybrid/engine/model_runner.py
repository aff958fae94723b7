"""The pass of a step: from its plan to tokens, on the model's device.

`launch` gives work to the device and returns; on a GPU the next step is scheduled while it computes. `Pending.wait` is
the only place that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybrid.cache.cache import HybridCache
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.planner import Padding, Plan, plan
from hybrid.engine.sampler import Logprobs, sample, token_logprobs
from hybrid.engine.scheduler import Step


class Result(NamedTuple):
    """What a pass computed for one part of its step.

    Attributes:
        is_finite: its logits and the checkpoints that it wrote hold no NaN and no infinity.
        token: the next token; None: the part does not end with the last known token.
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
    """A pass on the model's device.

    Attributes:
        plan: of the step.
        tokens: `[S]` the next token of every part.
        finite: `[S]` whether the logits of a part are finite.
        finite_checkpoints: `[C]` whether the checkpoints are finite that the pass wrote; None: it wrote none.
        logprobs: of all parts; None: not requested.
    """

    plan: Plan
    tokens: Tensor
    finite: Tensor
    finite_checkpoints: Tensor | None = None
    logprobs: Logprobs | None = None

    def wait(self) -> list[Result]:
        """One result per part of the step, once the device has them."""
        tokens = torch.where(self.finite, self.tokens, -1).tolist()
        bad = {row for row, token in enumerate(tokens) if token < 0}
        if self.finite_checkpoints is not None:
            checks = zip(self.plan.checkpoint_slots, self.finite_checkpoints.tolist(), strict=True)
            bad |= {row for (row, _), is_finite in checks if not is_finite}
        logprobs = self._logprobs(tokens)
        return [
            Result(row not in bad, token if samples else None, known)
            for row, (token, samples, known) in enumerate(zip(tokens, self.plan.samples, logprobs, strict=True))
        ]

    def _logprobs(self, tokens: list[int]) -> list[dict[int, float] | None]:
        if self.logprobs is None:
            return [None] * len(tokens)
        values, most_likely, chosen = (part.tolist() for part in self.logprobs)
        found: list[dict[int, float] | None] = []
        for row, (token, count) in enumerate(zip(tokens, self.plan.logprobs, strict=True)):
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
        if self.graphs is not None and not any(part.is_prefill or part.request.media for part in step.parts):
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
        tokens = sample(logits, sampling)
        num_parts = len(plan.samples)
        most = max((count for count in plan.logprobs if count is not None), default=None)
        logprobs = None if most is None else token_logprobs(logits[:num_parts], tokens[:num_parts], most)
        return PendingTokens(plan, tokens[:num_parts], finite[:num_parts], self._finite_checkpoints(plan), logprobs)

    def _finite_checkpoints(self, plan: Plan) -> Tensor | None:
        slots = [slot for _, slot in plan.checkpoint_slots]
        if not slots:
            return None
        tensors = self._cache.state_tensors.values()
        sums = [torch.stack([tensor[slot].sum(dtype=torch.float32) for tensor in tensors]) for slot in slots]
        return torch.stack(sums).isfinite().all(-1)
