"""Mixtures of experts: the twins and the Triton kernels against plain products, and what must not change a bit.

The kernels run in Triton's interpreter where there is no GPU.
"""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from hybrid.kernels.reference import experts as twins
from hybrid.kernels.triton import experts as kernels
from support.tensors import same_bits

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
EXPERTS, TOP = 13, 3
BOTH = pytest.mark.parametrize("made_by", [twins, kernels], ids=["twin", "kernel"])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def chosen(rows: int, seed: int = 0) -> Tensor:
    """Experts of each row, few of them popular."""
    scores = random(rows, EXPERTS, seed=seed) + torch.linspace(2, -2, EXPERTS, device=DEVICE)
    return scores.topk(TOP, dim=-1).indices


# Routing


@BOTH
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(13, 3), (128, 8), (1, 1), (512, 10)])
def test_routing_takes_the_most_probable(made_by: ModuleType, num_experts: int, top_k: int, normalise: bool) -> None:
    logits = 3 * random(7, num_experts)
    weights, experts = made_by.route_experts(logits, top_k, normalise)
    probabilities = logits.double().softmax(-1)
    expected, places = probabilities.sort(descending=True)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert torch.equal(experts, places[:, :top_k])
    expected = expected[:, :top_k]
    expected = expected / expected.sum(-1, keepdim=True) if normalise else expected
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_probabilities_the_kernel_takes_the_lower_experts() -> None:
    logits = torch.zeros(2, 12, device=DEVICE)
    logits[1, 5] = 1
    assert kernels.route_experts(logits, 3, True)[1].tolist() == [[0, 1, 2], [5, 0, 1]]


def test_logits_that_are_no_numbers_route_to_experts_that_exist() -> None:
    experts = kernels.route_experts(torch.full((2, 5), float("nan"), device=DEVICE), 2, True)[1]
    assert 0 <= int(experts.min()) <= int(experts.max()) < 5


# Sorting


@BOTH
@pytest.mark.parametrize(("rows", "decode_start"), [(1, 0), (1, 1), (30, 0), (30, 30), (30, 17), (900, 500)])
def test_pairs_are_sorted_by_expert_prompts_before_decoded_rows(
    made_by: ModuleType, rows: int, decode_start: int
) -> None:
    choice = chosen(rows)
    order, places, ends = made_by.sort_by_expert(choice, EXPERTS, decode_start)
    pairs = list(enumerate(choice.flatten().tolist()))
    first = decode_start * TOP
    expected = sorted(pairs[:first], key=lambda pair: pair[1]) + sorted(pairs[first:], key=lambda pair: pair[1])
    assert order.tolist() == [pair for pair, _ in expected]
    assert places.shape == choice.shape
    assert places.flatten()[order].tolist() == list(range(len(pairs)))
    for part, (begin, stop) in enumerate(((0, first), (first, len(pairs)))):
        counts = torch.bincount(choice.flatten()[begin:stop], minlength=EXPERTS)
        assert ends[part].tolist() == (begin + counts.cumsum(0)).tolist()


# The product


def by_columns(weight: Tensor) -> Tensor:
    """The same, with outputs next to each other in memory."""
    return weight.transpose(1, 2).contiguous().transpose(1, 2)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_by_columns", [True, False])
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "decode_start"), [(1, 24, 7, 0), (20, 130, 70, 12), (150, 128, 64, 150)]
)
def test_every_row_meets_its_experts_and_nobody_elses(
    made_by: ModuleType, rows: int, inner: int, columns: int, decode_start: int, is_by_columns: bool, dtype: torch.dtype
) -> None:
    x, choice = random(rows, inner, dtype=dtype), chosen(rows)
    weight = random(EXPERTS, columns, inner, seed=1, dtype=dtype) / inner**0.5
    weight = by_columns(weight) if is_by_columns else weight
    untouched = sorted(set(range(EXPERTS)) - set(choice.flatten().tolist()))
    weight[untouched] = float("nan")
    order, places, ends = twins.sort_by_expert(choice, EXPERTS, decode_start)
    y = made_by.expert_linear(x, weight, order, ends, TOP, decode_start * TOP)
    expected = torch.einsum("ti,tkoi->tko", x.double(), weight[choice].double())
    bounds = {"rtol": torch.finfo(dtype).eps, "atol": 2e-6}
    torch.testing.assert_close(y[places].double(), expected, **bounds)
    # a row per place, as the second product of an expert takes them
    again = made_by.expert_linear(x[order // TOP], weight, order, ends, 0, decode_start * TOP)
    assert same_bits(again, y)
    shares = random(rows, TOP, seed=2).softmax(-1)
    combined = made_by.combine_experts(y, places, shares)
    exact = (y[places].double() * shares.double().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(combined.double(), exact, **bounds)


@pytest.mark.parametrize(("dtype", "is_by_columns"), [(DTYPES[0], True), (DTYPES[-1], False)])
def test_the_bits_of_a_row_do_not_depend_on_who_shares_its_experts(dtype: torch.dtype, is_by_columns: bool) -> None:
    rows, inner, columns = 60, 48, 40
    x, choice, shares = random(rows, inner, dtype=dtype), chosen(rows), random(rows, TOP, seed=4).softmax(-1)
    weight = random(EXPERTS, columns, inner, seed=1, dtype=dtype)
    weight = by_columns(weight) if is_by_columns else weight

    def run(which: list[int], decode_start: int) -> Tensor:
        order, places, ends = kernels.sort_by_expert(choice[which], EXPERTS, decode_start)
        y = kernels.expert_linear(x[which], weight, order, ends, TOP, decode_start * TOP)
        return kernels.combine_experts(y, places, shares[which])

    decoded, prompt = run(list(range(rows)), 0), run(list(range(rows)), rows)
    for which in ([0], [7, 3], list(range(20, 41)), list(range(rows - 1, -1, -1))):
        assert same_bits(run(which, 0), decoded[which])
        assert same_bits(run(which, len(which)), prompt[which])
    mixed = run(list(range(50)), 20)
    assert same_bits(mixed[:20], prompt[:20])
    assert same_bits(mixed[20:], decoded[20:50])
