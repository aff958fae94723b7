"""Mixtures of experts: the products of `hybrid.kernels.experts` against plain ones, and what must not change a bit."""

import pytest
import torch
from tensor_helpers import same_bits
from torch import Tensor

from hybrid.kernels import experts as kernels
from hybrid.models.moe import Experts, Router

EXPERTS, SIZE, OUT, TOP = 16, 48, 40, 3
SIZES = (2, 4, 8)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def chosen(rows: int, seed: int = 0) -> Tensor:
    """Experts of each row, few of them popular."""
    scores = random(rows, EXPERTS, seed=seed) + torch.linspace(2, 0, EXPERTS)
    return scores.topk(TOP, dim=-1).indices


@pytest.mark.parametrize("sizes", [None, SIZES, (1,)])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_every_row_meets_its_experts_and_nobody_elses(rows: int, sizes: tuple[int, ...] | None) -> None:
    x, weight, choice = random(rows, SIZE), random(EXPERTS, OUT, SIZE, seed=1), chosen(rows)
    untouched = sorted(set(range(EXPERTS)) - set(choice.flatten().tolist()))
    weight[untouched] = float("nan")
    grouped = kernels.group_rows(choice, EXPERTS, sizes)
    y = kernels.expert_linear(x[grouped.rows], weight, grouped, sizes is not None)
    assert {expert for expert, _, _ in grouped.spans} == set(choice.flatten().tolist())
    expected = torch.einsum("ti,tkoi->tko", x, weight[choice])
    torch.testing.assert_close(y[grouped.places], expected, rtol=1e-5, atol=1e-5)
    shares = random(rows, TOP, seed=2).softmax(-1)
    combined = kernels.combine(y, grouped, shares)
    torch.testing.assert_close(combined, (expected * shares.unsqueeze(-1)).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("counts", [[1], [3, 9], [16], [17, 0, 5]])
def test_blocks_have_the_sizes_asked_for_and_hold_each_row_once(counts: list[int]) -> None:
    choice = torch.cat([torch.full((count, 1), expert) for expert, count in enumerate(counts)])
    choice = choice[torch.randperm(len(choice), generator=torch.Generator().manual_seed(0))]
    grouped = kernels.group_rows(choice, EXPERTS, SIZES)
    assert all(end - start in SIZES for _, start, end in grouped.spans)
    assert [start for _, start, _ in grouped.spans[1:]] == [end for _, _, end in grouped.spans[:-1]]
    assert len(set(grouped.places.flatten().tolist())) == len(choice)
    assert grouped.rows[grouped.places.flatten()].tolist() == list(range(len(choice)))
    for expert, start, end in grouped.spans:
        here = [row for row, place in enumerate(grouped.places.flatten().tolist()) if start <= place < end]
        assert all(int(choice[row]) == expert for row in here)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_columns", [True, False])
def test_the_bits_of_a_row_do_not_depend_on_who_shares_its_experts(dtype: torch.dtype, by_columns: bool) -> None:
    layer = Experts(SIZE, 24, EXPERTS)
    for name, parameter in layer.named_parameters():
        weight = random(*parameter.shape, seed=len(name), dtype=dtype)
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if by_columns else weight
        setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
    layer.make_rows_independent(64, {})
    rows = 300
    x, choice, shares = random(rows, SIZE, dtype=dtype), chosen(rows), random(rows, TOP, seed=4).softmax(-1)

    def run(which: list[int]) -> Tensor:
        grouped = kernels.group_rows(choice[which], EXPERTS, layer.sizes)
        gate, up = kernels.expert_linear(x[which][grouped.rows], layer.gate_up_proj, grouped, True).chunk(2, -1)
        y = kernels.expert_linear(gate * up, layer.down_proj, grouped, True)
        return kernels.combine(y, grouped, shares[which])

    everybody = run(list(range(rows)))
    for which in ([0], [7, 3], list(range(20, 61)), list(range(299, -1, -1))):
        assert same_bits(run(which), everybody[which])


def test_sizes_of_blocks_are_those_that_agree_and_one_where_the_place_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(OUT, SIZE)
    assert kernels.BLOCK_ROWS in kernels.block_sizes_that_agree(weight)
    product, last = torch.mm, 0.0

    def by_place(x: Tensor, w: Tensor) -> Tensor:
        return product(x, w) + torch.arange(len(x)).unsqueeze(1) * last

    last = 1.0
    monkeypatch.setattr(torch, "mm", by_place)
    assert kernels.block_sizes_that_agree(weight) == (1,)


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_is_in_fp32_whatever_the_type_of_the_model(normalise: bool) -> None:
    router = Router(SIZE, EXPERTS, TOP, normalise)
    router.weight = torch.nn.Parameter(random(EXPERTS, SIZE, dtype=torch.bfloat16), requires_grad=False)
    logits = random(9, SIZE) @ router.matrix().t()
    assert router.matrix().dtype == torch.float32
    weights, experts = kernels.route(logits, TOP, normalise)
    probabilities = logits.softmax(-1)
    assert weights.dtype == torch.float32
    expected = probabilities.gather(1, experts)
    assert bool((expected[:, -1:] >= probabilities.sort(descending=True).values[:, TOP - 1 : TOP]).all())
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if normalise else expected)
