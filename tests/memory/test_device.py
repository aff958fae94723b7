"""The way of numbers to a GPU: from pinned memory, without waiting for it. The GPU is a stand-in."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.memory.device import on_device

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_host_does_not_wait_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pin(self: Tensor) -> Tensor:
        calls.append("pinned")
        return self

    def to(self: Tensor, device: torch.device, non_blocking: bool = False) -> Tensor:
        calls.append((device.type, non_blocking))
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "to", to)
    on_device(torch.zeros(2), GPU)
    assert calls == ["pinned", ("cuda", True)]


def test_on_a_cpu_numbers_stay_where_they_are() -> None:
    numbers = torch.arange(3)
    assert on_device(numbers, CPU) is numbers
