"""The pass of a step: from its plan to tokens, on the model's device.

`launch` gives work to the device and comes back; on a GPU the books can go on while it computes. `Pending.wait` is the
one place that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid.cache.cache import HybridCache
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.planner import Padding, plan
from hybrid.engine.sampler import Logprobs, sample, token_logprobs
from hybrid.engine.scheduler import Step

Token = tuple[int, dict[int, float] | None]
"""A token of an answer, and `{token_id: logprob}` if that was asked for."""


@dataclass(frozen=True)
class Pending:
    """What a pass will have given.

    Attributes:
        tokens: `[S]`, one per sampled part.
        logprobs: of all of them; None: nobody asked.
        wanted: how many log-probabilities each asked for.
    """

    tokens: Tensor
    logprobs: Logprobs | None
    wanted: list[int | None]

    def wait(self) -> list[Token]:
        """One token per sampled part, once the device has it."""
        tokens = self.tokens.tolist()
        if self.logprobs is None:
            return [(token, None) for token in tokens]
        values, likeliest, chosen = (part.tolist() for part in self.logprobs)
        told: list[Token] = []
        for row, (token, count) in enumerate(zip(tokens, self.wanted, strict=True)):
            if count is None:
                told.append((token, None))
                continue
            known = dict(zip(likeliest[row][:count], values[row][:count], strict=True))
            known.setdefault(token, chosen[row])
            told.append((token, known))
        return told


class Runner:
    """Computes the steps of one engine.

    Args:
        graphs: CUDA graphs for steps in which everybody decodes; None: every step is launched kernel by kernel.
    """

    def __init__(
        self, model: Any, cache: HybridCache, device: torch.device, deterministic: bool, graphs: DecodeGraphs | None
    ) -> None:
        self.model = model
        self._cache = cache
        self._device = device
        self._deterministic = deterministic
        self._graphs = graphs

    def launch(self, step: Step) -> Pending:
        """Give a step to the device."""
        config, on_gpu = self._cache.config, self._device.type == "cuda"
        how = (config.page_size, config.chunk_size, self._deterministic)
        if self._graphs is not None and not any(part.is_prefill or part.request.media for part in step.parts):
            padding = Padding.of(len(step.parts), max(len(part.lease.block_table) for part in step.parts))
            host = plan(step, *how, padding, pin=on_gpu)
            logits, sampling = self._graphs.run(host)
        else:
            host = plan(step, *how, pin=on_gpu)
            batch, sampling = host.on(self._device)
            logits = self.model(batch, self._cache.kv, self._cache.state_tensors)
        logits = logits[: host.num_sampled]
        tokens = sample(logits, sampling)
        wanted = [part.request.params.logprobs if part.request.params else None for part in step.sampled()]
        most = max((count for count in wanted if count is not None), default=None)
        return Pending(tokens, None if most is None else token_logprobs(logits, tokens, most), wanted)
