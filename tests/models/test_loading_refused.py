"""Checkpoints that are refused, and with what words; and prompts without a tokenizer or a chat template."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid
from hybrid.models import loading, transformers_types
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.transformers_types import NEEDED
from support.checkpoints import INDEX, WEIGHTS, edit_config, edit_weights, layers, shard
from support.tensors import CPU

SMALL = hybrid.CacheConfig(memory="8MiB", page_size=16)


def refused(path: Path, *words: str, error: type[hybrid.HybridError] = hybrid.CheckpointError) -> None:
    """Loading must raise exactly this error, with these words in its message."""
    with pytest.raises(error) as raised:
        load_model(open_checkpoint(path), torch.float32, CPU, 64)
    assert type(raised.value) is error
    for word in words:
        assert word in str(raised.value)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", str(tmp_path / "nothing"), "config.json")


@pytest.mark.parametrize("name", ["nothing", "./nothing/here", "a/b/c", ""])
def test_a_name_that_is_neither_a_folder_nor_a_hub_id_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hybrid.CheckpointError, match=r"hub id|has no config"):
        open_checkpoint(name)


def test_a_file_instead_of_a_folder_is_refused(copy: Path) -> None:
    refused(copy / WEIGHTS, WEIGHTS, "folder")


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "config.json")


@pytest.mark.parametrize("text", ["", "{", "not json"])
def test_a_configuration_that_is_no_json_is_refused(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    refused(copy, "config.json", "JSON")


@pytest.mark.parametrize(("model_type", "first"), NEEDED.items())
def test_a_type_that_the_installed_transformers_lacks_is_refused_with_the_version_that_has_it(
    model_type: str, first: str, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loading, transformers_types):
        monkeypatch.setattr(module, "version", lambda package: "5.16.1")  # the oldest that is allowed
    edit_config(copy, model_type=model_type)
    words = model_type, f"from version {first} on", "installed is 5.16.1", f'pip install -U "transformers>={first}"'
    refused(copy, *words, error=hybrid.UnsupportedModelError)


@pytest.mark.parametrize("text", ["[1, 2]", "null", "{}", '{"model_type": 7}'])
def test_json_that_names_no_architecture_is_refused(text: str, copy: Path) -> None:
    (copy / "config.json").write_text(text)
    refused(copy, "qwen3_5_text", error=hybrid.UnsupportedModelError)


def test_another_architecture_is_refused_with_those_that_run(copy: Path) -> None:
    edit_config(copy, model_type="t5")
    refused(copy, "t5", "supported", "qwen3_5", "qwen3_5_text", error=hybrid.UnsupportedModelError)


def test_weights_of_another_architecture_of_transformers_are_refused(copy: Path) -> None:
    edit_config(copy, model_type="olmo2")
    refused(copy, "lacks weights", "model.layers.0", error=hybrid.CheckpointError)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0, "rope_theta": 1e4}}, ["rope_type", "spiral"]),
        ({"layer_types": layers("FFF")}, ["linear_attention"]),
        ({"layer_types": layers("LLL")}, ["full_attention"]),
        ({"hidden_act": "mish", "hidden_size": 200}, ["hidden_act", "mish", "other shapes"]),
    ],
)
def test_a_configuration_that_does_not_run_here_is_refused(
    changes: dict[str, Any], words: list[str], copy: Path
) -> None:
    edit_config(copy, **changes)
    refused(copy, *words, error=hybrid.UnsupportedModelError)


def test_a_configuration_that_transformers_does_not_understand_is_refused(copy: Path) -> None:
    edit_config(copy, hidden_size="wide")
    refused(copy, "config.json", "cannot be read")


def test_a_checkpoint_without_weights_is_refused(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    refused(copy, WEIGHTS, "missing")


def test_a_missing_shard_is_refused(copy: Path) -> None:
    shard(copy)
    (copy / "model-00002-of-00003.safetensors").unlink()
    refused(copy, "model-00002-of-00003.safetensors", "missing")


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_damaged_is_refused(text: str, copy: Path) -> None:
    shard(copy)
    (copy / INDEX).write_text(text)
    refused(copy, INDEX)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    refused(copy, "missing", "model.layers.1.self_attn.k_norm.weight")


def test_the_head_must_be_there_when_it_is_not_tied(copy: Path) -> None:
    edit_config(copy, tie_word_embeddings=False)
    refused(copy, "missing", "lm_head.weight")


def test_an_unexpected_tensor_is_named(copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}))
    refused(copy, "unexpected", "model.layers.9.mlp.up_proj.weight")


@pytest.mark.parametrize("shape", [(64,), (320, 65), (64, 320)])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(shape: tuple[int, ...], copy: Path) -> None:
    edit_weights(copy, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.zeros(shape)}))
    refused(copy, "model.embed_tokens.weight", str(shape), "(320, 64)")


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.5, 0.999])
def test_a_truncated_file_is_refused(kept: float, copy: Path) -> None:
    with (copy / WEIGHTS).open("r+b") as file:
        file.truncate(int((copy / WEIGHTS).stat().st_size * kept))
    refused(copy, WEIGHTS, "truncated")


def waited(seconds: float) -> None:
    raise AssertionError("it is tried again later")


def test_a_hub_id_out_of_reach_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "sleep", waited)
    with pytest.raises(hybrid.CheckpointError, match="Qwen/no-such-model"):
        open_checkpoint("Qwen/no-such-model")


# Tokenizers


def test_without_a_tokenizer_texts_are_refused_and_token_ids_run(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    engine = hybrid.Engine.from_pretrained(copy, device="cpu", cache=SMALL)
    assert engine.tokenizer is None
    with pytest.raises(hybrid.PromptError, match="no tokenizer"):
        engine.generate("some text")
    with pytest.raises(hybrid.PromptError, match="no tokenizer"):
        engine.stream("some text")
    with pytest.raises(hybrid.PromptError, match="stop"):
        engine.generate([5, 6], hybrid.SamplingParams(stop="a"))
    output = engine.generate([5, 6], hybrid.SamplingParams(max_new_tokens=2, ignore_eos=True))[0]
    assert output.text == ""
    assert len(output.token_ids) == 2


def test_without_a_chat_template_messages_are_refused_and_texts_run(copy: Path) -> None:
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = hybrid.Engine.from_pretrained(copy, device="cpu", cache=SMALL)
    with pytest.raises(hybrid.PromptError, match="chat template"):
        engine.generate([{"role": "user", "content": "Hello"}])
    assert engine.generate("Hello", hybrid.SamplingParams(max_new_tokens=1))[0].usage.prompt_tokens > 0


def test_messages_go_through_the_chat_template(checkpoint: Path) -> None:
    engine = hybrid.Engine.from_pretrained(checkpoint, device="cpu", cache=SMALL)
    output = engine.generate([{"role": "user", "content": "Hello"}], hybrid.SamplingParams(max_new_tokens=1))[0]
    assert engine.tokenizer is not None
    asked = engine.tokenizer.decode(output.prompt_token_ids)
    assert asked == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids[0] == engine.tokenizer.convert_tokens_to_ids("<|im_start|>")


@pytest.mark.parametrize("messages", [[{"role": "user", "content": ""}], [{"role": "system", "content": ""}]])
def test_messages_that_the_template_does_not_understand_are_refused(messages: list[dict[str, Any]], copy: Path) -> None:
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% if not messages[0].content %}{{ raise_exception('no content') }}{% endif %}"
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = hybrid.Engine.from_pretrained(copy, device="cpu", cache=SMALL)
    with pytest.raises(hybrid.PromptError, match="no content"):
        engine.generate([messages])


def test_a_damaged_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(hybrid.CheckpointError, match="tokenizer"):
        hybrid.Engine.from_pretrained(copy, device="cpu", cache=SMALL)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq, 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "bitsandbytes", "bits": 4}, "bitsandbytes, 4 bits"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8 with one factor per tensor"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}},
            },
            "floats of 4 bits",
        ),
        ({"group_size": 64, "bits": 4}, "MLX, 4 bits"),
    ],
)
def test_quantized_weights_are_refused_by_their_method_with_the_way_out(
    copy: Path, quantization: dict[str, Any], name: str
) -> None:
    edit_config(copy, quantization_config=quantization)
    refused(copy, name, "in bfloat16 or float32", "load_dtype=", error=hybrid.UnsupportedModelError)
