"""Captured decode steps: one launch for all kernels of a pass, as CUDA graphs or as programs on a CPU.

A graph is captured for the whole layout of a plan: where each of its tensors is, and its shape. Steps are padded so
that few layouts occur (`hybrid.engine.planner.Padding`); padding writes nothing. When a capture fails, as for lack of
memory, no further one is tried: layouts without a graph are launched kernel by kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hybrid.engine.pieces import Layout
from hybrid.engine.planner import Plan
from hybrid.engine.sampler import SamplingRows
from hybrid.kernels.ops import compiled_module

log: logging.Logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures a function without arguments: returns what runs it again, and the tensor that it writes each time."""

WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and buffers allocated."""


@dataclass(frozen=True)
class Graph:
    """A captured pass, and what it reads and writes.

    Attributes:
        numbers: the plan's numbers, on the device.
        replay: runs the pass.
        logits: `[rows, vocab]`, written by each run.
    """

    numbers: Tensor
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Graphs by the layout of plans, captured when a layout first occurs.

    Args:
        model: computes a batch.
        kv: the pages.
        state: the state slots, by name.
        device: of the model.
        capture: captures a pass; None: `capture_for(device)`.
    """

    def __init__(
        self, model: Any, kv: Tensor, state: dict[str, Tensor], device: torch.device, capture: Capture | None = None
    ) -> None:
        self._model = model
        self._kv, self._state = kv, state
        self._device = device
        self._capture: Capture = capture or capture_for(device)
        self._graphs: dict[Layout, Graph] = {}
        self._captures = True
        modules = model.modules() if isinstance(model, nn.Module) else ()
        self._weights = tuple(model.parameters()) if isinstance(model, nn.Module) else ()  # graphs know addresses alone
        self._hooks = [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]

    @property
    def is_hooked(self) -> bool:
        """Whether a module of the model has a hook, which a graph would not call: steps are launched then."""
        return any(self._hooks)

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """The graphs captured so far, oldest first."""
        return tuple(self._graphs.values())

    def run(self, plan: Plan, tokens: Tensor | None = None) -> tuple[Tensor, SamplingRows | None]:
        """The logits of a padded plan without prompt parts, `[rows, vocab]`: valid until the next run.

        Args:
            tokens: those of the pass before, if this one continues from them.
        """
        graph = self._graphs.get(plan.shape) or self._capture_plan(plan)
        if graph is None:
            batch, sampling = plan.on(self._device, tokens)
            return self._model(batch, self._kv, self._state), sampling
        graph.numbers[: plan.numbers.numel()].copy_(plan.numbers, non_blocking=True)
        plan.fill_in(graph.numbers, tokens)
        graph.replay()
        return graph.logits, plan.sampling(graph.numbers)

    def _capture_plan(self, plan: Plan) -> Graph | None:
        """The graph of a plan; None if none can be captured. What is wrong with the pass itself is raised when it is
        launched kernel by kernel."""
        if not self._captures:
            return None
        rows, width = plan.layout["decodes.block_table"][1]
        log.info("capturing a graph for %d rows and block tables of %d pages", rows, width)
        try:
            numbers = torch.zeros(plan.max_numbers, dtype=torch.int64, device=self._device)
            idle = plan.idle()
            numbers[: idle.numel()].copy_(idle)
            batch = plan.batch(numbers)
            replay, logits = self._capture(lambda: self._model(batch, self._kv, self._state))
        except Exception as error:
            self._captures = False
            log.warning(
                "capturing a graph for %d rows failed (%s: %s); steps without a graph are launched kernel by kernel",
                rows,
                type(error).__name__,
                error,
            )
            return None
        self._graphs[plan.shape] = Graph(numbers, replay, logits)
        return self._graphs[plan.shape]


def capture_for(device: torch.device) -> Capture:
    """What captures passes on a device: CUDA graphs, or programs of compiled operations on a CPU."""
    if device.type == "cuda":
        return CudaCapture(device)
    module: Any = compiled_module("capture")
    capture: Capture = module.CpuCapture()
    return capture


class CudaCapture:
    """Captures on a GPU. All graphs share their memory, as only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = run()
        self._pool = graph.pool()
        return graph.replay, logits
