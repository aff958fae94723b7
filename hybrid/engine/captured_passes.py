"""Captured passes: one launch for all kernels, as CUDA graphs or, of decode steps, as programs on a CPU.

A graph is captured for the whole layout of a plan: where each of its tensors is, and its shape. Steps are padded so
that few layouts occur (`hybrid.engine.padding`); padding writes nothing. A capture takes as long as three launches of
the pass, kernel by kernel, which a decode step earns back at once. Layouts with prompts are more, and many occur once:
these are captured when they occur for the second time. When a capture fails, as for lack of memory, no further one is
tried: layouts without a graph are launched kernel by kernel.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.batch import Batch
from hybrid.engine.capture import Capture, Postable, capture_for
from hybrid.engine.planner import LINKS, Layout, Plan
from hybrid.engine.replay import Log, Replay, ReplayOfAll, replay_states
from hybrid.engine.results import ForwardPass
from hybrid.engine.sampler import compiled_most_likely
from hybrid.memory.contents import WorkerRun

log: logging.Logger = logging.getLogger(__name__)

MAX_GRAPHS = 256
"""Graphs that are kept, at most; the one that was not used for longest goes."""

MAX_OCCURRED = 4096
"""Layouts with prompts that occurred once and are remembered, at most."""


@dataclass(frozen=True)
class Graph:
    """A captured pass, and what it reads and writes.

    Attributes:
        numbers: the plan's numbers, on the device.
        batch: views of them.
        replay: runs the pass.
        post: has other threads run it, as `Postable.post`; None: none can.
        logits: `[rows, vocab]`, written by each run.
        most_likely: `[rows]` the most likely tokens, written by each run; empty: it does not choose any.
        after_drafts: computes the states after accepted drafts; None: the pass has no log.
    """

    numbers: Tensor
    batch: Batch
    replay: Callable[[], None]
    post: Callable[[Sequence[Tensor], Sequence[Tensor], object], WorkerRun | None] | None
    logits: Tensor
    most_likely: list[Tensor]
    after_drafts: ReplayOfAll | None


class SharedLogits:
    """The logits of all graphs, in one memory: a row of a large vocabulary takes 1 MB, and graphs may be hundreds."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None

    def hold(self, logits: Tensor) -> Tensor:
        """Return a copy of `[rows, vocab]` logits, valid until the next one. Where the rows are more than before, new
        memory is taken, which no graph may do while it is captured: those captured so far keep the old one, half as
        large."""
        count = len(logits)
        if self._rows is None or len(self._rows) < count:
            self._rows = logits.new_empty(1 << (count - 1).bit_length(), logits.shape[1])
        return self._rows[:count].copy_(logits)


class CapturedModel:
    """A model as captured passes need it: its weights stay where they are, since graphs know addresses alone.

    Args:
        parts: modules that compute the pass, with all that belong to them; anything else has neither weights nor hooks.
    """

    def __init__(self, *parts: Any) -> None:
        modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
        self._weights = tuple(parameter for module in modules for parameter in module.parameters(recurse=False))
        self._hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]

    @property
    def is_hooked(self) -> bool:
        """Tell whether a module has a hook, which a graph would not call."""
        return any(self._hooks)


