"""The compiled operations of Mamba-2's layers, held to their twins or fp64, and to the promise that what a request or
a token gets depends on it alone: not on its place, its neighbours or the number of threads.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybrid.kernels.cpu import state_space
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.kernels.reference import state_space as twins
from support.tensors import ints, rows_of, same_bits, starts_of

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(4, 2, 5, 6), (8, 1, 16, 64), (3, 3, 33, 83)]
"""(heads, groups, state size, head size)."""
CHUNK, SLOTS = 8, 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has work of any size shared among threads."""
    monkeypatch.setattr(state_space, "MIN_SHARED", 1)
    monkeypatch.setattr(state_space, "MIN_SHARED_ROWS", 1)
    monkeypatch.setattr("hybrid.kernels.cpu.convolution.MIN_SHARED", 1)


class Rule(NamedTuple):
    """The tokens of the rule, as parts of wider rows."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor

    def __getitem__(self, rows: slice | list[int]) -> "Rule":  # type: ignore[override]
        return Rule(*(part[rows] for part in (self.x, self.dt, self.b, self.c)))


def rule_of(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Rule, Tensor, Tensor]:
    """Tokens, rates, and a layer's states, of which the first is empty and those from 8 on are NaN."""
    heads, groups, size, dim = sizes
    shared = groups * size
    mixed = torch.randn(tokens, 3 + heads * dim + 2 * shared).to(dtype)[:, 3:]
    x, b, c = mixed.split((heads * dim, shared, shared), dim=-1)
    b, c = (part.unflatten(-1, (groups, size)) for part in (b, c))
    states = torch.randn(SLOTS, 2, heads, size, dim)[:, 1]
    states[0], states[8:] = 0, math.nan
    return Rule(x.unflatten(-1, (heads, dim)), torch.rand(tokens, heads), b, c), -torch.rand(heads), states


def like(states: Tensor) -> Tensor:
    """A copy whose slots lie as far apart."""
    whole = states._base
    assert whole is not None
    return whole.clone().as_strided(states.shape, states.stride(), states.storage_offset())


def scan(
    rule: Rule,
    rate: Tensor,
    states: Tensor,
    lengths: Sequence[int],
    reads: Sequence[int],
    writes: Sequence[int],
    captures: Sequence[tuple[int, int, int]] = (),
) -> Tensor:
    where = starts_of(lengths), ints(reads), ints(writes), rows_of(captures)
    return state_space.chunk_state_space(*vars_of(rule), rate, states, *where, CHUNK)


