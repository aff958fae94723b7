"""The kernels, each on the sizes that a model has: results against the twins, times against the roofline and peers."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from gpu import peers
from gpu.harness import STATE_TOLERANCE, Bench, Call, Case, Peers, Planned, Result, compare, relative_error, same_bits
from torch import Tensor

from hybrid.engine.planner import BATCH_INVARIANT_SPLITS
from hybrid.kernels import reference
from hybrid.kernels.reference import sigmoid, softplus
from hybrid.kernels.reference.elementwise import rotate

EPS = 1e-6
CUT = (1,)
"""For the twins of experts in a rehearsal: rows one by one, whose bits do not depend on their number. Kernels do not
cut."""


def each_with(
    function: Callable[..., object], sets: Iterator[tuple[Any, ...]] | Sequence[tuple[Any, ...]]
) -> list[Call]:
    """A call for every set of arguments."""
    return [partial(function, *arguments) for arguments in sets]


# Attention over pages


class Attention:
    """Requests of equal length with `new` query tokens each, in as many sets as rotating takes. All sets are in one
    pool of several layers, in pages that are never adjacent.

    Args:
        visible: which drafts a draft sees, `[new, new]`.

    Attributes:
        kv_bytes: of keys and values that a call reads.
    """

    def __init__(self, bench: Bench, requests: int, length: int, new: int, visible: Tensor | None = None) -> None:
        s = bench.sizes
        heads, kv_heads, head_dim = s.heads
        self.bench, self.requests, self.length, self.new = bench, requests, length, new
        self.scale = head_dim**-0.5
        self.kv_bytes = requests * length * s.kv_bytes
        self.visible = None if visible is None else visible.repeat(requests, 1)
        pages = -(-length // s.page_size)
        sets = bench.sets(self.kv_bytes)
        per_layer = -(-sets // s.layers)
        pool = bench.normal(per_layer * requests * pages, s.layers, 2, s.page_size, kv_heads, head_dim)
        places = bench.shuffled(len(pool)).view(per_layer, requests, pages)
        caches = [pool[:, at % s.layers] for at in range(sets)]
        tables = [places[at // s.layers].clone() for at in range(sets)]  # a copy is aligned, as an engine's are
        queries = [bench.normal(requests * new, heads, head_dim) for _ in range(sets)]
        self.sets = [*zip(queries, caches, tables, strict=True)]
        self.starts = bench.ints([*range(0, requests * new + 1, new)])
        self.lengths = bench.ints([length] * requests)

    def ours(self, num_splits: int | None) -> list[Call]:
        def call(query: Tensor, cache: Tensor, table: Tensor) -> Tensor:
            where = (self.starts, self.lengths, self.scale, self.bench.sizes.page_size)
            return self.bench.ops.paged_attention(query, cache, table, *where, num_splits, self.visible)

        return each_with(call, self.sets)

    @cached_property
    def contiguous(self) -> list[peers.Contiguous]:
        """The same requests with keys and values in one piece, for peers without pages."""
        made = []
        for query, cache, table in self.sets:
            keys, values = (
                cache[:, kind][table].flatten(1, 2)[:, : self.length].transpose(1, 2).contiguous() for kind in (0, 1)
            )
            made.append((query.unflatten(0, (self.requests, self.new)).transpose(1, 2).contiguous(), keys, values))
        return made

    def checks(self, name: str, *splits: int | None) -> Iterator[Result]:
        """The first and the last request of the first set against fp64."""
        query, cache, table = self.sets[0]
        rows = sorted({0, self.requests - 1})
        truths = []
        for row in rows:
            tokens, small = slice(row * self.new, (row + 1) * self.new), cache[table[row]].double()
            pages = torch.arange(len(small), device=small.device).unsqueeze(0)
            where = (self.starts[:2], self.lengths[:1], self.scale, self.bench.sizes.page_size)
            seen = None if self.visible is None else self.visible[tokens]
            truths.append(reference.paged_attention(query[tokens].double(), small, pages, *where, None, seen))
        for num_splits in splits:
            self.bench.poison(*query.shape)
            found = self.ours(num_splits)[0]()
            assert isinstance(found, Tensor)
            mine = found.unflatten(0, (self.requests, self.new))[rows].flatten(0, 1)
            yield compare(name if num_splits is None else f"{name}, batch-invariant", mine, torch.cat(truths))

    def error(self, output: Any) -> float:
        """How far a peer's output is from ours, in any order of its tokens and heads."""
        ours = self.ours(None)[0]()
        assert isinstance(ours, Tensor)
        return relative_error(output.transpose(1, 2).flatten(0, 1) if output.dim() == 4 else output, ours)


