"""The most likely tokens, and what a captured pass of a predictor begins with: hidden states."""

import random

import pytest
import torch

from hybrid.kernels.cpu.drafts import (
    Chains,
    Rounds,
    Verified,
    accept_drafts,
    begin_chains,
    choose_drafts,
    continue_chains,
    most_likely,
    next_round,
    resume_rounds,
)
from hybrid.kernels.cpu.kinds import ENDED, LEFT, LEFT_OUT
from hybrid.kernels.cpu.memory import shift_rows, take_rows
from support.tensors import ints, same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
@pytest.mark.parametrize("vocab", [5, 16, 300, 1024])
def test_the_most_probable_tokens_and_their_probabilities_are_those_of_torch(vocab: int, dtype: torch.dtype) -> None:
    logits, hidden = 4 * torch.randn(3, vocab), torch.randn(3, 24).to(dtype)
    logits[1, 2] = logits[1, 4] = logits.max() + 1  # the first of equal ones
    logits[2, -1] = logits.max() + 1
    tokens, before, chances = torch.empty(3, dtype=torch.int64), torch.empty_like(hidden), torch.empty(3)
    choose_drafts(logits, hidden, tokens, before, chances)
    expected, likely = logits.softmax(-1).max(-1)
    assert tokens.tolist() == likely.tolist()
    torch.testing.assert_close(chances, expected, rtol=1e-5, atol=0)
    assert same_bits(before, hidden)


def test_a_logit_that_is_not_finite_is_no_probability() -> None:
    logits = torch.zeros(2, 32)
    logits[0, 3], logits[1, 7] = float("nan"), float("inf")
    tokens, chances = torch.empty(2, dtype=torch.int64), torch.empty(2)
    choose_drafts(logits, torch.zeros(2, 4), tokens, torch.empty(2, 4), chances)
    assert all(0 <= token < 32 for token in tokens.tolist())
    assert chances.isnan().all()


@DTYPES
def test_hidden_states_come_from_slots_or_are_there(dtype: torch.dtype) -> None:
    states, hidden = torch.randn(5, 2, 24).to(dtype)[:, 1], torch.randn(3, 24).to(dtype)
    expected = torch.stack([states[4], hidden[1], states[0]])
    take_rows(states, ints([4, -1, 0]).long(), hidden)
    assert same_bits(hidden, expected)


@pytest.mark.parametrize("vocab", [1, 5, 16, 300, 1024])
def test_the_most_likely_tokens_are_those_of_torch(vocab: int) -> None:
    logits = torch.randn(40, vocab + 3).round(decimals=1)[:, :vocab]  # many are equal
    assert most_likely(logits, -2).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 17, 33])
def test_a_row_that_is_not_finite_has_no_most_likely_token(bad: float, place: int) -> None:
    logits = torch.randn(3, 34)
    logits[1, place] = bad
    expected = logits.argmax(-1).tolist()
    assert most_likely(logits, -2).tolist() == [expected[0], -2, expected[2]]


def test_chains_continue_where_they_have_pages_and_are_worth_it() -> None:
    """Two sequences, pages of four tokens: the second one has no page for its tenth token."""
    tables, ends, believed = [[5, 2, 9], [3, 7, 6]], [12, 9], [[0.1, 0.9], [0.5, 0.8]]
    columns = [[11, 12], [6, 30], [-1, 4], [7, 8], [3, 1], ends]  # tokens, positions, slots, lengths, states
    chains = Chains(
        torch.tensor(columns),
        torch.tensor(tables),
        chances=torch.empty(2),
        beliefs=torch.tensor([0.3, 1.0, 1.0, *believed[0], *believed[1]]),
        control=torch.zeros(2, dtype=torch.int64),
        tokens=torch.zeros(3, 2, 1, dtype=torch.int64),
        claims=torch.zeros(3, 2, 1),
    )
    claimed = [[0.7, 0.2], [1.0, 0.9], [0.4, float("nan")]]
    slots = [[2 * 4 + 3, 6 * 4], [9 * 4, -1], [9 * 4 + 1, -1]]
    for at, (chances, own_slots) in enumerate(zip(claimed, slots, strict=True), 1):
        chains.chances.copy_(torch.tensor(chances))
        chains.columns[0] = torch.tensor([100 + at, 200 + at])
        continue_chains(chains, 4)
        assert chains.columns.tolist() == [
            [100 + at, 200 + at],
            [6 + at, 30 + at],
            own_slots,
            [7 + at, min(8 + at, 9)],
            [-1, -1],
            ends,
        ]
        assert chains.control.tolist() == [at, int(at == 3)]  # 0.9, 0.81, 0.081; 0.5, 0.4, nothing
    assert chains.tokens[:3, :, 0].tolist() == [[101, 201], [102, 202], [103, 203]]
    torch.testing.assert_close(chains.claims[:3, :, 0], torch.tensor(claimed), equal_nan=True)
    torch.testing.assert_close(chains.beliefs[1:3], torch.tensor([0.081, 0.0]))
    chains.columns[0] = torch.tensor([104, 204])
    continue_chains(chains, 4)  # there is no place for a fourth pass
    assert chains.tokens[:, :, 0].tolist() == [[101, 201], [102, 202], [104, 204]]


