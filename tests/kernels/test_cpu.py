"""The operations that are compiled for the CPU at hand, held to fp64, to their twins, and to the promise that a row's
bits depend on the row alone: not on its place, its neighbours, its address or the number of threads.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.cpu import (
    attention,
    convolution,
    delta_rule,
    elementwise,
    experts,
    matmul,
    recurrences,
)
from hybrid.kernels.cpu.compiled.matmul import MAX_NEAR
from hybrid.kernels.cpu.kinds import LEFT_OUT
from hybrid.kernels.packed_kv import KV_DTYPES, pack, row_size, unpack
from hybrid.kernels.reference import convolution as twin_convolution
from hybrid.kernels.reference import delta_rule as twin_delta_rule
from hybrid.kernels.reference import elementwise as twin_elementwise
from hybrid.kernels.reference import experts as twin_experts
from hybrid.kernels.reference import kda, rg_lru, selective_scan
from support.tensors import ints, poisoned_pages, same_bits, starts_of

DTYPES = [torch.float32, torch.bfloat16]
PAIRS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
PAIRS += [(torch.int8, torch.float32), (torch.int8, torch.bfloat16)]
EPS = 1e-6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inside(x: Tensor, before: int = 3, after: int = 5) -> Tensor:
    """The same numbers as a part of longer rows, NaN before and after."""
    wide = x.new_full((*x.shape[:-1], before + x.shape[-1] + after), float("nan"))
    view = wide[..., before : before + x.shape[-1]]
    view.copy_(x)
    return view


def close(ours: Tensor, exact: Tensor, roundings: float = 4) -> None:
    """Equal up to so many roundings to the type of `ours`."""
    step = roundings * torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact.double(), rtol=step, atol=step)


# Products


def weight_of(outputs: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A weight, and the scale of its rows if it has one."""
    if dtype == torch.int8:
        return torch.randint(-127, 128, (outputs, inner), dtype=dtype), torch.rand(outputs) / 100
    return inside(torch.randn(outputs, inner).to(dtype)), None


SIZES = [(1, 7), (6, 160), (777, 161), (50, 33), (97, 1030), (100, 2053)]
"""(out, in)."""


