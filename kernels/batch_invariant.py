"""Matrix products whose rows do not depend on the rest of the batch.

A BLAS picks its algorithm by the number of rows, and on some CPUs by a row's place among them and by addresses, and a
row's bits change with it. So products are computed by code of ours, whose outputs are summed one by one in a fixed
order: compiled for the CPU at hand (`hybrid.kernels.cpu.matmul`), in fast mode, too, since it is the fastest there, and
on a GPU in deterministic mode by a kernel whose tiles have a fixed shape (`hybrid.kernels.triton.matmul`).

What traces a model, and `HYBRID_KERNELS=reference`, get products of torch, which promise nothing about batches.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid.kernels import ops


@dataclass(frozen=True)
class RowBlocks:
    """The rows of a step.

    Attributes:
        decode_start: rows before it belong to prompts, rows from it on are one token each.
    """

    decode_start: int


def linear(x: Tensor, weight: Tensor, blocks: RowBlocks | None = None, scale: Tensor | None = None) -> Tensor:
    """`x @ weight.T`.

    Args:
        x: `[rows, in]`.
        weight: `[out, in]`.
        blocks: the rows, where they must not depend on the batch; None: on a GPU the fastest product is taken. On a CPU
            they never do.
        scale: `[out]` fp32 of the rows of a weight that is int8.

    Returns:
        `[rows, out]` in the type of `x`.
    """
    compiled: Any = ops.compiled_for("matmul", x)
    if compiled is not None:
        y: Tensor = compiled.multiply(x, weight, scale)
        return y
    if blocks is not None and ops.uses_triton(x.device):
        return ops.batch_invariant_linear(x, weight, blocks.decode_start)
    y = torch.nn.functional.linear(x, weight.to(x.dtype))
    return y if scale is None else (y.float() * scale).to(x.dtype)


def is_compiled(device: torch.device) -> bool:
    """Whether the operations on tensors of a device are compiled for the CPU at hand."""
    return device.type == "cpu" and ops.setting() == "auto"


def multiplies_pairs() -> bool:
    """Whether compiled products of bfloat16 are faster than those of float32: the CPU multiplies pairs of numbers."""
    return ops.setting() == "auto" and bool(ops.compiled_module("target").HAS_PAIRS)
