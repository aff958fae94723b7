"""CUDA graphs of decode steps: one launch for all kernels of a pass.

A graph is recorded for a number of rows and a width of the block table; steps are filled up to one of few such shapes
(`hybrid.plan.Padding`). What fills them up writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid.engine.planner import Plan
from hybrid.engine.sampler import SamplingRows

log = logging.getLogger(__name__)

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Records a function of no arguments: gives what runs it again, and the tensor that it fills each time."""

WARM_UPS = 2
"""Runs before a recording, in which kernels are compiled and buffers made."""


@dataclass(frozen=True)
class Recorded:
    """A graph and what it reads and writes.

    Attributes:
        numbers: the plan's numbers, on the device.
        replay: runs it.
        logits: `[rows, vocab]`, filled by each run.
    """

    numbers: Tensor
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Graphs by shape, recorded when a shape first occurs.

    Args:
        capture: records; `capture_cuda` unless a test brings its own.
    """

    def __init__(
        self, model: Any, kv: Tensor, state: dict[str, Tensor], device: torch.device, capture: Capture | None = None
    ) -> None:
        self._model = model
        self._kv, self._state = kv, state
        self._device = device
        self._capture = capture or CudaCapture(device)
        self._recorded: dict[tuple[int, ...], Recorded] = {}

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far."""
        return len(self._recorded)

    def run(self, host: Plan) -> tuple[Tensor, SamplingRows | None]:
        """The logits of a padded plan in which everybody decodes, `[rows, vocab]`: valid until the next run."""
        shape = host.layout["decodes.block_table"][1]
        graph = self._recorded.get(shape)
        if graph is None:
            graph = self._recorded[shape] = self._record(host)
        graph.numbers[: host.numbers.numel()].copy_(host.numbers, non_blocking=True)
        graph.replay()
        return graph.logits, host.sampling(graph.numbers)

    def _record(self, host: Plan) -> Recorded:
        rows, width = host.layout["decodes.block_table"][1]
        log.info("recording a graph for %d rows and block tables of %d pages", rows, width)
        numbers = torch.zeros(host.most_numbers, dtype=torch.int64, device=self._device)
        idle = host.idle()
        numbers[: idle.numel()].copy_(idle)
        batch = host.batch(numbers)
        replay, logits = self._capture(lambda: self._model(batch, self._kv, self._state))
        return Recorded(numbers, replay, logits)


class CudaCapture:
    """Records on a GPU; all its graphs share their memory, as only one of them runs at a time."""

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