def ragged(bench: Bench) -> Iterator[Result]:
    """Requests of all kinds in one batch, every place that belongs to no request being NaN, against fp64."""
    s, page = bench.sizes, bench.sizes.page_size
    heads, kv_heads, head_dim = s.heads
    news = (1, 2, page - 1, page, page + 1, 4 * page + 3, 1)
    befores = (0, 5 * page + 1, page, 0, 3 * page - 1, 2 * page, 9 * page + 7)
    single = (page + 3, 1, 5 * page, page - 1)
    for name, new, before, splits in (
        ("ragged prompts", news, befores, None),
        ("ragged prompts, batch-invariant", news, befores, 1),
        ("ragged decoding", (1,) * len(single), single, None),
        ("ragged decoding, batch-invariant", (1,) * len(single), single, BATCH_INVARIANT_SPLITS),
    ):
        lengths = [x + y for x, y in zip(new, before, strict=True)]
        counts = [-(-length // page) for length in lengths]
        places = bench.shuffled(sum(counts) + 3).tolist()
        table = torch.zeros(len(new), max(counts), dtype=torch.int64)
        cache = bench.normal(len(places), s.layers, 2, page, kv_heads, head_dim).fill_(float("nan"))[:, 1]
        for row, (first, count) in enumerate(zip(accumulate([0, *counts]), counts, strict=False)):
            mine = places[first : first + count]
            table[row, :count] = torch.tensor(mine)
            slots = [mine[at // page] * page + at % page for at in range(lengths[row])]
            key, value = (bench.normal(lengths[row], kv_heads, head_dim) for _ in range(2))
            reference.store_kv(key, value, cache, bench.ints(slots))
        query = bench.normal(sum(new), heads, head_dim)
        rest = (table.to(query.device), bench.ints([0, *accumulate(new)]), bench.ints(lengths), head_dim**-0.5, page)
        bench.poison(*query.shape)
        found = bench.ops.paged_attention(query, cache, *rest, splits, None)
        yield compare(name, found, reference.paged_attention(query.double(), cache.double(), *rest))


def decode_attention(bench: Bench) -> Iterator[Planned]:
    """One token of each request, whose time goes into reading keys and values; trees of drafts."""

    def decode(name: str, requests: int, length: int) -> Case:
        work = Attention(bench, requests, length, 1)
        moved = work.kv_bytes + 2 * work.sets[0][0].numel() * bench.sizes.dtype.itemsize
        sdpa: Peers = {
            f"sdpa, {label}": lambda run=run, kind=kind: run(work.contiguous, work.scale, kind)
            for label, run, kind in (
                ("flash", peers.sdpa_decode, "FLASH_ATTENTION"),
                ("cudnn", peers.sdpa_decode, "CUDNN_ATTENTION"),
                ("flash, heads as tokens", peers.sdpa_decode_grouped, "FLASH_ATTENTION"),
                ("efficient, heads as tokens", peers.sdpa_decode_grouped, "EFFICIENT_ATTENTION"),
            )
        }
        return Case(
            work.ours(None),
            partial(work.checks, name, None, BATCH_INVARIANT_SPLITS),
            num_bytes=moved,
            target=0.85 if work.kv_bytes > 1e9 else None,
            variants={"batch-invariant": work.ours(BATCH_INVARIANT_SPLITS)},
            peers=sdpa,
            peer_target=1.05,
            error=work.error,
        )

    def tree(name: str, requests: int, count: int) -> Case:
        visible = torch.eye(count, dtype=torch.bool, device=bench.device.device)
        for draft in range(1, count):  # a binary tree: a draft sees those above it and itself
            visible[draft] |= visible[(draft - 1) // 2]
        work = Attention(bench, requests, bench.sizes.decode[0][1] + count, count, visible)
        return Case(work.ours(None), partial(work.checks, name, None))

    yield Planned("ragged batches", 5, lambda: Case(checks=partial(ragged, bench)))
    for requests, length in bench.sizes.decode:
        name = f"decode {requests} x {length}"
        yield Planned(name, 15, partial(decode, name, requests, length))
    name = f"drafts, {bench.sizes.drafts[0]} trees of {bench.sizes.drafts[1]}"
    yield Planned(name, 5, partial(tree, name, *bench.sizes.drafts))


def extend_attention(bench: Bench) -> Iterator[Planned]:
    """A piece of a prompt after a cached prefix: the time goes into matrix products."""
    s = bench.sizes

    def extend(name: str, requests: int, before: int) -> Case:
        work = Attention(bench, requests, before + s.new, s.new)
        pairs = requests * (s.new * before + s.new * (s.new + 1) // 2)
        flash: Peers = {
            "sdpa, flash": lambda: peers.sdpa_extend(work.contiguous, work.scale),
            "sdpa, flash, keys repeated": lambda: peers.sdpa_extend(
                peers.with_keys_repeated(work.contiguous), work.scale
            ),
        }
        return Case(
            work.ours(None),
            partial(work.checks, name, None, 1),
            operations=4 * s.heads[0] * s.heads[2] * pairs,
            variants={"batch-invariant": work.ours(1)},
            peers=flash,
            peer_target=round(1 / 0.6, 3),  # at least 60 % of its speed
            error=work.error,
        )

    for requests, before in s.extend:
        name = f"extend {requests} x {s.new} after {before}"
        yield Planned(name, 15, partial(extend, name, requests, before))


def slow_peers(bench: Bench) -> Iterator[Planned]:
    """Decoding against flex_attention and flashinfer, which first compile for many seconds."""

    def decode(requests: int, length: int) -> Case:
        work = Attention(bench, requests, length, 1)
        compiled: Peers = {
            "flex_attention": lambda: peers.flex_decode(work.contiguous, work.scale),
            "flashinfer": lambda: peers.flashinfer_decode(work.sets, work.length, work.scale),
        }
        return Case(work.ours(None), peers=compiled, peer_target=1.05, error=work.error)

    for requests, length in sorted(bench.sizes.decode, key=lambda shape: -shape[0] * shape[1]):
        yield Planned(f"decode {requests} x {length}, slow peers", 45, partial(decode, requests, length))


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

    def of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the windows and states of some slots."""
        return self.conv[slots].clone(), self.recurrent[slots].clone()

    def gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.rate * softplus(a.float() + self.dt_bias), sigmoid(b)


def delta_step(bench: Bench) -> Iterator[Planned]:
    """One token of each request, or its drafts: convolution, gates and rule on the slots of the pool."""
    s = bench.sizes
    for requests, each in (*((requests, 1) for requests in s.steps), s.drafts):
        what = f"of {requests}" if each == 1 else f"of {requests} x {each} drafts"
        name = f"delta rule step {what}"
        yield Planned(name, 12, partial(_step, bench, name, requests, each))


def _step(bench: Bench, name: str, requests: int, each: int) -> Case:
    s, tokens = bench.sizes, requests * each
    _, value_heads, _, value_dim = s.linear_heads
    moved = (requests + tokens) * (s.state_bytes + s.window_bytes) + tokens * s.channels * s.dtype.itemsize
    moved += (tokens * value_heads * (value_dim + 2) + s.channels * s.width) * s.dtype.itemsize
    sets = bench.sets(moved)
    taken = requests if each == 1 else requests + tokens  # drafts write slots of their own
    work = Linear(bench, 1 + taken * sets)
    slots = (1 + bench.shuffled(taken * sets)).view(sets, taken)
    starts = bench.ints([*range(0, tokens + 1, each)])
    gates = [[bench.normal(tokens, value_heads) for _ in range(2)] for _ in range(sets)]
    rows = [row.clone() for row in slots]  # a copy is aligned, as an engine's are
    inputs = [
        (bench.normal(tokens, s.channels), *ab, row[:requests].repeat_interleave(each), row[-tokens:])
        for ab, row in zip(gates, rows, strict=True)
    ]
    weights = (work.taps, work.rate, work.dt_bias)

    def call(mixed: Tensor, a: Tensor, b: Tensor, read: Tensor, write: Tensor) -> Tensor:
        pools = (work.conv, work.recurrent)
        return bench.ops.gated_delta_step(mixed, a, b, *weights, *pools, starts, read, write)

    def checks() -> Iterator[Result]:
        """The first set, its first, middle and last requests; other slots stay as they are."""
        *mixed, read, write = inputs[0]
        chosen = bench.ints([row * each + at for row in sorted({0, requests // 2, requests - 1}) for at in range(each)])
        named = torch.cat((read[chosen], write[chosen])).unique()
        others = torch.cat((slots[1:].flatten()[:4], slots.new_zeros(1)))
        small, before = work.of(named), work.of(others)
        where = (torch.searchsorted(named, x[chosen]) for x in (read, write))
        few = bench.ints([*range(0, len(chosen) + 1, each)])
        truth = reference.gated_delta_step(*(x[chosen] for x in mixed), *weights, *small, few, *where)
        yield compare(f"{name}, output", call(*inputs[0])[chosen], truth)
        yield compare(f"{name}, states", work.recurrent[named], small[1], STATE_TOLERANCE)
        yield compare(f"{name}, windows", work.conv[named], small[0], 0.0)
        yield same_bits(f"{name}, other slots", *zip(before, work.of(others), strict=True))

    def fla() -> list[Call]:
        made: list[Call] = []
        for _, a, b, read, write in inputs:
            q, k = (bench.normal(requests, work.key_heads, work.key_dim) for _ in range(2))
            v = bench.normal(requests, value_heads, value_dim)
            made.append(peers.fla_step(q, k, v, *work.gates(a, b), work.recurrent, read, write))
        return made

    rival: Peers = {"FLA's recurrent rule without convolution and gates, with gather and scatter": fla}
    target = 0.8 if requests >= 64 else None
    compared = rival if each == 1 else {}
    return Case(each_with(call, inputs), checks, num_bytes=moved, target=target, peers=compared, peer_target=1.0)


class Prompt:
    """A packed batch of prompts of equal length for the chunk rule, reading and writing slots of its own."""

    def __init__(self, bench: Bench, work: Linear, requests: int, tokens: int, at: int) -> None:
        s, keys = bench.sizes, work.key_heads * work.key_dim
        self.bench, self.work, self.requests = bench, work, requests
        q, k, v = bench.normal(requests * tokens, s.channels).split(
            (keys, keys, work.value_heads * work.value_dim), dim=-1
        )
        heads = (x.unflatten(-1, (-1, size)) for x, size in ((q, work.key_dim), (k, work.key_dim), (v, work.value_dim)))
        gates = work.gates(*(bench.normal(requests * tokens, work.value_heads) for _ in range(2)))
        self.inputs: tuple[Tensor, ...] = (*heads, *gates)
        self.starts = bench.ints([*range(0, requests * tokens + 1, tokens)])
        self.slots = 1 + at * requests + torch.arange(requests, device=q.device)
        self.spare = torch.arange(len(work.recurrent) - requests, len(work.recurrent), device=q.device)

    def run(self, captures: Tensor) -> Tensor:
        where = (self.work.recurrent, self.starts, self.slots, self.slots, captures, self.bench.sizes.page_size)
        return self.bench.ops.chunk_gated_delta_rule(*self.inputs, *where, batch_invariant=True)

    def ours(self) -> Tensor:
        return self.run(_none(self.starts))

    def truth(self, state: Tensor, read: Tensor, captures: Tensor) -> Tensor:
        where = (self.starts, read, read, captures, self.bench.sizes.page_size)
        return reference.chunk_gated_delta_rule(*self.inputs, state, *where)

    def checks(self, name: str) -> Iterator[Result]:
        """Against the twin, with a state captured on the way."""
        state = self.work.recurrent
        small = state[torch.cat((self.slots, self.spare))].clone()
        index = torch.arange(2 * self.requests, device=small.device)
        read, spare = index[: self.requests], index[self.requests :]
        count = torch.full_like(read, self.bench.sizes.page_size)
        truth = self.truth(small, read, torch.stack((read, count, spare), 1))
        found = self.run(torch.stack((read, count, self.spare), 1))
        yield compare(f"{name}, output", found, truth)
        yield compare(f"{name}, states", state[self.slots], small[read], STATE_TOLERANCE)
        yield compare(f"{name}, captured states", state[self.spare], small[spare], STATE_TOLERANCE)

    def fla(self) -> Call:
        batched = [x.unflatten(0, (self.requests, -1)).contiguous() for x in self.inputs]
        return peers.fla_chunk(*batched, self.work.recurrent[self.slots].clone())

    def error(self, output: tuple[Tensor, Tensor]) -> float:
        """How far FLA's output is from the twin's, on the states that the pool has now."""
        state, read = self.work.recurrent[self.slots].clone(), torch.arange(self.requests, device=self.slots.device)
        return relative_error(output[0].flatten(0, 1), self.truth(state, read, _none(read)))


def _none(like: Tensor) -> Tensor:
    """No captures."""
    return torch.empty(0, 3, dtype=torch.int64, device=like.device)


def chunk_rule(bench: Bench) -> Iterator[Planned]:
    """Prompts: the chunk rule, against FLA's."""
    s = bench.sizes

    def prompts(name: str, requests: int, tokens: int) -> Case:
        sets = bench.sets(requests * (tokens * s.channels * s.dtype.itemsize + 2 * s.state_bytes))
        work = Linear(bench, 1 + requests * (sets + 1))
        made = [Prompt(bench, work, requests, tokens, at) for at in range(sets)]
        rival: Peers = {"FLA's chunk rule": lambda: [one.fla() for one in made]}
        checks, error = partial(made[0].checks, name), made[0].error
        return Case([one.ours for one in made], checks, tokens=requests * tokens, peers=rival, error=error)

    for tokens in s.prompts:
        for requests in (1, s.many):
            name = f"chunk rule, {requests} x {tokens}"
            yield Planned(name, 20, partial(prompts, name, requests, tokens))


def convolution(bench: Bench) -> Iterator[Planned]:
    """Prompts: the causal convolution, against copy bandwidth and the package causal-conv1d."""
    s = bench.sizes

    def prompts(name: str, tokens: int) -> Case:
        moved = 2 * tokens * s.channels * s.dtype.itemsize
        work = Linear(bench, 1 + bench.sets(moved))
        inputs = [(bench.normal(tokens, s.channels), bench.ints([slot])) for slot in range(1, len(work.conv))]
        starts = bench.ints([0, tokens])

        def call(x: Tensor, slot: Tensor) -> Tensor:
            where = (work.conv, starts, slot, slot, _none(x))
            return bench.ops.causal_conv1d(x, work.taps, *where, batch_invariant=True)

        def checks() -> Iterator[Result]:
            x, slot = inputs[0]
            small, index = work.conv[slot].clone(), torch.zeros_like(slot)
            truth = reference.causal_conv1d(x, work.taps, small, starts, index, index, _none(x))
            yield compare(f"{name}, output", call(x, slot), truth)
            yield compare(f"{name}, window", work.conv[slot], small, 0.0)

        def package() -> list[Call]:
            return [peers.package_convolution(x.unsqueeze(0), work.taps, work.conv[slot].clone()) for x, slot in inputs]

        return Case(each_with(call, inputs), checks, num_bytes=moved, peers={"causal-conv1d": package})

    for tokens in s.prompts:
        name = f"convolution of {tokens}"
        yield Planned(name, 10, partial(prompts, name, tokens))


def state_copies(bench: Bench) -> Iterator[Planned]:
    """Copies of whole states, all layers of them, from slots to slots."""
    s = bench.sizes
    size = s.config["num_hidden_layers"] * 3 // 4 * (s.state_bytes + s.window_bytes)

    def copy(name: str, count: int) -> Case:
        sets = bench.sets(2 * count * size)
        rows = bench.normal(2 * count * sets, size // 4, dtype=torch.float32).view(torch.uint8)
        places = [tuple(x.clone() for x in pair) for pair in bench.shuffled(len(rows)).view(sets, 2, count)]

        def checks() -> Iterator[Result]:
            source, target = places[0]
            everything = count <= 8
            before = rows.clone() if everything else rows[source].clone()
            bench.ops.copy_states(rows, source, target)
            if everything:
                reference.copy_states(before, source, target)
            yield same_bits(name, (rows if everything else rows[target], before))

        calls = each_with(partial(bench.ops.copy_states, rows), places)
        return Case(calls, checks, num_bytes=2 * count * size, target=0.85 if count >= 8 else None)

    for count in s.copies:
        name = f"copy of {count} states"
        yield Planned(name, 8, partial(copy, name, count))


# Row by row


def elementwise(bench: Bench) -> Iterator[Planned]:
    """One pass of each kernel against its twin, and against copy bandwidth."""
    s = bench.sizes
    hidden, inner = s.config["hidden_size"], s.config["intermediate_size"]
    heads, _, head_dim = s.heads
    _, value_heads, _, value_dim = s.linear_heads

    norm = 1 + 0.1 * bench.normal(hidden, dtype=torch.float32), EPS
    gated_norm = (1 + 0.1 * bench.normal(value_dim, dtype=torch.float32)).to(s.dtype), EPS
    kernels: dict[str, tuple[tuple[int, ...], int, int, tuple[Any, ...]]] = {
        "rms_norm": ((hidden,), 1, 2, norm),
        "add_rms_norm": ((hidden,), 2, 4, norm),
        "gated_rms_norm": ((value_heads, value_dim), 2, 3, gated_norm),
        "silu_and_mul": ((inner,), 2, 3, ()),
        "sigmoid_and_mul": ((heads, head_dim), 2, 3, ()),
    }
    """Shape of a row, number of inputs and of inputs and outputs, further arguments."""

    def kernel(name: str, operation: str, moved: int, make: Callable[[], tuple[Any, ...]]) -> Case:
        sets = [make() for _ in range(bench.sets(moved))]
        run = getattr(bench.ops, operation)

        def checks() -> Iterator[Result]:
            found, truth = run(*sets[0]), getattr(reference, operation)(*sets[0])
            for mine, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (found, truth)), strict=True):
                yield compare(name, mine, theirs)

        return Case(each_with(run, sets), checks, num_bytes=moved)

    def inputs_of(operation: str, rows: int) -> tuple[Any, ...]:
        shape, count, _, rest = kernels[operation]
        if operation.endswith("_and_mul"):  # halves of a projection
            return bench.normal(rows, *shape[:-1], count * shape[-1]).chunk(count, dim=-1)
        return *(bench.normal(rows, *shape) for _ in range(count)), *rest

    for rows in s.rows:
        for operation, (shape, _, moves, _) in kernels.items():
            name, moved = f"{operation} of {rows}", rows * moves * math.prod(shape) * s.dtype.itemsize
            yield Planned(name, 2, partial(kernel, name, operation, moved, partial(inputs_of, operation, rows)))
        name = f"norm_rotate_store of {rows}"
        yield Planned(name, 3, partial(_store, bench, name, rows))


def _store(bench: Bench, name: str, rows: int) -> Case:
    """Norm, rotation and store in one kernel, against three kernels of ours and torch's own for the rotation."""
    s = bench.sizes
    heads, kv_heads, head_dim = s.heads
    moved = rows * 2 * (heads + 2 * kv_heads) * head_dim * s.dtype.itemsize
    sets = bench.sets(moved)
    pages = -(-rows // s.page_size) * sets
    kv = bench.normal(pages, s.layers, 2, s.page_size, kv_heads, head_dim)
    cache = kv[:, s.layers - 1]
    slots = bench.shuffled(pages * s.page_size)[: rows * sets].view(sets, rows)
    q_scale, k_scale = (1 + 0.1 * bench.normal(head_dim, dtype=torch.float32) for _ in range(2))
    angles = bench.normal(rows, head_dim // 8, dtype=torch.float32).repeat(1, 2)
    weights = (q_scale, k_scale, EPS, angles.cos().to(s.dtype), angles.sin().to(s.dtype))
    inputs = [
        (
            bench.normal(rows, heads, 2 * head_dim)[..., :head_dim],
            *bench.normal(rows, 2 * kv_heads, head_dim).chunk(2, dim=1),
            chosen,
        )
        for chosen in slots
    ]

    def fused(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        return bench.ops.norm_rotate_store(q, k, v, *weights, cache, chosen)

    def unfused(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        bench.ops.store_kv(rotate(bench.ops.rms_norm(k, k_scale, EPS), *weights[3:]), v, cache, chosen)
        return rotate(bench.ops.rms_norm(q, q_scale, EPS), *weights[3:])

    def checks() -> Iterator[Result]:
        expected = kv.clone()
        target = expected[:, s.layers - 1]
        truth = reference.norm_rotate_store(*inputs[0][:3], *weights, target, slots[0])
        yield compare(f"{name}, q", fused(*inputs[0]), truth)
        yield compare(f"{name}, pages", kv, expected)
        others = torch.ones(pages * s.page_size, dtype=torch.bool, device=kv.device)
        others[slots[0]] = False
        others = others.view(pages, s.page_size)
        kept = [(cache[:, kind][others], target[:, kind][others]) for kind in (0, 1)]
        yield same_bits(f"{name}, other layers and places", (kv[:, 0], expected[:, 0]), *kept)

    return Case(each_with(fused, inputs), checks, num_bytes=moved, variants={"unfused": each_with(unfused, inputs)})


def products(bench: Bench) -> Iterator[Planned]:
    """What it costs that a row's bits do not depend on the number of rows: against torch's own product."""
    s = bench.sizes

    def product(name: str, rows: int, out: int, inner: int) -> Case:
        num_bytes = out * inner * s.dtype.itemsize
        weights = [bench.normal(out, inner) * inner**-0.5 for _ in range(bench.sets(num_bytes))]
        x = bench.normal(rows, inner)
        start = 0 if rows <= 64 else rows  # few rows as decoded ones, many as a prompt's
        ours = partial(bench.ops.batch_invariant_linear, x)

        def checks() -> Iterator[Result]:
            found, chosen = ours(weights[0], start), [*range(min(rows, 4)), rows - 1]
            yield compare(name, found[chosen], x[chosen].double() @ weights[0].double().t())
            half = x[rows // 2 :].contiguous()
            part = bench.ops.batch_invariant_linear(half, weights[0], min(start, len(half)))
            yield same_bits(f"{name}, half of them alone", (part, found[rows // 2 :]))

        return Case(
            each_with(ours, [(weight, start) for weight in weights]),
            checks,
            num_bytes=num_bytes + rows * (out + inner) * s.dtype.itemsize,
            operations=2 * rows * out * inner,
            peers={"torch's linear": lambda: each_with(partial(F.linear, x), [(weight,) for weight in weights])},
        )

    for out, inner, matrix in s.matrices:
        for rows in s.products:
            if rows * out <= 1 << 28:  # logits of more rows are never asked for
                name = f"{rows} rows times {matrix}"
                yield Planned(name, 6, partial(product, name, rows, out, inner))


def experts(bench: Bench) -> Iterator[Planned]:
    """The first product of an expert layer, against copy bandwidth and torch's grouped product; the whole layer."""
    s = bench.sizes
    count, top_k, hidden, inner = s.experts

    def weights() -> tuple[Tensor, Tensor]:
        return bench.normal(count, 2 * inner, hidden) * hidden**-0.5, bench.normal(count, hidden, inner) * inner**-0.5

    def routed(rows: int, whole: bool, name: str) -> Case:
        ops, (weight, second) = bench.ops, bench.keep("experts", weights)
        start = 0 if rows <= 256 else rows  # few rows as decoded ones, many as a prompt's
        logits = bench.normal(rows, count, dtype=torch.float32)
        xs = [(bench.normal(rows, hidden),) for _ in range(4)]
        chosen = ops.route_experts(logits, top_k, True)[1]
        order, places, ends = ops.sort_by_expert(chosen, count, start)
        used = len(chosen.unique())
        moved = used * 2 * inner * hidden * s.dtype.itemsize + rows * (hidden + 2 * inner * top_k) * s.dtype.itemsize

        def product(x: Tensor) -> Tensor:
            return ops.expert_linear(x, weight, order, ends, top_k, start * top_k, CUT)

        def layer(x: Tensor) -> Tensor:
            shares, chosen = ops.route_experts(logits, top_k, True)
            order, places, ends = ops.sort_by_expert(chosen, count, start)
            gate, up = ops.expert_linear(x, weight, order, ends, top_k, start * top_k, ()).chunk(2, dim=-1)
            y = ops.expert_linear(ops.silu_and_mul(gate, up), second, order, ends, 0, start * top_k, ())
            return ops.combine_experts(y, places, shares)

        def checks() -> Iterator[Result]:
            x, found, few = xs[0][0], product(*xs[0]), [0, rows - 1]
            truth = torch.einsum("ti,tkoi->tko", x[few].double(), weight[chosen[few]].double())
            yield compare(name, found[places[few]], truth)
            alone = ops.sort_by_expert(chosen[-1:], count, min(start, 1))
            again = ops.expert_linear(x[-1:], weight, alone[0], alone[2], top_k, min(start, 1) * top_k, CUT)
            yield same_bits(f"{name}, one of them alone", (again[alone[1]], found[places[-1:]]))

        def grouped(x: Tensor) -> Tensor:
            offsets = ends[0 if start else 1].int()
            return F.grouped_mm(x[order // top_k], weight.transpose(1, 2), offs=offsets)

        if whole:
            return Case(each_with(layer, xs), num_bytes=1.5 * moved)
        rival: Peers = {"torch's grouped product": lambda: each_with(grouped, xs)}
        return Case(each_with(product, xs), checks, num_bytes=moved, peers=rival)

    for rows in s.expert_rows:
        for what, whole in (("experts", False), ("expert layer", True)):
            name = f"{what} of {rows} rows"
            yield Planned(name, 4, partial(routed, rows, whole, name))
