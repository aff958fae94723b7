"""Attention over rings in state slots against attention written key by key, over poisoned slots."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybrid.batch import StateSteps
from hybrid.models.attention import decode_windows, window_attention
from support.tensors import ints, poisoned_states, rows_of, same_bits, starts_of, untouched

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

HEADS, KV_HEADS, DIM, CHUNK, SLOTS, SCALE = 4, 2, 6, 8, 14, 0.3
WINDOWS = [1, 3, CHUNK, 2 * CHUNK + 5]


@pytest.fixture(autouse=True, params=["auto", "reference"])
def _kernels(request: pytest.FixtureRequest, use_kernels: Callable[[str], None]) -> None:
    use_kernels(request.param)


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a sequence."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(count, HEADS, DIM, generator=rng)
    return q, *(torch.randn(count, KV_HEADS, DIM, generator=rng) for _ in range(2))


def key_by_key(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    outputs = torch.empty_like(q)
    for at in range(len(q)):
        seen = slice(max(0, at - window + 1), at + 1)
        for head in range(HEADS):
            of = head // (HEADS // KV_HEADS)
            weights = (k[seen, of] @ q[at, head] * SCALE).softmax(0)
            outputs[at, head] = weights @ v[seen, of]
    return outputs


def ring_after(k: Tensor, v: Tensor, count: int, window: int) -> Tensor:
    """The ring of a sequence's first `count` tokens."""
    ring = torch.zeros(2, window, KV_HEADS, DIM)
    for at in range(max(0, count - window), count):
        ring[0, at % window], ring[1, at % window] = k[at], v[at]
    return ring


def rings_of(window: int) -> Tensor:
    return poisoned_states(SLOTS, (2, window, KV_HEADS, DIM))


def run(
    parts: tuple[Tensor, Tensor, Tensor],
    rings: Tensor,
    spans: list[tuple[int, int, int, int]],
    captures: list[tuple[int, int, int]] | None = None,
) -> Tensor:
    """New tokens `[start, end)` of one sequence, for each (start, end, read, write) as a request."""
    packed = tuple(torch.cat([part[start:end] for start, end, *_ in spans]) for part in parts)
    q, k, v = packed
    starts = starts_of([end - start for start, end, *_ in spans])
    ends, reads, writes = (ints([span[at] for span in spans]) for at in (1, 2, 3))
    return window_attention(q, k, v, rings, starts, ends, reads, writes, rows_of(captures or []), SCALE, CHUNK)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("length", [1, CHUNK, 4 * CHUNK + 3])
def test_prompts_see_the_window_and_leave_its_ring(window: int, length: int) -> None:
    parts, rings = tokens(length), rings_of(window)
    before, captures = rings.clone(), [(0, CHUNK, 9)] if length > CHUNK else []
    y = run(parts, rings, [(0, length, 0, 2)], captures)
    torch.testing.assert_close(y, key_by_key(*parts, window), rtol=1e-5, atol=1e-5)
    assert same_bits(rings[2], ring_after(*parts[1:], length, window))
    for _, count, slot in captures:
        assert same_bits(rings[slot], ring_after(*parts[1:], count, window))
    assert untouched(before, rings, [2, *(slot for *_, slot in captures)])


@pytest.mark.parametrize("window", WINDOWS)
def test_a_prompt_may_be_cut_at_any_chunk(window: int) -> None:
    length = 5 * CHUNK + 1
    parts, rings = tokens(length), rings_of(window)
    whole = run(parts, rings, [(0, length, 0, 2)])
    for cut in range(CHUNK, length, CHUNK):
        first = run(parts, rings, [(0, cut, 0, 3)])
        rest = run(parts, rings, [(cut, length, 3, 3)])  # a request's own slot is read and written
        assert same_bits(torch.cat((first, rest)), whole)
        assert same_bits(rings[3], rings[2])


def test_requests_of_a_batch_do_not_see_each_other() -> None:
    parts, rings = tokens(3 * CHUNK), rings_of(5)
    alone = run(parts, rings, [(0, 2 * CHUNK, 0, 2)])
    spans = [(0, 2 * CHUNK, 0, 3), (2 * CHUNK, 3 * CHUNK, 2, 4), (0, 3, 0, 5)]
    y = run(parts, rings, spans, [(0, CHUNK, 6), (1, CHUNK, 7)])
    assert same_bits(y[: 2 * CHUNK], alone)
    assert same_bits(rings[3], rings[2])
    assert same_bits(rings[6], ring_after(*parts[1:], CHUNK, 5))
    assert same_bits(rings[7], rings[4])


def decode(parts: tuple[Tensor, ...], rings: Tensor, at: list[int], read: list[int], write: list[int]) -> Tensor:
    """Tokens of one sequence, each a request of its own."""
    q, k, v = (part[at] for part in parts)
    steps = StateSteps(starts_of([1] * len(at)), ints(read), ints(write))
    return decode_windows(q, k, v, ints(at), rings, steps, SCALE)


@pytest.mark.parametrize("window", WINDOWS)
def test_decoded_tokens_see_the_window_and_move_its_ring(window: int) -> None:
    length = 2 * window + 3
    parts, rings = tokens(length), rings_of(window)
    outputs = [decode(parts, rings, [at], [2 if at else 0], [2]) for at in range(length)]
    torch.testing.assert_close(torch.cat(outputs), key_by_key(*parts, window), rtol=1e-5, atol=1e-5)
    assert same_bits(rings[2], ring_after(*parts[1:], length, window))


def test_two_that_read_one_slot_leave_it_as_it_is() -> None:
    """The slot is read as forks do, and as a first step after a hit does."""
    window, parts, rings = 5, tokens(12), rings_of(5)
    rings[1] = ring_after(*parts[1:], 10, window)
    before = rings.clone()
    y = decode(parts, rings, [10, 10, 3], [1, 1, 0], [4, 5, 6])
    assert same_bits(y[0], y[1])
    assert same_bits(rings[4], ring_after(*parts[1:], 11, window))
    assert same_bits(rings[4], rings[5])
    assert untouched(before, rings, [4, 5, 6])


@pytest.mark.parametrize("window", [2, 5, 40])
def test_a_draft_has_the_bits_of_the_token_decoded_alone(window: int) -> None:
    """A run of drafts, then two paths that begin with the same token, which reads what the one before wrote."""
    parts, rings = tokens(30), rings_of(window)
    rings[1] = ring_after(*parts[1:], 20, window)
    rings[2] = rings[1]
    before = rings.clone()
    alone = torch.cat([decode(parts, rings, [at], [2], [2]) for at in range(20, 26)])
    at = [20, 21, 22, 21, 22, 23, 24, 25]
    q, k, v = (part[at] for part in parts)
    steps = StateSteps(starts_of([len(at)]), ints([1, -1, -1, 3, -1, -1, -1, -1]), ints([3, -1, -1, -1, -1, 8, -1, -1]))
    y = decode_windows(q, k, v, ints(at), rings, steps, SCALE)
    assert same_bits(y, alone[[position - 20 for position in at]])
    assert same_bits(rings[3], ring_after(*parts[1:], 21, window))
    assert same_bits(rings[8], ring_after(*parts[1:], 24, window))
    assert untouched(before, rings, [2, 3, 8])
