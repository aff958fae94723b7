"""The most likely tokens, and what a captured pass of a predictor begins with: hidden states."""

import pytest
import torch

from hybrid.kernels.cpu.drafts import choose_drafts, most_likely
from hybrid.kernels.cpu.memory import take_rows
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
