"""Passes before the first step, in which Triton compiles the kernels: for every variant that a step may need, so that
none is compiled while requests wait.

Which variant a step needs depends on few of its sizes: whether there are prompts, how many requests decode and with
how many drafts, how wide the block table is, whether a checkpoint is captured (`sizes`). A pass of each kind is
computed on nothing: it writes one state slot, and no page.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybrid.batch import Batch, Group, StateSteps, Unrolled
from hybrid.cache.cache import HybridCache
from hybrid.engine.config import EngineConfig
from hybrid.engine.planner import BATCH_INVARIANT_SPLITS, LINK_FIELDS
from hybrid.kernels.ops import fill_in_tokens
from hybrid.memory.pool import EMPTY_STATE
from hybrid.speculation.config import SpeculationConfig
from hybrid.units import ceil_div

log: logging.Logger = logging.getLogger(__name__)


ROWS = (1, 2, 16, 17, 32, 33)
"""Numbers of decoding requests at which one tile or another is taken; beyond them powers of two."""

ROWS_WITH_DRAFTS = (2, 16, 32, 64)
"""The same for decoded tokens and their drafts together: one number for each tile."""

SHORT = (1, 2, 4, 8, 16)
"""Tokens of prompts with few rows of queries, for any number of heads that share keys."""


class Size(NamedTuple):
    """The sizes of a step.

    Attributes:
        prompts: new tokens of each prompt.
        decodes: requests that decode.
        pages: columns of block tables: enough for the longest prompt.
        captures: checkpoints that are captured.
        drafts: of each request that decodes.
        is_tree: the drafts form a tree.
        is_padded: as `Batch.is_padded`.
    """

    prompts: tuple[int, ...]
    decodes: int
    pages: int
    captures: int
    drafts: int = 0
    is_tree: bool = False
    is_padded: bool = False

    @property
    def rows(self) -> int:
        """Decoded tokens and drafts."""
        return self.decodes * (1 + self.drafts)


class Limits(NamedTuple):
    """The limits of the steps of an engine.

    Attributes:
        requests: that run.
        tokens: of a step.
        pages: of a request.
        chunk_size, page_size: in tokens.
        drafts: of a request.
    """

    requests: int
    tokens: int
    pages: int
    chunk_size: int
    page_size: int
    drafts: int = 0


def sizes(limits: Limits) -> Iterator[Size]:
    """Generate steps of every kind, within the limits of an engine; prompts of a chunk in any case.

    Tiles of matrix products and of attention depend on the number of rows, pieces of attention on the width of block
    tables, and where decoded rows follow those of prompts, their address may be aligned or not.
    """
    max_requests, max_tokens, max_pages, chunk_size, page_size, _ = limits
    rows = row_counts(max_requests)
    widths = [1 << power for power in range(max_pages.bit_length() + 1)]
    yield from (Size((), count, width, 0) for count in rows for width in widths)
    odd = chunk_size + 1
    yield from (Size((odd,), count, ceil_div(odd, page_size), 0) for count in rows)
    longest = max(chunk_size, min(max_tokens - max_requests, max_pages * page_size))
    for prompts in (*((length,) for length in SHORT), (chunk_size,), (longest,), (1, 1), (chunk_size, chunk_size)):
        needed = ceil_div(max(prompts), page_size)
        yield from (Size(prompts, 0, width, 0) for width in (needed, max(needed, max_pages)))
    for is_padded in (False, True):  # where it is not, kernels of other packages may compute it
        yield Size((chunk_size,), 0, ceil_div(chunk_size, page_size), 1, is_padded=is_padded)
    for count, drafts in _drafted(limits):
        for prompts in ((), (odd,)):
            needed = ceil_div(max(prompts, default=1), page_size)
            yield Size(prompts, count, needed, 0, drafts)
        yield Size((), count, max_pages, 0, drafts, is_tree=True)


def row_counts(max_requests: int) -> list[int]:
    """Return numbers of decoding requests, one for every choice of tiles."""
    powers = (1 << power for power in range(6, max_requests.bit_length()))
    return [count for count in (*ROWS, *powers) if count <= max_requests]


def _drafted(limits: Limits) -> Iterator[tuple[int, int]]:
    """Generate numbers of requests, and of drafts of each."""
    if not limits.drafts:
        return
    for rows in ROWS_WITH_DRAFTS:
        drafts = min(limits.drafts, rows - 1)
        yield min(rows // (1 + drafts), limits.requests), drafts
    yield from ((count, 1) for count in row_counts(limits.requests) if count >= ROWS_WITH_DRAFTS[-1])


def idle_batch(size: Size, chunk_size: int, deterministic: bool, slot: int, device: torch.device) -> Batch:
    """Return a batch of these sizes that writes one state slot, and no page."""
    starts = [0, *accumulate(size.prompts)]
    num_prompt, num_rows = starts[-1], starts[-1] + size.rows

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
    decodes = group(slice(num_prompt, None), [*range(size.rows + 1)], BATCH_INVARIANT_SPLITS, -1)
    if size.drafts:
        every = torch.arange(size.rows, device=device)
        steps = _steps(size.decodes, 1 + size.drafts, device)
        unrolled = Unrolled(every, every.clone()) if size.is_tree else None
        decodes = replace(decodes, state_read=steps.read, run_starts=steps.starts, unrolled=unrolled)
    return Batch(
        token_ids=ints(num_rows),
        positions=ints(num_rows),
        slot_mapping=ints(num_rows, value=-1),
        checkpoints=captured,
        sample_rows=ints(len(size.prompts) + size.rows),
        prefills=prefills if size.prompts else None,
        decodes=decodes if size.decodes else None,
        decode_start=num_prompt if deterministic else None,
        log=[] if size.drafts else None,
        copies=torch.tensor([[0], [-1]], device=device) if size.is_tree else None,
        is_padded=size.is_padded,
    )


def _steps(requests: int, count: int, device: torch.device) -> StateSteps:
    """`count` tokens of each request, after the empty state; no state is kept."""
    read = torch.full((requests, count), -1, device=device)
    read[:, 0] = EMPTY_STATE
    starts = torch.arange(0, requests * count + 1, count, device=device)
    return StateSteps(starts, read.flatten(), torch.full_like(read, -1).flatten())


def run(model: Any, size: Size, deterministic: bool, slot: int, kv: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Return a pass of these sizes, and what is computed after it for drafts that are accepted.

    Args:
        model: computes a batch.
        deterministic: as steps will be.
        slot: a state slot, which is written.
        kv, state: the memory that the model reads and writes.

    Returns:
        The logits.
    """
    batch = idle_batch(size, model.chunk_size, deterministic, slot, kv.device)
    logits: Tensor = model(batch, kv, state)
    for count in range(1, min(size.drafts, 2) + 1):
        rows = torch.arange(size.decodes * count, device=kv.device)
        model.replay(batch.log, rows, _steps(size.decodes, count, kv.device), state)
    return logits