class CapturedPasses:
    """Captured passes by the layout of plans.

    Args:
        model: computes a batch.
        kv: the pages.
        state: the state slots, by name.
        device: of the model.
        capture: captures a pass; None: `capture_for(device)`.
        max_prompt_tokens: tokens of prompts up to which passes with prompts are captured; 0: they are not.
        on_gpu: passes are captured as CUDA graphs are: each once, before it is computed, with padding, and with logits
            that all share. None: as `device` is.

    Attributes:
        max_prompt_tokens, on_gpu: as given.
        captured_model: whether the model has a hook, which a graph would not call: steps are launched then.
    """

    def __init__(
        self,
        model: Any,
        kv: Tensor,
        state: dict[str, Tensor],
        device: torch.device,
        capture: Capture | None = None,
        max_prompt_tokens: int = 0,
        on_gpu: bool | None = None,
    ) -> None:
        self.max_prompt_tokens: int = max_prompt_tokens
        self.on_gpu: bool = device.type == "cuda" if on_gpu is None else on_gpu
        self._model = model
        self._kv, self._state = kv, state
        self._device = device
        self._capture: Capture = capture or capture_for(device)
        self._capture_replay: Capture = capture or capture_for(device)  # while it runs it needs the log of the pass
        self._graphs: OrderedDict[Layout, Graph] = OrderedDict()  # in the order in which they were used last
        self._occurred: set[Layout] = set()  # layouts with prompts
        self._captures = True
        self._logits = SharedLogits()
        self.captured_model = CapturedModel(model)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs that are kept, the one that was used last at the end."""
        return tuple(self._graphs.values())

    def run(self, plan: Plan, tokens: Tensor | None = None) -> ForwardPass:
        """Run a padded plan.

        Args:
            tokens: those of the pass before, if this one continues from them.
        """
        shape = plan.shape
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
        elif self._captures and self._is_worth_it(plan):
            if self._graphs and not self.on_gpu:
                return self._result(plan, self._capture_and_run(plan, tokens))
            graph = self._capture_idle(plan)
        if graph is None:
            batch, sampling = plan.on(self._device, tokens)
            logits = self._model(batch, self._kv, self._state)
            keep_states = partial(self._replay, batch.log) if batch.log is not None else None
            return ForwardPass(plan, logits, sampling, keep_states=keep_states)
        self._fill(graph.numbers, plan, tokens)
        graph.replay()
        return self._result(plan, graph)

    def post(self, plan: Plan, tokens: Tensor | None = None) -> ForwardPass | None:
        """Have other threads of a CPU run a padded plan, after what they were given before. None: they do not: there is
        no graph yet, it has operations of torch or drafts, or torch has one thread.

        Args:
            tokens: as in `run`; they may become known meanwhile.
        """
        shape = plan.shape
        graph = self._graphs.get(shape)
        if graph is None or graph.post is None or plan.has_drafts or not graph.most_likely:
            return None
        numbers = [plan.numbers, graph.numbers]
        if plan.has_links:
            assert tokens is not None
            start, size = plan.layout[LINKS]
            numbers += tokens, plan.numbers[start : start + math.prod(size)].view(size)
        (likely,) = graph.most_likely
        found = torch.empty_like(likely)
        run = graph.post(numbers, (likely, found), (self, graph, plan))
        if run is None:
            return None
        self._graphs.move_to_end(shape)
        return ForwardPass(plan, graph.logits, plan.sampling(plan.numbers), found, run=run)

    def _is_worth_it(self, plan: Plan) -> bool:
        """Tell whether a layout without a graph is captured now: where there are prompts, when it occurs again."""
        if not plan.num_prefill_tokens or plan.shape in self._occurred:
            self._occurred.discard(plan.shape)
            return True
        if len(self._occurred) == MAX_OCCURRED:
            self._occurred.clear()
        self._occurred.add(plan.shape)
        return False

    def _fill(self, numbers: Tensor, plan: Plan, tokens: Tensor | None) -> None:
        """Write what a pass reads."""
        numbers[: plan.numbers.numel()].copy_(plan.numbers, non_blocking=True)
        if plan.has_links:
            plan.fill_in(numbers, tokens)

    def _result(self, plan: Plan, graph: Graph) -> ForwardPass:
        """Return the pass of a graph for a plan."""
        keep_states = graph.after_drafts.keep if graph.after_drafts is not None else None
        most_likely = graph.most_likely[0] if graph.most_likely else None
        return ForwardPass(plan, graph.logits, plan.sampling(graph.numbers), most_likely, keep_states)

    def _replay(self, log: Log, replay: Replay) -> None:
        replay_states(self._model, log, replay, self._state, self._device)

    def _capture_and_run(self, plan: Plan, tokens: Tensor | None) -> Graph:
        """Return the graph of a plan on a CPU, where a pass is captured while it is computed. Others were captured
        before, so that none is expected to fail; one that does fails the step."""
        numbers = self._numbers(plan)
        self._fill(numbers, plan, tokens)
        try:
            return self._capture_plan(plan, numbers)
        except Exception as error:
            self._give_up(plan, error)
            raise

    def _capture_idle(self, plan: Plan) -> Graph | None:
        """Return the graph of a plan; None if none can be captured. What is wrong with the pass itself is raised when
        it is launched kernel by kernel."""
        try:
            numbers, idle = self._numbers(plan), plan.idle()
            numbers[: idle.numel()].copy_(idle)
            return self._capture_plan(plan, numbers)
        except Exception as error:
            self._give_up(plan, error)
            return None

    def _numbers(self, plan: Plan) -> Tensor:
        return torch.zeros(plan.max_numbers, dtype=torch.int64, device=self._device)

    @property
    def _captured(self) -> str:
        return "a graph" if self.on_gpu else "the operations"

    def _give_up(self, plan: Plan, error: Exception) -> None:
        """Capture no further graph."""
        self._captures = False
        log.warning(
            "capturing %s for %s failed (%s: %s); steps without one are launched operation by operation",
            self._captured,
            plan.sizes,
            type(error).__name__,
            error,
        )

    def _capture_plan(self, plan: Plan, numbers: Tensor) -> Graph:
        """Capture a pass over numbers of a plan's layout."""
        log.info("capturing %s for %s", self._captured, plan.sizes)
        batch = plan.batch(numbers)
        if not self.on_gpu and plan.num_decoded:  # a step without drafts and one with them are the same pass
            batch = replace(batch, log=[])
        most_likely: list[Tensor] = []
        run, logits = self._capture(partial(self._run_pass, batch, most_likely))
        after_drafts = None
        if batch.log is not None:
            replay_all = partial(self._model.replay, batch.log, None, state=self._state)
            runs = plan.num_runs if self.on_gpu else None
            after_drafts = ReplayOfAll(plan.num_decoded, runs, self._device, replay_all, self._capture_replay)
        if len(self._graphs) == MAX_GRAPHS:
            self._graphs.popitem(last=False)
        post = run.post if isinstance(run, Postable) else None
        graph = self._graphs[plan.shape] = Graph(numbers, batch, run, post, logits, most_likely, after_drafts)
        return graph

    def _run_pass(self, batch: Batch, most_likely: list[Tensor]) -> Tensor:
        """Compute a batch; returns its logits, and leaves the most likely tokens in the list, where they are found by
        compiled code: called after the pass, it would be the smaller part of its call."""
        if batch.log is not None:
            batch.log.clear()  # of the run before
        logits: Tensor = self._model(batch, self._kv, self._state)
        if self.on_gpu:
            return self._logits.hold(logits)
        tokens = compiled_most_likely(logits)
        most_likely[:] = [tokens] if tokens is not None else []
        return logits
