"""LoRA adapters: equal to the merged model of PEFT, several in a batch, apart in the cache, loaded at run time."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from hybrid import (
    ArgumentError,
    CacheConfig,
    CheckpointError,
    Engine,
    EngineConfig,
    MemoryBudgetError,
    PromptError,
    UnsupportedModelError,
)
from hybrid.commands.random_checkpoints import is_comparable, write_random_checkpoint
from hybrid.engine.adapters import Adapters, namespace_of
from hybrid.speculation.config import SpeculationConfig
from support.checkpoints import cast_weights, random_model, text_config
from support.drafters import following
from support.engines import GRID, answer, assert_nothing_held, greedy, run_to_end
from support.peft_adapters import make_adapter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    more = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}, "use_rslora": True}
    return {
        "one": make_adapter(random_model(text_config()), root / "one", 1),
        "two": make_adapter(random_model(text_config()), root / "two", 2, ["q_proj", "v_proj", "up_proj"], **more),
    }


def load(checkpoint: Path, dtype: str) -> Engine:
    config = CacheConfig(page_size=GRID, chunk_size=GRID, memory="16MiB")
    limits = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, audit=True)
    return Engine.from_pretrained(checkpoint, device="cpu", dtype=dtype, cache=config, config=limits)


@pytest.fixture(scope="module")
def loaded(checkpoint: Path) -> Engine:
    return load(checkpoint, "float32")


def engine_on(
    loaded: Engine, folders: dict[str, Path], pages: int = 96, speculation: SpeculationConfig | None = None, **more: Any
) -> Engine:
    cache = CacheConfig(page_size=GRID, chunk_size=GRID, **more)
    engine = loaded.with_cache(cache, size=(pages, 24), speculation=speculation)
    for name, folder in folders.items():
        engine.adapters.load(name, folder)
    return engine


def test_no_draft_crosses_from_one_adapter_to_another(loaded: Engine, folders: dict[str, Path]) -> None:
    drafts = SpeculationConfig(drafters=("cache",), adaptive=False)
    engine, prompt = engine_on(loaded, folders, speculation=drafts), list(range(3, 43))  # no token twice
    answer(engine, prompt, greedy(30, adapter="one"))
    for adapter, others in (("two", False), (None, False), ("one", True)):
        before = engine.stats().speculation["continuation"].drafted_tokens
        answer(engine, prompt, greedy(4, adapter=adapter))
        assert (engine.stats().speculation["continuation"].drafted_tokens > before) == others


@pytest.mark.parametrize("right", [1.0, 0.6])
def test_drafts_change_no_answer_with_adapters(loaded: Engine, folders: dict[str, Path], right: float) -> None:
    prompts = [prompt_of(seed) for seed in range(3)]
    params = [greedy(30, logprobs=1, adapter=adapter) for adapter in (None, "one", "two")]
    plain = engine_on(loaded, folders).generate(prompts, params, progress=False)
    known = {tuple(prompt): output.token_ids for prompt, output in zip(prompts, plain, strict=True)}
    drafts = SpeculationConfig(drafters=(following(known, right),), adaptive=False)
    engine = engine_on(loaded, folders, speculation=drafts)
    for _ in range(2):  # the second time after hits
        found = engine.generate(prompts, params, progress=False)
        assert [(o.token_ids, o.logprobs) for o in found] == [(o.token_ids, o.logprobs) for o in plain]
        assert all(output.usage.accepted_tokens for output in found)
    assert_nothing_held(engine)


def test_a_pin_keeps_what_was_computed_with_an_adapter(loaded: Engine, folders: dict[str, Path]) -> None:
    engine = engine_on(loaded, folders, pages=24)
    prompt = prompt_of(0)
    answer(engine, prompt, greedy(1, adapter="one"))
    for adapter in (None, "two"):
        with pytest.raises(PromptError, match="nothing of this prompt is cached"):
            engine.pin(prompt, adapter=adapter)
    pin = engine.pin(prompt, adapter="one")
    for seed in range(1, 12):
        answer(engine, prompt_of(seed, 100), greedy(1))
    assert engine.cache.stats().evicted_pages > 0
    assert answer(engine, prompt, greedy(1, adapter="one")).usage.cached_tokens == pin.num_tokens == 2 * GRID
    engine.unpin(pin)
    for seed in range(1, 12):
        answer(engine, prompt_of(seed, 100), greedy(1))
    with pytest.raises(PromptError, match="nothing of this prompt is cached"):
        engine.pin(prompt, adapter="one")
    assert_nothing_held(engine)


def prompt_of(seed: int, count: int = 45) -> list[int]:
    return torch.randint(3, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def merged_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """Return log-probabilities of PEFT's own merged model in transformers."""
    model: Any = PeftModel.from_pretrained(random_model(text_config()), str(folder)).merge_and_unload()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)


