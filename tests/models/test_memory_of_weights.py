"""What weights take in memory: the bytes of their file, whatever the layout, and a byte each as int8."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid import ArgumentError, CacheConfig, Engine, SamplingParams
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.models.causal_lm import CausalLM
from hybrid.models.layers import Linear
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.weights import quantize_rows

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
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_the_bytes_of_their_file(
    family: str, dtype: torch.dtype, kernels: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", kernels)
    path = checkpoints[family]
    model = load_model(open_checkpoint(path), dtype, CPU, 64)
    model.make_batch_invariant()
    on_disk = sum(file.stat().st_size for file in path.glob("*.safetensors")) * dtype.itemsize / 4
    assert num_bytes(model) <= 1.05 * on_disk


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
        ({"load_dtype": "int4"}, "auto", "load_dtype must be 'int8' or None, got 'int4'"),
        ({"load_dtype": "int8", "dtype": "float16"}, "auto", "needs a CPU with the extra numba.*float16"),
        ({"load_dtype": "int8"}, "reference", "install hybrid-prefix-cache.numba., or leave load_dtype out"),
    ],
)
def test_where_weights_cannot_be_quantized_the_error_says_what_to_do(
    arguments: dict[str, str], kernels: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRID_KERNELS", kernels)
    with pytest.raises(ArgumentError, match=message):
        Engine.from_pretrained("tiny", device="cpu", **arguments)
