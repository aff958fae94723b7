"""Passes before the first step, in which Triton compiles the kernels: for every variant that a step may need, so that
none is compiled while requests wait.

Which variant a step needs depends on few of its sizes: whether there are prompts, how many requests decode, how wide
the block table is, whether a checkpoint is captured (`sizes`). A pass of each kind is computed on nothing: it writes
one state slot, and no page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.batch import Batch, Group
from hybrid.cache.cache import HybridCache
from hybrid.engine.config import EngineConfig
from hybrid.engine.planner import BATCH_INVARIANT_SPLITS, LINK_FIELDS
from hybrid.kernels.batch_invariant import RowBlocks
from hybrid.kernels.ops import fill_in_tokens
from hybrid.memory.pool import EMPTY_STATE
from hybrid.units import ceil_div

log: logging.Logger = logging.getLogger(__name__)


ROWS = (1, 2, 16, 17, 32, 33)
"""Numbers of decoding requests at which one tile or another is taken; beyond them powers of two."""

SHORT = (1, 2, 4, 8, 16)
"""Tokens of prompts with few rows of queries, for any number of heads that share keys."""


class Size(NamedTuple):
    """The sizes of a step.

    Attributes:
        prompts: new tokens of each prompt.
        decodes: requests that decode.
        pages: columns of block tables: enough for the longest prompt.
        captures: checkpoints that are captured.
    """

    prompts: tuple[int, ...]
    decodes: int
    pages: int
    captures: int


def sizes(max_requests: int, max_tokens: int, max_pages: int, chunk_size: int, page_size: int) -> Iterator[Size]:
    """Steps of every kind, within the limits of an engine; prompts of a chunk in any case.

    Tiles of matrix products and of attention depend on the number of rows, pieces of attention on the width of block
    tables, and where decoded rows follow those of prompts, their address may be aligned or not.
    """
    powers = (1 << power for power in range(6, max_requests.bit_length()))
    rows = [count for count in (*ROWS, *powers) if count <= max_requests]
    widths = [1 << power for power in range(max_pages.bit_length() + 1)]
    yield from (Size((), count, width, 0) for count in rows for width in widths)
    odd = chunk_size + 1
    yield from (Size((odd,), count, ceil_div(odd, page_size), 0) for count in rows)
    longest = max(chunk_size, min(max_tokens - max_requests, max_pages * page_size))
    for prompts in (*((length,) for length in SHORT), (chunk_size,), (longest,), (1, 1), (chunk_size, chunk_size)):
        needed = ceil_div(max(prompts), page_size)
        yield from (Size(prompts, 0, width, 0) for width in (needed, max(needed, max_pages)))
    yield Size((chunk_size,), 0, ceil_div(chunk_size, page_size), 1)


def idle_batch(size: Size, chunk_size: int, deterministic: bool, slot: int, device: torch.device) -> Batch:
    """A batch of these sizes that writes one state slot, and no page."""
    starts = [0, *accumulate(size.prompts)]
    num_prompt, num_rows = starts[-1], starts[-1] + size.decodes

    def ints(*shape: int, value: int = 0) -> Tensor:
        return torch.full(shape, value, dtype=torch.int64, device=device)

    def group(rows: slice, ends: list[int], num_splits: int, write: int) -> Group:
        count = len(ends) - 1
        lengths = [end - start for start, end in pairwise(ends)]
        return Group(
            rows,
            cu_seqlens=torch.tensor(ends, device=device),
            seq_lens=torch.tensor(lengths, device=device),
            block_table=ints(count, size.pages),
            state_read=ints(count, value=EMPTY_STATE),
            state_write=ints(count, value=write),
            num_splits=num_splits if deterministic else None,
        )

    captured = torch.tensor([0, chunk_size, slot], device=device).repeat(size.captures, 1)
    prefills = group(slice(0, num_prompt), starts, 1, slot)
    decodes = group(slice(num_prompt, None), [*range(size.decodes + 1)], BATCH_INVARIANT_SPLITS, -1)
    blocks = RowBlocks([*pairwise(starts)], num_prompt, num_rows, chunk_size)
    return Batch(
        token_ids=ints(num_rows),
        positions=ints(num_rows),
        slot_mapping=ints(num_rows, value=-1),
        checkpoints=captured,
        sample_rows=ints(len(size.prompts) + size.decodes),
        prefills=prefills if size.prompts else None,
        decodes=decodes if size.decodes else None,
        blocks=blocks if deterministic else None,
    )


def warm_up(model: Any, cache: HybridCache, config: EngineConfig, deterministic: bool) -> None:
    """Compile what the steps of an engine need, drafts aside. The cache must be empty, and is left so.

    Args:
        model: computes a batch.
        cache: the memory that the model reads and writes.
        config: limits of steps.
        deterministic: as the steps will be.
    """
    started, allocator, mover, device = time.perf_counter(), cache.allocator, cache.memory.mover, cache.kv.device
    longest = config.max_model_len or model.config.max_position_embeddings
    max_pages = min(ceil_div(longest, cache.config.page_size), cache.memory.pages.capacity)
    slots = [slot for slot in (allocator.allocate_state(), allocator.allocate_state()) if slot is not None]
    pages = allocator.allocate_pages(2) or []
    try:
        limits = config.max_num_seqs, config.max_num_batched_tokens, max_pages
        for size in sizes(*limits, cache.config.chunk_size, cache.config.page_size):
            batch = idle_batch(size, cache.config.chunk_size, deterministic, slots[0], device)
            tokens = model(batch, cache.kv, cache.state_tensors).argmax(-1)
        fill_in_tokens(batch.token_ids, tokens, torch.zeros(1, LINK_FIELDS, dtype=torch.int64, device=device))
        if mover is not None and len(slots) == len(pages) == 2:
            mover.move_states({slots[0]: slots[1]})
            mover.move_pages({pages[0]: pages[1]})
    finally:
        allocator.free_states(slots)
        allocator.free_pages(pages)
    log.info("kernels are compiled, in %.1f s", time.perf_counter() - started)
