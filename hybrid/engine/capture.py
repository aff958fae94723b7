"""Capturing of a function, so that it runs again in one launch: a CUDA graph, or a program of compiled operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybrid.kernels.ops import compiled_module
from hybrid.memory.contents import WorkerRun

Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]
"""Captures a function without arguments: returns what runs it again, and the tensor that it writes each time."""

WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and buffers allocated."""


@runtime_checkable
class Postable(Protocol):
    """A captured function that other threads can run again: a program of compiled operations."""

    def post(self, before: Sequence[Tensor], after: Sequence[Tensor], keep: object) -> WorkerRun | None:
        """Have it run by other threads, after what was posted before. None: by no other one.

        Args:
            before, after: what is copied before and after it, as `hybrid.kernels.cpu.memory.fill` has it.
            keep: what the run reads and writes.
        """
        ...


def capture_for(device: torch.device) -> Capture:
    """Return the way to capture passes on a device: CUDA graphs, or programs of compiled operations on a CPU."""
    if device.type == "cuda":
        return CudaCapture(device)
    module: Any = compiled_module("capture")
    capture: Capture = module.CpuCapture()
    return capture


class CudaCapture:
    """Captures on a GPU. All graphs share their memory, as only one of them runs at a time.

    What other threads do meanwhile is not an error, neither here nor there: another engine may take pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        with torch.cuda.device(self._device):  # whose stream is captured
            if self._stream is None:  # one for all, since what is freed is kept for the stream that had it
                self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    run()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        self._pool = graph.pool()
        return graph.replay, result
