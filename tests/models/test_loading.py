"""From a checkpoint in Hugging Face form to a model: the layouts that are accepted, and the memory that it takes."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import hybrid
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
from support.checkpoints import (
    WEIGHTS,
    cast_weights,
    edit_config,
    edit_weights,
    random_model,
    shard,
    text_config,
    write_checkpoint,
)
from support.tensors import CPU, same_bits

SMALL = hybrid.CacheConfig(memory="8MiB", page_size=16)


def load(path: Path, dtype: torch.dtype = torch.float32) -> Qwen3_5ForCausalLM:
    return load_model(open_checkpoint(path), dtype, CPU, 64)


def to_vision_language_layout(path: Path) -> None:
    """Rewrite a text checkpoint as the published ones are: part of a model that also sees and predicts ahead."""
    text = json.loads((path / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, "mtp_num_hidden_layers": 1, "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
        "vision_config": {"model_type": "qwen3_5", "depth": 2, "hidden_size": 32, "num_heads": 2},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "image_token_id": 5,
    }
    (path / "config.json").write_text(json.dumps(outer))

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("model."):
                tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3)
        tensors["model.visual.blocks.0.norm1.weight"] = torch.zeros(3)
        tensors["mtp.fc.weight"] = torch.zeros(3)

    edit_weights(path, rename)


def assert_same_parameters(model: Qwen3_5ForCausalLM, expected: torch.nn.Module) -> None:
    """A head that is tied counts as a parameter of its own."""
    ours, theirs = model.state_dict(), expected.state_dict()
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert same_bits(parameter, theirs[name]), name


# What is accepted


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_is_the_tensor_of_its_name(tied: bool, bias: bool, tmp_path: Path) -> None:
    theirs = random_model(text_config(tie_word_embeddings=tied, attention_bias=bias))
    ours = load(write_checkpoint(tmp_path, theirs))
    assert_same_parameters(ours, theirs)
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert (ours.lm_head.weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()) == tied
    assert not ours.training


def test_a_sharded_checkpoint_is_the_same_as_one_file(checkpoint: Path, copy: Path) -> None:
    shard(copy)
    assert_same_parameters(load(copy), load(checkpoint))


@pytest.mark.parametrize("inside", [True, False])
def test_it_does_not_matter_which_part_of_a_vision_language_checkpoint_says_that_the_head_is_tied(
    inside: bool, checkpoint: Path, copy: Path
) -> None:
    to_vision_language_layout(copy)
    text = json.loads((copy / "config.json").read_text())["text_config"]
    edit_config(copy, text_config={**text, "tie_word_embeddings": inside}, tie_word_embeddings=not inside)
    assert_same_parameters(load(copy), load(checkpoint))


@pytest.mark.parametrize("tied", [True, False])
def test_of_a_vision_language_checkpoint_the_text_model_is_taken(tied: bool, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, random_model(text_config(tie_word_embeddings=tied)))
    expected = load(path)
    to_vision_language_layout(path)
    assert open_checkpoint(path).model_type == "qwen3_5"
    assert_same_parameters(load(path), expected)


def test_a_head_that_is_stored_although_it_is_tied_and_is_the_embedding_is_tied(checkpoint: Path, copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    model = load(copy)
    assert_same_parameters(model, load(checkpoint))
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_head_that_is_stored_although_it_is_tied_and_differs_is_used_as_by_transformers(
    copy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = torch.randn(320, 64)
    edit_weights(copy, lambda tensors: tensors.update({"lm_head.weight": head}))
    model, theirs = load(copy), AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    assert same_bits(model.lm_head.weight, head) and same_bits(theirs.lm_head.weight.detach(), head)
    assert not same_bits(model.model.embed_tokens.weight, head)
    assert not model.config.tie_word_embeddings  # the digest of the model knows
    assert "differs from the embedding" in caplog.text


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_cast_to_the_dtype_asked_for(stored: torch.dtype, dtype: torch.dtype, copy: Path) -> None:
    model, tensors = load(cast_weights(copy, stored), dtype), load_file(copy / WEIGHTS)
    for name, tensor in tensors.items():
        assert same_bits(model.get_parameter(name).to(dtype), tensor.to(dtype)), name


def test_float16_is_widened_to_float32_on_a_cpu_and_says_so(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hybrid.models.loading")
    model, tensors = load(cast_weights(copy, torch.float16), torch.float16), load_file(copy / WEIGHTS)
    for name, tensor in tensors.items():
        assert same_bits(model.get_parameter(name), tensor.float()), name
    assert "widened to float32" in caplog.text


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_of_a_model_of_fp32_matrices_that_are_bfloat16_stay_so_where_products_are_compiled(
    kernels: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", kernels)
    exact = "model.layers.0.mlp.down_proj.weight"
    kept = load_file(copy / WEIGHTS)[exact]
    edit_weights(cast_weights(copy, torch.bfloat16), lambda tensors: tensors.update({exact: kept}))
    model, tensors = load(copy), load_file(copy / WEIGHTS)
    for name, tensor in tensors.items():
        stays = kernels == "auto" and name != exact and tensor.dim() == 2
        assert model.get_parameter(name).dtype == (torch.bfloat16 if stays else torch.float32), name
        assert same_bits(model.get_parameter(name).float(), tensor.float()), name
    assert model.dtype == torch.float32


@pytest.mark.parametrize(
    ("asked", "dtype"), [(None, torch.float32), ("bfloat16", torch.bfloat16), (torch.float16, torch.float32)]
)
def test_the_engine_takes_a_dtype_by_name_or_as_it_is_and_fp32_on_a_cpu(
    asked: str | torch.dtype | None, dtype: torch.dtype, checkpoint: Path
) -> None:
    engine = hybrid.Engine.from_pretrained(checkpoint, device="cpu", dtype=asked, cache=SMALL)
    assert {parameter.dtype for parameter in engine.model.parameters()} == {dtype}
    assert engine.cache.kv.dtype == dtype
    assert engine.cache.state_tensors["recurrent"].dtype == torch.float32
    prompts = [list(range(5, 100)), [3, 4]]
    assert [
        len(o.token_ids) for o in engine.generate(prompts, hybrid.SamplingParams(max_new_tokens=3, ignore_eos=True))
    ] == [3, 3]


@pytest.mark.parametrize("asked", ["float64", "fp32"])
def test_another_dtype_is_refused_with_those_that_there_are(asked: str, checkpoint: Path) -> None:
    with pytest.raises(hybrid.ArgumentError, match="float32, bfloat16, float16"):
        hybrid.Engine.from_pretrained(checkpoint, dtype=asked, cache=SMALL)


def test_a_loaded_model_does_not_hold_on_to_its_file(copy: Path) -> None:
    model, expected = load(copy), load(copy)
    with (copy / WEIGHTS).open("r+b") as file:  # in place: a mapped weight would change with it
        file.seek(4096)
        file.write(b"\0" * ((copy / WEIGHTS).stat().st_size - 4096))
    assert_same_parameters(model, expected)
