"""The kernels but attention, on the sizes that a model has: against their twins, the roofline and peers."""

import math
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from common import Line
from gpu.harness import Bench, Call, Case, Planned, each_with, plan
from torch import Tensor

from hybrid.kernels.packed_kv import KV_DTYPES, row_size
from hybrid.kernels.reference import sigmoid, softplus

EPS = 1e-6

# Linear attention


class Linear:
    """One layer of linear attention: weights in the ranges that trained models have, and the pools of states and
    windows, in slots as far apart as in a model with several layers."""

    def __init__(self, bench: Bench, slots: int) -> None:
        s = bench.sizes
        self.sizes = s
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = s.linear_heads
        self.taps = bench.normal(s.channels, s.width) * s.width**-0.5
        self.rate = -torch.linspace(1, 16, self.value_heads, device=bench.device.device)
        self.dt_bias = torch.linspace(-6, -2, self.value_heads, device=bench.device.device).to(s.dtype)
        shape = (slots, s.layers, self.value_heads, self.key_dim, self.value_dim)
        self.recurrent = bench.normal(*shape, dtype=torch.float32)[:, s.layers - 1]
        self.conv = bench.normal(slots, s.layers, s.width - 1, s.channels)[:, s.layers - 1]

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.rate * softplus(a.float() + self.dt_bias), sigmoid(b)


def fla_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, read: Tensor, write: Tensor
) -> Call:
    """FLA's recurrent rule on one token of each request: states gathered from the pool and scattered back. Shapes are
    those of `reference.recurrent_gated_delta_rule`."""
    rule: Any = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    q, k, v, g, beta = (x.unsqueeze(1) for x in (q, k, v, g, beta))

    def call() -> Tensor:
        output, state = rule(
            q, k, v, g=g, beta=beta, initial_state=pool[read], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        pool[write] = state
        return output.squeeze(1)

    return call


def delta_step(bench: Bench) -> Iterator[Planned]:
    """One token of each request: convolution, gates and rule on the slots of the pool."""
    s = bench.sizes
    _, value_heads, _, value_dim = s.linear_heads

    def step(name: str, requests: int) -> Case:
        moved = 2 * requests * (s.state_bytes + s.window_bytes) + requests * s.channels * s.dtype.itemsize
        moved += (requests * value_heads * (value_dim + 2) + s.channels * s.width) * s.dtype.itemsize
        sets = bench.sets(moved)
        work = Linear(bench, 1 + requests * sets)
        slots = (1 + bench.shuffled(requests * sets)).view(sets, requests)
        fixed = (work.taps, work.rate, work.dt_bias, work.conv, work.recurrent, bench.ints([*range(requests + 1)]))
        inputs = []
        for row in slots:
            a, b = (bench.normal(requests, value_heads) for _ in range(2))
            read, write = row.clone(), row.clone()  # a copy is aligned, as an engine's are
            inputs.append((bench.normal(requests, s.channels), a, b, *fixed, read, write))

        def fla() -> list[Call]:
            q, k = (bench.normal(requests, work.key_heads, work.key_dim) for _ in range(2))
            v, pool = bench.normal(requests, value_heads, value_dim), work.recurrent
            return [fla_step(q, k, v, *work.gates(a, b), pool, read, write) for _, a, b, *_, read, write in inputs]

        return bench.case(
            name,
            "gated_delta_step",
            inputs,
            num_bytes=moved,
            target=0.8 if requests >= 64 else None,
            peers={"FLA's recurrent rule without convolution and gates, with gather and scatter": fla},
            peer_target=1.0,
        )

    for requests in s.steps:
        yield plan(f"delta rule step of {requests}", 12, step, requests)


def chunk_rule(bench: Bench) -> Iterator[Planned]:
    """Packed batches of prompts of equal length, reading and writing slots of their own: the chunk rule."""
    for tokens in bench.sizes.prompts:
        for requests in (1, bench.sizes.many):
            yield plan(f"chunk rule, {requests} x {tokens}", 20, _chunks, bench, requests, tokens)


def _chunks(name: str, bench: Bench, requests: int, tokens: int) -> Case:
    s = bench.sizes
    key_heads, value_heads, key_dim, value_dim = s.linear_heads
    sets = bench.sets(requests * (tokens * s.channels * s.dtype.itemsize + 2 * s.state_bytes))
    work = Linear(bench, 1 + requests * (sets + 1))
    starts, each = bench.ints([*range(0, requests * tokens + 1, tokens)]), bench.ints([*range(requests)])
    spare = len(work.recurrent) - requests + each  # for captured states

    def inputs() -> tuple[Tensor, ...]:
        mixed = bench.normal(requests * tokens, s.channels)
        heads = mixed.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim), dim=-1)
        parts = (x.unflatten(-1, (-1, size)) for x, size in zip(heads, (key_dim, key_dim, value_dim), strict=True))
        return *parts, *bench.normal(2, requests * tokens, value_heads), work.rate, work.dt_bias

    made = [(inputs(), 1 + at * requests + each) for at in range(sets)]

    def arguments(at: int, captures: Tensor) -> tuple[Any, ...]:
        given, slots = made[at]
        return *given, work.recurrent, starts, slots, slots, captures, s.page_size

    captures = torch.stack((each, torch.full_like(each, s.page_size), spare), 1)
    operation, none = "chunk_gated_delta_rule", bench.ints([]).view(0, 3)
    calls = each_with(bench.call(operation), [arguments(at, none) for at in range(sets)])
    return Case(calls, partial(bench.twins, name, operation, *arguments(0, captures)), tokens=requests * tokens)


