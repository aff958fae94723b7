"""Drafts of the predictor inside the package: where something else happens, and what `usage` and `stats` say."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, Image, ImagePrompt, SamplingParams, SpeculationConfig
from support.engines import GRID, answer, assert_nothing_held, cold, greedy, ids, run_to_end

TEXT = "The module defines the following functions:\n\n"


@pytest.fixture(scope="module")
def predicting() -> Iterator[Engine]:
    cache = CacheConfig(memory="64MiB", page_size=GRID, chunk_size=GRID, deterministic=True)
    with Engine.from_pretrained("tiny", dtype="float32", cache=cache, speculation="mtp") as engine:
        yield engine


def with_drafts(
    predicting: Engine,
    *drafters: str,
    pages: int = 128,
    states: int = 32,
    adaptive: bool = False,
    eager: bool = False,
    **cache: Any,
) -> Engine:
    """An engine that computes all that the predictor proposes, audited after every step."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, **cache)
    drafts = SpeculationConfig(drafters=drafters or ("mtp",), adaptive=adaptive, max_drafts=3)
    config = EngineConfig(audit=True, enforce_eager=eager)
    return predicting.with_cache(settings, size=(pages, states), config=config, speculation=drafts)


def prompt_of(engine: Engine, text: str = TEXT) -> list[int]:
    found: list[int] = engine.tokenizer(text).input_ids  # type: ignore[misc]
    return found


def test_most_drafts_are_what_the_model_says(tiny: Engine, predicting: Engine) -> None:
    engine, accepted, first = with_drafts(predicting), 0, 0
    for text in (TEXT, "class Queue:\n    def put(self, item):\n", "<|im_start|>user\nWhat is json?<|im_end|>\n"):
        prompt = prompt_of(engine, text)
        output = answer(engine, prompt, greedy(60))
        assert output.token_ids == cold(tiny, prompt, greedy(60)).token_ids
        accepted += output.usage.accepted_tokens
        first += output.usage.drafted_tokens // 3
    stats = engine.stats().speculation["mtp"]
    assert (stats.accepted_tokens, stats.refused) == (accepted, 0)
    assert accepted > 1.9 * first  # of three in a chain
    assert_nothing_held(engine)


@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_and_turns_are_those_without_drafts(tiny: Engine, predicting: Engine, deterministic: bool) -> None:
    """A boundary in accepted drafts, a turn that resumes there, several answers, an end inside drafts, another seed."""
    plain = tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=deterministic), size=(128, 32))
    engine = with_drafts(predicting, "cache", "mtp", deterministic=deterministic)
    prompt = prompt_of(engine)
    for params in (
        greedy(45),
        greedy(30, n=3, temperature=0.9, seed=5),
        greedy(40, stop=["the"], temperature=0.7, seed=1),
        SamplingParams(max_new_tokens=60, temperature=1.0, seed=3),
    ):
        for _ in range(2):
            expected, found = answer(plain, prompt, params), answer(engine, prompt, params)
            assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
            assert found.usage.cached_tokens == expected.usage.cached_tokens
        prompt = [*prompt, *expected.token_ids, *ids(5, seed=len(prompt))]
    assert engine.stats().speculation["mtp"].accepted_tokens > 0
    assert_nothing_held(engine)


def test_requests_join_leave_and_are_retracted(tiny: Engine, predicting: Engine) -> None:
    engine = with_drafts(predicting, pages=14, states=12)
    prompts = [ids(30, seed=seed) for seed in range(5)]
    outputs = {}
    for prompt in prompts:
        engine.add_request(prompt, greedy(60))
        outputs.update({output.request_id: output for output in engine.step()})
    gone = next(iter(outputs))
    engine.abort(gone)
    outputs.update(run_to_end(engine))
    for prompt, (name, output) in zip(prompts, sorted(outputs.items()), strict=True):
        expected = cold(tiny, prompt, greedy(60)).token_ids
        assert output.token_ids == (expected if name != gone else expected[: len(output.token_ids)])
    assert engine.scheduler.num_retractions > 0
    assert_nothing_held(engine)


def test_drafts_pause_where_they_do_not_pay_and_alternatives_form_trees(tiny: Engine, predicting: Engine) -> None:
    engine = with_drafts(predicting, adaptive=True)
    for seed in range(3):
        prompt = ids(20, seed=seed)
        params = greedy(50, temperature=2.0, seed=seed)
        assert answer(engine, prompt, params).token_ids == cold(tiny, prompt, params).token_ids
    assert_nothing_held(engine)


def test_requests_of_which_few_tokens_are_left_change_no_draft_of_others(predicting: Engine) -> None:
    """Chains of several lengths are computed together."""
    prompts = [prompt_of(predicting, text) for text in (TEXT, "class Queue:\n    def put(", "import json\n\ndef load(")]
    params = [greedy(count) for count in (5, 24, 9)]
    for eager in (False, True):
        engine = with_drafts(predicting, eager=eager, enabled=False)
        alone = [answer(engine, prompt, own).usage for prompt, own in zip(prompts, params, strict=True)]
        together = engine.generate(prompts, params, progress=False)
        assert [output.usage for output in together] == alone
        assert alone[1].accepted_tokens > 8


def test_what_follows_images_is_drafted_too(tiny: Engine, predicting: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    size = tiny.model.config.hidden_size
    values = torch.randn(12, size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, -1).clone()
    positions[1:, 10:22] += torch.arange(12) % 3
    positions[:, 22:] += 5  # as are those of what is generated
    prompt = ImagePrompt(ids(40), [Image(10, values)], positions)
    engine = with_drafts(predicting, eager=True)
    shifts, draft = set(), engine.model.draft

    def watched(batch: Any, *more: Any) -> Any:
        shifts.add(int(batch.positions - batch.decodes.seq_lens))
        return draft(batch, *more)

    monkeypatch.setattr(engine.model, "draft", watched)
    for _ in range(2):
        assert answer(engine, prompt, greedy(30)).token_ids == cold(tiny, prompt, greedy(30)).token_ids  # type: ignore[arg-type]
    assert engine.stats().speculation["mtp"].drafted_tokens > 0
    assert shifts == {5 - 1}
    assert_nothing_held(engine)


def test_a_predictor_that_fails_costs_drafts_and_nothing_else(
    tiny: Engine, predicting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prompts = with_drafts(predicting, eager=True), [ids(20, seed=seed) for seed in range(3)]
    working, calls = engine.model.draft, 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise MemoryError("no memory for a pass of the predictor")
        return working(*arguments)

    monkeypatch.setattr(engine.model, "draft", failing)
    outputs = engine.generate(prompts, greedy(30), progress=False)
    assert [output.token_ids for output in outputs] == [cold(tiny, prompt, greedy(30)).token_ids for prompt in prompts]
    assert engine.stats().speculation["mtp"].refused > 0
    assert_nothing_held(engine)
