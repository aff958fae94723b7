"""The most likely tokens, and what a captured pass of a predictor begins with: hidden states."""

import pytest
import torch

from hybrid.kernels.cpu.drafts import (
    Chains,
    choose_drafts,
    continue_chains,
    most_likely,
)
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.kernels.cpu.memory import shift_rows, take_rows
from support.tensors import ints, same_bits

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

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


def test_rows_of_a_replay_that_are_left_out_change_nothing() -> None:
    """The rows are those before and after an accepted run, and of a request of which nothing is accepted."""
    x, state = torch.randn(5, 24), torch.randn(4, 24)
    expected = state.clone()
    expected[2] = x[2]
    reads, writes = [LEFT_OUT, 1, -1, LEFT_OUT, LEFT_OUT], [-1, -1, 2, -1, -1]
    output = shift_rows(x, state, torch.arange(6), torch.tensor(reads), torch.tensor(writes))
    assert same_bits(state, expected)
    assert same_bits(output[2], x[1])