@pytest.mark.parametrize("name", ["one", "two"])
def test_an_adapter_computes_what_the_merged_model_of_peft_computes(
    loaded: Engine, folders: dict[str, Path], name: str
) -> None:
    engine, prompt = engine_on(loaded, folders), prompt_of(0)
    plain = answer(engine, prompt, greedy(12, logprobs=20))
    found = answer(engine, prompt, greedy(12, logprobs=20, adapter=name))
    expected = merged_logprobs(folders[name], [*prompt, *found.token_ids])
    assert found.logprobs is not None
    assert plain.logprobs is not None
    for at, row in enumerate(found.logprobs, len(prompt) - 1):
        for token, value in row.items():
            assert value == pytest.approx(float(expected[at, token]), abs=2e-4)
    assert max(abs(plain.logprobs[0][t] - found.logprobs[0].get(t, 0.0)) for t in plain.logprobs[0]) > 0.05


def test_adapters_change_fused_projections_as_they_change_single_ones(
    checkpoint: Path, folders: dict[str, Path]
) -> None:
    """Rows of two adapters and of none in one batch, whose projections are parts of one product."""
    config = CacheConfig(page_size=GRID, chunk_size=GRID, memory="16MiB")
    loaded = Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=config)
    engine = engine_on(loaded, folders, enabled=False)
    prompts = [prompt_of(seed, 20 + 9 * seed) for seed in range(3)]
    params = [greedy(6, logprobs=5, adapter=name) for name in ("one", None, "two")]
    before = engine.generate(prompts, params, progress=False)
    engine.model.fuse_projections()
    after = engine.generate(prompts, params, progress=False)
    assert [output.token_ids for output in after] == [output.token_ids for output in before]
    for old, new in zip(before, after, strict=True):
        assert old.logprobs is not None and new.logprobs is not None
        for known, found in zip(old.logprobs, new.logprobs, strict=True):
            assert found == pytest.approx(known, abs=1e-5)


@pytest.mark.parametrize("load_dtype", [None, "int8"])
def test_an_adapter_has_the_type_of_the_rows_whatever_that_of_the_weights_beside_it(
    load_dtype: str | None, copy: Path, folders: dict[str, Path]
) -> None:
    config, found = CacheConfig(page_size=GRID, chunk_size=GRID, memory="16MiB"), []
    for stored in (torch.bfloat16, torch.float32):  # the same numbers
        path = cast_weights(copy, stored)
        engine = Engine.from_pretrained(path, device="cpu", dtype="float32", load_dtype=load_dtype, cache=config)
        engine.adapters.load("one", folders["one"])
        output = answer(engine, prompt_of(0), greedy(6, logprobs=5, adapter="one"))
        assert len(output.token_ids) == 6
        found.append((output.token_ids, output.logprobs))
    assert found[0] == found[1]


@pytest.mark.parametrize(("dtype", "deterministic"), [("float32", True), ("float32", False), ("bfloat16", True)])
def test_several_in_one_batch_give_each_what_it_gives_alone(
    checkpoint: Path, folders: dict[str, Path], dtype: str, deterministic: bool
) -> None:
    """In deterministic mode every bit: log-probabilities are compared as they are."""
    loaded = load(checkpoint, dtype)
    names = [None, "one", "two", "one", None, "two"]
    lengths = [45, 45, 37, 61, 20, 33]
    params = [greedy(10, logprobs=3, adapter=name) for name in names]
    prompts = [prompt_of(n, length) for n, length in enumerate(lengths)]
    alone = [
        answer(engine_on(loaded, folders, enabled=False, deterministic=deterministic), prompt, own)
        for prompt, own in zip(prompts, params, strict=True)
    ]
    engine = engine_on(loaded, folders, pages=19, deterministic=deterministic)
    for _ in range(2):
        together = engine.generate(prompts, params, progress=False)
        assert [output.token_ids for output in together] == [output.token_ids for output in alone]
        if deterministic:
            assert [output.logprobs for output in together] == [output.logprobs for output in alone]
    assert any(output.usage.cached_tokens for output in together)
    assert_nothing_held(engine)


