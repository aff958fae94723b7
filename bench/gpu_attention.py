"""Attention over pages: decoding and extending, against copy bandwidth, torch's SDPA, and later peers that take long to
compile."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import gpu_peers
import torch
from gpu_bench import Bench, Line, Peers, Result, compare, relative_error
from gpu_device import Call
from torch import Tensor

from hybrid.engine.planner import BATCH_INVARIANT_SPLITS
from hybrid.kernels import ops, reference


class Work:
    """Requests of equal length whose last `new` tokens are asked, in as many sets as rotating takes. All sets lie in
    one pool of several layers, in pages that are nowhere neighbours.

    Attributes:
        kv_bytes: of keys and values that a call reads.
    """

    def __init__(self, bench: Bench, requests: int, length: int, new: int) -> None:
        s = bench.sizes
        self.requests, self.length, self.new, self.chunk = requests, length, new, s.new
        self.scale = s.head_dim**-0.5
        self.kv_bytes = requests * length * s.kv_bytes
        pages = -(-length // s.page_size)
        sets = bench.sets(self.kv_bytes)
        per_layer = -(-sets // s.layers)
        shape = (per_layer * requests * pages, s.layers, 2, s.page_size, s.kv_heads, s.head_dim)
        pool = bench.normal(*shape)
        places = bench.shuffled(shape[0]).view(per_layer, requests, pages)
        self.caches = [pool[:, at % s.layers] for at in range(sets)]
        self.tables = [places[at // s.layers].clone() for at in range(sets)]  # a place of their own is aligned
        self.queries = [bench.normal(requests * new, s.heads, s.head_dim) for _ in range(sets)]
        self.starts = bench.ints([*range(0, requests * new + 1, new)])
        self.lengths = bench.ints([length] * requests)

    def ours(self, num_splits: int | None) -> list[Call]:
        def call(query: Tensor, cache: Tensor, table: Tensor) -> Tensor:
            return ops.paged_attention(
                query, cache, table, self.starts, self.lengths, self.scale, self.chunk, num_splits, None
            )

        sets = zip(self.queries, self.caches, self.tables, strict=True)
        return [lambda x=x: call(*x) for x in sets]

    def contiguous(self) -> list[gpu_peers.Contiguous]:
        """The same requests with keys and values in one piece, for those who know no pages."""
        made = []
        for query, cache, table in zip(self.queries, self.caches, self.tables, strict=True):
            keys, values = (
                cache[:, kind][table].flatten(1, 2)[:, : self.length].transpose(1, 2).contiguous() for kind in (0, 1)
            )
            made.append((query.unflatten(0, (self.requests, self.new)).transpose(1, 2).contiguous(), keys, values))
        return made

    def truth(self, row: int) -> Tensor:
        """The first set's output of one request, in fp64."""
        pages = self.tables[0][row]
        tokens = slice(row * self.new, (row + 1) * self.new)
        small = self.caches[0][pages].double()
        table = torch.arange(len(pages), device=small.device).unsqueeze(0)
        starts, lengths = self.starts[:2], self.lengths[:1]
        query = self.queries[0][tokens].double()
        return reference.paged_attention(query, small, table, starts, lengths, self.scale, self.chunk)

    def checks(self, bench: Bench, name: str, num_splits: int | None) -> Iterator[Result]:
        """The first and the last request against fp64."""
        poison(bench, *self.queries[0].shape)
        found = self.ours(num_splits)[0]()
        assert isinstance(found, Tensor)
        rows = sorted({0, self.requests - 1})
        mine = torch.cat([found.unflatten(0, (self.requests, self.new))[row] for row in rows])
        yield compare(name, mine, torch.cat([self.truth(row) for row in rows]))

    def error(self, output: Any) -> float:
        """How far a peer's output is from ours, whatever the order of its tokens and heads."""
        ours = self.ours(None)[0]()
        assert isinstance(ours, Tensor)
        if output.dim() == 4:
            output = output.transpose(1, 2).flatten(0, 1)
        return relative_error(output, ours)


def poison(bench: Bench, *shape: int) -> None:
    """Leave NaN in the memory that an output of this shape gets next: what is not written shows."""
    torch.full(shape, float("nan"), dtype=bench.sizes.dtype, device=bench.device.device)


