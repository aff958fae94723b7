"""Weights of four bits: what they stand for, and models that are computed with them."""

from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.commands import parity
from hybrid.commands.random_checkpoints import FAMILIES, is_comparable, write_random_checkpoint
from hybrid.kernels import packed_weights
from hybrid.kernels.ops import linear
from hybrid.models.layers import Linear
from hybrid.models.moe import ExpertRouter, Experts

GREEDY = SamplingParams(max_new_tokens=4, logprobs=5, ignore_eos=True)
SETTINGS = CacheConfig(memory="64MiB", deterministic=True)


def weights(outputs: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(inputs)
    spread = torch.rand(outputs, 1, generator=generator) * 10
    return torch.randn(outputs, inputs, generator=generator) * spread


@pytest.mark.parametrize("group", packed_weights.GROUPS)
@pytest.mark.parametrize("inputs", [32, 75, 128, 300])
def test_a_number_changes_by_little_more_than_half_the_step_of_its_group(group: int, inputs: int) -> None:
    weight = weights(9, inputs)
    weight[3] = 0
    packed, scales = packed_weights.quantize(weight, group)
    assert packed.nbytes + scales.nbytes == 9 * -(-inputs // 128) * (64 + 128 // group * 4)
    found = packed_weights.unpack(packed, scales, inputs)
    steps = scales[..., 0].float().flatten(1).repeat_interleave(group, 1)[:, :inputs]
    assert ((found - weight).abs() <= (0.5 + 1 / 16) * steps + 1e-30).all()
    assert not found[3].any()


def test_a_group_that_is_not_finite_is_nan_and_no_other() -> None:
    weight = weights(4, 256)
    weight[2, 70] = float("inf")
    found = packed_weights.unpack(*packed_weights.quantize(weight, 64), 256)
    assert found.isnan().nonzero().tolist() == [[2, column] for column in range(64, 128)]


def test_numbers_lie_in_blocks_of_128_in_16_bit_lanes() -> None:
    q = torch.randint(0, 16, (3, 300), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    lanes = packed_weights.pack(q).view(torch.int16).int() & 0xFFFF
    for column in (0, 31, 32, 127, 128, 299):
        block, place = divmod(column, 128)
        assert torch.equal(lanes[:, 32 * block + place % 32] >> 4 * (place // 32) & 15, q[:, column].int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_with_the_numbers_that_the_bits_stand_for(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid.kernels.ops.SLICE", 7 * 150)  # several slices
    x = torch.randn(5, 150, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed, scales = packed_weights.quantize(weights(40, 150), 64)
    expected = linear(x, packed_weights.unpack(packed, scales, 150).to(dtype), 0)
    assert torch.equal(linear(x, packed, 0, scales), expected)
    assert torch.equal(linear(x[2:3], packed, 0, scales), expected[2:3])


@pytest.mark.parametrize(
    ("family", "dtype"), [("tiny", "float32"), ("tiny", "bfloat16"), ("lfm2, odd sizes, untied", "float32")]
)
def test_hits_are_bitwise_cold_runs(family: str, dtype: str, tmp_path: Path) -> None:
    path = "tiny" if family == "tiny" else write_random_checkpoint(tmp_path / "checkpoint", family)
    engine = Engine.from_pretrained(path, device="cpu", dtype=dtype, load_dtype="int4", cache=SETTINGS)
    model = engine.loaded.model
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    packed = {name for name, module in linears.items() if module.weight.dtype == torch.uint8}
    assert packed == {name for name, module in linears.items() if module is not model.lm_head and module.shape[0] >= 64}
    prompt = list(range(5, 155))
    cold, warm = (engine.generate([prompt], GREEDY, progress=False)[0] for _ in range(2))
    assert warm.usage.cached_tokens >= 128
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


WITH_EXPERTS = [
    "bailing_hybrid",
    "gpt_oss",
    "granitemoehybrid",
    "jamba",
    "kimi_linear, odd sizes, low rank, fused",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "nemotron_h, odd sizes, latent, fused",
    "qwen3_5_moe_text",
    "qwen3_next, odd sizes",
]


@pytest.mark.parametrize(("family", "group"), [*zip(WITH_EXPERTS, cycle(packed_weights.GROUPS))])
def test_experts_have_four_bits_and_logits_those_of_their_numbers_in_transformers(
    family: str, group: int, tmp_path: Path
) -> None:
    if family not in FAMILIES:
        pytest.skip("the installed transformers lacks the type")
    path, numbers = write_random_checkpoint(tmp_path / "checkpoint", family), tmp_path / "numbers"
    engine = Engine.from_pretrained(path, device="cpu", dtype="float32", load_dtype=f"int4:{group}", cache=SETTINGS)
    model = engine.loaded.model
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    assert experts
    for module in experts:
        assert module.scales.keys() == module.sizes.keys()
        assert {getattr(module, name).dtype for name in module.sizes} == {torch.uint8}
    routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
    assert len(routers) == len(experts)
    assert all(module.scale is None and module.weight.is_floating_point() for module in routers)
    prompt = list(range(5, 155))
    cold, warm = (engine.generate([prompt], GREEDY, progress=False)[0] for _ in range(2))
    assert warm.usage.cached_tokens >= 128
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    if not is_comparable(family):
        pytest.skip("the installed transformers computes it otherwise than it was trained")
    parity.write_numbers(engine, path, numbers, partial(parity.represented, torch.Generator()))
    theirs = torch.from_numpy(parity.transformers_logits(numbers, prompt))
    found = parity.prompt_logits(engine, prompt, len(prompt))
    assert parity.compare_logits(family, found, theirs).passed


def test_answers_are_those_of_the_weights_that_the_bits_stand_for(tmp_path: Path) -> None:
    engine = Engine.from_pretrained("tiny", device="cpu", dtype="float32", load_dtype="int4:32", cache=SETTINGS)
    exact = Engine.from_pretrained("tiny", device="cpu", dtype="float32", cache=SETTINGS)
    for name, module in engine.loaded.model.named_modules():
        if isinstance(module, Linear) and module.weight.dtype == torch.uint8:
            assert module.scale is not None
            whole = packed_weights.unpack(module.weight, module.scale, module.shape[1])
            exact.loaded.model.get_submodule(name).weight = torch.nn.Parameter(whole, requires_grad=False)
    outputs = [each.generate([list(range(5, 155))], GREEDY, progress=False)[0] for each in (engine, exact)]
    assert outputs[0].logprobs == outputs[1].logprobs


@pytest.mark.parametrize("load_dtype", ["int8", "int4:32"])
def test_quantization_is_as_far_off_as_random_changes_of_its_size_and_a_wrong_weight_is_not(
    load_dtype: str, tmp_path: Path
) -> None:
    path = write_random_checkpoint(tmp_path / "checkpoint", "lfm2")
    engine = Engine.from_pretrained(path, device="cpu", dtype="float32", load_dtype=load_dtype, cache=SETTINGS)
    generator = torch.Generator().manual_seed(1)
    parity.write_numbers(engine, path, tmp_path / "changed", partial(parity.changed_at_random, generator))
    judge = parity.Judge(engine)
    ids = parity.compared_with_transformers(judge)
    exact, changed = (torch.from_numpy(parity.transformers_logits(of, ids)) for of in (path, tmp_path / "changed"))
    check = parity.of_quantization(judge, exact, changed, load_dtype)
    assert check.passed, check.detail
    module = engine.loaded.model.get_submodule("model.layers.1.self_attn.o_proj")
    assert isinstance(module, Linear) and module.scale is not None
    module.scale *= -1  # of one product
    wrong = parity.of_quantization(judge, exact, changed, load_dtype)
    assert not wrong.passed, wrong.detail


@pytest.mark.parametrize("load_dtype", ["int8", "int4:128"])
def test_random_changes_are_even_within_half_a_step(load_dtype: str, tmp_path: Path) -> None:
    path = write_random_checkpoint(tmp_path / "checkpoint", "lfm2_moe")
    engine = Engine.from_pretrained(path, device="cpu", dtype="float32", load_dtype=load_dtype, cache=SETTINGS)
    for module in engine.loaded.model.modules():
        for name in module.scales if isinstance(module, Linear | Experts) else ():
            numbers, steps = module.numbers(name), module.steps(name)
            changed = parity.changed_at_random(torch.Generator().manual_seed(0), module, name, numbers)
            shares = (changed - numbers)[steps > 0] / steps[steps > 0]
            assert shares.abs().max() <= 0.5 + 1e-3
            torch.testing.assert_close(shares.square().mean().sqrt(), torch.tensor(12**-0.5), rtol=0.05, atol=0)