def test_what_adapters_cache_is_apart(loaded: Engine, folders: dict[str, Path]) -> None:
    engine, prompt = engine_on(loaded, folders), prompt_of(0, 70)
    cold = {name: answer(engine, prompt, greedy(6, adapter=name)) for name in (None, "one", "two")}
    assert [output.usage.cached_tokens for output in cold.values()] == [0, 0, 0]
    for name, output in cold.items():
        again = answer(engine, prompt, greedy(6, adapter=name))
        assert again.usage.cached_tokens == 64
        assert again.token_ids == output.token_ids
    with pytest.raises(ArgumentError, match="marks those of adapters"):
        answer(engine, prompt, namespace=f"\0adapter {engine.adapters['one'].digest}\0")


def test_who_knows_an_adapter_without_its_matrices_names_what_it_caches_alike(
    loaded: Engine, folders: dict[str, Path], tmp_path: Path
) -> None:
    known = Adapters(loaded.model, None, list, lambda: None)
    for name, folder in folders.items():
        known.declare(name, folder)
    engine = engine_on(loaded, folders)
    for name, adapter in engine.adapters.items():
        assert namespace_of(known.named(name), "ann") == namespace_of(adapter, "ann")
        assert known[name].num_bytes == 0
    with pytest.raises(CheckpointError, match="not an adapter"):
        known.declare("none", tmp_path)


def test_an_adapter_loaded_again_finds_what_it_cached_and_another_of_its_name_does_not(
    loaded: Engine, folders: dict[str, Path]
) -> None:
    engine, prompt = engine_on(loaded, {}), prompt_of(0, 70)
    engine.adapters.load("mine", folders["one"])
    answer(engine, prompt, greedy(4, adapter="mine"))
    engine.adapters.unload("mine")
    assert engine.adapters.num_bytes == 0
    engine.adapters.load("mine", folders["two"])
    assert answer(engine, prompt, greedy(4, adapter="mine")).usage.cached_tokens == 0
    engine.adapters.unload("mine")
    engine.adapters.load("mine", folders["one"])
    assert answer(engine, prompt, greedy(4, adapter="mine")).usage.cached_tokens == 64


def test_a_prompt_that_is_encoded_while_its_adapter_is_replaced_is_refused(
    loaded: Engine, folders: dict[str, Path]
) -> None:
    engine = engine_on(loaded, {"mine": folders["one"]})
    for remedy in ("is loaded", "send it again"):
        prepared = engine.prepare(prompt_of(0, 70), greedy(4, adapter="mine"), "", "mine")
        engine.adapters.unload("mine")
        if remedy == "send it again":
            engine.adapters.load("mine", folders["two"])
        with pytest.raises(ArgumentError, match=remedy):
            engine.enter(prepared)
        if remedy == "is loaded":
            engine.adapters.load("mine", folders["one"])
    assert not engine.has_work


def test_adapters_come_and_go_while_requests_run(loaded: Engine, folders: dict[str, Path]) -> None:
    engine, prompt = engine_on(loaded, {"one": folders["one"]}), prompt_of(0)
    engine.add_request(prompt, greedy(12, adapter="one"), request_id="first")
    engine.step()
    engine.adapters.load("two", folders["two"])
    engine.add_request(prompt, greedy(12, adapter="two"), request_id="second")
    with pytest.raises(ArgumentError, match="1 requests use the adapter 'one'"):
        engine.adapters.unload("one")
    outputs = run_to_end(engine)
    assert outputs["first"].token_ids == answer(engine, prompt, greedy(12, adapter="one")).token_ids
    engine.adapters.unload("one")
    assert list(engine.adapters) == ["two"]
    with pytest.raises(ArgumentError, match=r"no adapter named 'one' is loaded \(loaded: 'two'\)"):
        engine.add_request(prompt, greedy(4, adapter="one"))
    assert_nothing_held(engine)


def test_the_memory_of_adapters_is_counted_and_limited(loaded: Engine, folders: dict[str, Path]) -> None:
    tensors = load_file(folders["one"] / "adapter_model.safetensors").values()
    num_bytes = sum(tensor.numel() * 4 for tensor in tensors)
    config = replace(loaded.config, adapter_memory=num_bytes)
    engine = loaded.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID), size=(32, 8), config=config)
    assert engine.adapters.load("one", folders["one"]).num_bytes == num_bytes == engine.adapters.num_bytes
    with pytest.raises(MemoryBudgetError, match=r"EngineConfig\(adapter_memory="):
        engine.adapters.load("two", folders["two"])
    assert list(engine.adapters) == ["one"]


