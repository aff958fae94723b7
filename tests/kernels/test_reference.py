"""The kernels in plain torch: pages and attention, the causal convolution, and functions of single elements.

The gated delta rule has a file of its own. Memory that a kernel must not read is full of NaN here, and memory that it
must not write is compared bit by bit. Page tables are random permutations.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import reference as kernels
from support.tensors import ints, poisoned_pages, poisoned_states, rows_of, same_bits, starts_of, untouched

CHUNK = 16
RAGGED = [
    (0, 1),
    (0, CHUNK - 1),
    (0, CHUNK),
    (0, CHUNK + 1),
    (CHUNK, 1),
    (3 * CHUNK, 2 * CHUNK + 5),
    (37, 20),
    (100, 1),
    (64, 64),
]
"""(tokens cached, tokens that come) of the requests of a ragged batch."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Functions of single elements


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_elementwise_functions_agree_with_those_of_torch(name: str) -> None:
    x = torch.cat(
        (torch.randn(1000) * 10, torch.linspace(-120, 120, 999), torch.tensor([0.0, -0.0, 20.0, 20.001, 1e30, -1e30]))
    )
    ours, theirs = getattr(kernels, name)(x), getattr(F, name)(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_element_gives_the_same_bits_wherever_it_stands(name: str, dtype: torch.dtype) -> None:
    function = getattr(kernels, name)
    x = (torch.randn(203) * 8).to(dtype)
    whole = function(x)
    assert whole.dtype == dtype
    for start in range(34):
        for end in (start + 1, start + 7, start + 8, start + 15, start + 33, 203):
            assert same_bits(function(x[start:end].clone()), whole[start:end])
            assert same_bits(function(x[start:end]), whole[start:end])
    strided = torch.stack((x, torch.zeros_like(x)), dim=1)
    assert same_bits(function(strided[:, 0]), whole)
    assert same_bits(function(strided)[:, 0], whole)


@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_elementwise_functions_leave_their_input_alone(name: str) -> None:
    x = torch.linspace(-50, 50, 101)
    before = x.clone()
    getattr(kernels, name)(x)
    assert same_bits(x, before)


def test_l2norm_gives_rows_of_unit_length_and_keeps_zeros() -> None:
    x = torch.randn(50, 3, 24, dtype=torch.float64)
    torch.testing.assert_close(
        kernels.l2norm(x).norm(dim=-1), torch.ones(50, 3, dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert kernels.l2norm(torch.zeros(2, 24)).eq(0).all()


# Pages


class Paged:
    """A ragged batch over poisoned pages: new tokens of each request at the end of its sequence, all K and V stored.

    Args:
        requests: (tokens cached, tokens that come) of each.
        chunk: queries are taken in chunks of so many.
    """

    def __init__(
        self,
        requests: list[tuple[int, int]],
        page_size: int,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 24,
        dtype: torch.dtype = torch.float32,
        chunk: int = CHUNK,
    ) -> None:
        self.requests, self.scale, self.chunk = requests, head_dim**-0.5, chunk
        total = [cached + new for cached, new in requests]
        self.query = [torch.randn(new, heads, head_dim).to(dtype) for _, new in requests]
        self.key = [torch.randn(length, kv_heads, head_dim).to(dtype) for length in total]
        self.value = [torch.randn(length, kv_heads, head_dim).to(dtype) for length in total]
        needed = [-(-length // page_size) for length in total]
        self.pages = poisoned_pages(sum(needed) + 5, page_size, kv_heads, head_dim, dtype)
        order = torch.randperm(sum(needed) + 5).tolist()
        self.table = torch.full(
            (len(requests), max(needed) + 2), order.pop()
        )  # beyond a request's pages: a poisoned one
        for row, length in enumerate(total):
            self.table[row, : needed[row]] = ints([order.pop() for _ in range(needed[row])])
            at = torch.arange(length)
            slots = self.table[row, at // page_size] * page_size + at % page_size
            kernels.store_kv(self.key[row], self.value[row], self.pages, slots)

    def attend(self, rows: list[int], cut: tuple[int, int] | None = None) -> Tensor:
        """Attention of some of the requests in one call; `cut` takes new tokens `[start, end)` of the only one."""
        query = torch.cat([self.query[row] for row in rows])
        lengths = [sum(self.requests[row]) for row in rows]
        if cut is not None:
            query = query[cut[0] : cut[1]]
            lengths = [self.requests[rows[0]][0] + cut[1]]
        starts = starts_of([self.requests[row][1] for row in rows]) if cut is None else starts_of([len(query)])
        return kernels.paged_attention(
            query, self.pages, self.table[rows], starts, ints(lengths), self.scale, self.chunk
        )

    def expected(self) -> Tensor:
        """The same by scaled_dot_product_attention in fp64, on K and V that lie in one piece."""
        outputs = []
        for (cached, new), query, key, value in zip(self.requests, self.query, self.key, self.value, strict=True):
            mask = torch.ones(new, cached + new, dtype=torch.bool).tril(cached)
            q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
            outputs.append(mixed.transpose(0, 1))
        return torch.cat(outputs)


@pytest.mark.parametrize("page_size", [16, 64])
def test_store_kv_writes_its_slots_and_nothing_else(page_size: int) -> None:
    pages = poisoned_pages(7, page_size, kv_heads=2, head_dim=8)
    whole = pages._base
    assert whole is not None
    before, chosen = whole.clone(), torch.randperm(7 * page_size)[:50]
    key, value = torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    slots = chosen.clone()
    slots[::3] = -1
    kernels.store_kv(key, value, pages, slots)
    written = slots >= 0
    flat = pages.transpose(1, 2).flatten(0, 1)  # [slots, 2, kv_heads, head_dim], a copy
    assert same_bits(flat[slots[written], 0], key[written])
    assert same_bits(flat[slots[written], 1], value[written])
    expected = before.view_as(whole).clone()
    layer = expected.view(7, 3, 2, page_size, 2, 8)[:, 1]
    for index in written.nonzero().flatten().tolist():
        page, offset = divmod(int(slots[index]), page_size)
        layer[page, 0, offset], layer[page, 1, offset] = key[index], value[index]
    assert same_bits(whole, expected)


def test_store_kv_with_all_slots_minus_one_writes_nothing() -> None:
    pages = poisoned_pages(4, 16, kv_heads=2, head_dim=8)
    before = pages.clone()
    kernels.store_kv(torch.randn(6, 2, 8), torch.randn(6, 2, 8), pages, torch.full((6,), -1))
    assert same_bits(pages, before)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_over_pages_equals_attention_over_contiguous_memory(
    heads: int, kv_heads: int, page_size: int
) -> None:
    case = Paged(RAGGED, page_size, heads, kv_heads)
    before = case.pages.clone()
    output = case.attend(list(range(len(RAGGED))))
    torch.testing.assert_close(output.double(), case.expected(), rtol=1e-5, atol=2e-6)
    assert same_bits(case.pages, before)


def test_attention_in_bfloat16_is_right_to_its_rounding() -> None:
    case = Paged(RAGGED, 16, dtype=torch.bfloat16)
    output = case.attend(list(range(len(RAGGED))))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), case.expected(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_request_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    case = Paged(RAGGED, 16, dtype=dtype)
    together = case.attend(list(range(len(RAGGED)))).split([new for _, new in RAGGED])
    for row in range(len(RAGGED)):
        assert same_bits(case.attend([row]), together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "head_dim"), [(16, 24), (64, 64), (64, 256)])
def test_attention_does_not_depend_on_where_a_prompt_is_cut(chunk: int, head_dim: int, dtype: torch.dtype) -> None:
    length = 5 * chunk + 3
    case = Paged([(0, length)], 16, head_dim=head_dim, dtype=dtype, chunk=chunk)
    whole = case.attend([0])
    for cuts in ([0, chunk, length], [0, 3 * chunk, 4 * chunk, length], [0, *range(chunk, length, chunk), length]):
        pieces = [case.attend([0], cut) for cut in pairwise(cuts)]
        assert same_bits(torch.cat(pieces), whole)


def test_attention_survives_large_scores_and_identical_keys() -> None:
    case = Paged([(0, 40), (17, 1)], 16)
    case.query = [1e4 * query for query in case.query]
    torch.testing.assert_close(case.attend([0, 1]).double(), case.expected(), rtol=1e-3, atol=1e-3)
    case = Paged([(0, 40)], 16)
    case.pages[:, 0] = 1e3
    means = case.value[0].cumsum(0) / torch.arange(1, 41).view(-1, 1, 1)
    torch.testing.assert_close(case.attend([0]), means.repeat_interleave(2, dim=1), rtol=1e-4, atol=1e-5)


# The causal convolution

LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
CAPTURES = [(4, CHUNK, 20), (5, CHUNK, 21), (6, CHUNK, 22), (6, 3 * CHUNK, 23)]
READS, WRITES = (
    [0, 1, 2, 3, 0, 5, 6],
    [8, 9, 10, 3, 11, 12, 13],
)  # request 3 goes on in its own slot; two begin at the empty state


def convolution_case(width: int = 4, channels: int = 21) -> tuple[Tensor, Tensor, Tensor]:
    """(new tokens, weight, windows): slots 1 to 6 hold windows, the others NaN."""
    windows = poisoned_states(25, (width - 1, channels))
    windows[1:7] = torch.randn(6, width - 1, channels)
    return torch.randn(sum(LENGTHS), channels), torch.randn(channels, width), windows


def expected_convolution(x: Tensor, weight: Tensor, windows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Per request the outputs and all inputs, the window's first, in fp64 by torch's own convolution."""
    outputs, inputs = [], []
    for slot, new in zip(READS, x.split(LENGTHS), strict=True):
        inputs.append(torch.cat((windows[slot], new)))
        mixed = F.conv1d(inputs[-1].double().t()[None], weight.double()[:, None], groups=weight.shape[0])
        outputs.append(F.silu(mixed[0].t()))
    return outputs, inputs


@pytest.mark.parametrize("width", [2, 4])
def test_the_convolution_goes_on_from_its_window_and_leaves_the_next_one(width: int) -> None:
    x, weight, windows = convolution_case(width)
    outputs, inputs = expected_convolution(x, weight, windows)
    before = windows.clone()
    output = kernels.causal_conv1d(x, weight, windows, starts_of(LENGTHS), ints(READS), ints(WRITES), rows_of(CAPTURES))
    torch.testing.assert_close(output.double(), torch.cat(outputs), rtol=1e-5, atol=2e-6)
    for row, slot in enumerate(WRITES):
        assert same_bits(windows[slot], inputs[row][1 - width :])
    for row, count, slot in CAPTURES:
        assert same_bits(windows[slot], inputs[row][count : count + width - 1])
    assert untouched(before, windows, [*WRITES, *(slot for *_, slot in CAPTURES)])


def test_one_step_of_the_convolution_equals_a_prompt_of_one_token() -> None:
    x, weight, windows = convolution_case()
    x, others = x[: len(READS)], windows.clone()
    before = windows.clone()
    output = kernels.causal_conv1d_update(x, weight, windows, ints(READS), ints(WRITES))
    expected = kernels.causal_conv1d(
        x, weight, others, starts_of([1] * len(READS)), ints(READS), ints(WRITES), rows_of([])
    )
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    assert same_bits(windows, others)
    assert untouched(before, windows, WRITES)


@pytest.mark.parametrize("channels", [16, 21, 100])
def test_the_convolution_of_a_request_does_not_depend_on_the_batch(channels: int) -> None:
    x, weight, windows = convolution_case(channels=channels)
    untouched_windows = windows.clone()
    together = kernels.causal_conv1d(x, weight, windows, starts_of(LENGTHS), ints(READS), ints(WRITES), rows_of([]))
    for row, (new, output) in enumerate(zip(x.split(LENGTHS), together.split(LENGTHS), strict=True)):
        alone = untouched_windows.clone()
        slots = (ints(READS[row : row + 1]), ints(WRITES[row : row + 1]))
        assert same_bits(kernels.causal_conv1d(new, weight, alone, starts_of([len(new)]), *slots, rows_of([])), output)
        assert same_bits(alone[WRITES[row]], windows[WRITES[row]])
    one_each = kernels.causal_conv1d_update(x[:7], weight, untouched_windows.clone(), ints(READS), ints(WRITES))
    for row in range(7):
        slots = (ints(READS[row : row + 1]), ints(WRITES[row : row + 1]))
        alone = kernels.causal_conv1d_update(x[row : row + 1], weight, untouched_windows.clone(), *slots)
        assert same_bits(alone, one_each[row : row + 1])


def test_the_convolution_does_not_depend_on_where_a_prompt_is_cut() -> None:
    x, weight, windows = convolution_case()
    x, length = x[: 3 * CHUNK + 5], 3 * CHUNK + 5
    captures = rows_of([(0, CHUNK, 20), (0, 2 * CHUNK, 21)])
    whole = kernels.causal_conv1d(x, weight, windows, starts_of([length]), ints([1]), ints([8]), captures)
    for slot, start in ((20, CHUNK), (21, 2 * CHUNK)):
        rest = kernels.causal_conv1d(
            x[start:], weight, windows, starts_of([length - start]), ints([slot]), ints([9]), rows_of([])
        )
        assert same_bits(rest, whole[start:])
        assert same_bits(windows[9], windows[8])