@pytest.mark.parametrize(("weight_dtype", "dtype"), PAIRS)
@pytest.mark.parametrize(("outputs", "inner"), SIZES)
def test_a_product_is_right_and_its_rows_are_by_themselves(
    outputs: int, inner: int, weight_dtype: torch.dtype, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    weight, scale = weight_of(outputs, inner, weight_dtype)
    rows = matmul.MANY_ROWS + 7
    x = inside(torch.randn(rows, inner).to(dtype))
    together = matmul.multiply(x, weight, scale)
    factor = 1.0 if scale is None else scale.double()
    exact, size = x.double() @ weight.double().t() * factor, x.double().abs() @ weight.double().abs().t() * factor
    assert ((together.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * size).all()
    for count in (1, 2, 3, 4, 5, 6, 8, 16, matmul.MANY_ROWS, matmul.MANY_ROWS + 4, rows):  # parts of panels of x, too
        threads(1 + count % 3)
        order = torch.randperm(rows)[:count]
        alone = torch.empty(count * inner + 1, dtype=dtype)[1:].view(count, inner).copy_(x[order])
        assert same_bits(matmul.multiply(alone, weight, scale), together[order])


def added_up(x: Tensor, weight: Tensor) -> Tensor:
    """The products of rows of x and of a weight, `[rows, out]` fp32, as all CPUs add them up: element i to sum i % 16,
    of bfloat16 numbers pairs 2i and 2i + 1, the second one first, rounded each time; then halves of the sums."""
    of_sum = 2 if x.dtype == weight.dtype == torch.bfloat16 else 1
    steps = -(-x.shape[1] // (16 * of_sum))
    pad = torch.nn.functional.pad
    a, b = (pad(y.double(), (0, steps * 16 * of_sum - y.shape[1])).view(len(y), steps, 16, of_sum) for y in (x, weight))
    sums = torch.zeros(len(x), len(weight), 16)
    for step in range(steps):
        for place in reversed(range(of_sum)):  # in fp64 a product is exact, and so is what it is added to
            sums = (sums.double() + a[:, None, step, :, place] * b[None, :, step, :, place]).float()
    while sums.shape[-1] > 1:
        first, second = sums.chunk(2, dim=-1)
        sums = first + second
    return sums[..., 0]


def in_whole_numbers(x: Tensor, weight: Tensor) -> Tensor:
    """The products of bfloat16 rows with bytes, `[rows, out]` fp32: of each 256 numbers of a row the largest is 32767,
    sums of whole numbers are exact, and blocks are added up one after another."""
    total, largest = torch.zeros(len(x), len(weight)), torch.tensor(32767.0)
    for own, other in zip(x.split(256, dim=1), weight.split(256, dim=1), strict=True):
        most = own.float().abs().amax(1, keepdim=True)
        whole = (own.float() * (largest / most)).round().double() @ other.double().t()
        total = (total.double() + whole.float().double() * (most / largest).double()).float()
    return total


@pytest.mark.parametrize(("weight_dtype", "dtype"), PAIRS)
@pytest.mark.parametrize("inner", [1, 31, 33, 160, 300])
def test_products_are_added_up_in_one_order_on_every_cpu(
    inner: int, weight_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    weight, scale = weight_of(37, inner, weight_dtype)
    few_digits = torch.randn(matmul.MANY_ROWS + 1, inner).bfloat16()  # a sum has a digit for each of theirs in fp64
    weight = weight if scale is not None else weight.bfloat16().to(weight_dtype)
    x = few_digits.to(dtype)
    is_whole = scale is not None and dtype == torch.bfloat16
    expected = in_whole_numbers(x, weight) if is_whole else added_up(x, weight)
    expected = expected if scale is None else expected * scale
    assert same_bits(matmul.multiply(x, weight, scale), expected.to(dtype))
    assert same_bits(matmul.multiply(x[:5], weight, scale), expected[:5].to(dtype))


@pytest.mark.parametrize("inner", [7, 161, 2048])
def test_a_bfloat16_weight_gives_fp32_rows_the_bits_of_its_numbers_as_fp32(inner: int) -> None:
    weight, x = torch.randn(37, inner).bfloat16(), torch.randn(matmul.MANY_ROWS + 7, inner)
    weight[1], weight[2, :1], weight[3, :1], weight[4] = 1e-39, float("nan"), float("inf"), -0.0
    for rows in (x[:1], x[:2], x[:3], x[:8], x):
        assert same_bits(matmul.multiply(rows, weight), matmul.multiply(rows, weight.float()))


@pytest.mark.parametrize(("rows", "inner"), [(5, 700), (100, 2048)])
def test_large_products_have_the_same_bits_on_any_number_of_threads(
    rows: int, inner: int, threads: Callable[[int], None]
) -> None:
    weight, x = torch.randn(1100, inner), torch.randn(rows, inner)
    results = []
    for count in (1, 2, 3, 4):
        threads(count)
        results.append(matmul.multiply(x, weight))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.parametrize(("inner", "outputs"), [(300, 70), (3300, 40)])
def test_rows_have_the_bits_of_few_rows_where_x_and_the_weight_are_taken_in_parts(inner: int, outputs: int) -> None:
    weight, x = torch.randn(outputs, inner), torch.randn(MAX_NEAR // inner + 50, inner)
    few = [matmul.multiply(rows, weight) for rows in x.split(matmul.MANY_ROWS - 1)]
    assert same_bits(matmul.multiply(x, weight), torch.cat(few))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 15, 16, 40])
def test_rows_have_the_bits_of_few_rows_among_many_whatever_the_numbers_are(inner: int, dtype: torch.dtype) -> None:
    """Zeros of both signs, numbers below the normal ones, sums that lose all digits, infinity and NaN."""
    magnitudes = 10 ** torch.tensor([-38.0, -30.0, 0.0, 30.0]).repeat(40)
    x, weight = magnitudes[:, None] * torch.randn(160, inner), 1e-8 * torch.randn(90, inner)
    x[1], x[2, :1], x[3, :1], weight[5], weight[6] = -0.0, float("inf"), float("nan"), -0.0, 1e-42
    x, weight = x.to(dtype), weight.to(dtype)
    together = matmul.multiply(x, weight)
    assert together[1:3].isnan().any()
    assert together[3].isnan().all()
    for row in range(0, len(x), 8):
        assert same_bits(matmul.multiply(x[row : row + 8], weight), together[row : row + 8])


def test_a_number_that_is_not_finite_spoils_its_row_of_a_product_with_bytes_alone() -> None:
    weight, scale, x = *weight_of(20, 600, torch.int8), torch.randn(20, 600).bfloat16()
    expected = matmul.multiply(x, weight, scale)
    x[3, 500], x[9, 0], x[11, 260:512] = float("nan"), float("inf"), 1e-38
    found = matmul.multiply(x, weight, scale)
    assert found[3].isnan().all() and found[9].isnan().all() and found[11].isfinite().all()
    others = [row for row in range(20) if row not in (3, 9, 11)]
    assert same_bits(found[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [-float("inf"), 1.0]]).to(dtype)
    one = torch.ones(1, 2, dtype=dtype)
    product = matmul.multiply(x, one).squeeze(1)
    assert product.isnan().tolist() == [True, False, False]
    assert product[1:].tolist() == [float("inf"), -float("inf")]
    for y in (
        elementwise.silu_and_mul(x, x),
        elementwise.sigmoid_and_mul(x, x),
        elementwise.rms_norm(x, torch.ones(2), EPS),
    ):
        assert not y[0].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_experts_are_those_of_the_twin_and_of_each_pair_by_itself(
    dtype: torch.dtype,
) -> None:
    weight, x = torch.randn(5, 24, 33).to(dtype), torch.randn(40, 33).to(dtype)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(40)])
    order, places, ends = experts.sort_by_expert(chosen, 5, 7)
    for own, theirs in zip((order, places, ends), reference.sort_by_expert(chosen, 5, 7), strict=True):
        assert torch.equal(own, theirs)
    order, places, ends = experts.sort_by_expert(chosen, 5, 0)
    together = experts.expert_linear(x, weight, order, ends, 2, 0)
    twin = reference.expert_linear(x, weight, order, ends, 2, 0)
    torch.testing.assert_close(together, twin, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    for row in range(40):
        own_order, own_places, own_ends = reference.sort_by_expert(chosen[row : row + 1], 5, 0)
        alone = experts.expert_linear(x[row : row + 1], weight, own_order, own_ends, 2, 0)
        assert same_bits(alone[own_places[0]], together[places[row]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_get_the_biases_of_their_experts(dtype: torch.dtype) -> None:
    y, biases = inside(torch.randn(40, 21).to(dtype)), inside(torch.randn(6, 21).to(dtype))
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(20)])
    order, _, _ = experts.sort_by_expert(chosen, 6, 0)
    assert same_bits(experts.add_biases(y, biases, chosen, order), y + biases[chosen.flatten()[order]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_rows_and_bounded_gates(dtype: torch.dtype) -> None:
    x, gate = inside(torch.randn(30, 37).to(dtype)), torch.randn(30).to(dtype)
    close(elementwise.gate_rows(x, gate), x.double() * gate.double().sigmoid()[:, None])
    both = inside(4 * torch.randn(30, 74).to(dtype))
    gates, others = both.double()[:, ::2].clamp(max=2.5), both.double()[:, 1::2].clamp(-2.5, 2.5)
    assert bool((both[:, ::2] > 2.5).any()) and bool((both[:, 1::2] < -2.5).any())
    bounded = elementwise.bounded_silu_and_mul(both, 1.7, 2.5)
    close(bounded, (others + 1) * gates * (1.7 * gates).sigmoid(), 16)
    both[3, 7] = float("nan")
    assert bool(elementwise.bounded_silu_and_mul(both, 1.7, 2.5)[3, 3].isnan())
    for row in (0, 29):
        assert same_bits(elementwise.bounded_silu_and_mul(both[row : row + 1], 1.7, 2.5)[0], bounded[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_of_numbers_are_rotated_as_halves_are(dtype: torch.dtype) -> None:
    x, angles = inside(torch.randn(9, 3, 12).to(dtype)), torch.randn(9, 6).repeat(1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    halves = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    assert same_bits(elementwise.rotate_pairs(x, cos, sin), elementwise.rotate(halves, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_takes_a_share_of_the_attention(dtype: torch.dtype) -> None:
    """As a key with that score and without a value; a token's bits are the same alone and in its prompt."""
    heads, size, length, page = 4, 10, 150, 16
    query, sinks = torch.randn(length, heads, size).to(dtype), 3 * torch.randn(heads)
    pages = torch.randn(11, 2, page, 2, size).to(dtype)
    table = torch.randperm(11)[:10].unsqueeze(0)
    places = table, torch.tensor([0, length]), torch.tensor([length])
    y = attention.paged_attention_with_sinks(query, pages, *places, 0.4, sinks)
    keys, values = (pages[table[0], part].flatten(0, 1)[:length].double() for part in (0, 1))
    for head in range(heads):
        scores = query[:, head].double() @ keys[:, head // 2].t() * 0.4
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        shares = torch.cat((scores, sinks[head].double().expand(length, 1)), 1).softmax(1)[:, :length]
        close(y[:, head], shares @ values[:, head // 2], 16)
    for at in (0, 63, 64, 149):
        own = table, torch.tensor([0, 1]), torch.tensor([at + 1])
        alone = attention.paged_attention_with_sinks(query[at : at + 1], pages, *own, 0.4, sinks)
        assert same_bits(alone[0], y[at])


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(13, 3), (128, 8), (1, 1), (512, 10), (6, 6)])
def test_experts_are_those_of_fp64_and_of_a_row_by_itself(
    count: int, top_k: int, normalise: bool, threads: Callable[[int], None]
) -> None:
    logits = inside(3 * torch.randn(70, count))
    weights, chosen = experts.route_experts(logits, top_k, normalise)
    exact, places = logits.double().softmax(-1).sort(descending=True)
    exact = exact[:, :top_k]
    exact = exact / exact.sum(-1, keepdim=True) if normalise else exact
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    assert torch.equal(chosen, places[:, :top_k])
    torch.testing.assert_close(weights.double(), exact, rtol=1e-5, atol=1e-7)
    for number in (1, 2):
        threads(number)
        for rows in ([69], [3, 40, 2], list(range(69, -1, -1))):
            found, places = experts.route_experts(logits[rows], top_k, normalise)
            assert same_bits(found, weights[rows])
            assert torch.equal(places, chosen[rows])


def test_of_equal_logits_the_lower_experts_come_first_and_nan_routes_to_experts_that_exist() -> None:
    logits = torch.zeros(3, 12)
    logits[1, 5], logits[2, 3:6] = 1, -1
    assert experts.route_experts(logits, 3, True)[1].tolist() == [[0, 1, 2], [5, 0, 1], [0, 1, 2]]
    for places in (slice(None), slice(0, 1), slice(11, 12), slice(2, 9)):
        for value in (float("nan"), float("inf"), -float("inf")):
            spoiled = torch.randn(2, 12)
            before = experts.route_experts(spoiled, 3, True)
            spoiled[0, places] = value
            for normalise in (True, False):
                weights, chosen = experts.route_experts(spoiled, 3, normalise)
                assert bool(((chosen >= 0) & (chosen < 12)).all())
                assert all(len(set(row)) == 3 for row in chosen.tolist())
                if value != -float("inf") or places == slice(None):
                    assert bool(weights[0].isnan().all())
                assert torch.equal(chosen[1], before[1][1])
            assert same_bits(experts.route_experts(spoiled, 3, True)[0][1], before[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_experts_give_is_added_up_by_ranks_and_each_row_by_itself(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    y, places = inside(torch.randn(120, 77).to(dtype)), torch.randperm(120).view(40, 3)
    shares = torch.randn(40, 3).softmax(-1)
    total = experts.combine_experts(y, places, shares)
    close(total, (y[places].double() * shares.double().unsqueeze(-1)).sum(1), 2)
    close(total, reference.combine_experts(y, places, shares), 2)
    shared, gate = torch.randn(40, 77).to(dtype), 5 * torch.randn(40, 1).to(dtype)
    summed = experts.add_shared(total, shared, gate)
    close(summed, total.double() + shared.double() * gate.double().sigmoid(), 4)
    for number in (1, 2):
        threads(number)
        for rows in ([39], [3, 20, 2], list(range(39, -1, -1))):
            assert same_bits(experts.combine_experts(y, places[rows], shares[rows]), total[rows])
            assert same_bits(experts.add_shared(total[rows], shared[rows], gate[rows]), summed[rows])


# Rows


SHAPES = [(7, 24), (1, 100), (3, 2500), (5, 3, 33), (64,), (400, 130)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_agree_with_fp64(shape: tuple[int, ...], dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    def norm(x: Tensor) -> Tensor:
        return x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()

    x, scale = inside(torch.randn(shape).to(dtype)), torch.randn(shape[-1]) + 1
    y = elementwise.rms_norm(x, scale, EPS)
    close(y, norm(x) * scale.double())
    other = torch.randn(shape).to(dtype)
    total, z = elementwise.add_rms_norm(x, other, scale, EPS)
    assert same_bits(total, other + x)
    close(z, norm(total) * scale.double())
    threads(3)
    assert same_bits(elementwise.rms_norm(x, scale, EPS), y)
    assert same_bits(elementwise.add_rms_norm(x, other, scale, EPS)[1], z)
    assert same_bits(elementwise.rms_norm(x.flatten()[-shape[-1] :].clone(), scale, EPS), y.flatten()[-shape[-1] :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_agree_with_fp64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, gate = inside(20 * torch.randn(shape).to(dtype)), 20 * torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    sigmoid = gate.double().sigmoid()
    silu, product = elementwise.silu_and_mul(gate, x), elementwise.sigmoid_and_mul(x, gate)
    close(silu, gate.double() * sigmoid * x.double(), 8)
    close(product, x.double() * sigmoid, 8)
    normalised = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt()
    close(elementwise.gated_rms_norm(x, gate, weight, EPS), weight.double() * normalised * gate.double() * sigmoid, 8)
    last = shape[-1]
    assert same_bits(elementwise.silu_and_mul(gate.flatten()[-last:], x.flatten()[-last:]), silu.flatten()[-last:])
    assert same_bits(elementwise.silu_and_mul(gate[..., 1:], x[..., 1:]), silu[..., 1:])  # another place in a vector


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_before_attention_agrees_with_its_twin(dtype: torch.dtype) -> None:
    tokens, heads, kv_heads, size, rotary = 9, 6, 2, 40, 10
    q = torch.randn(tokens, heads, 2 * size).to(dtype)[..., :size]
    k, v = torch.randn(2, tokens, kv_heads, size).to(dtype)
    scales, angles = torch.randn(2, size), torch.randn(tokens, rotary)
    slots = ints([0, 1, -1, 9, 17, -1, 30, 31, 8])
    ours, theirs = poisoned_pages(4, 8, kv_heads, size, dtype), poisoned_pages(4, 8, kv_heads, size, dtype)
    rest = EPS, angles.cos().to(dtype), angles.sin().to(dtype)
    y = elementwise.norm_rotate_store(q, k, v, *scales, *rest, ours, slots)
    expected = reference.norm_rotate_store(q, k, v, *scales, *rest, theirs, slots)
    close(y, expected, 8)
    assert torch.equal(ours.isnan(), theirs.isnan())
    close(ours.nan_to_num(), theirs.nan_to_num(), 8)
    assert same_bits(ours[:, 1][~ours[:, 1].isnan()], theirs[:, 1][~theirs[:, 1].isnan()])
    alone = elementwise.norm_rotate_store(
        q[3:4], k[3:4], v[3:4], *scales, EPS, *(a[3:4] for a in rest[1:]), ours, slots[3:4]
    )
    assert same_bits(alone, y[3:4])
    without = poisoned_pages(4, 8, kv_heads, size, dtype)
    elementwise.norm_rotate_store(q[:, :0], k, v, *scales, *rest, without, slots)  # no queries
    assert same_bits(without, ours)


# Decode steps


def pages_of(lengths: list[int], page_size: int, heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pages that hold sequences of these lengths, NaN elsewhere, and their block table in a mixed order."""
    width = max(-(-length // page_size) for length in lengths)
    order = torch.randperm(width * len(lengths) + 3)
    cache, table = poisoned_pages(len(order), page_size, heads, size, dtype), torch.zeros(len(lengths), width).long()
    for row, length in enumerate(lengths):
        for page in range(-(-length // page_size)):
            table[row, page] = order[row * width + page]
            count = min(page_size, length - page * page_size)
            cache[table[row, page], :, :count] = torch.randn(2, count, heads, size).to(dtype)
    return cache, table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "page_size"), [(6, 2, 40, 8), (8, 2, 64, 64), (3, 1, 33, 100), (2, 2, 16, 256)]
)
def test_attention_agrees_with_its_twin_and_a_token_is_by_itself(
    heads: int, kv_heads: int, size: int, page_size: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """However many tokens come with it: what comes after a token is NaN where it is computed alone."""
    lengths, counts = [1, 9, 75, 203, 700], [1, 5, 75, attention.TOKENS + 3, 1]
    cache, table = pages_of(lengths, page_size, kv_heads, size, dtype)
    starts, rest = starts_of(counts), (size**-0.5, 16)
    query = 2 * torch.randn(sum(counts), heads, size).to(dtype)
    y = attention.paged_attention(query, cache, table, starts, ints(lengths), *rest)
    expected = reference.paged_attention(query.double(), cache.double(), table, starts, ints(lengths), *rest)
    close(y, expected, 16)
    for count in (2, 3):
        threads(count)
        assert same_bits(attention.paged_attention(query, cache, table, starts, ints(lengths), *rest), y)
    for row, length in enumerate(lengths):
        first, end = starts[row : row + 2].tolist()
        own = cache.clone()
        for at in reversed(range(first, end)):
            alone = table[row : row + 1], starts_of([1]), ints([length])
            assert same_bits(attention.paged_attention(query[at : at + 1], own, *alone, *rest), y[at : at + 1])
            length -= 1
            own[table[row, length // page_size], :, length % page_size] = float("nan")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 5, 64, 300])
def test_the_bits_of_attention_do_not_depend_on_the_size_of_pages(page_size: int, dtype: torch.dtype) -> None:
    lengths, counts, size = [1, 90, 203], [1, 20, 1], 24
    query, rest = torch.randn(sum(counts), 4, size).to(dtype), (starts_of(counts), ints(lengths), 0.2, 16)
    cache, table = pages_of(lengths, 16, 2, size, dtype)
    other, places = pages_of(lengths, page_size, 2, size, dtype)
    for row, length in enumerate(lengths):
        for at in range(length):
            other[places[row, at // page_size], :, at % page_size] = cache[table[row, at // 16], :, at % 16]
    expected = attention.paged_attention(query, cache, table, *rest)
    assert same_bits(attention.paged_attention(query, other, places, *rest), expected)


def test_requests_without_tokens_that_are_seen_give_zeros() -> None:
    cache, table = pages_of([20, 33], 8, 2, 16, torch.float32)
    query = torch.randn(5, 4, 16)
    args = query, cache, table, starts_of([1, 4]), ints([0, 4]), 0.25, 16
    y = attention.paged_attention(*args, None, 2)
    assert not y[:3].any()
    torch.testing.assert_close(y[3:], reference.paged_attention(*args, None, 2)[3:])
    assert y[3:].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_spoils_what_sees_it_alone(value: float) -> None:
    cache, table = pages_of([30], 8, 1, 16, torch.float32)
    cache[table[0, 2], 0, 4] = value  # position 20
    y = attention.paged_attention(torch.ones(30, 1, 16), cache, table, starts_of([30]), ints([30]), 0.25, 16)
    assert y[:20].isfinite().all()
    assert y[20:].isnan().all()


# Packed keys and values


def rows_of(*shape: int) -> Tensor:
    """Rows of magnitudes that differ by factors of thousands; some are zeros, tiny or not finite."""
    rows = torch.randn(shape) * 10 ** (4 * torch.rand(*shape[:-1], 1) - 2)
    rows *= 10 ** (-6 * torch.rand(shape))  # below the normal numbers of e4m3, too
    flat = rows.view(-1, shape[-1])
    flat[0], flat[1], flat[2, 3], flat[3, 4], flat[4, 5] = 0, 1e-42, float("nan"), float("inf"), -float("inf")
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KV_DTYPES)
def test_keys_and_values_are_packed_as_the_twin_packs_them(name: str, dtype: torch.dtype) -> None:
    tokens, heads, size, kept = 40, 2, 26, KV_DTYPES[name]
    k, v = rows_of(tokens, heads, size).to(dtype), rows_of(tokens, heads, size).to(dtype)
    q, scale, angles = torch.randn(tokens, 4, size).to(dtype), torch.rand(size), torch.randn(tokens, 10)
    rest, slots = (scale, scale, EPS, angles.cos().to(dtype), angles.sin().to(dtype)), torch.randperm(64)[:tokens]
    slots[7] = -1
    plain = torch.zeros(8, 2, 8, heads, size, dtype=dtype)
    packed = torch.zeros(8, 2, 8, heads, row_size(size), dtype=torch.uint8)
    y = elementwise.norm_rotate_store(q, k, v, *rest, plain, slots)
    assert same_bits(elementwise.norm_rotate_store(q, k, v, *rest, packed.view(kept), slots), y)
    expected = pack(plain, kept)
    expected[(plain == 0).all(-1)] = packed[(plain == 0).all(-1)]  # most were not written
    is_finite = plain.float().isfinite().all(-1)
    assert 0 < (~is_finite).sum() < 20
    assert torch.equal(packed[is_finite], expected[is_finite])
    assert torch.equal(unpack(packed, size, kept, dtype).isnan(), unpack(expected, size, kept, dtype).isnan())
    written = torch.zeros_like(packed.view(kept))
    reference.store_kv(v, v, written, slots)
    has_row = (packed[:, 1] != 0).any(-1) & is_finite[:, 1]
    assert torch.equal(packed[:, 1][has_row], written[:, 1].view(torch.uint8)[has_row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KV_DTYPES)
def test_attention_over_packed_rows_has_the_bits_of_what_they_are_unpacked_to(name: str, dtype: torch.dtype) -> None:
    kept, size, lengths, counts = KV_DTYPES[name], 40, [1, 90, 33], [1, 20, 1]
    cache, table = pages_of(lengths, 16, 2, size, torch.float32)
    packed = pack(cache, kept).view(kept)
    unpacked = unpack(packed.view(torch.uint8), size, kept, dtype)
    query = torch.randn(sum(counts), 6, size).to(dtype)
    rest = table, starts_of(counts), ints(lengths), 0.2, 16
    y = attention.paged_attention(query, packed, *rest)
    assert y.isfinite().all()
    assert same_bits(y, attention.paged_attention(query, unpacked, *rest))


def test_every_code_is_unpacked_as_the_twin_unpacks_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for kept in KV_DTYPES.values():
        for code in codes:
            cache = torch.zeros(1, 2, 1, 1, row_size(4), dtype=torch.uint8)
            cache[..., :4], cache[..., -4:] = code, torch.tensor([1.25]).view(torch.uint8)
            place = torch.zeros(1, 1).long(), starts_of([1]), ints([1]), 1.0, 16
            y = attention.paged_attention(torch.zeros(1, 1, 4), cache.view(kept), *place)
            expected = unpack(cache[0, 1, 0, 0], 4, kept, torch.float32)
            torch.testing.assert_close(y[0, 0], expected, rtol=0, atol=0, equal_nan=True)


class Layer:
    """A linear-attention layer's weights and pools."""

    def __init__(self, heads: tuple[int, int], dims: tuple[int, int], width: int, dtype: torch.dtype) -> None:
        (key_heads, value_heads), (key_dim, value_dim) = heads, dims
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.heads, self.dtype, self.channels = value_heads, dtype, channels
        self.weights = (
            torch.randn(channels, width).to(dtype),
            -4 * torch.rand(value_heads),
            torch.randn(value_heads).to(dtype),
        )
        self.conv = torch.randn(8, 3, width - 1, channels).to(dtype)
        self.recurrent = torch.randn(8, 3, value_heads, key_dim, value_dim)
        self.conv[5:], self.recurrent[5:] = float("nan"), float("nan")

    def tokens(self, count: int) -> tuple[Tensor, ...]:
        gates = 3 * torch.randn(2, count, self.heads)
        return inside(torch.randn(count, self.channels).to(self.dtype)), *gates.to(self.dtype)

    def pools(self) -> tuple[Tensor, Tensor]:
        """Copies of one layer's windows and states."""
        return self.conv.clone()[:, 1], self.recurrent.clone()[:, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dims", "width"), [((2, 4), (12, 20), 4), ((2, 6), (13, 11), 4), ((4, 4), (64, 64), 2)], ids=str
)
def test_a_decode_step_of_a_linear_layer_agrees_with_its_twin_and_is_by_itself(
    heads: tuple[int, int], dims: tuple[int, int], width: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    layer = Layer(heads, dims, width, dtype)
    tokens, reads, writes = layer.tokens(3), ints([1, 2, 3]), ints([1, 5, 6])
    ours, theirs = layer.pools(), layer.pools()
    y = delta_rule.gated_delta_step(*tokens, *layer.weights, *ours, starts_of([1] * 3), reads, writes)
    expected = reference.gated_delta_step(*tokens, *layer.weights, *theirs, starts_of([1] * 3), reads, writes)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[1], theirs[1], rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    for row, count in ((2, 1), (1, 2), (0, 3)):
        threads(count)
        pools, own = layer.pools(), slice(row, row + 1)
        arguments = (*(part[own] for part in tokens), *layer.weights, *pools, starts_of([1]), reads[own], writes[own])
        assert same_bits(delta_rule.gated_delta_step(*arguments), y[own])
        slot = int(writes[row])
        assert all(same_bits(pool[slot], together[slot]) for pool, together in zip(pools, ours, strict=True))


@pytest.mark.parametrize(
    ("dims", "reads", "writes"),
    [
        ((12, 20), [1, -1, 5], [-1, 5, 6]),
        ((12, 72), [1, *[-1] * 18, 2, -1], [-1, 1, *[-1] * 8, 5, *[-1] * 6, 1, -1, -1, 6]),
        ((12, 20), [-2, 1, -1, -2, -2, 2, -1, -2], [-1, 1, 5, -1, -1, -1, 6, -1]),
    ],
    ids=["a slot is read where it was written", "long, of several requests, not all kept", "some are left out"],
)
def test_tokens_that_follow_each_other_are_those_of_single_steps(
    dims: tuple[int, int], reads: list[int], writes: list[int]
) -> None:
    layer, count = Layer((2, 4), dims, 4, torch.float32), len(reads)
    tokens, pools, one_by_one = layer.tokens(count), layer.pools(), layer.pools()
    y = delta_rule.gated_delta_step(*tokens, *layer.weights, *pools, starts_of([count]), ints(reads), ints(writes))
    slot = -1
    for at, (read, write) in enumerate(zip(reads, writes, strict=True)):
        if read == LEFT_OUT:
            continue
        own = tuple(part[at : at + 1] for part in tokens)
        before, slot = read if read >= 0 else slot, write if write >= 0 else 7
        step = delta_rule.gated_delta_step(
            *own, *layer.weights, *one_by_one, starts_of([1]), ints([before]), ints([slot])
        )
        assert same_bits(step, y[at : at + 1])
    for pool, single in zip(pools, one_by_one, strict=True):
        assert same_bits(pool[:7], single[:7])


# Prompts


Prompt = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def prompt_of(layer: Layer, count: int, heads: tuple[int, int], dims: tuple[int, int]) -> tuple[Tensor, Prompt]:
    """Return the inputs of the convolution, and of the chunk rule: q, k, v, a and b."""
    (key_heads, _), (key_dim, value_dim) = heads, dims
    mixed, a, b = layer.tokens(count)
    values = (heads[1], value_dim)
    keys = key_heads * key_dim
    q, k, v = mixed.split((keys, keys, math.prod(values)), dim=-1)
    return mixed, (*(part.unflatten(-1, (-1, key_dim)) for part in (q, k)), v.unflatten(-1, values), a, b)


CHUNK = 16
PARTS = [(0, 1, 5, 41), (41, 2, 6, 3), (44, 3, 3, 2 * CHUNK)]
"""(first row, slot read, slot written, tokens) of each request."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dims", "width"), [((2, 4), (12, 20), 4), ((2, 6), (13, 11), 3), ((2, 2), (64, 64), 2)], ids=str
)
def test_prompts_of_a_linear_layer_agree_with_the_twins_and_are_by_themselves(
    heads: tuple[int, int], dims: tuple[int, int], width: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    layer = Layer(heads, dims, width, dtype)
    count = sum(part[3] for part in PARTS)
    mixed, inputs = prompt_of(layer, count, heads, dims)
    starts, captures = starts_of([part[3] for part in PARTS]), ints([0, CHUNK, 7]).view(1, 3)
    slots = starts, ints([part[1] for part in PARTS]), ints([part[2] for part in PARTS]), captures
    ours, theirs = layer.pools(), layer.pools()
    conv = convolution.causal_conv1d(mixed, layer.weights[0], ours[0], *slots)
    rule = delta_rule.chunk_gated_delta_rule(*inputs, *layer.weights[1:], ours[1], *slots, CHUNK)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for mine, twin in (
        (conv, reference.causal_conv1d(mixed, layer.weights[0], theirs[0], *slots)),
        (rule, reference.chunk_gated_delta_rule(*inputs, *layer.weights[1:], theirs[1], *slots, CHUNK)),
    ):
        torch.testing.assert_close(mine, twin, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    for at, (first, read, write, length) in enumerate(PARTS):  # alone, and cut at a multiple of the chunk
        threads(at + 1)
        pools, source = layer.pools(), read
        for start in range(0, length, CHUNK):
            end = min(start + CHUNK, length)
            rows, own = slice(first + start, first + end), (starts_of([end - start]), ints([source]), ints([write]))
            none = torch.zeros(0, 3).long()
            y = convolution.causal_conv1d(mixed[rows], layer.weights[0], pools[0], *own, none)
            part = (*(each[rows] for each in inputs), *layer.weights[1:])
            z = delta_rule.chunk_gated_delta_rule(*part, pools[1], *own, none, CHUNK)
            assert same_bits(y, conv[rows])
            assert same_bits(z, rule[rows])
            source = write
            if at == 0 and end == CHUNK:
                assert all(same_bits(pool[write], kept[7]) for pool, kept in zip(pools, ours, strict=True))
        assert all(same_bits(pool[write], together[write]) for pool, together in zip(pools, ours, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_of_the_delta_rule_agree_with_fp64_and_a_token_is_by_itself(
    dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    a, b = inside(20 * torch.randn(400, 24).to(dtype)), 20 * torch.randn(24, 400).to(dtype).t()
    rate, bias = -4 * torch.rand(24), torch.randn(24).to(dtype)
    g, beta = delta_rule.delta_gates(a, b, rate, bias)
    assert (g.dtype, beta.dtype) == (torch.float32, dtype)
    exact = torch.nn.functional.softplus((a.float() + bias.float()).double(), threshold=100)
    torch.testing.assert_close(g.double(), rate.double() * exact, rtol=1e-6, atol=1e-37)
    close(beta, b.double().sigmoid(), 8)
    for ours, twin in zip((g, beta), reference.delta_gates(a, b, rate, bias), strict=True):
        close(ours, twin, 8)
    for number in (1, 2):
        threads(number)
        for rows in ([399], [3, 40, 2], list(range(399, -1, -1))):
            for ours, own in zip((g, beta), delta_rule.delta_gates(a[rows], b[rows], rate, bias), strict=True):
                assert same_bits(own, ours[rows])
    far = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.0]]).to(dtype)
    g = delta_rule.delta_gates(far, far, -torch.ones(6), torch.zeros(6).to(dtype))[0]
    expected = torch.tensor([[float("nan"), -float("inf"), 0.0, -far[0, 3].item(), 0.0, -math.log(2)]])
    torch.testing.assert_close(g, expected, rtol=1e-6, atol=1e-37, equal_nan=True)


# Probabilities


@pytest.mark.parametrize("size", [1, 7, 16, 100, 1024, 5003])
def test_probabilities_agree_with_fp64_and_a_row_is_by_itself(size: int, threads: Callable[[int], None]) -> None:
    logits = inside(5 * torch.randn(40, size))
    temperature = torch.rand(40, dtype=torch.float64) + 0.3
    values, logs = elementwise.softmax(logits, temperature), elementwise.log_softmax(logits)
    exact = (logits.double() / temperature.unsqueeze(-1)).softmax(-1)
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(logs.double(), logits.double().log_softmax(-1), rtol=1e-6, atol=2e-6)
    for number in (1, 2):
        threads(number)
        for rows in ([39], [3, 20, 2], list(range(39, -1, -1))):
            assert same_bits(elementwise.softmax(logits[rows], temperature[rows]), values[rows])
            assert same_bits(elementwise.log_softmax(logits[rows]), logs[rows])


def test_probabilities_of_what_is_excluded_are_zero_and_what_is_not_finite_spoils_its_row() -> None:
    size, infinity = 37, float("inf")
    logits, temperature = torch.randn(5, size), torch.ones(5).double()
    logits[0, :30], logits[1, 17], logits[2, 36], logits[3] = -infinity, float("nan"), infinity, -infinity
    values, logs = elementwise.softmax(logits, temperature), elementwise.log_softmax(logits)
    assert bool((values[0, :30] == 0).all())
    assert bool((logs[0, :30] == -infinity).all())
    for ours, theirs in ((values, logits.softmax(-1)), (logs, logits.log_softmax(-1))):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    for tiny in (0.0, 1e-300, 1e-30):
        values = elementwise.softmax(logits[4:], torch.tensor([tiny], dtype=torch.float64))
        assert values.tolist() == [[float(i == int(logits[4].argmax())) for i in range(size)]]


@pytest.mark.parametrize("size", [1, 7, 16, 5003])
def test_bounded_logits_agree_with_fp64_and_a_row_is_by_itself(size: int, threads: Callable[[int], None]) -> None:
    logits, cap = inside(20 * torch.randn(40, size)), 7.0
    logits[0, 0], logits[1, 0] = 1e30, -1e30
    bounded = elementwise.soft_cap(logits, cap)
    torch.testing.assert_close(bounded.double(), cap * (logits.double() / cap).tanh(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(twin_elementwise.soft_cap(logits, cap), bounded, rtol=1e-6, atol=2e-6)
    for number in (1, 2):
        threads(number)
        for rows in ([39], [3, 20, 2], list(range(39, -1, -1))):
            assert same_bits(elementwise.soft_cap(logits[rows], cap), bounded[rows])


def test_experts_with_logits_of_their_own_are_those_of_the_twin() -> None:
    logits, bias = torch.randn(30, 24), torch.randn(24)
    for own, normalise, groups in ((bias, True, (4, 2)), (None, False, (1, 1)), (bias, True, (6, 1))):
        how = own, 3, normalise, 1e-6, 1.7, groups
        weights, chosen = experts.choose_experts(logits, *how)
        expected, places = twin_experts.choose_experts(logits, *how)
        assert torch.equal(chosen, places)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
        assert same_bits(experts.choose_experts(logits[5:6], *how)[0], weights[5:6])
    logits[2, 7] = float("nan")
    weights, chosen = experts.choose_experts(logits, bias, 3, True, 1e-6, 1.7, (4, 2))
    assert weights[2].isnan().all() and not weights[3:].isnan().any()
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 24


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_convolutions_and_what_comes_before_attention_without_norms(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(9, 37).to(dtype), torch.randn(37, 3).to(dtype), torch.randn(37).to(dtype)
    state, slots = torch.randn(6, 2, 37).to(dtype), (ints([0, 4, 9]), ints([1, 2]), ints([3, -1]), ints([[1, 2, 4]]))
    ours, theirs = state.clone(), state.clone()
    sums = convolution.causal_sums(x, weight, ours, *slots, bias)
    twin = twin_convolution.causal_sums(x, weight, theirs, *slots, bias)
    close(sums, twin), close(ours, theirs, 0)
    reads, writes = ints([1, -1, 5]), ints([-1, 2, 5])
    step = convolution.causal_sums_update(x[:3], weight, ours, reads, writes, bias)
    close(step, twin_convolution.causal_sums_update(x[:3], weight, theirs, reads, writes, bias)), close(ours, theirs, 0)

    (q, k, v), angles = (torch.randn(5, 2, 24).to(dtype) for _ in range(3)), torch.randn(2, 5, 16).to(dtype)
    pages, slots_of_tokens = torch.randn(4, 2, 8, 2, 24).to(dtype), ints([0, 9, -1, 31, 17])
    expected, (cos, sin) = pages.clone(), angles
    reference.store_kv(elementwise.rotate(k, cos, sin), v, expected, slots_of_tokens)
    turned = elementwise.rotate_store(q, k, v, cos, sin, pages, slots_of_tokens)
    assert same_bits(turned, elementwise.rotate(q, cos, sin)) and same_bits(pages, expected)
    assert same_bits(elementwise.rotate_store(q, k, v, cos[:, :0], sin[:, :0], pages, slots_of_tokens), q)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_that_are_computed_token_by_token_agree_with_their_twins(dtype: torch.dtype) -> None:
    tokens, heads, keys, values, channels, size = 70, 3, 13, 11, 41, 7
    slots = ints([0, 32, 32, 70]), ints([1, 2, 3]), ints([1, -1, 4]), ints([[0, 16, 5], [2, 32, 6], [-1, 0, 0]])
    steps = ints([1, -1, -1, 2, 7, 3]), ints([1, -1, 5, -1, -1, 8])
    q, k = torch.randn(2, tokens, heads, keys).to(dtype)
    v, beta = torch.randn(tokens, heads, values).to(dtype), torch.rand(tokens, heads).to(dtype)
    g = -torch.rand(tokens, heads, keys)
    x, b, c = (torch.randn(tokens, width).to(dtype) for width in (channels, size, size))
    dt, rate, scanned = torch.rand(tokens, channels), -torch.rand(size, channels), torch.randn(9, size, channels)
    gated = *torch.randn(3, tokens, channels).to(dtype), torch.arange(tokens) % 32
    cases: list[tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[Tensor, ...], tuple[Any, ...], Tensor]] = [
        (recurrences.chunk_kda, kda.chunk_kda, (q, k, v, g, beta), (*slots, 16), torch.randn(9, heads, keys, values)),
        (recurrences.kda_step, kda.kda_step, (q, k, v, g, beta), steps, torch.randn(9, heads, keys, values)),
        (
            delta_rule.recurrent_gated_delta_rule,
            twin_delta_rule.recurrent_gated_delta_rule,
            (q[:, :1], k[:, :1], v, g[:, :, 0].contiguous(), beta),
            steps,
            torch.randn(9, heads, keys, values),
        ),
        (
            recurrences.selective_scan,
            selective_scan.selective_scan,
            (x, dt, b, c),
            slots,
            scanned,
        ),
        (
            recurrences.selective_step,
            selective_scan.selective_step,
            (x, dt, b, c),
            steps,
            scanned,
        ),
        (recurrences.rg_lru, rg_lru.rg_lru, gated, slots, torch.randn(9, channels)),
        (recurrences.rg_lru_step, rg_lru.rg_lru_step, gated, steps, torch.randn(9, channels)),
    ]
    for ours, theirs, inputs, places, state in cases:
        if places is steps:
            inputs = tuple(part[:6] for part in inputs)
        fixed = {scanned.shape: (rate,), (9, channels): (rate[0].contiguous(),)}.get(state.shape, ())
        own, other = state.clone(), state.clone()
        y = ours(*inputs, *fixed, own, *places)
        expected = theirs(*inputs, *fixed, other, *places)
        is_rounded = ours in (recurrences.rg_lru, recurrences.rg_lru_step) and dtype == torch.bfloat16  # to its type
        torch.testing.assert_close(y.float(), expected.float(), rtol=2**-7 if is_rounded else 1e-5, atol=2e-5)
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_other_types_are_refused() -> None:
    x, scale = torch.randn(3, 8).half(), torch.ones(8)
    for call in (
        lambda: elementwise.rms_norm(x, scale, EPS),
        lambda: elementwise.silu_and_mul(x, x),
        lambda: elementwise.silu_and_mul(scale[None], torch.ones(1, 8).bfloat16()),
        lambda: elementwise.add_rms_norm(x.float(), x[:2].float(), scale, EPS),
        lambda: matmul.multiply(x, x),
        lambda: matmul.multiply(x.bfloat16(), x.float()),
        lambda: experts.route_experts(x.float(), 9, True),
    ):
        with pytest.raises(TypeError, match="is compiled for float32 and bfloat16"):
            call()
