"""What a device can give."""

from __future__ import annotations

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that a device can give."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    torch.cuda.empty_cache()  # what loading the weights left behind is free too
    return torch.cuda.mem_get_info(device)[0]
