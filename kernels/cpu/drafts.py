"""The most likely tokens of rows of logits: of a model's, and what a predictor's passes over single tokens end with, so
that a chain of them needs no torch in between."""

from typing import NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.cpu.functions import COMPILED
from hybrid.kernels.cpu.kinds import FLOAT
from hybrid.kernels.cpu.machine_code import Compiled
from hybrid.kernels.cpu.tasks import KINDS, run

MIN_SHARED = 1 << 16
"""Logits that are worth a thread."""

_most_likely = Compiled(f"{COMPILED}.drafts", "most_likely")
_choose_drafts = Compiled(f"{COMPILED}.drafts", "choose_drafts")
_continue_chains = Compiled(f"{COMPILED}.drafts", "continue_chains")


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


class Chains(NamedTuple):
    """The numbers that a chain of passes over one token of each of N sequences continues with, and leaves to the host.
    M passes at most, P kinds of claims.

    Attributes:
        columns: `[6, N or more]` int64: of each sequence its token, rotary position, where its keys and values are
            written (-1: nowhere), its length up to there, the state slot that is read (-1: none), and the tokens for
            which it has pages: the length grows no further.
        block_table: `[N, max_pages]` int64.
        chances: `[N]` fp32, what the predictor claims of the tokens of the latest pass.
        beliefs: `[1 + N + N P]` fp32: the chance of a chain below which it is not continued; of each sequence the
            chance of its chain so far, and how often it was right with claims of each P-th.
        control: `[2]` int64: the passes so far, and whether no chain is worth another one.
        tokens: `[M, N, 1]` int64, of each pass. A pass after M of them is kept in the place of the last one.
        claims: `[M, N, 1]` fp32.
    """

    columns: Tensor
    block_table: Tensor
    chances: Tensor
    beliefs: Tensor
    control: Tensor
    tokens: Tensor
    claims: Tensor


def continue_chains(chains: Chains, page_size: int) -> None:
    """Keep what a pass has found, turn its numbers into those of the pass over the token after it, and say whether that
    is worth it.

    Args:
        chains: all contiguous; columns, beliefs, control, tokens and claims are written.
        page_size: tokens of a page.
    """
    columns, table, chances, *rest = chains
    (count, width), of_column = table.shape, columns.shape[1]
    kinds = (len(chains.beliefs) - 1 - count) // count
    addresses = chances.data_ptr(), *(tensor.data_ptr() for tensor in rest)
    sizes = count, of_column, width, page_size
    args = columns.data_ptr(), table.data_ptr(), *sizes, *addresses, kinds, len(chains.tokens)
    run(_continue_chains, FLOAT, args, 1, 1, 1)
