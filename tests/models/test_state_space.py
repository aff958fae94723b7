"""Mamba-2's kernels against the rule written token by token, over poisoned slots."""

import pytest
import torch
from torch import Tensor

from hybrid.kernels.reference import state_space
from hybrid.models.bamba import BambaForCausalLM
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.spec import TokenTensor
from support.tensors import CPU, ints, rows_of, same_bits, starts_of

HEADS, DIM, GROUPS, STATE, CHUNK, SLOTS = 4, 6, 2, 5, 8, 12


def inputs(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    x, dt = torch.randn(tokens, HEADS, DIM, generator=dice), torch.rand(tokens, HEADS, generator=dice)
    b, c = (torch.randn(tokens, GROUPS, STATE, generator=dice) for _ in range(2))
    return x, dt, b, c, -torch.rand(HEADS, generator=dice)


def token_by_token(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    b, c = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (b, c))
    for t in range(len(x)):
        grown = (dt[t] * rate).exp()[:, None, None]
        state = state * grown + dt[t, :, None, None] * b[t, :, :, None] * x[t, :, None, :]
        outputs.append((c[t, :, None, :] @ state)[:, 0])
    return torch.stack(outputs), state


def poisoned() -> Tensor:
    states = torch.full((SLOTS, HEADS, STATE, DIM), float("nan"))
    states[0] = 0
    return states


@pytest.mark.parametrize("lengths", [[1], [CHUNK], [3 * CHUNK + 5], [5, 2 * CHUNK, 11]])
def test_chunks_give_what_the_rule_gives_token_by_token(lengths: list[int]) -> None:
    parts, states = inputs(sum(lengths)), poisoned()
    first = torch.randn(HEADS, STATE, DIM, generator=torch.Generator().manual_seed(9))
    states[1] = first
    writes = [2 + row for row in range(len(lengths))]
    captures = [(row, CHUNK, 8 + row) for row, length in enumerate(lengths) if length > CHUNK]
    output = state_space.chunk_state_space(
        *parts, states, starts_of(lengths), ints([1] * len(lengths)), ints(writes), rows_of(captures), CHUNK
    )
    start = 0
    for row, length in enumerate(lengths):
        own = [part[start : start + length] for part in parts[:4]]
        expected, last = token_by_token(first, *own, parts[4])
        torch.testing.assert_close(output[start : start + length], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[writes[row]], last, rtol=1e-4, atol=1e-5)
        for _, count, slot in (capture for capture in captures if capture[0] == row):
            state = token_by_token(first, *(part[:count] for part in own), parts[4])[1]
            torch.testing.assert_close(states[slot], state, rtol=1e-4, atol=1e-5)
        start += length
    assert same_bits(states[1], first)
    written = {1, *writes, *(slot for _, _, slot in captures)}
    assert all(bool(states[slot].isnan().all()) for slot in range(1, SLOTS) if slot not in written)


def test_a_step_goes_on_from_one_slot_and_writes_another() -> None:
    x, dt, b, c, rate = inputs(3)
    states = poisoned()
    states[1:4] = torch.randn(3, HEADS, STATE, DIM, generator=torch.Generator().manual_seed(9))
    before = states.clone()
    output = state_space.state_space_step(x, dt, b, c, rate, states, ints([1, 2, 1]), ints([5, 6, 7]))
    for row, read in enumerate([1, 2, 1]):
        own = [part[row : row + 1] for part in (x, dt, b, c)]
        expected, last = token_by_token(before[read], *own, rate)
        torch.testing.assert_close(output[row : row + 1], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[5 + row], last, rtol=1e-5, atol=1e-6)
    assert same_bits(states[:5], before[:5])


def test_another_kind_of_state_is_only_another_spec(tmp_path_factory: pytest.TempPathFactory) -> None:
    from hybrid.commands.random_checkpoints import write_random_checkpoint

    checkpoint = open_checkpoint(write_random_checkpoint(tmp_path_factory.mktemp("bamba"), "bamba"))
    model = load_model(checkpoint, torch.bfloat16, CPU, 64)
    assert isinstance(model, BambaForCausalLM)
    spec = model.spec(checkpoint.config, torch.bfloat16)
    recurrent, conv = spec.state
    assert spec.tokens == (TokenTensor.kv(1, 4, 16, torch.bfloat16),)
    assert (recurrent.shape, recurrent.dtype) == ((2, 8, 13, 16), torch.float32)
    assert (conv.shape, conv.dtype) == ((2, 2, 128 + 2 * 2 * 13), torch.bfloat16)
