"""The pass of a step: from its plan to tokens, on the model's device.

`launch` gives work to the device and returns; `ForwardPass.results` is the only place that waits for it. In between the
next step can be planned and launched: its pass takes the tokens of this one on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hybrid.cache.cache import HybridCache
from hybrid.engine.captured_passes import CapturedPasses
from hybrid.engine.padding import padding_of
from hybrid.engine.planner import Plan, plan
from hybrid.engine.replay import Log, Replay, replay_states
from hybrid.engine.results import ForwardPass, Result, Verification
from hybrid.engine.step import Step
from hybrid.errors import ClosedError
from hybrid.kernels.cpu.threads import torch_on_one_thread


class LaunchedPass(Protocol):
    """A pass that was launched, as a `Runner` returns it."""

    def results(self) -> list[Result]:
        """Return one result per part of the step, once the device has them."""
        ...


class Runner(Protocol):
    """Computes the steps of an engine.

    Before the results of a step are waited for, the next one may be planned and launched: of a request whose token that
    step chooses (`Part.samples`) it may compute this token (`Part.num_unknown`). Where there is none after all
    (`Result.is_late`, or the request fails), nothing is written for that part.
    """

    def plan(self, step: Step, before: Any) -> Any:
        """Build the plan of a step whose memory has been allocated.

        Args:
            before: what `launch` returned for the pass before, from which the step may continue; None: there is
                none, its results are known, or it was undone.
        """
        ...

    def launch(self, plan: Any) -> LaunchedPass:
        """Give the plan to the device, without waiting for the results."""
        ...


class ClosedRunner:
    """In place of the runner of an engine that was closed, which holds the model and the cache's memory."""

    def plan(self, step: Step, before: Any) -> Any:
        """Refuse."""
        raise ClosedError("this engine was closed")

    def launch(self, plan: Any) -> Any:
        """Refuse."""
        raise ClosedError("this engine was closed")


class ModelRunner:
    """Computes the steps of one engine with its model.

    Args:
        model: computes a batch.
        cache: the memory that the model reads and writes.
        device: of the model.
        deterministic: results must not depend on the rest of the batch.
        graphs: of passes that are captured; None: every step is launched kernel by kernel.
        end_tokens: the model's tokens that end an answer.
        is_compiled: on a CPU all operations of the model that take long are compiled: torch has one thread for the
            others, since its own threads would take the cores of the next compiled one.
        posts: on a CPU other threads compute captured passes, where torch has several, and `launch` returns at once.
    """

    def __init__(
        self,
        model: Any,
        cache: HybridCache,
        device: torch.device,
        deterministic: bool,
        graphs: CapturedPasses | None,
        end_tokens: frozenset[int] = frozenset(),
        is_compiled: bool = False,
        posts: bool = False,
    ) -> None:
        self.model: Any = model
        self.graphs = graphs
        self._cache = cache
        self._kv, self._state = cache.kv, cache.state_tensors
        self._arrivals = cache.memory.uploads
        self._computing = cache.memory.in_flight
        self._device = device
        self._deterministic = deterministic
        self._end_tokens = end_tokens
        self._posts = posts
        self._threads: Callable[[], AbstractContextManager[None]] = torch_on_one_thread if is_compiled else nullcontext

    def plan(self, step: Step, before: ForwardPass | None = None) -> Plan:
        """Build the plan of a step whose memory has been allocated. Steps that a graph can compute are padded."""
        config, graphs, padding = self._cache.config, self.graphs, None
        if graphs is not None and not graphs.captured_model.is_hooked:
            padding = padding_of(step, graphs.max_prompt_tokens, graphs.on_gpu)
        sizes = config.page_size, config.chunk_size
        on_gpu = self._device.type == "cuda"
        if before is None:
            return plan(step, *sizes, self._deterministic, padding, on_gpu)
        return plan(step, *sizes, self._deterministic, padding, on_gpu, before.sources, before.tokens)

    def launch(self, plan: Plan) -> ForwardPass:
        """Give a plan to the device, without waiting for the results."""
        with self._threads():
            # it is taken, since a pass keeps its plan, and must not keep all passes before it
            before, plan.before = plan.before, None
            tokens = before() if before is not None else None  # before this pass writes the same logits
            launched = self._run(plan, tokens)
            if plan.has_drafts:
                keep_states = launched.keep_states
                keep = partial(self._keep, keep_states) if keep_states is not None else None
                launched.verification = Verification(plan.parts, self._end_tokens, keep)
            if plan.checkpoint_slots:
                launched.finite_checkpoints = self._are_finite([slot for _, slot in plan.checkpoint_slots])
            return launched

    def _run(self, plan: Plan, tokens: Tensor | None) -> ForwardPass:
        """Run a plan: by other threads of a CPU after the one before, or when no other thread computes any more."""
        graphs = self.graphs if plan.is_padded else None
        if graphs is not None and self._posts:
            launched = graphs.post(plan, tokens)
            if launched is not None and launched.run is not None:
                self._computing.begin_pass(launched.run)
                return launched
        self._computing.wait_for_pass()
        if graphs is not None:
            self._arrivals.wait_for_all()  # a graph waits for no layer
            return graphs.run(plan, tokens)
        batch, sampling = plan.on(self._device, tokens)
        if self._arrivals.are_pending:
            batch = replace(batch, arriving=self._arrivals)
        logits = self.model(batch, self._kv, self._state)
        keep_states = partial(self._replay, batch.log) if batch.log is not None else None
        return ForwardPass(plan, logits, sampling, keep_states=keep_states)

    def _replay(self, log: Log, replay: Replay) -> None:
        replay_states(self.model, log, replay, self._cache.state_tensors, self._device)

    def _keep(self, keep: Callable[[Replay], None], replay: Replay) -> None:
        with self._threads():
            keep(replay)

    def _are_finite(self, slots: list[int]) -> Tensor:
        """`[C]` whether the states in these slots are finite."""
        tensors = self._cache.state_tensors.values()
        if not tensors:  # full attention in every layer
            return torch.ones(len(slots), dtype=torch.bool, device=self._device)
        with torch_on_one_thread():
            sums = [torch.stack([tensor[slot].sum(dtype=torch.float32) for tensor in tensors]) for slot in slots]
            return torch.stack(sums).isfinite().all(-1)
