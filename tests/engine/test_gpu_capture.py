"""The capture of CUDA graphs, by a stand-in for what torch has of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.engine.capture import WARM_UPS, CudaCapture

GPU = torch.device("cuda", 1)


class Gpu:
    """In the place of `torch.cuda`.

    Attributes:
        said: what was asked of it, in order.
    """

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.streams = 0

    def Stream(self, device: torch.device) -> "Gpu":  # noqa: N802 (torch's name)
        self.streams += 1
        return self

    def current_stream(self, device: torch.device) -> "Gpu":
        return self

    def wait_stream(self, other: "Gpu") -> None:
        self.said.append("wait")

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.said.append(device)
        yield
        self.said.append("another device")

    @contextmanager
    def stream(self, stream: "Gpu") -> Iterator[None]:
        self.said.append("on a stream")
        yield

    def CUDAGraph(self) -> "Graph":  # noqa: N802
        return Graph(self)

    @contextmanager
    def graph(self, graph: "Graph", pool: object, capture_error_mode: str) -> Iterator[None]:
        self.said.append(("capture", pool, capture_error_mode))
        yield
        self.said.append("captured")


class Graph:
    """A captured graph, whose memory is its own unless it was given another one's."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def replay(self) -> None:
        self._gpu.said.append("replay")

    def pool(self) -> str:
        return "the pool"


def test_captures_are_warmed_up_share_memory_and_a_stream_and_let_other_threads_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error mode of all threads would fail both this capture and what another thread does: pinned memory is taken by
    another engine, or by a loader of data."""
    gpu = Gpu()
    for name in ("device", "Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    capture, logits = CudaCapture(GPU), torch.zeros(2, 3)

    def run() -> Tensor:
        gpu.said.append("run")
        return logits

    for pool in (None, "the pool"):
        gpu.said.clear()
        replay, found = capture(run)
        replay()
        warm = [GPU, "wait", "on a stream", *["run"] * WARM_UPS, "wait"]
        captured = [("capture", pool, "thread_local"), "run", "captured", "another device"]
        assert gpu.said == [*warm, *captured, "replay"]
        assert found is logits
    assert gpu.streams == 1
