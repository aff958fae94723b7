"""The most likely tokens of rows of logits: of a model's, and what a predictor's passes over single tokens end with, so
that a chain of them needs no torch in between."""

import numpy as np
import torch
from torch import Tensor

from hybrid.kernels.cpu.machine_code import compiled, compiled_inline
from hybrid.kernels.cpu.tasks import run
from hybrid.kernels.cpu.tiles import row_max, row_sum
from hybrid.kernels.cpu.vectors import INDEX, KINDS, LANES, ZERO, allocate, at, exp, get, numbers, put, release

MIN_SHARED = 1 << 16
"""Logits that are worth a thread."""


@compiled_inline
def _first_largest(own, vocab):  # type: ignore[no-untyped-def]
    """The largest number of a row, and its first place."""
    whole, token = vocab // LANES * LANES, 0
    most = row_max(own, whole) if whole else get(own, 0)
    for i in range(whole, vocab):
        most = max(most, get(own, i))
    while token < vocab - 1 and get(own, token) != most:
        token += 1
    return most, token


@compiled
def _most_likely(args, kind, first, last):  # type: ignore[no-untyped-def]
    """Tokens `[first, last)`."""
    a = numbers(args, INDEX)
    logits, tokens, vocab, of_row, not_finite = numbers(a[0], kind), numbers(a[1], INDEX), a[2], a[3], a[4]
    whole = vocab // LANES * LANES
    for row in range(first, last):
        own = at(logits, row * of_row)
        total = row_sum(own, whole) if whole else ZERO
        for i in range(whole, vocab):
            total += get(own, i)
        _, token = _first_largest(own, vocab)
        tokens[row] = token if total - total == ZERO else not_finite  # NaN and infinity remain in a sum


def most_likely(logits: Tensor, not_finite: int) -> Tensor:
    """The most likely token of each row, of equal ones the first.

    Args:
        logits: `[N, vocab]` fp32, each row contiguous.
        not_finite: in the place of the token of a row with NaN or infinity.

    Returns:
        `[N]` int64.
    """
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    args = logits.data_ptr(), tokens.data_ptr(), logits.shape[1], logits.stride(0), not_finite
    run(_most_likely, ZERO, args, len(logits), 1, logits.numel() // MIN_SHARED)
    return tokens


@compiled
def _choose_drafts(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    logits, hidden, tokens = numbers(a[0], ZERO), numbers(a[1], kind), numbers(a[2], INDEX)
    before, chances, vocab, size = numbers(a[3], kind), numbers(a[4], ZERO), a[5], a[6]
    whole = vocab // LANES * LANES
    memory = allocate(LANES)
    sums = numbers(memory, ZERO)
    for row in range(first, last):
        own = at(logits, row * vocab)
        most, token = _first_largest(own, vocab)
        for lane in range(LANES):
            put(sums, lane, ZERO)
        for i in range(0, whole, LANES):
            for lane in range(LANES):
                put(sums, lane, get(sums, lane) + exp(get(own, i + lane) - most))
        total = ZERO
        for lane in range(LANES):
            total += get(sums, lane)
        for i in range(whole, vocab):
            total += exp(get(own, i) - most)
        tokens[row] = token
        put(chances, row, np.float32(1) / total)
        source, target = at(hidden, row * size), at(before, row * size)
        for i in range(size):
            target[i] = source[i]
    release(memory)


def choose_drafts(logits: Tensor, hidden: Tensor, tokens: Tensor, before: Tensor, chances: Tensor) -> None:
    """Write the most probable token of each row, and what the pass over these tokens begins with.

    Args:
        logits: `[N, vocab]` fp32, contiguous.
        hidden: `[N, hidden_size]` the hidden states that the logits are of, contiguous.
        tokens: `[N]` int64; written.
        before: as `hidden`; they are copied there.
        chances: `[N]` fp32, the probabilities of the tokens; written. NaN where a logit is not finite.
    """
    (count, vocab), size = logits.shape, hidden.shape[1]
    addresses = tuple(tensor.data_ptr() for tensor in (logits, hidden, tokens, before, chances))
    run(_choose_drafts, KINDS[hidden.dtype], (*addresses, vocab, size), count, 1, 1)


@compiled
def _go_on(args, kind, first, last):  # type: ignore[no-untyped-def]
    a = numbers(args, INDEX)
    positions, slots, lengths = numbers(a[0], INDEX), numbers(a[1], INDEX), numbers(a[2], INDEX)
    states, table, width, page_size = numbers(a[3], INDEX), numbers(a[4], INDEX), a[5], a[6]
    for row in range(first, last):
        place = lengths[row]
        page, slot = place // page_size, -1
        if page < width:
            slot = table[row * width + page] * page_size + place % page_size
        positions[row], slots[row], lengths[row], states[row] = positions[row] + 1, slot, place + 1, -1


def go_on(
    positions: Tensor, slots: Tensor, lengths: Tensor, states: Tensor, block_table: Tensor, page_size: int
) -> None:
    """Turn the numbers of a pass over one token of each sequence into those of the pass over the token after it.

    Args:
        positions: `[N]` int64, rotary positions; written, as all but the table.
        slots: `[N]` int64, where keys and values are written; afterwards -1 where the table has no page.
        lengths: `[N]` int64, of the sequences up to there.
        states: `[N]` int64, slots of the states that are read; afterwards -1.
        block_table: `[N, max_pages]` int64, contiguous.
        page_size: tokens of a page.
    """
    addresses = tuple(tensor.data_ptr() for tensor in (positions, slots, lengths, states, block_table))
    count, width = block_table.shape
    run(_go_on, ZERO, (*addresses, width, page_size), count, 1, 1)
