"""What is done row by row: norms, gates, the store of keys and values, and matrix products that do not depend on the
number of rows."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_bench import Bench, Check, Line, Result, compare
from gpu_device import Call
from torch import Tensor

from hybrid.kernels import ops, reference
from hybrid.kernels.reference import rotate

EPS = 1e-6


def elementwise(bench: Bench) -> Iterator[Result]:
    """One pass of each kernel against its twin, and against copy bandwidth."""
    s = bench.sizes
    hidden, inner = s.config["hidden_size"], s.config["intermediate_size"]

    def scale(size: int) -> Tensor:
        return 1 + 0.1 * bench.normal(size, dtype=torch.float32)

    for rows in s.rows:
        if not bench.has(10, f"rows of {rows}"):
            continue
        heads = (rows, s.value_heads, s.value_dim)
        kernels: dict[str, tuple[Callable[[], tuple[Any, ...]], int]] = {
            "rms_norm": (lambda n=rows: (bench.normal(n, hidden), scale(hidden), EPS), 2 * rows * hidden),
            "add_rms_norm": (
                lambda n=rows: (bench.normal(n, hidden), bench.normal(n, hidden), scale(hidden), EPS),
                4 * rows * hidden,
            ),
            "gated_rms_norm": (
                lambda shape=heads: (
                    bench.normal(*shape),
                    bench.normal(*shape),
                    scale(s.value_dim).to(s.dtype),
                    EPS,
                ),
                3 * rows * s.value_heads * s.value_dim,
            ),
            "silu_and_mul": (lambda n=rows: (bench.normal(n, inner), bench.normal(n, inner)), 3 * rows * inner),
        }
        for kernel, (make, elements) in kernels.items():
            name, run = f"{kernel} of {rows}", getattr(ops, kernel)
            moved = elements * s.dtype.itemsize
            sets = [make() for _ in range(bench.sets(moved))]
            found, truth = run(*sets[0]), getattr(reference, kernel)(*sets[0])
            for mine, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, truth)), strict=True):
                yield compare(name, mine, theirs)
            timing = bench.device.time([lambda x=x, run=run: run(*x) for x in sets], 0.05)
            yield bench.of_bandwidth(name, moved, timing, None)
        yield from _store(bench, rows)


def _store(bench: Bench, rows: int) -> Iterator[Result]:
    """Norm, rotation and store in one kernel, against three kernels of ours and torch's own for the rotation."""
    s, name = bench.sizes, f"norm_rotate_store of {rows}"
    moved = rows * 2 * (s.heads + 2 * s.kv_heads) * s.head_dim * s.dtype.itemsize
    sets = bench.sets(moved)
    pages = -(-rows // s.page_size) * sets
    kv = bench.normal(pages, s.layers, 2, s.page_size, s.kv_heads, s.head_dim)
    cache = kv[:, s.layers - 1]
    slots = bench.shuffled(pages * s.page_size)[: rows * sets].view(sets, rows)
    q_scale, k_scale = (1 + 0.1 * bench.normal(s.head_dim, dtype=torch.float32) for _ in range(2))
    angles = bench.normal(rows, s.head_dim // 8, dtype=torch.float32).repeat(1, 2)
    cos, sin = angles.cos().to(s.dtype), angles.sin().to(s.dtype)
    inputs = [
        (
            bench.normal(rows, s.heads, 2 * s.head_dim)[..., : s.head_dim],
            *(bench.normal(rows, s.kv_heads, s.head_dim) for _ in range(2)),
            chosen,
        )
        for chosen in slots
    ]

    def fused(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        return ops.norm_rotate_store(q, k, v, q_scale, k_scale, EPS, cos, sin, cache, chosen)

    def unfused(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        ops.store_kv(rotate(ops.rms_norm(k, k_scale, EPS), cos, sin), v, cache, chosen)
        return rotate(ops.rms_norm(q, q_scale, EPS), cos, sin)

    expected = kv.clone()
    weights = (q_scale, k_scale, EPS, cos, sin)
    truth = reference.norm_rotate_store(*inputs[0][:3], *weights, expected[:, s.layers - 1], slots[0])
    yield compare(f"{name}, q", fused(*inputs[0]), truth)
    yield compare(f"{name}, pages", kv, expected)
    written = torch.zeros(pages * s.page_size, dtype=torch.bool, device=kv.device)
    written[slots[0]] = True
    others = (~written).view(pages, s.page_size)
    # the layers beside, and the places beside those that were named
    same = torch.equal(kv[:, 0], expected[:, 0]) and all(
        torch.equal(cache[:, kind][others], expected[:, s.layers - 1, kind][others]) for kind in (0, 1)
    )
    yield Check(f"{name}, other places", same, "bitwise as they were" if same else "CHANGED")
    timing = bench.device.time([lambda x=x: fused(*x) for x in inputs], 0.05)
    apart = bench.device.time([lambda x=x: unfused(*x) for x in inputs], 0.05)
    yield bench.of_bandwidth(name, moved, timing, None)
    seconds = {"fused": timing.seconds, "unfused": apart.seconds}
    yield Line(f"{name}, over unfused", timing.seconds / apart.seconds, None, True, seconds)


def products(bench: Bench) -> Iterator[Result]:
    """What it costs that a row's bits do not depend on the number of rows: against torch's own product."""
    s = bench.sizes
    for out, inner, matrix in s.matrices:
        weights: list[Tensor] = []
        num_bytes = out * inner * s.dtype.itemsize
        for rows in s.products:
            name = f"{rows} rows times {matrix}"
            if rows * out > 1 << 28 or not bench.has(6, name):  # logits of so many rows are never asked
                continue
            if not weights:
                weights += [bench.normal(out, inner) * inner**-0.5 for _ in range(bench.sets(num_bytes))]
            x = bench.normal(rows, inner)
            # few rows as decoded ones, many as a prompt's
            start = 0 if rows <= 64 else rows

            def ours(weight: Tensor, x: Tensor = x, start: int = start) -> Tensor:
                return ops.batch_invariant_linear(x, weight, start)

            found = ours(weights[0])
            chosen = [*range(min(rows, 4)), rows - 1]
            yield compare(name, found[chosen], x[chosen].double() @ weights[0].double().t())
            half = x[rows // 2 :].contiguous()
            part = ops.batch_invariant_linear(half, weights[0], 0 if start == 0 else len(half))
            same = torch.equal(part, found[rows // 2 :])
            yield Check(f"{name}, half of them alone", same, "the same bits" if same else "OTHER BITS")
            timing = bench.device.time([lambda w=w, ours=ours: ours(w) for w in weights], 0.05)

            def torchs(weights: list[Tensor] = weights, x: Tensor = x) -> list[Call]:
                return [lambda w=w: F.linear(x, w) for w in weights]

            yield bench.of_bandwidth(name, num_bytes + rows * (out + inner) * s.dtype.itemsize, timing, None)
            rate = 2 * rows * out * inner / timing.seconds / bench.roofline.matmul
            yield Line(f"{name}, of the matmul rate", rate, None, False, {"ours": timing.seconds})
            yield bench.against_fastest(name, timing, {"torch's linear": torchs}, None)
        del weights
        bench.device.release()
