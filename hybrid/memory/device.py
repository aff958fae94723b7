"""The memory of a device."""

from __future__ import annotations

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # memory that loading the weights left cached is free too
    return torch.cuda.mem_get_info(device)[0]
