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
_accept_drafts = Compiled(f"{COMPILED}.drafts", "accept_drafts")
_begin_chains = Compiled(f"{COMPILED}.drafts", "begin_chains")
_next_round = Compiled(f"{COMPILED}.drafts", "next_round")
_resume_rounds = Compiled(f"{COMPILED}.drafts", "resume_rounds")
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
    """What a chain of passes over one token of each of N sequences continues with, and leaves to the host. M passes at
    most, P kinds of claims.

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


class Verified(NamedTuple):
    """The rows of a pass with drafts, R of N sequences, and where it is kept which of them are accepted.

    Attributes:
        drafted: `[R]` int64, the token of each row: of each sequence the last known one, and then its drafts.
        chosen: `[R]` int64, the token that the model chooses after each; negative: there is none.
        positions, lengths: `[R]` int64, the rotary position of each, and the sequence's length up to it.
        block_table: `[R, max_pages]` int64, the page ids of its sequence.
        requests: `[N, VERIFIED]` int64: of each sequence its first row, its number of drafts, the slot that has the
            state after the last known token, and the one that is to have that after its accepted drafts if they are
            more than the next number (negative: there is none), after which the state stays in the first one; the
            tokens for which it has pages. At last what is written: the number of accepted drafts, and the slot that has
            the state after them.
        slots: `[2, R]` int64, the state slots that a replay of all rows reads and writes; written. A row that is not
            accepted reads `LEFT_OUT`.
    """

    drafted: Tensor
    chosen: Tensor
    positions: Tensor
    lengths: Tensor
    block_table: Tensor
    requests: Tensor
    slots: Tensor


def accept_drafts(verified: Verified) -> None:
    """Accept the drafts that are the tokens chosen before them, up to the first one of each sequence that is not.

    Args:
        verified: all contiguous; the numbers of accepted drafts, the slots after them and those of their replay are
            written.
    """
    tensors = verified.drafted, verified.chosen, verified.requests, verified.slots
    assert all(tensor.is_contiguous() for tensor in tensors)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    run(_accept_drafts, FLOAT, (*addresses, len(verified.requests), len(verified.drafted)), 1, 1, 1)


def begin_chains(verified: Verified, chains: Chains, page_size: int) -> None:
    """Write the numbers of chains after the tokens that are chosen after the drafts accepted.

    Args:
        verified: all contiguous; after `accept_drafts`.
        chains: the columns and the block table are written.
        page_size: tokens of a page.
    """
    _, chosen, positions, lengths, table, requests, _ = verified
    tensors = chosen, positions, lengths, table, requests, chains.columns, chains.block_table
    assert all(tensor.is_contiguous() for tensor in tensors)
    count, own_width = chains.block_table.shape
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    sizes = count, chains.columns.shape[1], table.shape[1], own_width, page_size
    run(_begin_chains, FLOAT, (*addresses, *sizes), 1, 1, 1)


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


class Rounds(NamedTuple):
    """What the numbers of a further pass with drafts are made of, L times at most: those of the pass before are
    replaced. R rows of N sequences, of which each has the rows of the first pass.

    Attributes:
        verified: the pass before.
        slots: `[R]` int64, where the keys and values of each row are written.
        read, write: `[R]` int64, the state slots of each row.
        followed: `[N, FOLLOWED]` int64: of each sequence the most drafts, the most tokens that it may have before one
            more is chosen, the tokens that it has, and the places in its source where its next drafts begin, and where
            that ends.
        sources: `[N, S]` int64, tokens that it may follow, where there are no chains.
        ends: `[N, E]` int64, tokens that nothing follows.
        control: `[2]` int64: the rounds so far, and `ENDED` or `LEFT` where there is no further one.
        log: `[L, 2 R + 2 N + 1 + M N]` int64: of each round the token of each row, and the one that was chosen after
            it; the number of drafts and of accepted ones of each sequence; how many tokens each chain has, and these.
        claims: `[L, M N]` fp32, of the tokens of chains.
    """

    verified: Verified
    slots: Tensor
    read: Tensor
    write: Tensor
    followed: Tensor
    sources: Tensor
    ends: Tensor
    control: Tensor
    log: Tensor
    claims: Tensor


def next_round(rounds: Rounds, chains: Chains | None, page_size: int, empty_state: int) -> None:
    """Keep what a pass has chosen, and write the numbers of the next one: over the tokens that were chosen last, and
    drafts: those of chains, or those that follow in a source.

    There is none (`ENDED`) where a sequence has ended, has no room for its drafts, or may end in them; and (`LEFT`)
    where a source has less than the most drafts, or no sequence has a draft.

    Args:
        rounds: all contiguous; after `accept_drafts`.
        chains: after the tokens that were chosen; None: there are none.
        page_size: tokens of a page.
        empty_state: the slot that rows read that are not needed.
    """
    run(_next_round, FLOAT, _arguments(rounds, chains, page_size, empty_state), 1, 1, 1)


def resume_rounds(rounds: Rounds, page_size: int, empty_state: int) -> None:
    """Write the numbers of the round after one that was `LEFT`, where `followed` and `sources` have others. With drafts
    or without, there is none (`ENDED`) where a sequence has no room for them, or may end in them.

    Args:
        rounds, page_size, empty_state: as for `next_round`.
    """
    run(_resume_rounds, FLOAT, _arguments(rounds, None, page_size, empty_state), 1, 1, 1)


def _arguments(rounds: Rounds, chains: Chains | None, page_size: int, empty_state: int) -> tuple[int, ...]:
    """The numbers of what is computed between two rounds."""
    drafted, chosen, positions, lengths, table, requests, _ = rounds.verified
    tensors = [drafted, chosen, positions, lengths, table, requests, *rounds[1:]]
    assert all(tensor.is_contiguous() for tensor in tensors)
    passes = len(chains.tokens) if chains is not None else 0
    found = (chains.tokens, chains.claims, chains.control) if chains is not None else (rounds.control,) * 3
    addresses = [tensor.data_ptr() for tensor in (*tensors, *found)]
    sizes = len(requests), len(drafted), table.shape[1], rounds.sources.shape[1], rounds.ends.shape[1], len(rounds.log)
    return *addresses, *sizes, passes, rounds.log.shape[1], page_size, empty_state
