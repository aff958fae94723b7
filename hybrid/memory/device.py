"""The memory of a device."""

from __future__ import annotations

import psutil
import torch
from torch import Tensor


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # memory that loading the weights left cached is free too
    return torch.cuda.mem_get_info(device)[0]


def on_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device.

    From the host a GPU copies it by itself from pinned memory, after the work that it was given before: the host does
    not wait for the step under way.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