TARGETS = {
    "bailing_hybrid": ["f_proj", "g_proj", "b_proj", "kv_a_proj_with_mqa", "o_proj", "down_proj"],
    "bamba": ["in_proj", "out_proj", "v_proj"],
    "falcon_h1": ["in_proj", "k_proj", "gate_proj", "down_proj"],
    "gpt_oss": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "granitemoehybrid": ["in_proj", "o_proj", "input_linear", "output_linear"],
    "jamba": ["in_proj", "x_proj", "dt_proj", "out_proj", "q_proj"],
    "kimi_linear": ["q_proj", "f_b_proj", "g_a_proj", "kv_a_proj_with_mqa", "o_proj"],
    "lfm2": ["in_proj", "out_proj", "q_proj", "w1", "w2"],
    "minimax": ["qkv_proj", "output_gate", "out_proj", "k_proj"],
    "nemotron_h": ["in_proj", "o_proj", "up_proj"],
    "olmo_hybrid": ["q_proj", "g_proj", "a_proj", "o_proj", "down_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "q_proj", "out_proj"],
    "recurrent_gemma": ["linear_x", "linear_out", "k_proj", "o_proj", "gate_proj"],
}
"""Matrix products that adapters of families change, some of them of another name or order than ours."""


@pytest.mark.parametrize("family", TARGETS)
def test_other_families_name_and_order_their_weights_otherwise(family: str, tmp_path: Path) -> None:
    if not is_comparable(family):
        pytest.skip("the installed transformers computes it otherwise than it was trained")
    base = write_random_checkpoint(tmp_path / "base", family)
    from transformers import AutoModelForCausalLM

    from hybrid.models.torch_functions import use_torch_functions

    def fresh() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        use_torch_functions(model)
        return model

    folder = make_adapter(fresh(), tmp_path / "adapter", 3, TARGETS[family])
    cache = CacheConfig(page_size=GRID, chunk_size=GRID, memory="32MiB")
    engine = Engine.from_pretrained(base, device="cpu", dtype="float32", cache=cache)
    engine.adapters.load("mine", folder)
    prompt = prompt_of(0, 40)
    found = answer(engine, prompt, greedy(4, logprobs=10, adapter="mine"))
    model: Any = PeftModel.from_pretrained(fresh(), str(folder)).merge_and_unload()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([[*prompt, *found.token_ids]])).logits[0].float(), -1)
    assert found.logprobs is not None
    for at, row in enumerate(found.logprobs, len(prompt) - 1):
        for token, value in row.items():
            assert value == pytest.approx(float(expected[at, token]), abs=5e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"use_dora": True}, UnsupportedModelError, "use_dora=True"),
        ({"bias": "all"}, UnsupportedModelError, "bias='all'"),
        ({"peft_type": "IA3"}, UnsupportedModelError, "type 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, UnsupportedModelError, "modules_to_save"),
        ({"lora_alpha": "six"}, CheckpointError, "must be numbers"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(
    loaded: Engine, folders: dict[str, Path], tmp_path: Path, change: dict[str, Any], error: Any, message: str
) -> None:
    folder = Path(shutil.copytree(folders["one"], tmp_path / "changed"))
    config = json.loads((folder / "adapter_config.json").read_text()) | change
    (folder / "adapter_config.json").write_text(json.dumps(config))
    engine = engine_on(loaded, {})
    with pytest.raises(error, match=message):
        engine.adapters.load("mine", folder)
    assert not engine.adapters


def test_weights_that_do_not_fit_are_refused(loaded: Engine, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["two"], tmp_path / "changed"))
    file = folder / "adapter_model.safetensors"
    whole = load_file(file)
    name = next(name for name in whole if name.endswith("q_proj.lora_B.weight"))
    missing = {key: value for key, value in whole.items() if key != name}
    wrong = [
        ({**whole, "base_model.model.lm_head.lora_A.weight": torch.ones(2, 64)}, "belong to no matrix product"),
        ({**whole, name: whole[name][:-1].contiguous()}, "do not fit a weight"),
        ({**whole, name: whole[name] * float("nan")}, "NaN"),
        ({**whole, name: whole[name].to(torch.int8)}, "expected a matrix of floats"),
        (missing, "only one of lora_A and lora_B"),
    ]
    engine = engine_on(loaded, {})
    for tensors, message in wrong:
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=message):
            engine.adapters.load("mine", folder)
    file.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        engine.adapters.load("mine", folder)
    with pytest.raises(CheckpointError, match="is not an adapter"):
        engine.adapters.load("mine", tmp_path)
    with pytest.raises(ArgumentError, match="is loaded; unload it first"):
        engine_on(loaded, folders).adapters.load("one", folders["one"])
