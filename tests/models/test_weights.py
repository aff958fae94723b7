"""Weights from disk to parameters: the memory it takes, the ways experts are stored, what is missing, and the layers
that predict further ahead."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybrid import CheckpointError
from hybrid.commands.random_checkpoints import FAMILIES, add_random_predictor, write_random_checkpoint
from hybrid.commands.random_checkpoints import random_model as random_of
from hybrid.models.causal_lm import CausalLM
from hybrid.models.loading import load_model, open_checkpoint
from support.checkpoints import (
    WEIGHTS,
    cast_weights,
    edit_weights,
    layers,
    random_model,
    shard,
    text_config,
    write_checkpoint,
)
from support.tensors import CPU, same_bits

MOE = "qwen3_5_moe_text"

EXPERT = "model.layers.0.mlp.experts.1.down_proj.weight"

MEASURE = """
import re, sys
from pathlib import Path
import psutil, torch
from hybrid.models.loading import load_model, open_checkpoint

def load(path):
    return load_model(open_checkpoint(Path(path)), torch.float32, torch.device("cpu"), 64)

def peak():  # with the pages of mapped files; ru_maxrss would count what the parent process had
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

load(sys.argv[1])  # whatever torch and transformers import on the way is in memory now
before = psutil.Process().memory_info().rss
assert peak() - before < 64e6
model = load(sys.argv[2])
print((peak() - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def load(path: Path, mtp: bool = False) -> CausalLM:
    return load_model(open_checkpoint(path), torch.float32, CPU, 64, mtp=mtp, progress=False)


def refused(path: Path, mtp: bool = False) -> str:
    with pytest.raises(CheckpointError) as raised:
        load(path, mtp)
    return str(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells the peak in another way elsewhere")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_needs_little_more_memory_than_the_weights(
    stored: torch.dtype, checkpoint: Path, tmp_path: Path
) -> None:
    """A quarter of this model is its embedding, which is read in slices too."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 8192, "tie_word_embeddings": False}
    write_checkpoint(tmp_path, random_model(text_config(**sizes, layer_types=layers("LF"))).to(stored))
    assert (tmp_path / WEIGHTS).stat().st_size > 70e6
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, checkpoint, tmp_path], capture_output=True, text=True, check=True
    )
    assert 0.8 < float(result.stdout) < 1.15


# Experts


def test_experts_stay_bfloat16_where_all_of_them_are(tmp_path: Path) -> None:
    path = cast_weights(write_random_checkpoint(tmp_path, "qwen3_next"), torch.bfloat16)
    assert load(path).get_parameter("model.layers.0.mlp.experts.down_proj").dtype == torch.bfloat16
    (file,) = (file for file in path.glob("*.safetensors") if EXPERT in load_file(file))
    tensors = load_file(file)
    tensors[EXPERT] = tensors[EXPERT].float() + 1e-6
    save_file(tensors, file, {"format": "pt"})
    experts = load(path).get_parameter("model.layers.0.mlp.experts.down_proj")
    assert experts.dtype == torch.float32
    assert same_bits(experts[1], tensors[EXPERT])


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("experts"), MOE)


@pytest.fixture
def own(one_by_one: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    for file in one_by_one.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def fuse(tensors: dict[str, Tensor]) -> None:
    """Experts stored together, as transformers has them in memory."""
    config = FAMILIES[MOE].settings
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = {
            kind: [tensors.pop(f"{prefix}.{e}.{kind}_proj.weight") for e in range(config["num_experts"])]
            for kind in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = torch.stack(parts["down"])


def test_experts_stored_together_or_one_by_one_in_one_file_or_several_are_the_same(one_by_one: Path, own: Path) -> None:
    expected = load(one_by_one).state_dict()
    shard(own)
    for name, tensor in load(own).state_dict().items():
        assert same_bits(tensor, expected[name]), name
    save_file(load_file(one_by_one / WEIGHTS), own / WEIGHTS, {"format": "pt"})
    (own / "model.safetensors.index.json").unlink()
    edit_weights(own, fuse)
    for name, tensor in load(own).state_dict().items():
        assert same_bits(tensor, expected[name]), name


@pytest.mark.parametrize("name", [MOE, "qwen3_next"])
def test_the_experts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = random_of(FAMILIES[name]).state_dict()
    for parameter, tensor in load(write_random_checkpoint(tmp_path, name)).state_dict().items():
        if "in_proj" not in parameter:  # Qwen3-Next stores them in another order
            assert same_bits(tensor, theirs[parameter]), parameter


def test_a_missing_expert_is_named_as_it_would_be_on_disk(own: Path) -> None:
    gone = ["model.layers.1.mlp.experts.4.up_proj.weight", "model.layers.2.mlp.experts.0.down_proj.weight"]
    edit_weights(own, lambda tensors: [tensors.pop(name) for name in gone])
    assert f"missing {gone}, unexpected nothing" in refused(own)


def test_a_missing_tensor_of_fused_experts_is_named_as_it_would_be_on_disk(own: Path) -> None:
    edit_weights(own, fuse)
    edit_weights(own, lambda tensors: tensors.pop("model.layers.0.mlp.experts.gate_up_proj"))
    assert "missing ['model.layers.0.mlp.experts.gate_up_proj'], unexpected nothing" in refused(own)


def test_an_expert_too_many_is_unexpected_and_one_of_another_shape_is_named_with_both_shapes(own: Path) -> None:
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    edit_weights(own, lambda tensors: tensors.update({name.format(12): torch.zeros(64, 24)}))
    assert f"missing nothing, unexpected ['{name.format(12)}']" in refused(own)
    edit_weights(own, lambda tensors: tensors.pop(name.format(12)))
    edit_weights(own, lambda tensors: tensors.update({name.format(3): torch.zeros(64, 25)}))
    assert f"{name.format(3)} has shape (64, 25), expected (64, 24)" in refused(own)


def test_projections_of_another_shape_are_named_with_the_shape_on_disk(tmp_path: Path) -> None:
    path = write_random_checkpoint(tmp_path, "qwen3_next, fused, probabilities")
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    edit_weights(path, lambda tensors: tensors.update({name: torch.zeros(208, 63)}))
    assert f"{name} has shape (208, 63), expected (208, 64)" in refused(path)


def test_weights_that_are_quantised_are_refused_with_what_to_do(own: Path) -> None:
    name = "model.layers.0.mlp.shared_expert.up_proj.weight"
    edit_weights(own, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert all(word in refused(own) for word in (name, "float8_e4m3fn", "bfloat16"))


# Layers that predict further ahead


@pytest.mark.parametrize("name", ["qwen3_5_text", MOE])
def test_layers_that_predict_further_ahead_are_loaded_when_asked_for(name: str, tmp_path: Path) -> None:
    path = write_random_checkpoint(tmp_path, name)
    assert load(path, mtp=True).mtp is None
    add_random_predictor(path)
    assert load(path).mtp is None
    model, tensors = load(path, mtp=True), load_file(path / WEIGHTS)
    assert model.mtp is not None
    loaded = {key for key in model.state_dict() if key.startswith("mtp.")}
    assert loaded >= {key for key in tensors if key.startswith("mtp.") and ".experts." not in key}
    assert same_bits(model.get_parameter("mtp.fc.weight"), tensors["mtp.fc.weight"])
    ours = {key: value for key, value in model.state_dict().items() if key.startswith("mtp.layers.0.")}
    for key, tensor in ours.items():
        assert same_bits(tensor, model.state_dict()[key.replace("mtp.layers.0.", "model.layers.1.")]), key
    edit_weights(path, lambda tensors: tensors.pop("mtp.norm.weight"))
    assert "missing ['mtp.norm.weight']" in refused(path, mtp=True)