def test_drafts_are_accepted_up_to_the_first_that_is_another_token() -> None:
    """Four sequences, pages of four tokens: none of two drafts is right; two of three, beyond a boundary after the
    first one; one without a draft, of which nothing is chosen; both of two, before a boundary and after the last
    page."""
    tables, ends = [[5, 2, 9], [3, 7, 6], [1, 0, 0], [8, 4, 0]], [12, 12, 4, 8]
    nothing = (torch.zeros(0),) * 2 + (torch.zeros(0, dtype=torch.int64),) * 3
    chains = Chains(torch.full((6, 4), 77), torch.full((4, 4), 77), *nothing)
    counts, starts = [3, 4, 1, 3], [7, 6, 3, 6]
    requests = [[0, 2, 10, 0, -1], [3, 3, 11, 21, 1], [7, 0, 12, 0, -1], [8, 2, 13, 23, 2]]
    lengths = [start + at for start, count in zip(starts, counts, strict=True) for at in range(count)]
    verified = Verified(
        torch.tensor([50, 51, 52, 60, 61, 62, 63, 70, 80, 81, 82]),
        torch.tensor([99, 52, 53, 61, 62, 90, 91, -2, 81, 82, 83]),
        torch.tensor([length + 99 for length in lengths]),
        torch.tensor(lengths),
        torch.tensor([table for table, count in zip(tables, counts, strict=True) for _ in range(count)]),
        torch.tensor([[*own, end, 77, 77] for own, end in zip(requests, ends, strict=True)]),
        torch.full((2, 11), 77),
    )
    accept_drafts(verified)
    assert verified.requests[:, -2:].tolist() == [[0, 10], [2, 21], [0, 12], [2, 13]]
    left = LEFT_OUT
    assert verified.slots.tolist() == [
        [left, left, left, left, 11, -1, left, left, left, 13, -1],
        [-1, -1, -1, -1, 11, 21, -1, -1, -1, -1, 13],
    ]
    begin_chains(verified, chains, 4)
    assert chains.columns.tolist() == [
        [99, 90, 0, 83],
        [107, 108, 103, 108],
        [2 * 4 + 3, 6 * 4, 1 * 4 + 3, -1],
        [8, 9, 4, 8],
        [10, 21, 12, 13],
        ends,
    ]
    assert chains.block_table.tolist() == [[*table, 0] for table in tables]


def test_rows_of_a_replay_that_are_left_out_change_nothing() -> None:
    """Those before and after an accepted run, and of a request of which nothing is accepted."""
    x, state = torch.randn(5, 24), torch.randn(4, 24)
    expected = state.clone()
    expected[2] = x[2]
    reads, writes = [LEFT_OUT, 1, -1, LEFT_OUT, LEFT_OUT], [-1, -1, 2, -1, -1]
    output = shift_rows(x, state, torch.arange(6), torch.tensor(reads), torch.tensor(writes))
    assert same_bits(state, expected)
    assert same_bits(output[2], x[1])


