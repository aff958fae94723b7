"""Keys and values kept in a byte per element: hits are cold runs bit by bit, errors are those that docs/eviction.md
states, and what cannot be done is refused."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hybrid import ArgumentError, CacheConfig, CacheFileError, Engine, RequestOutput
from hybrid.commands import parity
from hybrid.commands.parity import Judge, KnownAnswers
from hybrid.commands.random_checkpoints import write_random_checkpoint
from hybrid.speculation.config import SpeculationConfig
from support.checkpoints import random_model, text_config, write_checkpoint
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids, run_to_end
from support.small_passes import SIZES

KEPT = ("int8", "fp8")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kv_dtype", KEPT)
def test_a_page_takes_a_byte_per_element_and_a_scale_per_row(tiny: Engine, kv_dtype: str) -> None:
    config = tiny.model.config
    heads, rows = config.num_key_value_heads, config.layer_types.count("full_attention") * 2 * GRID
    for own, row in (("auto", 4 * config.head_dim), (kv_dtype, config.head_dim + 4)):
        assert engine_on(tiny, kv_dtype=own).cache.unit_bytes[0] == rows * heads * row


@pytest.mark.parametrize("kv_dtype", KEPT)
@pytest.mark.parametrize("scenario", [parity.branch, parity.busy_batch], ids=lambda scenario: scenario.__name__)
def test_hits_are_bitwise_cold_runs(tiny: Engine, kv_dtype: str, scenario: Any) -> None:
    """Deterministic mode accepts these types: what is kept of a token depends on no other, and every pass reads it."""
    check = scenario(Judge(engine_on(tiny, kv_dtype=kv_dtype)))
    assert check.passed, check.detail


@pytest.mark.parametrize(("family", "kv_dtype"), [("bamba", "fp8"), ("gemma3_text", "int8")])
def test_hits_of_every_family_are_bitwise_cold_runs(tmp_path: Path, kv_dtype: str, family: str) -> None:
    config = CacheConfig(memory="64MiB", kv_dtype=kv_dtype)
    engine = Engine.from_pretrained(write_random_checkpoint(tmp_path, family), device="cpu", cache=config)
    check = parity.second_turn(Judge(engine))
    assert check.passed, check.detail


@pytest.mark.parametrize("kv_dtype", KEPT)
def test_when_memory_runs_out_answers_stay_the_same(tiny: Engine, kv_dtype: str) -> None:
    engine = engine_on(tiny, pages=14, states=8, kv_dtype=kv_dtype)
    prompts = [ids(2 * GRID + 2 + at, at) for at in range(4)]
    names = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    outputs = run_to_end(engine)
    assert engine.scheduler.num_retractions > 0
    cold = engine_on(tiny, enabled=False, kv_dtype=kv_dtype)
    assert [outputs[name].token_ids for name in names] == [answer(cold, p, greedy(40)).token_ids for p in prompts]
    assert_nothing_held(engine)


@pytest.mark.parametrize("kv_dtype", KEPT)
def test_trees_of_drafts_change_no_bit(tiny: Engine, kv_dtype: str) -> None:
    """Paths of a tree copy rows from page to page."""
    judge, prompt = Judge(engine_on(tiny, kv_dtype=kv_dtype)), ids(3 * GRID + 9)
    expected = judge.cold(prompt)
    known = KnownAnswers({tuple(prompt): expected.token_ids}, wrong_every=4, as_tree=True)
    warm = judge.warm(speculation=SpeculationConfig(drafters=(known,), adaptive=False))
    for _ in range(2):
        output = answer(warm, prompt, parity.ANSWER)
        assert output.logprobs == expected.logprobs
        assert output.usage.accepted_tokens > 0
    assert_nothing_held(warm)


@pytest.mark.parametrize(("kv_dtype", "mean", "most"), [("int8", 0.007, 0.1), ("fp8", 0.03, 0.4)])
def test_log_probabilities_are_off_by_what_the_docs_state(kv_dtype: str, mean: float, most: float) -> None:
    """The log-probabilities are of every token of 4 texts of 1500 characters from LICENSE, given those before it."""
    texts = (ROOT / "LICENSE").read_text(encoding="utf-8")
    found = {}
    for own in ("auto", kv_dtype):
        engine = Engine.from_pretrained("tiny", device="cpu", cache=CacheConfig(memory="16MiB", kv_dtype=own))
        outputs = engine.generate(
            [texts[at : at + 1500] for at in range(0, 6000, 1500)], greedy(1, prompt_logprobs=0), progress=False
        )
        found[own] = [
            row[token]
            for output in outputs
            for token, row in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
            if row
        ]
    errors = [abs(one - other) for one, other in zip(found["auto"], found[kv_dtype], strict=True)]
    print(f"{kv_dtype}: {len(errors)} tokens, mean {sum(errors) / len(errors):.4f}, most {max(errors):.4f}")
    assert 0 < sum(errors) / len(errors) <= mean
    assert max(errors) <= most


@pytest.mark.parametrize("value", ["fp4", "", None, 8, "float32", b"int8"])
def test_another_type_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="kv_dtype must be one of auto, fp8, int8; got"):
        CacheConfig(kv_dtype=value)


def answers(checkpoint: Path, kv_dtype: str) -> list[RequestOutput]:
    """To a prompt, asked twice."""
    config = CacheConfig(page_size=16, chunk_size=16, memory="8MiB", kv_dtype=kv_dtype)
    engine = Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=config)
    return [answer(engine, list(range(5, 22)), greedy(2, logprobs=1)) for _ in range(2)]


def test_the_gpu_kernels_give_the_same_answers(tmp_path: Path) -> None:
    """Interpreted, in a process whose kernels are chosen anew."""
    pytest.importorskip("triton", reason="the extra gpu is not installed")
    checkpoint = write_checkpoint(tmp_path, random_model(text_config(**SIZES)))
    with ProcessPoolExecutor(1, get_context("spawn"), set_triton) as process:
        interpreted = process.submit(answers, checkpoint, "fp8").result()
    for found, expected in zip(interpreted, answers(checkpoint, "fp8"), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.usage.cached_tokens == expected.usage.cached_tokens
        for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
            assert one == pytest.approx(other, abs=2e-3)
    assert interpreted[1].usage.cached_tokens == 16
    assert interpreted[1].logprobs == interpreted[0].logprobs


def set_triton() -> None:
    os.environ["HYBRID_KERNELS"] = "triton"


def test_saved_prefixes_go_to_engines_that_keep_the_same_type(tiny: Engine) -> None:
    engines = {kv_dtype: engine_on(tiny, kv_dtype=kv_dtype) for kv_dtype in ("auto", *KEPT)}
    prompt = ids(4 * GRID + 5)
    expected = answer(engines["int8"], prompt, greedy(6, logprobs=2))
    saved = engines["int8"].dump()
    for other in ("auto", "fp8"):
        with pytest.raises(CacheFileError, match=r"page is .*kv int8"):
            engines[other].load(saved)
    another = engine_on(tiny, kv_dtype="int8")
    another.load(saved)
    warm = answer(another, prompt, greedy(6, logprobs=2))
    assert warm.usage.cached_tokens == 4 * GRID
    assert warm.logprobs == expected.logprobs


@pytest.mark.parametrize("kv_dtype", KEPT)
def test_what_comes_back_from_host_memory_is_the_same(tiny: Engine, kv_dtype: str) -> None:
    config = CacheConfig(page_size=GRID, chunk_size=GRID, kv_dtype=kv_dtype, memory="1500KiB", host="64MiB")
    engine, prompts = tiny.with_cache(config), [ids(6 * GRID + 3, seed) for seed in range(8)]
    first = [answer(engine, prompt, greedy(3, logprobs=2)) for prompt in prompts]
    again = [answer(engine, prompt, greedy(3, logprobs=2)) for prompt in prompts]
    assert [output.logprobs for output in again] == [output.logprobs for output in first]
    assert engine.cache.stats().restored_checkpoints > 0
    assert_nothing_held(engine)
