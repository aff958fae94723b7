"""Linear attention: the delta rule's step and chunks, the convolution, and copies of states."""

from collections.abc import Iterator, Sequence

import gpu_peers
import torch
from gpu_bench import STATE_TOLERANCE, Bench, Check, Line, Peers, Result, compare, relative_error
from gpu_device import Call
from torch import Tensor

from hybrid.kernels import ops, reference
from hybrid.kernels.reference import sigmoid, softplus


class Gates:
    """What a linear-attention layer's weights are beside its matrices, in the ranges that trained models have."""

    def __init__(self, bench: Bench) -> None:
        s = bench.sizes
        self.taps = bench.normal(s.channels, s.width) * s.width**-0.5
        self.rate = -torch.linspace(1, 16, s.value_heads, device=bench.device.device)
        self.dt_bias = torch.linspace(-6, -2, s.value_heads, device=bench.device.device).to(s.dtype)


class Pools:
    """One layer of the pools of states and windows, in slots as far apart as in a model with several layers."""

    def __init__(self, bench: Bench, slots: int) -> None:
        s = bench.sizes
        states = bench.normal(slots, s.layers, s.value_heads, s.key_dim, s.value_dim, dtype=torch.float32)
        self.recurrent = states[:, s.layers - 1]
        self.conv = bench.normal(slots, s.layers, s.width - 1, s.channels)[:, s.layers - 1]

    def of(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the windows and states of some slots."""
        return self.conv[slots].clone(), self.recurrent[slots].clone()


def untouched(name: str, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> Check:
    """Slots that were not named hold the bits that they held."""
    same = all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(before, after, strict=True)
    )
    return Check(f"{name}, other slots", same, "bitwise as they were" if same else "CHANGED")


def step(bench: Bench) -> Iterator[Result]:
    """One token of each request: convolution, gates and rule on the slots of the pool; bound by states."""
    s, gates = bench.sizes, Gates(bench)
    for requests in s.steps:
        name = f"delta rule step of {requests}"
        if not bench.has(12, name):
            continue
        moved = requests * (2 * s.state_bytes + (2 * (s.width - 1) + 1) * s.channels * s.dtype.itemsize)
        moved += requests * s.value_heads * (s.value_dim + 2) * s.dtype.itemsize
        moved += gates.taps.numel() * s.dtype.itemsize
        sets = bench.sets(moved)
        pools = Pools(bench, 1 + requests * sets)
        slots = (1 + bench.shuffled(requests * sets)).view(sets, requests)
        starts = bench.ints([*range(requests + 1)])
        inputs = [
            (bench.normal(requests, s.channels), *(bench.normal(requests, s.value_heads) for _ in range(2)))
            for _ in range(sets)
        ]

        calls = _steps(gates, pools, inputs, slots, starts)
        yield from _step_checks(bench, name, gates, pools, slots, inputs[0], starts)
        timing = bench.device.time(calls)
        yield bench.of_bandwidth(name, moved, timing, 0.8 if requests >= 64 else None)

        peer = "FLA's recurrent rule without convolution and gates, with gather and scatter"
        peers: Peers = {peer: lambda pools=pools, slots=slots: _fla_steps(bench, gates, pools, slots)}
        yield bench.against_fastest(name, timing, peers, 1.0)
        del pools, calls, peers
        bench.device.release()


def _steps(
    gates: Gates, pools: Pools, inputs: Sequence[tuple[Tensor, ...]], slots: Tensor, starts: Tensor
) -> list[Call]:
    def call(mixed: Tensor, a: Tensor, b: Tensor, chosen: Tensor) -> Tensor:
        weights = (gates.taps, gates.rate, gates.dt_bias)
        return ops.gated_delta_step(mixed, a, b, *weights, pools.conv, pools.recurrent, starts, chosen, chosen)

    rows = [row.clone() for row in slots]  # a copy is aligned, as an engine's are
    return [lambda x=(*x, chosen): call(*x) for x, chosen in zip(inputs, rows, strict=True)]


def _fla_steps(bench: Bench, gates: Gates, pools: Pools, slots: Tensor) -> list[Call]:
    s, made = bench.sizes, []
    for chosen in [row.clone() for row in slots]:
        rows = len(chosen)
        q, k = (bench.normal(rows, s.key_heads, s.key_dim) for _ in range(2))
        v, beta = bench.normal(rows, s.value_heads, s.value_dim), sigmoid(bench.normal(rows, s.value_heads))
        g = gates.rate * softplus(bench.normal(rows, s.value_heads, dtype=torch.float32) + gates.dt_bias)
        made.append(gpu_peers.fla_step(q, k, v, g, beta, pools.recurrent, chosen, chosen))
    return made


def _step_checks(
    bench: Bench, name: str, gates: Gates, pools: Pools, slots: Tensor, inputs: tuple[Tensor, ...], starts: Tensor
) -> Iterator[Result]:
    """The first set against the twin, its first, middle and last requests; other slots stay as they are."""
    mine, rows = slots[0], sorted({0, len(slots[0]) // 2, len(slots[0]) - 1})
    others = torch.cat((slots[1:].flatten()[:4], slots.new_zeros(1)))
    small, before = pools.of(mine[rows]), pools.of(others)
    index = bench.ints([*range(len(rows))])
    weights = (gates.taps, gates.rate, gates.dt_bias)
    chosen = [x[rows] for x in inputs]
    truth = reference.gated_delta_step(*chosen, *weights, *small, bench.ints([*range(len(rows) + 1)]), index, index)
    found = ops.gated_delta_step(*inputs, *weights, pools.conv, pools.recurrent, starts, mine, mine)
    yield compare(f"{name}, output", found[rows], truth)
    yield compare(f"{name}, states", pools.recurrent[mine[rows]], small[1], STATE_TOLERANCE)
    yield compare(f"{name}, windows", pools.conv[mine[rows]], small[0], 0.0)
    yield untouched(name, before, pools.of(others))


def chunks(bench: Bench) -> Iterator[Result]:
    """Prompts: the chunk rule, against FLA's."""
    s, gates = bench.sizes, Gates(bench)
    for tokens in s.prompts:
        for requests in (1, s.many):
            name = f"chunk rule, {requests} x {tokens}"
            if not bench.has(20, name):
                continue
            sets = bench.sets(requests * (tokens * s.channels * s.dtype.itemsize + 2 * s.state_bytes))
            pools = Pools(bench, 1 + requests * (sets + 1))
            calls = [_Prompt(bench, gates, requests, tokens, pools, at) for at in range(sets)]
            yield from calls[0].checks(name)
            timing = bench.device.time([call.ours for call in calls])
            rate = requests * tokens / timing.seconds
            yield Line(f"{name}, tokens per second", rate, None, False, {"ours": timing.seconds})

            peers: Peers = {"FLA's chunk rule": lambda calls=calls: [call.fla() for call in calls]}
            yield bench.against_fastest(name, timing, peers, None, calls[0].error_of)
            del pools, calls, peers
            bench.device.release()


class _Prompt:
    """A packed batch of prompts of equal length for the chunk rule, reading and writing slots of its own."""

    def __init__(self, bench: Bench, gates: Gates, requests: int, tokens: int, pools: Pools, at: int) -> None:
        s = bench.sizes
        self.bench, self.requests, self.pools = bench, requests, pools
        keys = s.key_heads * s.key_dim
        mixed = bench.normal(requests * tokens, s.channels)
        q, k, v = mixed.split((keys, keys, s.value_heads * s.value_dim), dim=-1)
        self.q, self.k = (x.unflatten(-1, (s.key_heads, s.key_dim)) for x in (q, k))
        self.v = v.unflatten(-1, (s.value_heads, s.value_dim))
        a, b = (bench.normal(requests * tokens, s.value_heads) for _ in range(2))
        self.g, self.beta = gates.rate * softplus(a.float() + gates.dt_bias), sigmoid(b)
        self.starts = bench.ints([*range(0, requests * tokens + 1, tokens)])
        first = 1 + at * requests
        self.slots = bench.ints([*range(first, first + requests)])
        self.spare = bench.ints([*range(len(pools.recurrent) - requests, len(pools.recurrent))])
        self.chunk = s.page_size
        self.captures = _none(mixed)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def ours(self) -> Tensor:
        slots = (self.starts, self.slots, self.slots, self.captures)
        return ops.chunk_gated_delta_rule(
            *self.inputs(), self.pools.recurrent, *slots, self.chunk, batch_invariant=True
        )

    def checks(self, name: str) -> Iterator[Result]:
        """Against the twin, with a state captured on the way."""
        state = self.pools.recurrent
        small = state[torch.cat((self.slots, self.spare))].clone()
        index = torch.arange(2 * self.requests, device=small.device)
        read, spare = index[: self.requests], index[self.requests :]
        count = torch.full_like(read, self.chunk)
        captures = torch.stack((read, count, spare), 1)
        truth = reference.chunk_gated_delta_rule(*self.inputs(), small, self.starts, read, read, captures, self.chunk)
        captures = torch.stack((read, count, self.spare), 1)
        found = ops.chunk_gated_delta_rule(
            *self.inputs(), state, self.starts, self.slots, self.slots, captures, self.chunk, batch_invariant=True
        )
        yield compare(f"{name}, output", found, truth)
        yield compare(f"{name}, states", state[self.slots], small[read], STATE_TOLERANCE)
        yield compare(f"{name}, captured states", state[self.spare], small[spare], STATE_TOLERANCE)

    def _batched(self) -> list[Tensor]:
        return [x.unflatten(0, (self.requests, -1)).contiguous() for x in self.inputs()]

    def fla(self) -> Call:
        return gpu_peers.fla_chunk(*self._batched(), self.pools.recurrent[self.slots].clone())

    def error_of(self, output: tuple[Tensor, Tensor]) -> float:
        """How far FLA's output is from the twin's, on the states that the pool has now."""
        state = self.pools.recurrent[self.slots].clone()
        index = torch.arange(self.requests, device=state.device)
        slots = (self.starts, index, index, self.captures)
        truth = reference.chunk_gated_delta_rule(*self.inputs(), state, *slots, self.chunk)
        return relative_error(output[0].flatten(0, 1), truth)


def convolution(bench: Bench) -> Iterator[Result]:
    """Prompts: the causal convolution, against copy bandwidth and the package causal-conv1d."""
    s, gates = bench.sizes, Gates(bench)
    for tokens in s.prompts:
        name = f"convolution of {tokens}"
        if not bench.has(10, name):
            continue
        moved = 2 * tokens * s.channels * s.dtype.itemsize
        sets = bench.sets(moved)
        pools = Pools(bench, 1 + sets)
        inputs = [(bench.normal(tokens, s.channels), bench.ints([1 + at])) for at in range(sets)]
        starts = bench.ints([0, tokens])

        calls = _convolutions(gates, pools, inputs, starts)
        x, slot = inputs[0]
        small, index = pools.conv[slot].clone(), torch.zeros_like(slot)
        truth = reference.causal_conv1d(x, gates.taps, small, starts, index, index, _none(x))
        found = calls[0]()
        assert isinstance(found, Tensor)
        yield compare(f"{name}, output", found, truth)
        yield compare(f"{name}, window", pools.conv[slot], small, 0.0)
        timing = bench.device.time(calls)
        yield bench.of_bandwidth(name, moved, timing, None)
        peers: Peers = {"causal-conv1d": lambda inputs=inputs, pools=pools: _packages(gates, pools, inputs)}
        yield bench.against_fastest(name, timing, peers, None)
        del pools, inputs, calls, peers
        bench.device.release()


def _convolutions(gates: Gates, pools: Pools, inputs: Sequence[tuple[Tensor, Tensor]], starts: Tensor) -> list[Call]:
    def call(x: Tensor, slot: Tensor) -> Tensor:
        return ops.causal_conv1d(x, gates.taps, pools.conv, starts, slot, slot, _none(x), batch_invariant=True)

    return [lambda y=y: call(*y) for y in inputs]


def _packages(gates: Gates, pools: Pools, inputs: Sequence[tuple[Tensor, Tensor]]) -> list[Call]:
    return [gpu_peers.package_convolution(x.unsqueeze(0), gates.taps, pools.conv[slot].clone()) for x, slot in inputs]


def _none(like: Tensor) -> Tensor:
    """No captures."""
    return torch.empty(0, 3, dtype=torch.int64, device=like.device)


def states(bench: Bench) -> Iterator[Result]:
    """Copies of whole states, all layers of them, from slots to slots."""
    s = bench.sizes
    layers = s.config["num_hidden_layers"] * 3 // 4
    size = layers * (s.state_bytes + (s.width - 1) * s.channels * s.dtype.itemsize)
    for count in s.copies:
        name = f"copy of {count} states"
        if not bench.has(8, name):
            continue
        sets = bench.sets(2 * count * size)
        rows = bench.normal(2 * count * sets, size // 4, dtype=torch.float32).view(torch.uint8)
        places = [[x.clone() for x in pair] for pair in bench.shuffled(len(rows)).view(sets, 2, count)]
        source, target = places[0]
        before = rows.clone() if count <= 8 else rows[source].clone()
        ops.copy_states(rows, source, target)
        if count <= 8:
            expected = before.clone()
            reference.copy_states(expected, source, target)
            right = torch.equal(rows, expected)
        else:
            right = torch.equal(rows[target], before)
        yield Check(name, right, "bitwise the twin's" if right else "DIFFERS")
        del before
        timing = bench.device.time([lambda x=x, rows=rows: ops.copy_states(rows, x[0], x[1]) for x in places])
        yield bench.of_bandwidth(name, 2 * count * size, timing, 0.85 if count >= 8 else None)
        del rows
        bench.device.release()
