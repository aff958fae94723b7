"""Mixtures of experts: the product that touches only the experts that rows are routed to, and what stands around it."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from gpu_bench import Bench, Check, Result, compare
from gpu_device import Call
from torch import Tensor

from hybrid.kernels import ops

CUT = (1,)
"""For the twins in a rehearsal: rows one by one, whose bits do not depend on their number. Kernels do not cut."""


def experts(bench: Bench) -> Iterator[Result]:
    """The first product of an expert layer, against copy bandwidth and torch's grouped product; the whole layer."""
    s = bench.sizes
    count, top_k, hidden, inner = s.experts
    bytes_of_expert = 2 * inner * hidden * s.dtype.itemsize
    weight = bench.normal(count, 2 * inner, hidden) * hidden**-0.5
    second = bench.normal(count, hidden, inner) * inner**-0.5
    for rows in s.expert_rows:
        name = f"experts of {rows} rows"
        if not bench.has(6, name):
            continue
        logits = bench.normal(rows, count, dtype=torch.float32)
        start = 0 if rows <= 256 else rows  # few rows as decoded ones, many as a prompt's
        chosen = ops.route_experts(logits, top_k, True)[1]
        order, places, ends = ops.sort_by_expert(chosen, count, start)
        xs = [bench.normal(rows, hidden) for _ in range(4)]

        def product(x: Tensor, order: Tensor = order, ends: Tensor = ends, start: int = start) -> Tensor:
            return ops.expert_linear(x, weight, order, ends, top_k, start * top_k, CUT)

        def layer(x: Tensor, logits: Tensor = logits, start: int = start) -> Tensor:
            weights, chosen = ops.route_experts(logits, top_k, True)
            order, places, ends = ops.sort_by_expert(chosen, count, start)
            y = ops.expert_linear(x, weight, order, ends, top_k, start * top_k, ())
            gate, up = y.chunk(2, dim=-1)
            y = ops.expert_linear(ops.silu_and_mul(gate, up), second, order, ends, 0, start * top_k, ())
            return ops.combine_experts(y, places, weights)

        found = product(xs[0])
        few = [0, rows - 1]
        truth = torch.einsum("ti,tkoi->tko", xs[0][few].double(), weight[chosen[few]].double())
        yield compare(name, found[places[few]], truth)
        alone = ops.sort_by_expert(chosen[-1:], count, 0 if start == 0 else 1)
        again = ops.expert_linear(xs[0][-1:], weight, alone[0], alone[2], top_k, 0 if start == 0 else top_k, CUT)
        same = torch.equal(again[alone[1]], found[places[-1:]])
        yield Check(f"{name}, one of them alone", same, "the same bits" if same else "OTHER BITS")

        used = len(chosen.unique())
        moved = used * bytes_of_expert + rows * (hidden + 2 * inner * top_k) * s.dtype.itemsize
        timing = bench.device.time([lambda x=x, product=product: product(x) for x in xs], 0.05)
        yield bench.of_bandwidth(f"{name}, {used} experts met", moved, timing, None)

        def torchs(xs: list[Tensor] = xs, order: Tensor = order, ends: Tensor = ends, part: int = start) -> list[Call]:
            offsets = ends[0 if part else 1].int()
            return [lambda x=x: F.grouped_mm(x[order // top_k], weight.transpose(1, 2), offs=offsets) for x in xs]

        yield bench.against_fastest(name, timing, {"torch's grouped product": torchs}, None)
        whole = bench.device.time([lambda x=x, layer=layer: layer(x) for x in xs], 0.05)
        yield bench.of_bandwidth(f"{name}, the layer", 1.5 * moved, whole, None)
