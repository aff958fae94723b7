"""Several answers to one prompt, and log-probabilities of prompts."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, SamplingError, SamplingParams
from hybrid.engine.request_builder import params_of
from support.checkpoints import random_model, text_config
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids, run_to_end

SAMPLED = SamplingParams(max_new_tokens=14, ignore_eos=True, temperature=1.5, seed=7, logprobs=2, n=4)


def one_by_one(tiny: Engine, prompt: list[int], params: SamplingParams, **config: Any) -> list[Any]:
    """Each answer as a request by itself, in an engine that keeps nothing."""
    alone = [replace(params_of(params, index), n=1) for index in range(params.n)]
    return [answer(engine_on(tiny, enabled=False, **config), prompt, own) for own in alone]


class Counted:
    """The runner of an engine, which counts the tokens that are computed."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.prompt_tokens = 0

    def plan(self, step: Any, before: Any) -> Any:
        self.prompt_tokens += sum(p.end - p.start for p in step.parts if p.is_prefill and not p.request.is_replay)
        return self.runner.plan(step, before)

    def launch(self, plan: Any) -> Any:
        return self.runner.launch(plan)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("deterministic", [True, False])
def test_answers_are_those_of_requests_by_themselves_and_the_prompt_is_computed_once(
    tiny: Engine, deterministic: bool, overlap: bool
) -> None:
    prompt = ids(3 * GRID + 7)
    alone = one_by_one(tiny, prompt, SAMPLED, deterministic=deterministic)
    made = engine_on(tiny, deterministic=deterministic, overlap=overlap)
    runner = Counted(made.runner)
    engine = Engine(tiny.loaded, made.cache, made.config, runner=runner)
    for cached in (0, 3 * GRID):
        runner.prompt_tokens = 0
        output = answer(engine, prompt, SAMPLED)
        assert runner.prompt_tokens == len(prompt) - cached
        assert [own.token_ids for own in output.outputs] == [single.token_ids for single in alone]
        assert len({tuple(own.token_ids) for own in output.outputs}) == 4
        if deterministic:
            assert [own.logprobs for own in output.outputs] == [single.logprobs for single in alone]
        assert [own.text for own in output.outputs] == [single.text for single in alone]
        assert [own.index for own in output.outputs] == [0, 1, 2, 3]
        assert (output.text, output.token_ids, output.finish_reason) == (alone[0].text, alone[0].token_ids, "length")
        assert output.usage.completion_tokens == 4 * 14
        assert_nothing_held(engine)


@pytest.mark.parametrize(("pages", "states"), [(9, 12), (40, 3), (40, 4)])
def test_answers_without_memory_wait_and_are_the_same(tiny: Engine, pages: int, states: int) -> None:
    prompt = ids(3 * GRID + 7)
    params = replace(SAMPLED, max_new_tokens=30)
    engine = engine_on(tiny, pages=pages, states=states)
    output = answer(engine, prompt, params)
    assert [own.token_ids for own in output.outputs] == [own.token_ids for own in one_by_one(tiny, prompt, params)]
    assert_nothing_held(engine)


def test_more_answers_than_may_run_at_once(tiny: Engine) -> None:
    made = engine_on(tiny)
    engine = Engine(tiny.loaded, made.cache, replace(made.config, max_num_seqs=2))
    params = replace(SAMPLED, n=5, max_new_tokens=6)
    output = answer(engine, ids(20), params)
    assert [own.token_ids for own in output.outputs] == [own.token_ids for own in one_by_one(tiny, ids(20), params)]
    assert_nothing_held(engine)


