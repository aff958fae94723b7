"""Projections of the same rows, fused into one product: the same bits, the same parameters, half the products."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hybrid import CacheConfig, Engine
from hybrid.batch import Batch, Group
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.memory.tensors import CacheTensors
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
from support.checkpoints import layers, text_config
from support.engines import greedy, ids
from support.tensors import CPU, ints, rows_of


def engine_batch(rows: int) -> Batch:
    """A batch of single rows, for layers that look at nothing else."""
    group = Group(slice(0, rows), ints([0]), ints([1]), ints([[0]]), ints([0]), ints([1]), None)
    return Batch(ints([5] * rows), ints([0] * rows), ints([0] * rows), rows_of([]), ints([0]), None, group, None)


def load(path: Path, **cache: Any) -> Engine:
    config = CacheConfig(page_size=64, chunk_size=64, memory="16MiB", **cache)
    return Engine.from_pretrained(path, device="cpu", dtype="float32", cache=config)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "bamba"])
def test_fused_projections_give_the_same_bits(family: str, tmp_path: Path) -> None:
    pytest.importorskip("numba", reason="products of torch may sum in another order when a weight has more rows")
    loaded = load(write_random_checkpoint(tmp_path, family), deterministic=True)
    engine = loaded.with_cache(loaded.cache.config, size=(24, 24))
    prompts = [[n % 300 for n in ids(20 + 50 * seed, seed)] for seed in range(3)]
    before = engine.generate(prompts, greedy(5, logprobs=4), progress=False)
    parameters = {name: values.clone() for name, values in engine.model.named_parameters()}
    loaded.model.fuse_projections()
    engine = loaded.with_cache(
        loaded.cache.config, size=(24, 24)
    )  # what the other one has captured is of the old weights
    after = engine.generate(prompts, greedy(5, logprobs=4), progress=False)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]
    assert [output.logprobs for output in after] == [output.logprobs for output in before]
    now = dict(engine.model.named_parameters())
    assert list(now) == list(parameters)
    assert all(torch.equal(now[name], values) for name, values in parameters.items())


def test_writing_to_a_fused_weight_is_seen(tmp_path: Path) -> None:
    loaded = load(write_random_checkpoint(tmp_path, "qwen3_5_text"), enabled=False)
    prompt = [n % 300 for n in ids(70)]
    loaded.model.fuse_projections()
    engine = loaded.with_cache(loaded.cache.config, size=(24, 24))
    before = engine.generate([prompt], greedy(3, logprobs=2), progress=False)
    with torch.no_grad():
        engine.model.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(2)
    assert engine.generate([prompt], greedy(3, logprobs=2), progress=False)[0].logprobs != before[0].logprobs


def test_compiled_products_of_the_same_rows_do_not_wait_for_each_other(tmp_path: Path) -> None:
    tasks = pytest.importorskip("hybrid.kernels.cpu.tasks", reason="nothing is compiled")
    engine = load(write_random_checkpoint(tmp_path, "qwen3_5_text"), enabled=False)
    module = engine.model.model.layers[0].mlp
    x, batch, found = torch.randn(8, module.gate_proj.weight.shape[1]), engine_batch(8), []
    before = tasks.recorder.set(found.append)
    try:
        gate, up = module.inputs(x, batch)
    finally:
        tasks.recorder.reset(before)
    assert [task.joins for task in found] == [False, True]
    assert torch.equal(gate, module.gate_proj(x, batch))
    assert torch.equal(up, module.up_proj(x, batch))


class Products(TorchFunctionMode):
    """Counts torch's products with weights."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.nn.functional.linear
        return func(*args, **(kwargs or {}))


def test_a_decode_step_of_32_layers_has_129_products(use_kernels: Callable[[str], None]) -> None:
    """The model has as many layers as Qwen3.5-9B: 2 products for a mixer, 2 for a feed-forward part, and the head; 249
    apart."""
    use_kernels("reference")
    config = text_config(layer_types=layers("LLLF" * 8), tie_word_embeddings=False)
    model = Qwen3_5ForCausalLM(config, 64)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.05)
    tensors = CacheTensors.fixed(model.spec(config, torch.float32), 64, 2, 3, CPU)
    batch = Batch(
        token_ids=ints([5]),
        positions=ints([0]),
        slot_mapping=ints([0]),
        checkpoints=rows_of([]),
        sample_rows=ints([0]),
        prefills=None,
        decodes=Group(slice(0, 1), ints([0, 1]), ints([1]), ints([[0]]), ints([0]), ints([1]), None),
        decode_start=None,
    )
    counts = []
    for _ in range(2):
        with Products() as products:
            model(batch, tensors.kv, tensors.state)
        counts.append(products.count)
        model.fuse_projections()
    assert counts == [249, 129]
