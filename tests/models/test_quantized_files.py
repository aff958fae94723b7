"""Checkpoints that other programs have quantized: the model is that of the numbers in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid import CacheConfig, CheckpointError, Engine, SamplingParams, UnsupportedModelError
from hybrid.commands import parity
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.models.layers import Linear
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.moe import Experts
from support.checkpoints import edit_config
from support.tensors import CPU

GROUP = 32
SETTINGS = CacheConfig(memory="64MiB", deterministic=True)
GREEDY = SamplingParams(max_new_tokens=4, logprobs=5, ignore_eos=True)

Written = tuple[dict[str, Tensor], Tensor]
"""What is on disk for a weight, by the end of its name, and the numbers that it stands for."""


def packed(q: Tensor) -> Tensor:
    """Integers of four bits, eight of the last dimension in a number of 32 bits."""
    words = (q.long().view(*q.shape[:-1], -1, 8) << torch.arange(0, 32, 4)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


def integers(weight: Tensor, scale_type: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, zero points and scales of groups, and the numbers."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = ((high - low) / 15).to(scale_type)
    zero = (-low / scale.float()).round().clamp(1, 15)  # GPTQ cannot store 0
    q = (groups / scale.float().unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    exact = (q - zero.unsqueeze(-1)) * scale.float().unsqueeze(-1)
    return q.view(weight.shape), zero, scale, exact.view(weight.shape)


def gptq(weight: Tensor, added: int = 1) -> Written:
    q, zero, scale, exact = integers(weight)
    found = {
        "qweight": packed(q).t(),
        "qzeros": packed(zero.t() - added),
        "scales": scale.t(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return found, exact


def gptq_2(weight: Tensor) -> Written:
    return gptq(weight, 0)


def gptq_by_activations(weight: Tensor) -> Written:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    found, exact = gptq(weight[:, order])
    places = order.argsort()
    q = integers(weight[:, order])[0][:, places]
    return {**found, "qweight": packed(q).t(), "g_idx": found["g_idx"][places]}, exact[:, places]


def awq(weight: Tensor) -> Written:
    q, zero, scale, exact = integers(weight)
    places = [0, 2, 4, 6, 1, 3, 5, 7]

    def columns(values: Tensor) -> Tensor:
        return packed(values.t().reshape(values.shape[1], -1, 8)[..., places].flatten(1))

    return {"qweight": columns(q), "qzeros": columns(zero), "scales": scale.t()}, exact


def with_zeros(weight: Tensor) -> Written:
    q, zero, scale, exact = integers(weight)
    shape = torch.tensor(weight.shape)
    zeros = packed(zero.t()).t()
    return {"weight_packed": packed(q), "weight_scale": scale, "weight_zero_point": zeros, "weight_shape": shape}, exact


def symmetric(weight: Tensor) -> Written:
    groups = weight.view(len(weight), -1, GROUP)
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7)
    exact = (q * scale.float().unsqueeze(-1)).view(weight.shape)
    whole = packed(q.view(weight.shape) + 8)
    return {"weight_packed": whole, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}, exact


def int8_rows(weight: Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = (weight / scale.float()).round().clamp(-128, 127)
    return {"weight": q.to(torch.int8), "weight_scale": scale}, q * scale.float()


def float8_rows(weight: Tensor) -> Written:
    scale = weight.abs().amax(1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}, values.float() * scale


def of_compressed_tensors(kind: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}
FOUR: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any], torch.dtype]] = {
    "gptq": (gptq, {**GPTQ, "checkpoint_format": "gptq"}, torch.uint8),
    "gptq_v2": (gptq_2, {**GPTQ, "checkpoint_format": "gptq_v2"}, torch.uint8),
    "desc_act": (gptq_by_activations, {**GPTQ, "desc_act": True}, torch.float32),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, torch.uint8),
    "pack-quantized": (with_zeros, of_compressed_tensors("pack-quantized", **FOUR, symmetric=False), torch.uint8),
    "symmetric": (symmetric, of_compressed_tensors("pack-quantized", **FOUR, symmetric=True), torch.uint8),
    "int8": (int8_rows, of_compressed_tensors("int-quantized", num_bits=8, type="int", strategy="channel"), torch.int8),
    "fp8": (
        float8_rows,
        of_compressed_tensors("float-quantized", num_bits=8, type="float", strategy="channel"),
        torch.float32,
    ),
}
"""What writes a weight, the configuration, and the type of the weights that are loaded."""


def written(tmp_path: Path, name: str, family: str = "llama") -> tuple[Path, Path]:
    """A checkpoint in a format, and one with the numbers that it stands for."""
    write, settings, _ = FORMATS[name]
    short, whole = (write_random_checkpoint(tmp_path / kind, family) for kind in ("short", "whole"))
    stored = load_file(short / "model.safetensors")
    found, exact = dict(stored), dict(stored)
    names = ("_proj.weight", ".w1.weight", ".w3.weight")
    for key in [key for key in stored if key.endswith(names) and stored[key].shape[1] % GROUP == 0]:
        parts, exact[key] = write(found.pop(key).float())
        base = key.removesuffix("weight")
        found |= {base + end: part.contiguous() for end, part in parts.items()}
    save_file(found, short / "model.safetensors", {"format": "pt"})
    save_file(exact, whole / "model.safetensors", {"format": "pt"})
    edit_config(short, quantization_config=settings)
    return short, whole


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stand_for_the_numbers_of_the_format(name: str, tmp_path: Path) -> None:
    models = [load_model(open_checkpoint(path), torch.float32, CPU, 64) for path in written(tmp_path, name)]
    found, expected = (dict(model.named_modules()) for model in models)
    kinds = set()
    for key, module in found.items():
        if isinstance(module, Linear):
            assert torch.equal(module.numbers(), expected[key].weight), key
            kinds.add(module.weight.dtype)
            if module.weight.dtype == torch.uint8:
                assert module.scale is not None
                assert module.scale.dtype == (torch.bfloat16 if name == "symmetric" else torch.float32)
    assert kinds == {FORMATS[name][2], torch.float32}  # of the head, and of small products


@pytest.mark.parametrize("name", ["gptq", "awq", "pack-quantized", "int8", "fp8"])
@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_5_moe_text"])
def test_experts_stay_in_four_bits_and_stand_for_the_numbers_of_the_format(
    name: str, family: str, tmp_path: Path
) -> None:
    models = [load_model(open_checkpoint(path), torch.float32, CPU, 64) for path in written(tmp_path, name, family)]
    expected = dict(models[1].named_modules())
    experts = {key: module for key, module in models[0].named_modules() if isinstance(module, Experts)}
    assert len(experts) > 1
    for key, module in experts.items():  # a row of 24 numbers is no whole group
        assert module.scales.keys() == ({"gate_up_proj"} if FORMATS[name][2] == torch.uint8 else set())
        assert module.down_proj.dtype == torch.float32
        assert torch.equal(module.numbers("gate_up_proj"), expected[key].gate_up_proj)


@pytest.mark.parametrize("family", ["llama", "lfm2_moe"])
def test_answers_are_those_of_the_numbers_and_hits_cold_runs(family: str, tmp_path: Path) -> None:
    short, whole = written(tmp_path, "awq", family)
    prompt = list(range(5, 155))
    engine = Engine.from_pretrained(short, device="cpu", dtype="float32", cache=SETTINGS)
    found = parity.prompt_logits(engine, prompt, len(prompt))
    theirs = torch.from_numpy(parity.transformers_logits(whole, prompt))
    assert parity.compare_logits("awq", found, theirs).passed
    cold, warm = (engine.generate([prompt], GREEDY, progress=False)[0] for _ in range(2))
    assert warm.usage.cached_tokens >= 128
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_where_products_of_four_bits_are_not_compiled_weights_are_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short, whole = written(tmp_path, "gptq")
    monkeypatch.setenv("HYBRID_KERNELS", "reference")
    with caplog.at_level("INFO", "hybrid.models.loading"):
        found, expected = (load_model(open_checkpoint(path), torch.bfloat16, CPU, 64) for path in (short, whole))
    assert "12 tensors are quantized; 0 weights stay" in caplog.text
    assert all(torch.equal(weight, dict(expected.named_parameters())[key]) for key, weight in found.named_parameters())


def test_every_setting_that_is_not_read_is_named_at_once(tmp_path: Path) -> None:
    path = write_random_checkpoint(tmp_path / "checkpoint", "llama")
    edit_config(path, quantization_config={**GPTQ, "bits": 3, "checkpoint_format": "marlin", "pack_dtype": "int16"})
    with pytest.raises(UnsupportedModelError, match=r"3 bits.*'marlin'.*'int16'.*in bfloat16 or float32"):
        load_model(open_checkpoint(path), torch.float32, CPU, 64)


def test_tensors_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    short, _ = written(tmp_path, "gptq")
    stored = load_file(short / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    save_file({**stored, f"{name}.qzeros": stored[f"{name}.qzeros"][:, 1:].contiguous()}, short / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}.qzeros is torch.int32 \[2, 11\]; expected \[2, 12\]"):
        load_model(open_checkpoint(short), torch.float32, CPU, 64)
    stored.pop(f"{name}.scales")
    save_file(stored, short / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}.scales' is missing"):
        load_model(open_checkpoint(short), torch.float32, CPU, 64)
