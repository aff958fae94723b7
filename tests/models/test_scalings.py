"""Rotary scalings and 8-bit checkpoints: logits are those of transformers."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybrid import CacheConfig, CheckpointError, Engine, UnsupportedModelError
from support.checkpoints import edit_config, random_model, text_config, write_checkpoint
from support.engines import answer, greedy

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, own attention factor": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    "yarn, betas": {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 2.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
BASE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}


def engine_of(path: Path, dtype: str = "float32") -> Engine:
    cache = CacheConfig(page_size=16, chunk_size=16, memory="8MiB")
    return Engine.from_pretrained(path, device="cpu", dtype=dtype, cache=cache)


def assert_logits_are_those_of(model: Any, engine: Engine, abs_error: float = 2e-4) -> None:
    prompt = torch.randint(3, 320, (75,), generator=torch.Generator().manual_seed(3)).tolist()
    answer(engine, prompt[:70], greedy(1))
    output = answer(engine, prompt, greedy(6, logprobs=10))
    assert output.usage.cached_tokens == 64  # hits continue at the same angles
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output.token_ids]])).logits[0].float()
    expected = torch.log_softmax(logits, -1)
    assert output.logprobs is not None
    for at, row in enumerate(output.logprobs, len(prompt) - 1):
        for token, value in row.items():
            assert value == pytest.approx(float(expected[at, token]), abs=abs_error)


@pytest.mark.parametrize("name", SCALINGS)
def test_the_logits_of_a_scaled_model_are_those_of_transformers(
    name: str, tmp_path: Path, use_kernels: Callable[[str], None]
) -> None:
    use_kernels("reference")  # the products of transformers: what differs is the scaling
    rope = {**BASE, "rope_type": name.split(",")[0], **SCALINGS[name]}
    model = random_model(text_config(rope_parameters=rope))
    assert_logits_are_those_of(model, engine_of(write_checkpoint(tmp_path, model)))


def test_a_scaling_changes_the_logits(tmp_path: Path, checkpoint: Path) -> None:
    rope = {**BASE, "rope_type": "yarn", **SCALINGS["yarn"]}
    scaled = engine_of(write_checkpoint(tmp_path, random_model(text_config(rope_parameters=rope))))
    prompt, params = [*range(5, 75)], greedy(1, logprobs=5)
    assert answer(scaled, prompt, params).logprobs != answer(engine_of(checkpoint), prompt, params).logprobs


@pytest.mark.parametrize(
    ("rope", "error"),
    [
        ({**BASE, "rope_type": "spiral"}, UnsupportedModelError),
        ({**BASE, "rope_type": "linear", "factor": math.nan}, CheckpointError),
        ({**BASE, "rope_type": "llama3"}, CheckpointError),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused(copy: Path, rope: dict[str, Any], error: Any) -> None:
    edit_config(copy, rope_parameters=rope)
    with pytest.raises(error):
        engine_of(copy)


# 8-bit floats with a factor for each block


def quantize(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as 8-bit floats, and the factor of each block: its largest value is the largest of the type."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // block), -(-columns // block))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block)
            scale[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
    return stored, scale


def write_8_bits(source: Path, target: Path, block: int, change: Any = lambda tensors: None) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if "proj" in name and name.endswith(".weight")]:
        tensors[name], tensors[f"{name}_scale_inv"] = quantize(tensors[name].float(), block)
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [block, block],
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("block", [16, 128])
def test_8_bit_weights_are_restored(checkpoint: Path, tmp_path: Path, block: int) -> None:
    path = write_8_bits(checkpoint, tmp_path / "stored", block)
    stored = load_file(path / "model.safetensors")
    model = random_model(text_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}_scale_inv" in stored:
                for i in range(parameter.shape[0]):
                    for j in range(parameter.shape[1]):
                        factor = stored[f"{name}_scale_inv"][i // block, j // block]
                        parameter[i, j] = stored[name][i, j].float() * factor
            elif name in stored:
                parameter.copy_(stored[name])
    engine = engine_of(path)
    loaded = dict(engine.model.named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in model.named_parameters() if name in loaded)
    assert_logits_are_those_of(model, engine)


@pytest.mark.skipif(transformers.__version__.startswith("5.16."), reason="it fails on such a model without experts")
def test_8_bit_weights_are_restored_as_transformers_restores_them(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    from hybrid.models.torch_functions import use_torch_functions

    path = write_8_bits(checkpoint, tmp_path / "stored", 16)
    config = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config).eval()
    use_torch_functions(model)
    assert_logits_are_those_of(model, engine_of(path))


def test_factors_that_do_not_fit_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"][:-1].contiguous()

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{name}_scale_inv"]

    def restore(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].float()

    def orphan(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.nothing.weight_scale_inv"] = torch.ones(1, 1)

    for number, (change, message) in enumerate(
        [
            (cut, "one for each block of 16 x 16"),
            (drop, "are supported"),
            (restore, "expected 8-bit"),
            (orphan, "unexpected"),
        ]
    ):
        path = write_8_bits(checkpoint, tmp_path / f"{number}", 16, change)
        with pytest.raises(CheckpointError, match=message):
            engine_of(path)
