"""The twins of the kernels of mixtures of experts, in plain torch: every row meets the few experts that it is routed
to.

Each row and each of its experts make a *pair*. Pairs are sorted by expert, those of prompt rows before those of decoded
rows; where a pair comes to lie is its *place*. An expert with pairs multiplies them in one go, the
others' weights are not touched.

These twins need the numbers of pairs on the host: there is one wait for the device in each `expert_linear`. The kernels
of `hybrid.kernels.triton.experts` need none.
"""

import torch
from torch import Tensor

from hybrid.kernels.reference.elementwise import sigmoid


def route_experts(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """The experts of each row: those of the highest probability, highest first.

    Args:
        logits: `[T, experts]` fp32.
        normalise: whether the weights of a row sum to one; else they are the probabilities.

    Returns:
        `[T, top_k]` fp32 weights, and `[T, top_k]` int64 experts.
    """
    weights, experts = logits.softmax(-1).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalise else weights), experts


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    normalise: bool,
    least: float,
    factor: float,
    groups: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """The experts of each row by the logistic function of their logits, each by itself.

    Args:
        logits: `[T, experts]` fp32.
        bias: `[experts]` fp32, added for the choice alone; None: there is none.
        normalise: weights are divided by their sum and `least`.
        factor: of the weights.
        groups: how many groups of equal sizes the experts are in, and how many of these are chosen from: those with the
            highest sum of two experts.

    Returns:
        `[T, top_k]` fp32 weights, and `[T, top_k]` int64 experts.
    """
    scores = sigmoid(logits)
    ranks, (count, top_groups) = scores if bias is None else scores + bias, groups
    if count > top_groups:
        best = ranks.unflatten(-1, (count, -1)).topk(2, dim=-1).values
        left_out = (best[..., 0] + best[..., 1]).topk(count - top_groups, dim=-1, largest=False).indices
        kept = ranks.new_zeros(len(ranks), count).scatter(1, left_out, float("-inf"))
        ranks = (ranks.unflatten(-1, (count, -1)) + kept.unsqueeze(-1)).flatten(1)
    experts = ranks.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if normalise:  # added up one after another: the sum of a row does not depend on how many rows there are
        total = weights[:, :1]
        for rank in range(1, top_k):
            total = total + weights[:, rank : rank + 1]
        weights = weights / (total + least)
    return weights * factor, experts


def sort_by_expert(experts: Tensor, num_experts: int, decode_start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort pairs by expert. Pairs of one expert keep the order of their rows.

    Args:
        experts: `[T, k]` of each row.
        decode_start: rows from it on are one token each; their pairs are sorted behind those of the others.

    Returns:
        `[T * k]` the pair (`row * k + rank`) at each place; `[T, k]` the place of each pair; `[2, num_experts]` where
        each expert's places end, of prompt rows and of decoded rows. int64, all of them.
    """
    first = decode_start * experts.shape[1]
    flat = experts.flatten()
    group = flat + num_experts * (torch.arange(len(flat), device=flat.device) >= first)
    order = group.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=flat.device)
    ends = torch.bincount(group, minlength=2 * num_experts).cumsum(0)
    return order, places.view_as(experts), ends.view(2, num_experts)


def expert_linear(x: Tensor, weight: Tensor, order: Tensor, ends: Tensor, top_k: int, num_prompt: int) -> Tensor:
    """`x @ weight[expert].T` for the pair at every place, accumulated in fp32.

    Args:
        x: `[T, in]`, a row per token; or `[P, in]`, a row per place, where `top_k` is 0.
        weight: `[experts, out, in]`, any strides.
        order, ends: from `sort_by_expert`.
        top_k: experts per token, or 0.
        num_prompt: pairs of prompt rows. The kernel computes those in another way than the others.

    Returns:
        `[P, out]`.
    """
    if top_k:
        x = x[order // top_k]
    output = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for at, end in enumerate(ends.flatten().tolist()):
        torch.mm(x[start:end], weight[at % len(weight)].t(), out=output[start:end])
        start = end
    return output


def combine_experts(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of a row's results, in fp32 and in the order of its weights.

    Args:
        y: `[P, size]`, by place.
        places: `[T, k]`.
        weights: `[T, k]` fp32.

    Returns:
        `[T, size]`.
    """
    total = y[places[:, 0]].float() * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total.addcmul_(y[places[:, rank]].float(), weights[:, rank : rank + 1])
    return total.to(y.dtype)


def add_shared(routed: Tensor, shared: Tensor, gate: Tensor) -> Tensor:
    """`routed + shared * sigmoid(gate)`: what a shared expert gives is added to what others give.

    Args:
        routed, shared: `[T, size]`.
        gate: `[T, 1]`.
    """
    return routed + shared * sigmoid(gate)
