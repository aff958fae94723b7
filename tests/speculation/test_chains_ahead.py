"""Chains of the predictor that are computed in the call of a pass, after the drafts that it accepts: they are what is
computed when they are asked for, and so are states and answers."""

from collections.abc import Iterator
from typing import Any

import pytest

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams, SpeculationConfig
from hybrid.engine.chains_ahead import ChainsAhead
from hybrid.engine.predictor_passes import PredictorPasses
from support.engines import GRID, assert_nothing_held, greedy, run_to_end

TEXTS = (
    "The module defines the following functions:\n\n",
    "class Queue:\n    def put(self, item):\n",
    "import os\n\ndef walk(path):\n    for name in",
)


@pytest.fixture(scope="module")
def predicting() -> Iterator[Engine]:
    cache = CacheConfig(memory="64MiB", page_size=GRID, chunk_size=GRID)
    with Engine.from_pretrained("tiny", dtype="float32", cache=cache, speculation="mtp") as engine:
        yield engine


def engine_of(predicting: Engine, eager: bool = False, max_drafts: int = 3, pages: int = 96, **cache: Any) -> Engine:
    """An engine that computes all that the predictor proposes, audited after every step."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, verify_contents=True, **cache)
    drafts = SpeculationConfig(drafters=("mtp",), adaptive=False, max_drafts=max_drafts)
    config = EngineConfig(audit=True, enforce_eager=eager)
    return predicting.with_cache(settings, size=(pages, 24), config=config, speculation=drafts)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[Any]:
    """The objects whose method is called from now on."""
    calls, method = list[Any](), getattr(owner, name)

    def noted(self: Any, *given: Any) -> Any:
        calls.append(self)
        return method(self, *given)

    monkeypatch.setattr(owner, name, noted)
    return calls


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    return [engine.tokenizer(text).input_ids for text in TEXTS[:count]]  # type: ignore[misc]


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize(("count", "max_drafts"), [(1, 3), (3, 6)])
def test_answers_drafts_and_states_are_those_of_launched_passes(
    predicting: Engine, deterministic: bool, count: int, max_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an accepted run crosses the grid, and the state there is kept."""
    ahead = counted(monkeypatch, ChainsAhead, "run")
    asked = counted(monkeypatch, PredictorPasses, "chains")
    params, answers, stats = greedy(70, logprobs=2), [], []
    for eager in (True, False):
        engine, calls = engine_of(predicting, eager, max_drafts, deterministic=deterministic), len(asked)
        prompts = prompts_of(engine, count)
        outputs = engine.generate(prompts, params, progress=False)
        longer = [output.prompt_token_ids + output.token_ids + [5] for output in outputs]
        outputs += engine.generate(longer, params, progress=False)  # hits: of what was computed
        assert bool(ahead) is not eager
        answers.append([(output.token_ids, output.logprobs, output.usage.cached_tokens) for output in outputs])
        stats.append(engine.stats().speculation["mtp"])
        assert_nothing_held(engine)
        engine.cache.audit(contents=True)
    assert answers[0] == answers[1]
    assert stats[0] == stats[1] and stats[0].accepted_tokens > 60 * count
    assert len(asked) - calls < len(ahead)


def test_drafts_that_depend_on_more_than_the_most_likely_tokens_are_accepted_by_the_host(
    predicting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = counted(monkeypatch, ChainsAhead, "run")
    engine = engine_of(predicting)
    (prompt,) = prompts_of(engine, 1)
    plain = predicting.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID), size=(96, 24))
    found = plain.generate([prompt], greedy(40), progress=False)[0]
    for params in (
        SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0.7, seed=3),
        greedy(40, repetition_penalty=1.2),
        greedy(40, logits_processors=[lambda answer, logits: logits.roll(len(answer) % 2)]),
    ):
        expected = plain.generate([prompt], params, progress=False)[0]
        output = engine.generate([prompt], params, progress=False)[0]
        assert output.token_ids == expected.token_ids and output.usage.drafted_tokens > 0
    assert not ahead
    stop = found.token_ids[30]  # where it is a draft, the host ends the answer with it
    params = greedy(40, stop_token_ids=[stop])
    output = engine.generate([prompt], params, progress=False)[0]
    assert output.token_ids == plain.generate([prompt], params, progress=False)[0].token_ids
    assert ahead and output.token_ids[-1] == stop
    assert_nothing_held(engine)


def test_requests_that_end_or_are_retracted_between_two_calls(
    predicting: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chains of the others are of use, and none is taken for another request."""
    ahead = counted(monkeypatch, ChainsAhead, "run")
    engine, params = engine_of(predicting, pages=8), greedy(60)
    prompts = prompts_of(engine, 3)
    plain = predicting.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID), size=(96, 24))
    expected = [plain.generate([prompt], params, progress=False)[0].token_ids for prompt in prompts]
    names = [engine.add_request(prompt, params) for prompt in prompts]
    for _ in range(9):
        engine.step()
    engine.abort(names[1])
    outputs = run_to_end(engine)
    assert [outputs[names[at]].token_ids for at in (0, 2)] == [expected[0], expected[2]]
    assert expected[1][: len(outputs[names[1]].token_ids)] == outputs[names[1]].token_ids
    assert engine.scheduler.num_retractions > 0 and ahead
    assert_nothing_held(engine)
