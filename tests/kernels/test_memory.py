"""The kernels that only move memory: what they write is exact, and nothing else changes by a bit."""

import pytest
import torch
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.cpu import memory as cpu_memory
from hybrid.kernels.triton import memory
from support.tensors import ints, poisoned_pages, same_bits, starts_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("page_size", "kv_heads", "head_dim"), [(16, 2, 8), (24, 3, 24), (64, 1, 256)])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_store_kv_writes_its_slots_and_nothing_else(
    kind: torch.dtype, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    pages = poisoned_pages(5, page_size, kv_heads, head_dim, dtype)
    pool = pages._base
    assert pool is not None
    pool = pool.to(DEVICE)
    layers = pool.view(5, 3, 2, page_size, kv_heads, head_dim)
    expected = pool.clone()
    slots = torch.randperm(5 * page_size)[:20]
    slots[::3] = -1
    both = torch.randn(20, kv_heads, 2, head_dim).to(DEVICE, dtype)  # as a projection that makes both would leave them
    key, value = both[:, :, 0], both[:, :, 1]
    memory.store_kv(key, value, layers[:, 1], slots.to(DEVICE, kind))
    reference.store_kv(key, value, expected.view(layers.shape)[:, 1], slots.to(DEVICE))
    assert same_bits(pool, expected)


def test_store_kv_takes_any_strides() -> None:
    cache = torch.full((2, 3, 4, 2, 8), float("nan")).permute(4, 3, 2, 1, 0)  # [8, 2, 4, 3, 2]
    cache = cache.to(DEVICE)
    expected = cache.clone()
    key, value = (torch.randn(2, 3, 6).to(DEVICE).permute(2, 1, 0) for _ in range(2))
    slots = ints([0, 5, -1, 31, 7, 2]).to(DEVICE)
    memory.store_kv(key, value, cache, slots)
    reference.store_kv(key, value, expected, slots)
    assert same_bits(cache, expected)


def test_store_kv_of_nothing_does_nothing() -> None:
    cache = torch.full((2, 2, 4, 1, 8), float("nan"), device=DEVICE)
    before = cache.clone()
    memory.store_kv(cache[0, 0, :0], cache[0, 0, :0], cache, ints([]).to(DEVICE))
    memory.store_kv(cache[0, 0, :2] * 0, cache[0, 0, :2] * 0, cache, ints([-1, -1]).to(DEVICE))
    assert same_bits(cache, before)


def pool_of(num_rows: int, num_bytes: int, row_stride: int, start: int) -> tuple[Tensor, Tensor]:
    """A buffer of random bytes, and rows within it."""
    buffer = torch.randint(256, (start + num_rows * row_stride + 3,), dtype=torch.uint8, device=DEVICE)
    return buffer, buffer[start:].as_strided((num_rows, num_bytes), (row_stride, 1))


@pytest.mark.parametrize(
    ("num_bytes", "row_stride", "start", "word"),
    [
        (4096, 4096, 0, 8),
        (40000, 65536, 64, 8),
        (24, 40, 8, 8),
        (100, 104, 0, 4),
        (96, 96, 4, 4),
        (50, 50, 0, 2),
        (51, 64, 0, 1),
        (64, 64, 1, 1),
    ],
)
def test_copy_states_copies_whole_rows_and_nothing_else(num_bytes: int, row_stride: int, start: int, word: int) -> None:
    buffer, rows = pool_of(9, num_bytes, row_stride, start)
    assert memory._as_words(rows).element_size() == word
    before = buffer.clone()
    expected = before[start:].as_strided(rows.shape, rows.stride())
    source, target = ints([3, 3, 8, 0]).to(DEVICE), ints([1, 7, 2, 4]).to(DEVICE)
    memory.copy_states(rows, source, target)
    reference.copy_states(expected, source, target)
    assert same_bits(buffer, before)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_copy_states_copies_views_of_any_type(kind: torch.dtype) -> None:
    states = torch.randn(6, 2, 5, 8, device=DEVICE)
    states[4] = float("nan")
    expected = states.clone()
    expected[1] = expected[4]
    rows = states.view(6, -1).view(torch.uint8)
    memory.copy_states(rows, torch.tensor([4], dtype=kind, device=DEVICE), torch.tensor([1], dtype=kind, device=DEVICE))
    assert same_bits(states, expected)


def test_copy_states_of_nothing_does_nothing() -> None:
    buffer, rows = pool_of(3, 64, 64, 0)
    before = buffer.clone()
    memory.copy_states(rows, ints([]).to(DEVICE), ints([]).to(DEVICE))
    memory.copy_states(rows[:, :0], ints([1]).to(DEVICE), ints([2]).to(DEVICE))
    assert same_bits(buffer, before)


def test_copy_states_takes_bytes_only() -> None:
    with pytest.raises(ValueError, match="view them as bytes first"):
        memory.copy_states(torch.zeros(3, 4, device=DEVICE), ints([0]), ints([1]))
    with pytest.raises(ValueError, match="contiguous rows"):
        memory.copy_states(torch.zeros(4, 3, dtype=torch.uint8, device=DEVICE).T, ints([0]), ints([1]))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU with 6 GiB to spare")
def test_rows_beyond_two_to_the_31_elements_are_reached() -> None:
    rows = torch.zeros(6, 2**30, dtype=torch.uint8, device=DEVICE)
    rows[0] = 7
    memory.copy_states(rows, ints([0]).to(DEVICE), ints([5]).to(DEVICE))
    assert rows[5].eq(7).all()
    assert rows[1:5].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [7, 1100])
