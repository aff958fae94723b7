"""Mixtures of experts: the choice of experts, their products, and the sum of what they give
(`hybrid.kernels.cpu.compiled.experts`)."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.matmul import Rows, multiply_into, multiply_parts
from hybrid.kernels.cpu.packed_weights import multiply_packed_into, multiply_packed_parts
from hybrid.kernels.cpu.target import HAS_TILES
from hybrid.kernels.cpu.tasks import bits, by_rows, kind_of, run

MIN_SHARED = 1 << 12
"""Elements that are worth a thread."""

MAX_FEW = 1024
"""Pairs up to which those of all experts are multiplied by one operation; steps that are captured have no more."""

READS_ON_HOST: bool = HAS_TILES
"""Whether it is read on the host which pairs are those of an expert, whatever their number."""

_route_experts = Compiled(f"{COMPILED}.experts", "route_experts")
_choose_experts = Compiled(f"{COMPILED}.experts", "choose_experts")
_sort_by_expert = Compiled(f"{COMPILED}.experts", "sort_by_expert")
_take_pairs_at = Compiled(f"{COMPILED}.experts", "take_pairs")
_add_biases = Compiled(f"{COMPILED}.experts", "add_biases")
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


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    normalise: bool,
    least: float,
    factor: float,
    groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """`reference.experts.choose_experts`; of experts with equal ranks the lower one comes first. A row with NaN has
    experts that exist, with weights that are NaN."""
    (rows, count), (num_groups, top_groups) = logits.shape, groups
    exact = (logits,) if bias is None else (logits, bias)
    kind_of("choose_experts", logits, exact=exact, lies_right=0 < top_k <= count and count % num_groups == 0)
    logits = by_rows(logits)
    weights = torch.empty(rows, top_k, dtype=torch.float32)
    experts = torch.empty(rows, top_k, dtype=torch.int64)
    addresses = logits.data_ptr(), 0 if bias is None else bias.data_ptr(), weights.data_ptr(), experts.data_ptr()
    sizes = logits.stride(0), count, top_k, int(normalise), num_groups, top_groups
    args = (*addresses, *sizes, bits(least), bits(factor))
    run(_choose_experts, FLOAT, args, rows, 1, logits.numel() // MIN_SHARED)
    return weights, experts


def sort_by_expert(experts: Tensor, num_experts: int, decode_start: int) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.sort_by_expert`."""
    experts = experts.contiguous()
    order, places = (torch.empty(shape, dtype=torch.int64) for shape in (experts.shape.numel(), experts.shape))
    ends = torch.empty(2, num_experts, dtype=torch.int64)
    addresses = tuple(tensor.data_ptr() for tensor in (experts, order, places, ends))
    args = (*addresses, experts.numel(), num_experts, decode_start * experts.shape[1])
    run(_sort_by_expert, FLOAT, args, 1, 1, 1)
    return order, places, ends


def expert_linear(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int) -> Tensor:
    """`reference.expert_linear`. Few pairs are multiplied without a look at them on the host."""
    return _product(x, weight, None, order, ends, top_k)


def packed_expert_linear(x: Tensor, weight: Tensor, scales: Tensor, order: Tensor, ends: Tensor, top_k: int) -> Tensor:
    """`expert_linear` with weights of four bits.

    Args:
        weight, scales: `[experts, ...]`, each as of `hybrid.kernels.cpu.packed_weights`.
    """
    return _product(x, weight, scales, order, ends, top_k)


def _product(x: Tensor, weight: Tensor, scales: Tensor | None, order: Tensor, ends: Tensor, top_k: int) -> Tensor:
    if top_k:
        x = _take_pairs(x, order, top_k)
    output = torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype)
    if len(x) <= MAX_FEW and not READS_ON_HOST:
        if scales is None:
            multiply_parts(output, x, weight, ends)
        else:
            multiply_packed_parts(output, x, weight, scales, ends)
        return output
    start = 0
    for at, end in enumerate(ends.flatten().tolist()):
        if start < end:
            own, rows, expert = output[start:end], Rows(x[start:end]), at % len(weight)
            if scales is None:
                multiply_into(own, rows, weight[expert])
            else:
                multiply_packed_into(own, rows, weight[expert], scales[expert])
            start = end
    return output


def _take_pairs(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The rows of pairs, `[pairs, size]`."""
    kind, x = kind_of("expert_linear", x), by_rows(x)
    output = torch.empty(len(order), x.shape[1], dtype=x.dtype)
    args = x.data_ptr(), output.data_ptr(), order.data_ptr(), x.stride(0), x.shape[1], top_k
    run(_take_pairs_at, kind, args, len(order), 1, output.numel() // MIN_SHARED)
    return output


def add_biases(y: Tensor, biases: Tensor, experts: Tensor, order: Tensor) -> Tensor:
    """What experts give for pairs, each with the bias of its expert.

    Args:
        y: `[pairs, size]`, in the order of `sort_by_expert`.
        biases: `[experts, size]`, of the same type.
        experts: `[T, top_k]` int64, those of tokens.
        order: `[pairs]` int64, of `sort_by_expert`.
    """
    kind, y, biases = kind_of("add_biases", y, biases), by_rows(y), by_rows(biases)
    experts, output = experts.contiguous(), torch.empty(y.shape, dtype=y.dtype)
    addresses = tuple(tensor.data_ptr() for tensor in (y, biases, output, experts, order))
    args = (*addresses, y.stride(0), biases.stride(0), y.shape[1])
    run(_add_biases, kind, args, len(y), 1, y.numel() // MIN_SHARED)
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