def vars_of(rule: Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rule.x, rule.dt, rule.b, rule.c


def step(rule: Rule, rate: Tensor, states: Tensor, reads: Sequence[int], writes: Sequence[int]) -> Tensor:
    return state_space.state_space_step(*vars_of(rule), rate, states, ints(reads), ints(writes))


LENGTHS, READS, WRITES = [3, 3 * CHUNK + 5, 2 * CHUNK, 1], [1, 0, 1, 2], [8, 9, -1, 2]
CAPTURES = [(1, CHUNK, 10), (2, 2 * CHUNK, 11), (1, 3 * CHUNK, 12), (-1, 0, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_prompts_agree_with_the_twin(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rule, rate, states = rule_of(sum(LENGTHS), sizes, dtype)
    expected = like(states)
    output = scan(rule, rate, states, LENGTHS, READS, WRITES, CAPTURES)
    where = starts_of(LENGTHS), ints(READS), ints(WRITES), rows_of(CAPTURES)
    truth = twins.chunk_state_space(*vars_of(rule), rate, expected, *where, CHUNK)
    torch.testing.assert_close(output, truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    unwritten = [slot for slot in range(SLOTS) if slot not in (2, 8, 9, 10, 11, 12)]
    assert same_bits(states[unwritten], expected[unwritten])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.usefixtures("shared")
def test_prompts_are_by_themselves(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    rule, rate, states = rule_of(sum(LENGTHS), sizes, dtype)
    before, starts = like(states), starts_of(LENGTHS).tolist()
    threads(1)
    output = scan(rule, rate, states, LENGTHS, READS, WRITES, CAPTURES)
    threads(2)
    others = like(before)
    assert same_bits(scan(rule, rate, others, LENGTHS, READS, WRITES, CAPTURES), output)
    assert same_bits(others, states)
    for row in range(len(LENGTHS)):  # alone
        own, others = slice(starts[row], starts[row + 1]), like(before)
        assert same_bits(scan(rule[own], rate, others, [LENGTHS[row]], [READS[row]], [14]), output[own])
        assert WRITES[row] < 0 or same_bits(others[14], states[WRITES[row]])
    turned = [2, 0, 1]  # in another order
    rows = [token for row in turned for token in range(starts[row], starts[row + 1])]
    lengths, reads, writes = ([numbers[row] for row in turned] for numbers in (LENGTHS, READS, WRITES))
    others = like(before)
    assert same_bits(scan(rule[rows], rate, others, lengths, reads, writes), output[rows])
    assert same_bits(others[8:10], states[8:10])
    for cut in (CHUNK, 2 * CHUNK, 3 * CHUNK):  # in two calls
        first, rest = slice(starts[1], starts[1] + cut), slice(starts[1] + cut, starts[2])
        others = like(before)
        parts = scan(rule[first], rate, others, [cut], [0], [13]), scan(rule[rest], rate, others, [29 - cut], [13], [9])
        assert same_bits(torch.cat(parts), output[starts[1] : starts[2]])
        assert same_bits(others[9], states[9])
    assert same_bits(scan(rule[:2], rate, like(before), [2], [1], [-1]), output[:2])  # of a shorter prompt


CHAINS = [1, -1, -1, 2, 1, 0, -1, 4], [8, -1, 9, 2, -1, 10, 11, 4]
"""What tokens read and write: some continue from the one before."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.usefixtures("shared")
def test_decoded_tokens_agree_with_the_twin_and_are_by_themselves(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    reads, writes = CHAINS
    rule, rate, states = rule_of(len(reads), sizes, dtype)
    before, expected = like(states), like(states)
    threads(1)
    output = step(rule, rate, states, reads, writes)
    truth = twins.state_space_step(*vars_of(rule), rate, expected, ints(reads), ints(writes))
    torch.testing.assert_close(output, truth, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    threads(2)
    others = like(before)
    assert same_bits(step(rule, rate, others, reads, writes), output)
    assert same_bits(others, states)
    single, others = [], like(before)
    for token, (read, write) in enumerate(zip(reads, writes, strict=True)):  # one call each
        source, target = read if read >= 0 else 15, write if write >= 0 else 14
        single.append(step(rule[token : token + 1], rate, others, [source], [target]))
        others[15] = others[target]
    assert same_bits(torch.cat(single), output)
    assert same_bits(others[:14], states[:14])
    others, rows = like(before), [5, 6, 7, 3, 0, 1, 2]  # in another order, one of them left out
    own = [LEFT_OUT if row == 3 else reads[row] for row in rows]
    turned = step(rule[rows], rate, others, own, [writes[row] for row in rows])
    computed = [place for place, row in enumerate(rows) if row != 3]
    assert same_bits(turned[computed], output[[row for row in rows if row != 3]])
    assert same_bits(others[8:], states[8:]) and same_bits(others[2], before[2])


# The convolution


def windows_of(channels: int, width: int, dtype: torch.dtype) -> Tensor:
    """A layer's windows, of which the first is empty and those from 8 on are NaN."""
    windows = torch.randn(SLOTS, 2, width - 1, channels).to(dtype)
    windows[0], windows[8:] = 0, math.nan
    return windows[:, 1]


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), [(40, 4), (21, 2), (600, 3)])
@pytest.mark.usefixtures("shared")
def test_the_convolution_agrees_with_the_twin_and_is_by_itself(
    channels: int, width: int, dtype: torch.dtype, has_bias: bool, threads: Callable[[int], None]
) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    x, weight = torch.randn(40, channels + 5).to(dtype)[:, 5:], torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    windows = windows_of(channels, width, dtype)
    before, expected = like(windows), like(windows)
    lengths, reads, writes, captures = [1, 30, 9], [1, 0, 2], [8, 9, -1], [(1, CHUNK, 10), (2, 1, 11), (-1, 0, 0)]
    where = starts_of(lengths), ints(reads), ints(writes), rows_of(captures)
    threads(1)
    output = state_space.causal_conv1d(x, weight, windows, *where, bias)
    truth = twins.causal_conv1d(x, weight, expected, *where, bias)
    torch.testing.assert_close(output, truth, rtol=tolerance, atol=tolerance)
    assert same_bits(windows, expected)
    threads(2)
    others = like(before)
    assert same_bits(state_space.causal_conv1d(x, weight, others, *where, bias), output)
    alone = starts_of([30]), ints([0]), ints([9]), rows_of([])
    assert same_bits(state_space.causal_conv1d(x[1:31], weight, others, *alone, bias), output[1:31])
    reads, writes = [1, 0, *[-1] * 29, 2, *[-1] * 8], [8, *[-1] * 7, 10, *[-1] * 21, 9, 11, *[-1] * 8]
    others = like(before)
    tokens = state_space.causal_conv1d_update(x, weight, others, ints(reads), ints(writes), bias)
    assert same_bits(tokens, output)  # one after another they get what the prompt gets
    assert same_bits(others, windows)
    threads(1)
    reads, writes = CHAINS
    own, others, expected = x[: len(reads)], like(before), like(before)
    tokens = state_space.causal_conv1d_update(own, weight, others, ints(reads), ints(writes), bias)
    truth = twins.causal_conv1d_update(own, weight, expected, ints(reads), ints(writes), bias)
    torch.testing.assert_close(tokens, truth, rtol=tolerance, atol=tolerance)
    assert same_bits(others, expected)


# Rows


def close(ours: Tensor, exact: Tensor, roundings: float = 4) -> None:
    """Equal up to so many roundings to the type of `ours`."""
    step = roundings * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("shared")
def test_time_steps_agree_with_fp64(dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    dt, bias = (10 * torch.randn(37, 19)).to(dtype)[:, 2:], torch.randn(17).to(dtype)
    dt[0, :5] = torch.tensor([30.0, -100.0, math.inf, -math.inf, 0.0])
    threads(1)
    for limits in ((0.0, math.inf), (0.01, 5.0)):
        y = state_space.time_steps(dt, bias, limits)
        sums = (dt.float() + bias.float()).double()
        exact = torch.where(sums > 20, sums, sums.exp().log1p()).clamp(*limits)
        close(y, exact)
        torch.testing.assert_close(y, twins.time_steps(dt, bias, limits))
        assert same_bits(torch.cat([state_space.time_steps(row, bias, limits) for row in dt.split(1)]), y)
        threads(2)
        assert same_bits(state_space.time_steps(dt, bias, limits), y)
    assert state_space.time_steps(dt * math.nan, bias, (0.01, 5.0)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "size"), [(1, 40), (2, 16), (3, 37)])
@pytest.mark.usefixtures("shared")
def test_skips_and_norms_agree_with_fp64(
    groups: int, size: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    width = groups * size
    x, gate = torch.randn(21, width), torch.randn(21, width + 3).to(dtype)[:, 3:]
    weight = torch.randn(width).to(dtype)
    threads(1)
    y = state_space.grouped_gated_norm(x, gate, weight, groups, 1e-5)
    assert y.dtype == dtype
    z = gate.double()
    parts = (x.double() * z * z.sigmoid()).unflatten(-1, (groups, -1))
    exact = parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(y, exact.flatten(1) * weight.double())
    rows = zip(x.split(1), gate.split(1), strict=True)
    assert same_bits(torch.cat([state_space.grouped_gated_norm(*row, weight, groups, 1e-5) for row in rows]), y)
    inner, d = gate.unflatten(-1, (groups, size)), torch.randn(groups).to(dtype)
    total = state_space.add_skip(x.unflatten(-1, (groups, size)), inner, d)
    close(total, x.unflatten(-1, (groups, size)).double() + d.double()[:, None] * inner.double())
    threads(2)
    assert same_bits(state_space.grouped_gated_norm(x, gate, weight, groups, 1e-5), y)
    assert same_bits(state_space.add_skip(x.unflatten(-1, (groups, size)), inner, d), total)


def test_other_types_are_refused() -> None:
    rule, rate, states = rule_of(9, SIZES[0], torch.float16)
    with pytest.raises(TypeError, match="state_space is compiled for float32 and bfloat16"):
        scan(rule, rate, states, [9], [1], [8])