@pytest.mark.parametrize("with_chains", [True, False], ids=["chains", "sources"])
@pytest.mark.parametrize("seed", range(40))
def test_the_numbers_of_the_next_round_are_those_of_a_step_after_it(with_chains: bool, seed: int) -> None:
    """Compared with what a step would be planned with; and what the round has chosen is kept."""
    rng, page_size, empty, most_passes = random.Random(seed), 4, 33, 3
    count = rng.randint(1, 3)
    most = [rng.randint(0, 3) for _ in range(count)]
    starts = [sum(most[:at]) + at for at in range(count)]
    rows, known = sum(most) + count, [rng.randint(5, 9) for _ in range(count)]
    drafts = [own if with_chains or rng.random() < 0.5 else rng.randint(0, own) for own in most]
    tables = [rng.sample(range(1, 40), 6) for _ in range(count)]
    vocab = 6 if rng.random() < 0.5 else 2
    sources = [[rng.randrange(vocab) for _ in range(rng.choice([0, 5, 8]))] for _ in range(count)]
    drafts = [min(own, len(source)) if not with_chains else own for own, source in zip(drafts, sources, strict=True)]
    tokens, chosen = [rng.randrange(vocab) for _ in range(rows)], [rng.randrange(vocab) for _ in range(rows)]
    if rng.random() < 0.2:
        chosen[rng.randrange(rows)] = -2
    for start, own, source in zip(starts, drafts, sources, strict=True):
        if not with_chains:
            tokens[start + 1 : start + 1 + own] = source[:own]
    rights = []
    for start, own in zip(starts, drafts, strict=True):
        right = 0
        while right < own and chosen[start + right] == tokens[start + 1 + right]:
            right += 1
        rights.append(right)
    untils, ends = (
        [length + rng.randint(0, 6) for length in known],
        [[rng.choice([-1, vocab]), 1] for _ in range(count)],
    )
    if rng.random() < 0.7:
        untils, ends = [99] * count, [[-1, -1]] * count
    chain = torch.randint(0, vocab, (most_passes, count, 1))
    found = rng.randint(1, most_passes)
    requests = [[starts[at], drafts[at], 10 + at, 20, 1, 24, rights[at], 20] for at in range(count)]
    lengths = [known[at] + row for at in range(count) for row in range(most[at] + 1)]
    table = [tables[at] for at in range(count) for _ in range(most[at] + 1)]
    verified = Verified(
        *map(torch.tensor, (tokens, chosen, [length + 99 for length in lengths], lengths, table, requests)),
        torch.zeros(2, rows, dtype=torch.int64),
    )
    width = 2 * rows + 2 * count + 1 + most_passes * count * with_chains
    rounds = Rounds(
        verified,
        *(torch.full((rows,), 77) for _ in range(3)),
        torch.tensor([[most[at], untils[at], known[at], 0, len(sources[at])] for at in range(count)]),
        torch.tensor([source + [0] * (8 - len(source)) for source in sources]),
        torch.tensor(ends),
        torch.zeros(2, dtype=torch.int64),
        torch.full((3, width), 77),
        torch.zeros(3, most_passes * count * with_chains),
    )
    nothing = torch.zeros(0)
    claims = torch.rand(most_passes, count, 1)
    chains = Chains(nothing, nothing, nothing, nothing, torch.tensor([found, 0]), chain, claims)
    next_round(rounds, chains if with_chains else None, page_size, empty)

    is_over = is_left = False
    next_drafts = list[list[int]]()
    for at in range(count):
        token, source = chosen[starts[at] + rights[at]], sources[at]
        length = known[at] + rights[at] + 1
        left = source[rights[at] + 1 :] if source[rights[at] : rights[at] + 1] == [token] else []
        own = (chain[:found, at, 0].tolist() if with_chains else left)[: most[at]]
        is_over |= token < 0 or token in ends[at] or length + len(own) > untils[at] or bool({*own} & {*ends[at]})
        is_left |= not with_chains and len(own) < most[at]
        next_drafts.append(own)
    stop = ENDED if is_over else LEFT if is_left or not any(next_drafts) else 0
    assert rounds.control.tolist() == [1, stop]
    kept = [number for pair in zip(tokens, chosen, strict=True) for number in pair]
    kept += [number for pair in zip(drafts, rights, strict=True) for number in pair] + [found * with_chains]
    assert rounds.log[0, : len(kept)].tolist() == kept
    if with_chains:
        assert rounds.log[0, len(kept) :][: found * count].tolist() == chain[:found].flatten().tolist()
        assert rounds.claims[0, : found * count].tolist() == claims[:found].flatten().tolist()
    if stop == LEFT and not with_chains:  # other sources are found
        sources = [[rng.randrange(vocab) for _ in range(rng.choice([0, 1, 8]))] for _ in range(count)]
        rounds.sources.copy_(torch.tensor([source + [0] * (8 - len(source)) for source in sources]))
        rounds.followed[:, 3:] = torch.tensor([[0, len(source)] for source in sources])
        resume_rounds(rounds, page_size, empty)
        next_drafts = [source[:own] for source, own in zip(sources, most, strict=True)]
        is_over = False
        for at, own in enumerate(next_drafts):
            is_over |= known[at] + rights[at] + 1 + len(own) > untils[at] or bool({*own} & {*ends[at]})
        stop = ENDED if is_over else 0
        assert rounds.control.tolist() == [1, stop]
    if stop:
        return
    for at, own in enumerate(next_drafts):
        place, slot_of = slice(starts[at], starts[at] + most[at] + 1), tables[at]
        length, idle = known[at] + rights[at] + 1, most[at] - len(own)
        span = range(length - 1, length + len(own))
        assert verified.drafted[place].tolist() == [chosen[starts[at] + rights[at]], *own, *[0] * idle]
        assert verified.positions[place].tolist() == [*(each + 100 for each in span), *[0] * idle]
        assert verified.lengths[place].tolist() == [*(each + 1 for each in span), *[1] * idle]
        slots = [slot_of[each // page_size] * page_size + each % page_size for each in span]
        assert rounds.slots[place].tolist() == [*slots, *[-1] * idle]
        assert rounds.read[place].tolist() == [10 + at, *[-1] * len(own), *[empty] * idle]
        assert rounds.write[place].tolist() == [10 + at, *[-1] * most[at]]
        assert verified.requests[at].tolist() == [starts[at], len(own), 10 + at, -1, -1, 24, 0, 0]