def predict(model: Any, rows: int, pages: int, slot: int, kv: Tensor) -> None:
    """Draft a token of each of some requests by the model's predictor."""
    batch = idle_batch(Size((), rows, pages, 0), model.chunk_size, False, slot, kv.device)
    hidden = model.embed(batch.token_ids)
    model.draft(batch, hidden, kv)


def warm_up(
    model: Any,
    cache: HybridCache,
    config: EngineConfig,
    deterministic: bool,
    speculation: SpeculationConfig | None = None,
) -> None:
    """Compile what the steps of an engine need. The cache must be empty, and is left so.

    Args:
        model: computes a batch.
        cache: the memory that the model reads and writes.
        config: limits of steps.
        deterministic: as the steps will be.
        speculation: how tokens are drafted; None: they are not.
    """
    started, allocator, contents, device = time.perf_counter(), cache.allocator, cache.memory.contents, cache.kv.device
    longest = config.max_model_len or model.config.max_position_embeddings
    max_pages = min(ceil_div(longest, cache.config.page_size), cache.memory.pages.capacity)
    slots = [slot for slot in (allocator.allocate_state(), allocator.allocate_state()) if slot is not None]
    pages = allocator.allocate_pages(2) or []
    try:
        drafts = speculation.max_drafts if speculation is not None else 0
        steps = config.max_num_seqs, config.max_num_batched_tokens
        limits = Limits(*steps, max_pages, cache.config.chunk_size, cache.config.page_size, drafts)
        for size in sizes(limits):
            logits = run(model, size, deterministic, slots[0], cache.kv, cache.state_tensors)
        if speculation is not None and speculation.uses_predictor and model.mtp is not None:
            for rows in row_counts(limits.requests):
                for power in range(max_pages.bit_length() + 1):
                    predict(model, rows, 1 << power, slots[0], cache.kv)
        numbers = torch.zeros(LINK_FIELDS, dtype=torch.int64, device=device)
        fill_in_tokens(numbers, logits.argmax(-1), numbers.new_zeros(1, LINK_FIELDS))
        if len(slots) == len(pages) == 2:
            contents.move_states({slots[0]: slots[1]})
            contents.move_pages({pages[0]: pages[1]})
    finally:
        allocator.free_states(slots)
        allocator.free_pages(pages)
    log.info("kernels are compiled, in %.1f s", time.perf_counter() - started)