def convolution(bench: Bench) -> Iterator[Planned]:
    """Prompts: the causal convolution, against copy bandwidth."""
    s = bench.sizes

    def prompts(name: str, tokens: int) -> Case:
        moved = 2 * tokens * s.channels * s.dtype.itemsize
        work = Linear(bench, 1 + bench.sets(moved))
        starts, slots = bench.ints([0, tokens]), [bench.ints([slot]) for slot in range(1, len(work.conv))]
        xs = [bench.normal(tokens, s.channels) for _ in slots]
        none = bench.ints([]).view(0, 3)
        inputs = [(x, work.taps, work.conv, starts, slot, slot, none) for x, slot in zip(xs, slots, strict=True)]
        return bench.case(name, "causal_conv1d", inputs, num_bytes=moved)

    for tokens in s.prompts:
        yield plan(f"convolution of {tokens}", 10, prompts, tokens)


def state_copies(bench: Bench) -> Iterator[Planned]:
    """Copies of whole states, all layers of them, from slots to slots; tokens to where a pass reads; rows before."""
    s = bench.sizes
    size = s.config["num_hidden_layers"] * 3 // 4 * (s.state_bytes + s.window_bytes)

    def copy(name: str, count: int) -> Case:
        sets = bench.sets(2 * count * size)
        rows = bench.normal(2 * count * sets, size // 4, dtype=torch.float32).view(torch.uint8)
        places = bench.shuffled(len(rows)).view(sets, 2, count)
        inputs = [(rows, *(x.clone() for x in pair)) for pair in places]
        return bench.case(name, "copy_states", inputs, num_bytes=2 * count * size, target=0.85 if count >= 8 else None)

    def links(name: str, count: int) -> Case:
        tokens, numbers = bench.shuffled(2 * count) - count // 2, bench.shuffled(8 * count)  # some are negative
        places = torch.stack([bench.shuffled(count), *(bench.shuffled(count) + count * at for at in range(4))], 1)
        return bench.case(name, "fill_in_tokens", [(numbers, tokens, places)])

    def shifts(name: str, count: int) -> Case:
        x, state = bench.normal(3 * count, s.config["hidden_size"]), bench.normal(2 * count, s.config["hidden_size"])
        reads, writes = bench.ints([-1] * 3 * count), bench.ints([-1] * 3 * count)
        reads[::3], writes[2::3] = bench.shuffled(count), bench.shuffled(count) + count
        inputs = x, state, bench.ints([*range(0, 3 * count + 1, 3)]), reads, writes
        return bench.case(name, "shift_rows", [inputs])

    for count in s.copies:
        yield plan(f"copy of {count} states", 8, copy, count)
    yield plan("tokens of 48 requests", 1, links, 48)
    yield plan("rows before three drafts of 48 requests", 1, shifts, 48)


# Row by row


def elementwise(bench: Bench) -> Iterator[Planned]:
    """One pass of each kernel against its twin, and against copy bandwidth."""
    s = bench.sizes
    hidden, inner = s.config["hidden_size"], s.config["intermediate_size"]
    heads, _, head_dim = s.heads
    _, value_heads, _, value_dim = s.linear_heads

    norm = 1 + 0.1 * bench.normal(hidden, dtype=torch.float32), EPS
    gated_norm = (1 + 0.1 * bench.normal(value_dim, dtype=torch.float32)).to(s.dtype), EPS
    rates = -torch.linspace(1, 16, value_heads, device=bench.device.device)
    kernels: dict[str, tuple[tuple[int, ...], int, int, tuple[Any, ...]]] = {
        "rms_norm": ((hidden,), 1, 2, norm),
        "add_rms_norm": ((hidden,), 2, 4, norm),
        "gated_rms_norm": ((value_heads, value_dim), 2, 3, gated_norm),
        "silu_and_mul": ((inner,), 2, 3, ()),
        "sigmoid_and_mul": ((heads, head_dim), 2, 3, ()),
        "delta_gates": ((value_heads,), 2, 5, (rates, rates.to(s.dtype))),
    }
    """Shape of a row, number of inputs and of inputs and outputs, further arguments."""

    def kernel(name: str, operation: str, rows: int) -> Case:
        shape, count, moves, rest = kernels[operation]
        moved = rows * moves * math.prod(shape) * s.dtype.itemsize

        def inputs() -> tuple[Any, ...]:
            if operation.endswith("_and_mul"):  # halves of a projection
                return bench.normal(rows, *shape[:-1], count * shape[-1]).chunk(count, dim=-1)
            return *(bench.normal(rows, *shape) for _ in range(count)), *rest

        return bench.case(name, operation, [inputs() for _ in range(bench.sets(moved))], num_bytes=moved)

    for rows in s.rows:
        for operation in kernels:
            yield plan(f"{operation} of {rows}", 2, kernel, operation, rows)
        yield plan(f"norm_rotate_store of {rows}", 3, _store, bench, rows)


def _store(name: str, bench: Bench, rows: int) -> Case:
    """Norm, rotation and store in one kernel; the store alone, which other models call."""
    s = bench.sizes
    heads, kv_heads, head_dim = s.heads
    moved = rows * 2 * (heads + 2 * kv_heads) * head_dim * s.dtype.itemsize
    sets = bench.sets(moved)
    pages = -(-rows // s.page_size) * sets
    cache = bench.normal(pages, s.layers, 2, s.page_size, kv_heads, head_dim)[:, s.layers - 1]
    slots = bench.shuffled(pages * s.page_size)[: rows * sets].view(sets, rows)
    q_scale, k_scale = (1 + 0.1 * bench.normal(head_dim, dtype=torch.float32) for _ in range(2))
    angles = bench.normal(rows, head_dim // 8, dtype=torch.float32).repeat(1, 2)
    weights = (q_scale, k_scale, EPS, angles.cos().to(s.dtype), angles.sin().to(s.dtype))
    inputs = [
        (
            bench.normal(rows, heads, 2 * head_dim)[..., :head_dim],
            *bench.normal(rows, 2 * kv_heads, head_dim).chunk(2, dim=1),
            *weights,
            cache,
            chosen,
        )
        for chosen in slots
    ]
    stored = [(k, v, *rest[-2:]) for _, k, v, *rest in inputs]
    variants = {"store_kv alone": each_with(bench.ops.store_kv, stored)}
    for kind, kept in KV_DTYPES.items():
        rows_of = torch.zeros((*cache.shape[:-1], row_size(head_dim)), dtype=torch.uint8, device=cache.device)
        packed = [(k, v, rows_of.view(kept), chosen) for k, v, _, chosen in stored]
        variants[f"store_kv, kv {kind}"] = each_with(bench.ops.store_kv, packed)
    return bench.case(name, "norm_rotate_store", inputs, num_bytes=moved, variants=variants)


def products(bench: Bench) -> Iterator[Planned]:
    """What it costs that a row's bits do not depend on the number of rows: against torch's own product."""
    s = bench.sizes

    def product(name: str, rows: int, out: int, inner: int) -> Case:
        num_bytes = out * inner * s.dtype.itemsize
        weights = [bench.normal(out, inner) * inner**-0.5 for _ in range(bench.sets(num_bytes))]
        x = bench.normal(rows, inner)
        start = 0 if rows <= 64 else rows  # few rows as decoded ones, many as a prompt's
        ours = partial(bench.ops.batch_invariant_linear, x)

        return Case(
            each_with(ours, [(weight, start) for weight in weights]),
            partial(bench.twins, name, "batch_invariant_linear", x, weights[0], start, fp64=True),
            num_bytes=num_bytes + rows * (out + inner) * s.dtype.itemsize,
            operations=2 * rows * out * inner,
            peers={"torch's linear": lambda: each_with(partial(F.linear, x), [(weight,) for weight in weights])},
        )

    for out, inner, matrix in s.matrices:
        for rows in s.products:
            if rows * out <= 1 << 28:  # logits of more rows are never asked for
                yield plan(f"{rows} rows times {matrix}", 6, product, rows, out, inner)


def experts(bench: Bench) -> Iterator[Planned]:
    """A layer of experts against copy bandwidth; its first product and the order of its rows against their twins."""
    s = bench.sizes
    count, top_k, hidden, inner = s.experts

    def weights() -> tuple[Tensor, Tensor]:
        return bench.normal(count, 2 * inner, hidden) * hidden**-0.5, bench.normal(count, hidden, inner) * inner**-0.5

    def routed(name: str, rows: int) -> Case:
        ops, (weight, second) = bench.ops, bench.keep("experts", weights)
        start = 0 if rows <= 256 else rows  # few rows as decoded ones, many as a prompt's
        logits = bench.normal(rows, count, dtype=torch.float32)
        xs = [(bench.normal(rows, hidden),) for _ in range(4)]
        chosen = ops.route_experts(logits, top_k, True)[1]
        order, _, ends = ops.sort_by_expert(chosen, count, start)
        read = len(chosen.unique()) * 3 * inner * hidden
        moved = (read + rows * (2 * hidden + 3 * inner * top_k)) * s.dtype.itemsize

        def layer(x: Tensor) -> Tensor:
            shares, chosen = ops.route_experts(logits, top_k, True)
            order, places, ends = ops.sort_by_expert(chosen, count, start)
            gate, up = ops.expert_linear(x, weight, order, ends, top_k, start * top_k).chunk(2, dim=-1)
            y = ops.expert_linear(ops.silu_and_mul(gate, up), second, order, ends, 0, start * top_k)
            return ops.combine_experts(y, places, shares)

        def checks() -> Iterator[Line]:
            yield from bench.twins(f"{name}, their order", "sort_by_expert", chosen, count, start)
            rest = (order, ends, top_k, start * top_k)
            yield from bench.twins(name, "expert_linear", *xs[0], weight, *rest, fp64=True)

        return Case(each_with(layer, xs), checks, num_bytes=moved)

    for rows in s.expert_rows:
        yield plan(f"expert layer of {rows} rows", 4, routed, rows)