def ragged(bench: Bench) -> Iterator[Result]:
    """Requests of all kinds in one batch, everything that belongs to nobody being NaN, against fp64."""
    s = bench.sizes
    page = s.page_size
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
        cache = torch.full(
            (len(places), s.layers, 2, page, s.kv_heads, s.head_dim),
            float("nan"),
            dtype=s.dtype,
            device=bench.device.device,
        )[:, 1]
        for row, (first, count) in enumerate(zip(accumulate([0, *counts]), counts, strict=False)):
            mine = places[first : first + count]
            table[row, :count] = torch.tensor(mine)
            slots = [mine[at // page] * page + at % page for at in range(lengths[row])]
            key, value = (bench.normal(lengths[row], s.kv_heads, s.head_dim) for _ in range(2))
            reference.store_kv(key, value, cache, bench.ints(slots))
        query = bench.normal(sum(new), s.heads, s.head_dim)
        rest = (table.to(query.device), bench.ints([0, *accumulate(new)]), bench.ints(lengths), s.head_dim**-0.5, page)
        poison(bench, *query.shape)
        found = ops.paged_attention(query, cache, *rest, splits, None)
        yield compare(name, found, reference.paged_attention(query.double(), cache.double(), *rest))


def decode(bench: Bench) -> Iterator[Result]:
    """One token of each request: the time goes into reading keys and values."""
    s = bench.sizes
    yield from ragged(bench)
    for requests, length in s.decode:
        name = f"decode {requests} x {length}"
        if not bench.has(15, name):
            continue
        work = Work(bench, requests, length, 1)
        yield from work.checks(bench, name, None)
        yield from work.checks(bench, f"{name}, batch-invariant", BATCH_INVARIANT_SPLITS)
        ours = bench.device.time(work.ours(None))
        moved = work.kv_bytes + 2 * work.queries[0].numel() * s.dtype.itemsize
        yield bench.of_bandwidth(name, moved, ours, 0.85 if work.kv_bytes > 1e9 else None)
        fixed = bench.device.time(work.ours(BATCH_INVARIANT_SPLITS))
        seconds = {"invariant": fixed.seconds, "ours": ours.seconds}
        yield Line(f"{name}, batch-invariant over fastest", fixed.seconds / ours.seconds, None, True, seconds)
        sets = work.contiguous()
        yield bench.against_fastest(name, ours, _sdpa(sets, work.scale), 1.05, work.error)
        del work, sets
        bench.device.release()


def _sdpa(sets: list[gpu_peers.Contiguous], scale: float) -> Peers:
    """torch's kernels for one token of each request, in the two ways in which heads can share keys there."""
    return {
        "sdpa, flash": lambda: gpu_peers.sdpa_decode(sets, scale, "FLASH_ATTENTION"),
        "sdpa, cudnn": lambda: gpu_peers.sdpa_decode(sets, scale, "CUDNN_ATTENTION"),
        "sdpa, flash, heads as tokens": lambda: gpu_peers.sdpa_decode_grouped(sets, scale, "FLASH_ATTENTION"),
        "sdpa, efficient, heads as tokens": lambda: gpu_peers.sdpa_decode_grouped(sets, scale, "EFFICIENT_ATTENTION"),
    }


def extend(bench: Bench) -> Iterator[Result]:
    """A piece of a prompt after a cached prefix: the time goes into matrix products."""
    s = bench.sizes
    for requests, before in s.extend:
        name = f"extend {requests} x {s.new} after {before}"
        if not bench.has(15, name):
            continue
        work = Work(bench, requests, before + s.new, s.new)
        yield from work.checks(bench, name, None)
        yield from work.checks(bench, f"{name}, batch-invariant", 1)
        ours = bench.device.time(work.ours(None))
        pairs = requests * (s.new * before + s.new * (s.new + 1) // 2)
        operations = 4 * s.heads * s.head_dim * pairs
        part = operations / ours.seconds / bench.roofline.matmul
        figures = {"operations": operations, "TFLOP/s": operations / ours.seconds / 1e12}
        yield Line(f"{name}, of the matmul rate", part, None, False, {"ours": ours.seconds}, figures)
        fixed = bench.device.time(work.ours(1))
        seconds = {"invariant": fixed.seconds, "ours": ours.seconds}
        yield Line(f"{name}, batch-invariant over fastest", fixed.seconds / ours.seconds, None, True, seconds)
        sets = work.contiguous()
        flash = _flash(sets, work.scale)
        # at least 60 % of its speed is at most 1 / 0.6 of its time
        yield bench.against_fastest(name, ours, flash, round(1 / 0.6, 3), work.error)
        del work, sets, flash
        bench.device.release()


def _flash(sets: list[gpu_peers.Contiguous], scale: float) -> Peers:
    """torch's flash kernel, with heads that share keys and with keys repeated."""
    return {
        "sdpa, flash": lambda: gpu_peers.sdpa_extend(sets, scale),
        "sdpa, flash, keys repeated": lambda: gpu_peers.sdpa_extend(gpu_peers.with_keys_repeated(sets), scale),
    }


def others(bench: Bench) -> Iterator[Result]:
    """Decoding against flex_attention and flashinfer, which compile for many seconds first."""
    s = bench.sizes
    for requests, length in sorted(s.decode, key=lambda shape: -shape[0] * shape[1]):
        name = f"decode {requests} x {length}"
        if not bench.has(45, f"{name} against flex_attention and flashinfer"):
            continue
        work = Work(bench, requests, length, 1)
        ours = bench.device.time(work.ours(None))
        yield bench.against_fastest(name, ours, _compiled(work), 1.05, work.error)
        del work
        bench.device.release()


def _compiled(work: Work) -> Peers:
    pages = (work.queries, work.caches, work.tables)
    return {
        "flex_attention": lambda: gpu_peers.flex_decode(work.contiguous(), work.scale),
        "flashinfer": lambda: gpu_peers.flashinfer_decode(*pages, work.length, work.scale),
    }
