"""The memory of a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil
import torch
from torch import Tensor


def free_memory(device: torch.device) -> int:
    """Count the bytes that are free on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # memory that loading the weights left cached is free too
    return torch.cuda.mem_get_info(device)[0]


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Put a tensor on a device.

    From the host a GPU copies it by itself from pinned memory, after the work that it was given before: the host does
    not wait for the step under way.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Tensors on their way to the host: copied after the work that their device was given before, while the host, and
    then the device, do other work.

    Args:
        tensors: at least one, on one device.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: Sequence[Tensor] = tensors
        self._copied: torch.cuda.Event | None = None
        device = tensors[0].device
        if device.type == "cuda":
            self._tensors = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            ]
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> list[list[Any]]:
        """Wait until the tensors are there. Returns them as lists."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.tolist() for tensor in self._tensors]