def test_shift_rows_gives_the_row_before_each_token(size: int, dtype: torch.dtype) -> None:
    """A chain, two paths that continue from what the first token left, one that keeps nothing, and a padding row."""
    read = [3, -1, -1, 4, -1, 5, -1, 2, 0]
    write = [3, -1, 6, 5, -1, -1, -1, -1, -1]
    starts, reads, writes = starts_of([3, 4, 1, 1]), ints(read), ints(write)
    x = torch.randn(9, 2 * size).to(dtype)[:, :size]
    slots = torch.full((8, 3, size), float("nan"), dtype=dtype)
    slots[:6] = torch.randn(6, 3, size).to(dtype)
    expected, state = torch.empty(9, size, dtype=dtype), slots[:, 1].clone()
    for row, (source, target) in enumerate(zip(read, write, strict=True)):
        expected[row] = state[source] if source >= 0 else x[row - 1]
        if target >= 0:
            state[target] = x[row]
    modules = (reference, memory) if x.dtype == torch.float16 else (reference, cpu_memory, memory)
    for module in modules:
        place = DEVICE if module is memory else "cpu"
        pool = slots.to(place, copy=True)
        own = module.shift_rows(x.to(place), pool[:, 1], *(each.to(place) for each in (starts, reads, writes)))
        assert same_bits(own.cpu(), expected)
        assert same_bits(pool[:, 1].cpu(), state)
        assert same_bits(pool[:, ::2].cpu(), slots[:, ::2])


@pytest.mark.parametrize("count", [1, 5, 32, 70])
def test_fill_in_tokens_writes_tokens_or_makes_padding_of_their_rows(count: int) -> None:
    tokens = torch.randperm(100)[: 2 * count] - 25  # some are negative: there is no token
    rows = torch.randperm(len(tokens))[:count]
    places = torch.randperm(6 * count + 3)[: 4 * count].view(count, 4)
    numbers = torch.randint(1 << 40, (6 * count + 3,))
    whole = torch.cat((numbers, torch.cat((rows[:, None], places), 1).flatten())).to(DEVICE)  # links lie behind numbers
    links = whole[len(numbers) :].view(count, 5)
    expected = numbers.clone()
    for row, (token, slot, length, state) in zip(rows.tolist(), places.tolist(), strict=True):
        expected[token] = max(int(tokens[row]), 0)
        if tokens[row] < 0:
            expected[slot], expected[length], expected[state] = -1, 0, -1
    for fill_in in (memory.fill_in_tokens, reference.fill_in_tokens):
        own = whole.clone()
        fill_in(own, tokens.to(DEVICE), own[len(numbers) :].view(count, 5))
        assert same_bits(own[: len(numbers)].cpu(), expected)
        assert same_bits(own[len(numbers) :].view(count, 5), links)
