"""Attention over pages, on the sizes that a model has: against fp64, copy bandwidth and torch's kernels."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Line
from gpu.harness import Bench, Call, Case, Peers, Planned, compare, each_with, plan, relative_error
from torch import Tensor

from hybrid.engine.planner import BATCH_INVARIANT_SPLITS
from hybrid.kernels import reference
from hybrid.kernels.packed_kv import KV_DTYPES, row_size

Contiguous = tuple[Tensor, Tensor, Tensor]
"""q `[R, heads, tokens, head_dim]`, k and v `[R, kv_heads, keys, head_dim]`, each in one piece."""


def _only(backend: str) -> Any:
    """One kernel of torch's; on a CPU the plain one, since a rehearsal proves the call alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    asked = getattr(SDPBackend, backend)
    return sdpa_kernel(asked if torch.cuda.is_available() else SDPBackend.MATH)


def sdpa_decode(sets: Sequence[Contiguous], scale: float, backend: str, grouped: bool) -> list[Call]:
    """torch's SDPA on one token of each request.

    Args:
        backend: a name of `torch.nn.attention.SDPBackend`.
        grouped: heads that share keys are given as tokens, which reads every key once.
    """

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        asked = q.view(q.shape[0], k.shape[1], -1, q.shape[-1]) if grouped else q
        with _only(backend):
            return F.scaled_dot_product_attention(asked, k, v, scale=scale, enable_gqa=not grouped).view(q.shape)

    return [lambda x=x: call(*x) for x in sets]


def sdpa_extend(sets: Sequence[Contiguous], scale: float) -> list[Call]:
    """torch's flash kernel on new tokens after a prefix: the mask is aligned to the last key."""
    from torch.nn.attention.bias import causal_lower_right

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = q.shape[1] != k.shape[1]
        if q.shape[2] == k.shape[2]:
            with _only("FLASH_ATTENTION"):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
        # takes the flash kernel wherever that can run; within `_only` it would ask for more than it needs
        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=shared)

    return [lambda x=x: call(*x) for x in sets]


class Attention:
    """Requests of equal length with `new` query tokens each, in as many sets as rotating takes. All sets are in one
    pool of several layers, in pages that are never adjacent. A call reads `kv_bytes` of keys and values."""

    def __init__(self, bench: Bench, requests: int, length: int, new: int) -> None:
        s = bench.sizes
        heads, kv_heads, head_dim = s.heads
        self.bench, self.requests, self.length, self.new = bench, requests, length, new
        self.scale = head_dim**-0.5
        self.kv_bytes = requests * length * s.kv_bytes
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

    def ours(self, num_splits: int | None, sets: Sequence[tuple[Tensor, ...]] | None = None) -> list[Call]:
        def call(query: Tensor, cache: Tensor, table: Tensor) -> Tensor:
            where = (self.starts, self.lengths, self.scale, self.bench.sizes.page_size)
            return self.bench.ops.paged_attention(query, cache, table, *where, num_splits)

        return each_with(call, sets or self.sets)

    def packed(self, kv_dtype: str, num_splits: int | None) -> list[Call]:
        """Keys and values in a byte per element."""
        head_dim, kept = self.sets[0][0].shape[-1], KV_DTYPES[kv_dtype]
        shape = (*self.sets[0][1].shape[:-1], row_size(head_dim))
        codes = torch.zeros(shape, dtype=torch.uint8, device=self.starts.device).view(kept)
        sets = [(query, codes, table) for query, _, table in self.sets]
        return self.ours(num_splits, sets)

    @cached_property
    def contiguous(self) -> list[Contiguous]:
        """The same requests with keys and values in one piece, for peers without pages."""
        made = []
        for query, cache, table in self.sets:
            keys, values = (
                cache[:, kind][table].flatten(1, 2)[:, : self.length].transpose(1, 2).contiguous() for kind in (0, 1)
            )
            made.append((query.unflatten(0, (self.requests, self.new)).transpose(1, 2).contiguous(), keys, values))
        return made

    def of(self, tokens: Tensor, requests: list[int]) -> Tensor:
        """The rows of some requests."""
        return tokens.unflatten(0, (self.requests, self.new))[requests].flatten(0, 1)

    def checks(self, name: str, *splits: int | None) -> Iterator[Line]:
        """The first and the last request of the first set against fp64."""
        query, cache, table = self.sets[0]
        chosen = sorted({0, self.requests - 1})
        few = cache[table[chosen]].double()
        pages = torch.arange(table[chosen].numel(), device=table.device).view(len(chosen), -1)
        where = (self.starts[: len(chosen) + 1], self.lengths[: len(chosen)], self.scale, self.bench.sizes.page_size)
        truth = reference.paged_attention(self.of(query, chosen).double(), few.flatten(0, 1), pages, *where)
        for num_splits, call in ((num_splits, self.ours(num_splits)[0]) for num_splits in splits):
            self.bench.poison(query)
            found = call()
            assert isinstance(found, Tensor)
            title = name if num_splits is None else f"{name}, batch-invariant"
            yield compare(title, self.of(found, chosen), truth)
            yield from self.bench.again(title, call, [found], {})

    def error(self, output: Any) -> float:
        """How far a peer's output is from ours, in any order of its tokens and heads."""
        ours = self.ours(None)[0]()
        assert isinstance(ours, Tensor)
        return relative_error(output.transpose(1, 2).flatten(0, 1) if output.dim() == 4 else output, ours)


