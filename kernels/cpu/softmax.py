"""Probabilities of rows of logits, and their logarithms (`hybrid.kernels.cpu.compiled.softmax`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import run

MIN_SHARED = 1 << 14
"""Logits that are worth a thread."""

_softmax = Compiled(f"{COMPILED}.softmax", "softmax")
_log_softmax = Compiled(f"{COMPILED}.softmax", "log_softmax")


def softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """The probabilities of each row at its temperature. A row with NaN or infinity, or with nothing but minus infinity,
    gives NaN.

    Args:
        logits: `[S, size]` fp32.
        temperature: `[S]` fp64. One below the smallest normal fp32 number is that number.
    """
    logits, temperature = _by_rows(logits), temperature.contiguous()
    rows, size = logits.shape
    y = torch.empty(rows, size, dtype=torch.float32)
    args = logits.data_ptr(), temperature.data_ptr(), y.data_ptr(), logits.stride(0), size
    run(_softmax, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED)
    return y


def log_softmax(logits: Tensor) -> Tensor:
    """The logarithms of the probabilities of each row.

    Args:
        logits: `[S, size]` fp32.
    """
    logits = _by_rows(logits)
    rows, size = logits.shape
    y = torch.empty(rows, size, dtype=torch.float32)
    args = logits.data_ptr(), y.data_ptr(), logits.stride(0), size
    run(_log_softmax, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED)
    return y


def _by_rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