def test_answers_end_each_by_itself_and_the_output_when_all_have_ended(tiny: Engine) -> None:
    plain = answer(engine_on(tiny), ids(20), SAMPLED)
    stop = plain.outputs[1].token_ids[2]
    engine = engine_on(tiny)
    name = engine.add_request(ids(20), replace(SAMPLED, stop_token_ids=[stop]))
    seen, deltas = [], []
    while engine.has_work:
        for output in engine.step():
            seen.append([own.finish_reason for own in output.outputs])
            deltas += output.delta_token_ids
            assert output.request_id == name
            assert (output.finish_reason is None) == (None in seen[-1])
    assert [None, "stop", None, None] in [[own and own for own in row] for row in seen] or seen[-1].count("stop") > 1
    assert seen[-1][1] == "stop"
    assert deltas == output.token_ids


def test_constraints_and_forms_are_those_of_each_answer(tiny: Engine) -> None:
    form = {"regex": "([a-f][0-9];){3}"}
    engine = engine_on(tiny)
    output = answer(engine, ids(20), SamplingParams(structured=form, n=3, temperature=1.0, seed=2))
    assert all(len(own.text) == 9 and own.finish_reason == "stop" for own in output.outputs)
    assert len({own.text for own in output.outputs}) > 1
    params = replace(SAMPLED, repetition_penalty=1.4, frequency_penalty=0.5)
    found = answer(engine, ids(30), params)
    assert [own.token_ids for own in found.outputs] == [own.token_ids for own in one_by_one(tiny, ids(30), params)]


def test_aborting_ends_all_answers_before_and_after_the_prompt(tiny: Engine) -> None:
    for steps in (0, 1, 3):
        engine = engine_on(tiny)
        engine.add_request(ids(2 * GRID), SAMPLED, request_id="mine")
        for _ in range(steps):
            engine.step()
        engine.abort("mine")
        output = run_to_end(engine)["mine"]
        assert [own.finish_reason for own in output.outputs] == ["abort"] * 4
        assert_nothing_held(engine)


def test_an_error_before_the_first_token_ends_all_and_one_after_it_a_single_answer(tiny: Engine) -> None:
    def breaks_at(length: int, chosen: int) -> Any:
        def process(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(answer) == length and (length == 0 or answer[0] == chosen):
                raise ValueError("broken on purpose")
            return logits

        return process

    firsts = [own.token_ids[0] for own in answer(engine_on(tiny), ids(20), SAMPLED).outputs]
    assert firsts.count(firsts[2]) == 1
    engine = engine_on(tiny)
    output = answer(engine, ids(20), replace(SAMPLED, logits_processors=[breaks_at(0, 0)]))
    assert [own.finish_reason for own in output.outputs] == ["error"] * 4
    output = answer(engine, ids(20), replace(SAMPLED, logits_processors=[breaks_at(3, firsts[2])]))
    assert [own.finish_reason for own in output.outputs] == ["length", "length", "error", "length"]
    assert output.outputs[2].error is not None
    assert "broken on purpose" in output.outputs[2].error
    assert_nothing_held(engine)


@pytest.mark.parametrize("setting", [{"n": 0}, {"n": 1.5}, {"n": 129}, {"n": True}, {"prompt_logprobs": -1}])
def test_a_wrong_number_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"^SamplingParams: {next(iter(setting))} "):
        SamplingParams(**setting)


# Log-probabilities of prompts


