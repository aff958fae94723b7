"""The memory of weights: the bytes of their file, whatever the layout, and a byte each as int8."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid import ArgumentError, CacheConfig, Engine, SamplingParams
from hybrid.commands.random_checkpoints import FAMILIES as RANDOM
from hybrid.commands.random_checkpoints import random_model as model_of
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.kernels.packed_weights import GROUPS
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import Linear
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.moe import Experts
from hybrid.models.weights import Quantization, quantize_rows
from support.checkpoints import WEIGHTS, cast_weights, layers, random_model, text_config, write_checkpoint

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

CPU = torch.device("cpu")
FAMILIES = ["bamba, odd sizes", "qwen3_5_text, odd sizes", "qwen3_next, odd sizes"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: write_random_checkpoint(folder / str(at), name) for at, name in enumerate(FAMILIES)}


def num_bytes(model: CausalLM) -> int:
    """Bytes of all tensors that a model holds."""
    tensors: list[Tensor] = list(model.parameters())
    for module in model.modules():
        tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
        tensors += getattr(module, "scales", {}).values()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def bytes_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_the_bytes_of_their_file(
    family: str, dtype: torch.dtype, kernels: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", kernels)
    path = checkpoints[family]
    model = load_model(open_checkpoint(path), dtype, CPU, 64)
    assert num_bytes(model) <= 1.05 * bytes_on_disk(path) * dtype.itemsize / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_that_stay_bfloat16_in_a_model_of_fp32_change_no_bit(
    family: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoints[family], tmp_path / "copy"))
    prompts, params = [list(range(3, 153)), [3, 4]], SamplingParams(max_new_tokens=5, logprobs=5, ignore_eos=True)
    answers = []
    for stored in (torch.bfloat16, torch.float32):  # the same numbers
        settings = CacheConfig(memory="16MiB", page_size=16, chunk_size=64)
        engine = Engine.from_pretrained(cast_weights(path, stored), device="cpu", dtype="float32", cache=settings)
        assert num_bytes(engine.loaded.model) <= 1.05 * bytes_on_disk(path)
        outputs = [output for _ in range(2) for output in engine.generate(prompts, params, progress=False)]
        assert outputs[2].usage.cached_tokens > 0
        answers.append([(output.token_ids, output.logprobs) for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("group", GROUPS)
def test_experts_in_four_bits_take_half_a_byte_for_each_number_and_four_for_each_group(
    group: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 32}
    family = replace(RANDOM["lfm2_moe"], settings={**RANDOM["lfm2_moe"].settings, **sizes})
    model_of(family).save_pretrained(tmp_path)
    cast_weights(tmp_path, torch.bfloat16)
    models = [
        load_model(open_checkpoint(tmp_path), torch.bfloat16, CPU, 64, quantize=form)
        for form in (None, Quantization(group))
    ]
    numbers = 3 * 128 * 256 * 32 * sum(isinstance(module, Experts) for module in models[0].modules())
    others = num_bytes(models[0]) - 2 * numbers
    assert numbers and others < 0.1 * num_bytes(models[0])
    of_experts = numbers // 2 + 4 * numbers // group
    assert of_experts <= num_bytes(models[1]) <= of_experts + others


RESIDENT = """
import ctypes, gc, json, re, sys
from pathlib import Path
from hybrid import CacheConfig, Engine, SamplingParams

