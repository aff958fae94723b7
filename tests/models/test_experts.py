"""The router of a mixture of experts, and the shared expert. Products are in `tests/kernels/test_experts.py`, whole
models in `test_families.py`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid.kernels import ops
from hybrid.kernels.ops import linear
from hybrid.models.moe import ExpertRouter, SparseMoE
from support.tensors import same_bits

SIZE, EXPERTS, TOP = 48, 16, 3


@pytest.mark.parametrize("normalise", [True, False])
def test_routing_is_in_fp32_whatever_the_type_of_the_model(normalise: bool) -> None:
    router = ExpertRouter(SIZE, EXPERTS, TOP, normalise)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, SIZE, generator=generator).to(torch.bfloat16)
    router.weight = torch.nn.Parameter(weight, requires_grad=False)
    x = torch.randn(9, SIZE, generator=generator).to(torch.bfloat16)
    logits = linear(x.float(), weight.float(), None)
    weights, experts = ops.route_experts(logits, TOP, normalise)
    batch: Any = SimpleNamespace(decode_start=None)
    chosen = router.choose(x, batch)
    assert torch.equal(chosen[1], experts)
    torch.testing.assert_close(chosen[0], weights)
    probabilities = logits.softmax(-1)
    assert weights.dtype == torch.float32
    expected = probabilities.gather(1, experts)
    assert bool((expected[:, -1:] >= probabilities.sort(descending=True).values[:, TOP - 1 : TOP]).all())
    torch.testing.assert_close(weights, expected / expected.sum(-1, keepdim=True) if normalise else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_meets_the_shared_expert_and_its_own_by_itself(dtype: torch.dtype) -> None:
    sizes = {"hidden_size": SIZE, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    config = SimpleNamespace(**sizes, num_experts=EXPERTS, num_experts_per_tok=TOP, hidden_act="silu")
    part, generator = SparseMoE(config, True).to(dtype), torch.Generator().manual_seed(0)
    for parameter in part.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) / SIZE**0.5).to(dtype)
    batch: Any = SimpleNamespace(decode_start=None, prefills=None, adapted=())
    x = torch.randn(50, SIZE, generator=generator).to(dtype)
    y = part(x, batch)
    routed = part.experts(x, *part.gate.choose(x, batch), batch).double()
    gate = part.shared_expert_gate(x, batch).double().sigmoid()
    expected = routed + part.shared_expert(x, batch).double() * gate
    step = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=step, atol=step)
    for rows in ([49], [3, 20, 2], list(range(49, -1, -1))):
        assert same_bits(part(x[rows], batch), y[rows])