def decode_attention(bench: Bench) -> Iterator[Planned]:
    """One token of each request, whose time goes into reading keys and values."""

    def decode(name: str, requests: int, length: int) -> Case:
        work = Attention(bench, requests, length, 1)
        moved = work.kv_bytes + 2 * work.sets[0][0].numel() * bench.sizes.dtype.itemsize
        sdpa: Peers = {
            f"sdpa, {label}": lambda kind=kind, grouped=grouped: sdpa_decode(work.contiguous, work.scale, kind, grouped)
            for label, kind, grouped in (
                ("flash", "FLASH_ATTENTION", False),
                ("cudnn", "CUDNN_ATTENTION", False),
                ("flash, heads as tokens", "FLASH_ATTENTION", True),
            )
        }
        return Case(
            work.ours(None),
            partial(work.checks, name, None, BATCH_INVARIANT_SPLITS),
            num_bytes=moved,
            target=0.85 if work.kv_bytes > 1e9 else None,
            variants={
                "batch-invariant": work.ours(BATCH_INVARIANT_SPLITS),
                **{f"kv {kind}": work.packed(kind, None) for kind in KV_DTYPES},
            },
            peers=sdpa,
            peer_target=1.05,
            error=work.error,
        )

    for requests, length in bench.sizes.decode:
        yield plan(f"decode {requests} x {length}", 15, decode, requests, length)


def extend_attention(bench: Bench) -> Iterator[Planned]:
    """A piece of a prompt after a cached prefix: the time goes into matrix products."""
    s = bench.sizes

    def extend(name: str, requests: int, before: int) -> Case:
        work = Attention(bench, requests, before + s.new, s.new)
        pairs = requests * (s.new * before + s.new * (s.new + 1) // 2)
        return Case(
            work.ours(None),
            partial(work.checks, name, None, 1),
            operations=4 * s.heads[0] * s.heads[2] * pairs,
            variants={"batch-invariant": work.ours(1), **{f"kv {kind}": work.packed(kind, 1) for kind in KV_DTYPES}},
            peers={"sdpa, flash": lambda: sdpa_extend(work.contiguous, work.scale)},
            peer_target=round(1 / 0.6, 3),  # at least 60 % of its speed
            error=work.error,
        )

    for requests, before in s.extend:
        yield plan(f"extend {requests} x {s.new} after {before}", 15, extend, requests, before)