def resident():  # without mapped files
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def used(path, how):  # for a prompt, alone and in products of many rows, and for decoded tokens
    engine = Engine.from_pretrained(path, device="cpu", cache=CacheConfig(memory="8MiB"), **how)
    engine.generate([list(range(3, 203)), [3]], SamplingParams(max_new_tokens=4, ignore_eos=True), progress=False)
    engine.close()
    return engine.loaded.model

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages: resident is then what was written
found = {}
for name, how in json.loads(sys.argv[2]).items():
    used(sys.argv[1], how)  # what is compiled and imported for these sizes is in memory now
    before = resident()
    model = used(sys.argv[1], how)
    found[name] = resident() - before
    del model
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells memory in another way elsewhere")
def test_a_model_in_use_takes_the_bytes_of_its_weights_in_the_memory_of_the_process(tmp_path: Path) -> None:
    """No copy of a weight is kept, as of panels in which many rows are multiplied."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "layer_types": layers("LFLF")}
    write_checkpoint(tmp_path, random_model(text_config(**sizes)))
    elements = (tmp_path / WEIGHTS).stat().st_size / 4
    types = {
        "float32": ({"dtype": "float32"}, 4),
        "bfloat16": ({"dtype": "bfloat16"}, 2),
        "int8": ({"dtype": "bfloat16", "load_dtype": "int8"}, 1),
    }
    settings = json.dumps({name: how for name, (how, _) in types.items()})
    command = [sys.executable, "-c", RESIDENT, tmp_path, settings]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    over = {name: found[name] / (elements * size) for name, (_, size) in types.items()}
    assert all(0.95 < ratio < 1.05 for ratio in over.values()), over


# int8


def test_an_element_changes_by_at_most_half_a_step_of_its_row() -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 33) * torch.rand(40, 1) * 10
    weight[3] = 0
    quantized, scale = quantize_rows(weight)
    assert quantized.dtype == torch.int8
    change = (quantized * scale.unsqueeze(1) - weight).abs()
    assert (change <= 0.5001 * scale.unsqueeze(1)).all()
    assert (quantized.abs().amax(1)[scale > 0] == 127).all()
    assert not quantized[3].any()
    for bad in (float("nan"), float("inf")):
        weight[5, 7] = bad
        assert quantize_rows(weight)[1].isnan().nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hits_of_a_quantized_model_are_bitwise_cold_runs_and_near_the_checkpoint(dtype: str) -> None:
    settings = CacheConfig(memory="64MiB", deterministic=True)
    engine = Engine.from_pretrained("tiny", device="cpu", dtype=dtype, load_dtype="int8", cache=settings)
    exact = Engine.from_pretrained("tiny", device="cpu", dtype=dtype, cache=settings)
    linears = [module for module in engine.loaded.model.modules() if isinstance(module, Linear)]
    assert sum(module.weight.dtype == torch.int8 for module in linears) >= len(linears) - 1  # the head may be tied
    params, prompt = SamplingParams(max_new_tokens=4, logprobs=5, ignore_eos=True), list(range(5, 155))
    cold, warm, expected = (e.generate([prompt], params, progress=False)[0] for e in (engine, engine, exact))
    assert warm.usage.cached_tokens >= 128
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
    assert cold.logprobs is not None and expected.logprobs is not None
    first, other = cold.logprobs[0], expected.logprobs[0]
    assert first != other
    assert all(abs(first[token] - other[token]) < 0.5 for token in first.keys() & other.keys())
    assert num_bytes(engine.loaded.model) < 0.62 * num_bytes(exact.loaded.model)


def test_experts_and_routers_are_not_quantized(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["qwen3_next, odd sizes"]
    engine = Engine.from_pretrained(path, device="cpu", dtype="float32", load_dtype="int8")
    weights = dict(engine.loaded.model.named_parameters())
    linears = {f"{name}.weight" for name, module in engine.loaded.model.named_modules() if isinstance(module, Linear)}
    routers = {name for name in linears if name.endswith("mlp.gate.weight")}
    assert routers
    assert {name for name, weight in weights.items() if weight.dtype == torch.int8} == linears - routers
    output = engine.generate([list(range(3, 60))], SamplingParams(max_new_tokens=3, ignore_eos=True), progress=False)[0]
    assert len(output.token_ids) == 3


@pytest.mark.parametrize(
    ("arguments", "kernels", "message"),
    [
        ({"load_dtype": "int3"}, "auto", "load_dtype must be one of int8, int4, .*; got 'int3'"),
        ({"load_dtype": "int8"}, "reference", "HYBRID_KERNELS=reference: leave load_dtype out"),
    ],
)
def test_where_weights_cannot_be_quantized_the_error_says_what_to_do(
    arguments: dict[str, str], kernels: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", kernels)
    with pytest.raises(ArgumentError, match=message):
        Engine.from_pretrained("tiny", device="cpu", **arguments)
