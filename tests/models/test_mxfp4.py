"""Experts as 4-bit floats with an exponent for each 32 of them, as gpt-oss has them: the numbers that transformers
restores, and answers of a checkpoint with these numbers, bit by bit."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hybrid import CacheConfig, CheckpointError, Engine, SamplingParams
from hybrid.commands.random_checkpoints import FAMILIES, Family, write_random_checkpoint
from hybrid.models.moe import Experts

CACHE = CacheConfig(memory="8MiB")
SIZES = {"intermediate_size": 32, "swiglu_limit": 7.0}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint with 4-bit floats, and one with the numbers that transformers restores from them."""
    family = FAMILIES["gpt_oss"]
    sized = Family(family.config, family.model, {**family.settings, **SIZES})
    with patch.dict(FAMILIES, gpt_oss=sized):
        packed, plain = (write_random_checkpoint(tmp_path / name, "gpt_oss") for name in ("packed", "plain"))
    weights, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(0)
    codes = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights[name].shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        del codes[name]
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    save_file(codes, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


@pytest.mark.parametrize("load_dtype", [None, "int4:32"])
def test_answers_are_those_of_the_numbers_that_transformers_restores(
    load_dtype: str | None, folders: tuple[Path, Path]
) -> None:
    params, prompt = SamplingParams(max_new_tokens=12, logprobs=3, ignore_eos=True), [*range(5, 60)]
    found = []
    for folder in folders:
        engine = Engine.from_pretrained(folder, device="cpu", dtype="float32", load_dtype=load_dtype, cache=CACHE)
        kinds = {module.down_proj.dtype for module in engine.loaded.model.modules() if isinstance(module, Experts)}
        assert (kinds == {torch.uint8}) == (load_dtype is not None)
        (output,) = engine.generate([prompt], params, progress=False)
        found.append((output.token_ids, output.logprobs))
    assert found[0] == found[1]


def test_exponents_that_do_not_fit_are_refused(folders: tuple[Path, Path]) -> None:
    file = folders[0] / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("_scales"))
    save_file(weights | {name: weights[name][:, :-1].contiguous()}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="an exponent of 8 bits for each block"):
        Engine.from_pretrained(folders[0], device="cpu", dtype="float32", cache=CACHE)
