"""The router of a mixture of experts. Its products are in `tests/kernels/test_experts.py`, whole models in
`test_families.py`."""

from types import SimpleNamespace

import pytest
import torch

from hybrid.kernels import ops
from hybrid.kernels.batch_invariant import linear
from hybrid.models.moe import Router

SIZE, EXPERTS, TOP = 48, 16, 3


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_is_in_fp32_whatever_the_type_of_the_model(normalise: bool) -> None:
    router = Router(SIZE, EXPERTS, TOP, normalise)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, SIZE, generator=generator).to(torch.bfloat16)
    router.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(9, SIZE, generator=generator).to(torch.bfloat16)
    logits = linear(x.float(), weight.float(), None)
    weights, experts = ops.route_experts(logits, TOP, normalise)
    chosen = router.choose(x, SimpleNamespace(blocks=None))  # type: ignore[arg-type]
    assert torch.equal(chosen[1], experts)
    torch.testing.assert_close(chosen[0], weights)
    probabilities = logits.softmax(-1)
    assert weights.dtype == torch.float32
    expected = probabilities.gather(1, experts)
    assert bool((expected[:, -1:] >= probabilities.sort(descending=True).values[:, TOP - 1 : TOP]).all())
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if normalise else expected)
