"""Mixtures of experts: the choice of experts, their products, and the sum of what they give
(`hybrid.kernels.cpu.compiled.experts`). Sorting moves whole numbers alone: its twin does that."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.matmul import multiply_into
from hybrid.kernels.cpu.tasks import by_rows, kind_of, run

MIN_SHARED = 1 << 12
"""Elements that are worth a thread."""

_route_experts = Compiled(f"{COMPILED}.experts", "route_experts")
_combine_experts = Compiled(f"{COMPILED}.experts", "combine_experts")
_add_shared = Compiled(f"{COMPILED}.experts", "add_shared")


def route_experts(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """`reference.route_experts`; of experts with equal logits the lower one comes first. A row with NaN is routed to
    experts that exist, with weights that are NaN."""
    (rows, count), top_k = logits.shape, int(top_k)
    kind_of("route_experts", logits, exact=(logits,), lies_right=0 < top_k <= count)
    logits = by_rows(logits)
    weights = torch.empty(rows, top_k, dtype=torch.float32)
    experts = torch.empty(rows, top_k, dtype=torch.int64)
    args = logits.data_ptr(), weights.data_ptr(), experts.data_ptr(), logits.stride(0), count, top_k, int(normalise)
    run(_route_experts, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED)
    return weights, experts


def expert_linear(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int) -> Tensor:
    """`reference.expert_linear`."""
    if top_k:
        x = x[order // top_k]
    output = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    start = 0
    for at, end in enumerate(ends.flatten().tolist()):
        if start < end:
            multiply_into(output[start:end], x[start:end], weight[at % len(weight)])
            start = end
    return output


def combine_experts(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """`reference.combine_experts`."""
    kind, y = kind_of("combine_experts", y, exact=(weights,)), by_rows(y)
    places, weights = places.contiguous(), weights.contiguous()
    (rows, top_k), size = places.shape, y.shape[1]
    output = torch.empty(rows, size, dtype=y.dtype)
    addresses = y.data_ptr(), places.data_ptr(), weights.data_ptr(), output.data_ptr()
    args = (*addresses, y.stride(0), size, top_k)
    run(_combine_experts, kind, args, rows, 1, rows * top_k * size // MIN_SHARED)
    return output


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """`reference.add_shared`, rounded once."""
    kind = kind_of("add_shared", routed, shared, gate)
    routed, shared, gate = routed.contiguous(), shared.contiguous(), gate.contiguous()
    output = torch.empty(routed.shape, dtype=routed.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (routed, shared, gate, output))
    args = (*addresses, routed.shape[1])
    run(_add_shared, kind, args, routed.shape[0], 1, routed.numel() // MIN_SHARED)
    return output