@pytest.mark.parametrize("length", [5, 2 * GRID, 70])
def test_the_log_probabilities_of_a_prompt_are_those_of_transformers(checkpoint: Path, length: int) -> None:
    cache = CacheConfig(page_size=GRID, chunk_size=GRID, memory="8MiB")
    engine = Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=cache)
    prompt = torch.randint(3, 320, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        logits = random_model(text_config())(torch.tensor([prompt])).logits[0].float()
    expected = torch.log_softmax(logits, -1)
    output = answer(engine, prompt, greedy(3, prompt_logprobs=4))
    found = output.prompt_logprobs
    assert found is not None
    assert len(found) == length
    assert found[0] is None
    for at, row in enumerate(found[1:]):
        assert row is not None
        assert set(row) == {*expected[at].topk(4).indices.tolist(), prompt[at + 1]}
        for token, value in row.items():
            assert value == pytest.approx(float(expected[at, token]), abs=1e-4)


def test_log_probabilities_of_a_prompt_do_not_depend_on_hits_batches_and_retraction(tiny: Engine) -> None:
    prompts = [ids(2 * GRID + 5, seed=n) for n in range(3)]
    params = greedy(20, prompt_logprobs=2)
    alone = [answer(engine_on(tiny, enabled=False), prompt, params) for prompt in prompts]
    engine = engine_on(tiny, pages=10, states=12)
    for _ in range(2):
        found = engine.generate(prompts, params, progress=False)
        assert [output.prompt_logprobs for output in found] == [output.prompt_logprobs for output in alone]
        assert [output.token_ids for output in found] == [output.token_ids for output in alone]
    assert engine.scheduler.num_retractions > 0
    assert answer(engine, prompts[0], greedy(4)).prompt_logprobs is None
    long = ids(20 * GRID, seed=9)
    whole = answer(engine_on(tiny, pages=64), long, replace(params, max_new_tokens=1))
    assert whole.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(long)
    assert_nothing_held(engine)


def test_several_answers_have_the_log_probabilities_of_their_prompt(tiny: Engine) -> None:
    params = replace(SAMPLED, prompt_logprobs=1)
    output = answer(engine_on(tiny), ids(40), params)
    assert output.prompt_logprobs == answer(engine_on(tiny), ids(40), greedy(1, prompt_logprobs=1)).prompt_logprobs
    plain = answer(engine_on(tiny), ids(40), SAMPLED)
    assert [own.token_ids for own in output.outputs] == [own.token_ids for own in plain.outputs]


@dataclass
class FailsOnce:
    """A runner of which one launch fails.

    Attributes:
        at: the number of that launch.
        calls: launches so far.
    """

    inner: Any
    at: int
    calls: int = 0

    def plan(self, step: Any, before: Any) -> Any:
        return self.inner.plan(step, before)

    def launch(self, plan: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("planted")
        return self.inner.launch(plan)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails_at", range(2, 7))
def test_log_probabilities_of_a_prompt_that_starts_again_are_reported_once(
    tiny: Engine, overlap: bool, fails_at: int
) -> None:
    """Nothing of it is a hit when it starts again: what is known is computed again, and was listed twice."""
    prompt, params = ids(5 * GRID + 3), greedy(3, prompt_logprobs=2)
    expected = answer(engine_on(tiny, enabled=False), prompt, params).prompt_logprobs
    cache = CacheConfig(page_size=GRID, chunk_size=GRID, placement=())
    config = EngineConfig(max_num_seqs=1, max_num_batched_tokens=GRID + 1, overlap=overlap, audit=True)
    own = tiny.with_cache(cache, size=(20, 4), config=config)
    runner = FailsOnce(own.runner, fails_at)
    engine = Engine(own.loaded, own.cache, config, runner=runner)
    assert answer(engine, prompt, params).prompt_logprobs == expected
    assert runner.calls > fails_at
    assert_nothing_held(engine)


def test_an_answer_that_fails_with_its_first_token_fails_alone(tiny: Engine) -> None:
    calls = []

    def planted(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append(answer)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return logits

    engine = engine_on(tiny)
    output = answer(engine, ids(40), greedy(6, n=4, logits_processors=[planted]))
    assert [own.finish_reason for own in output.outputs] == ["length", "error", "length", "length"]
    assert [len(own.token_ids) for own in output.outputs] == [6, 0, 6, 6]
    assert output.outputs[1].error == "RuntimeError: planted"
    assert_nothing_held(engine)


def test_tokens_of_all_answers_are_counted(tiny: Engine) -> None:
    engine = engine_on(tiny)
    output = answer(engine, ids(40), SAMPLED)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.completion_tokens) == (40, output.usage.completion_tokens) == (40, 4 * 14)
    assert sum(stats.time_to_first_token.counts) == 1
