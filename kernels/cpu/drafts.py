"""The most likely tokens of rows of logits: of a model's, and what a predictor's passes over single tokens end with, so
that a chain of them needs no torch in between."""

import torch
from torch import Tensor

from hybrid.kernels.cpu.kinds import FLOAT, KINDS
from hybrid.kernels.cpu.machine_code import COMPILED, Compiled
from hybrid.kernels.cpu.tasks import run

MIN_SHARED = 1 << 16
"""Logits that are worth a thread."""

_most_likely = Compiled(f"{COMPILED}.drafts", "most_likely")
_choose_drafts = Compiled(f"{COMPILED}.drafts", "choose_drafts")


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
    run(_most_likely, FLOAT, args, len(logits), 1, logits.numel() // MIN_SHARED)
    return tokens


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
