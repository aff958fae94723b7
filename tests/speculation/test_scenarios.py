"""Drafts where something else happens: ends inside them, boundaries, retraction, full memory."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, Image, ImagePrompt, SamplingParams
from hybrid.commands.parity import KnownAnswers
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import Drafter, History
from support.drafters import Scripted, chain, following
from support.engines import GRID, answer, assert_nothing_held, cold, greedy, ids, run_to_end

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests


def engine_with(
    tiny: Engine, drafter: Drafter, *, pages: int = 128, states: int = 32, audit: bool = True, **cache: Any
) -> Engine:
    """An engine that computes all that a drafter proposes, audited after every step."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, **cache)
    config = EngineConfig(audit=audit)
    own = SpeculationConfig(drafters=(drafter,), adaptive=False)
    return tiny.with_cache(settings, size=(pages, states), config=config, speculation=own)


def known(tiny: Engine, *prompts: list[int], count: int = 60) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): cold(tiny, prompt, greedy(count)).token_ids for prompt in prompts}


def test_an_end_token_inside_drafts_ends_the_answer(tiny: Engine) -> None:
    prompt = ids(20)
    answers = known(tiny, prompt)
    at = next(at for at in range(3, 60) if answers[tuple(prompt)][at] not in answers[tuple(prompt)][:at])
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, stop_token_ids=[answers[tuple(prompt)][at]])
    engine = engine_with(tiny, following(answers))
    output = answer(engine, prompt, params)
    assert output.token_ids == answers[tuple(prompt)][: at + 1]
    assert output.finish_reason == "stop"
    assert_nothing_held(engine)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_stop_text_inside_drafts_ends_the_answer_and_nothing_after_it_is_cached(
    tiny: Engine, deterministic: bool
) -> None:
    prompt = tiny.tokenizer("def add(a, b):").input_ids
    plain = engine_with(tiny, Scripted(lambda *_: chain([])), deterministic=deterministic)
    whole = answer(plain, prompt, greedy(60))
    stop = whole.text[40:46]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, stop=stop)
    expected = answer(plain, prompt, params)
    engine = engine_with(tiny, following({tuple(prompt): whole.token_ids}), deterministic=deterministic)
    output = answer(engine, prompt, params)
    assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
    assert 0 < output.usage.accepted_tokens < len(output.token_ids)  # without those after the stop
    assert_nothing_held(engine)
    again = [*prompt, *whole.token_ids]
    assert answer(engine, again, greedy(1)).usage.page_tokens <= len(prompt) + len(output.token_ids)


def test_the_last_token_that_there_is_room_for_is_no_draft(tiny: Engine) -> None:
    prompt = ids(20)
    answers = known(tiny, prompt)
    for count in (1, 2, 3, 8, 9):
        output = answer(engine_with(tiny, following(answers)), prompt, greedy(count))
        assert output.token_ids == answers[tuple(prompt)][:count]
        assert output.finish_reason == "length"


@pytest.mark.parametrize("max_drafts", [1, 5, 7, GRID, 3 * GRID])
@pytest.mark.parametrize("right", [1.0, 0.8])
@pytest.mark.parametrize("count", [45, 55])
def test_a_turn_that_follows_resumes_at_the_last_boundary_of_the_answer(
    tiny: Engine, max_drafts: int, right: float, count: int
) -> None:
    """Without determinism the state at a boundary is kept in the back, also when it is inside accepted drafts."""
    prompt = ids(20)
    plain = engine_with(tiny, Scripted(lambda *_: chain([])), deterministic=False)
    whole = answer(plain, prompt, greedy(count))
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=False)
    drafter = following({tuple(prompt): whole.token_ids}, right)
    own = SpeculationConfig(drafters=(drafter,), adaptive=False, max_drafts=max_drafts)
    engine = tiny.with_cache(settings, size=(64, 8), config=EngineConfig(audit=True), speculation=own)
    output = answer(engine, prompt, greedy(count))
    assert output.token_ids == whole.token_ids
    turn = [*prompt, *whole.token_ids, *ids(5, seed=9)]
    expected, found = answer(plain, turn, greedy(5)), answer(engine, turn, greedy(5))
    assert found.usage.cached_tokens == expected.usage.cached_tokens == 4 * GRID
    assert found.token_ids == expected.token_ids
    assert_nothing_held(engine)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_turn_after_a_stop_text_resumes_where_it_would_without_drafts(tiny: Engine, deterministic: bool) -> None:
    """A boundary after the stop text, in the same drafts, does not take the place of the one before it."""
    prompt, decode = ids(20), tiny.tokenizer.decode
    plain = engine_with(tiny, Scripted(lambda *_: chain([])), deterministic=deterministic)
    whole = answer(plain, prompt, greedy(60))
    tokens, hits = whole.token_ids, set()
    for at in range(30, 46):
        stop = decode(tokens[at : at + 2])
        if whole.text.find(stop) != len(decode(tokens[:at])):
            continue
        params = greedy(60, stop=stop)
        outputs = []
        for drafter in (Scripted(lambda *_: chain([])), following({tuple(prompt): tokens})):
            engine = engine_with(tiny, drafter, deterministic=deterministic)
            first = answer(engine, prompt, params)
            turn = [*prompt, *first.token_ids[:at], *ids(20, seed=9)]
            second = answer(engine, turn, greedy(3))
            outputs.append((first.token_ids, first.text, second.usage.cached_tokens, second.token_ids))
            assert_nothing_held(engine)
        assert outputs[0] == outputs[1]
        hits.add(outputs[0][2])
    assert hits == {3 * GRID, 4 * GRID}


@pytest.mark.parametrize("length", [17, 24, 29, 30, 31, 32])
def test_a_boundary_may_be_anywhere_among_accepted_drafts(tiny: Engine, length: int) -> None:
    prompt = ids(length)
    plain, turn = engine_with(tiny, Scripted(lambda *_: chain([])), deterministic=False), ids(5, seed=9)
    expected = answer(plain, prompt, greedy(40)).token_ids
    engine = engine_with(tiny, following({tuple(prompt): expected}), deterministic=False)
    assert answer(engine, prompt, greedy(40)).token_ids == expected
    again = answer(engine, [*prompt, *expected, *turn], greedy(1, logprobs=3))
    assert again.usage.cached_tokens == (length + 39) // GRID * GRID
    first = answer(plain, [*prompt, *expected, *turn], greedy(1, logprobs=3))
    assert again.logprobs is not None and first.logprobs is not None
    assert again.logprobs[0] == pytest.approx(first.logprobs[0], abs=1e-3)  # the state is the one at the boundary
    assert_nothing_held(engine)


def test_drafts_of_all_requests_fit_into_a_step(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [ids(20, seed=seed) for seed in range(3)]
    answers = known(tiny, *prompts, count=30)
    settings = CacheConfig(page_size=GRID, chunk_size=GRID)
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=GRID + 3 + 5, audit=True)
    drafts = SpeculationConfig(drafters=(following(answers),), adaptive=False)
    engine = tiny.with_cache(settings, size=(96, 24), config=config, speculation=drafts)
    plan, drafted = engine.runner.plan, list[int]()

    def noted(step: Any, under_way: Any) -> Any:
        drafted.append(sum(part.num_drafts for part in step.parts))
        return plan(step, under_way)

    monkeypatch.setattr(engine.runner, "plan", noted)
    outputs = engine.generate(prompts, greedy(30), progress=False)
    assert [output.token_ids for output in outputs] == [*answers.values()]
    assert max(drafted) == 5


def test_requests_with_and_without_drafts_are_computed_in_one_step(tiny: Engine) -> None:
    prompts = [ids(20, seed=seed) for seed in range(5)]
    answers = known(tiny, *prompts)
    helped = {tuple(prompt): answers[tuple(prompt)] for prompt in prompts[::2]}

    def script(history: Any, limit: int) -> Any:
        done = len(history) - history.prompt_len
        return chain(helped.get(tuple(history[: history.prompt_len]), [])[done : done + limit])

    engine = engine_with(tiny, Scripted(script))
    outputs = {}
    for prompt in prompts:
        engine.add_request(prompt, greedy(30))
        outputs.update({output.request_id: output for output in engine.step()})
    outputs.update(run_to_end(engine))
    assert [output.token_ids for output in outputs.values()] == [answers[tuple(p)][:30] for p in prompts]
    assert [output.usage.accepted_tokens > 0 for output in outputs.values()] == [True, False, True, False, True]
    assert_nothing_held(engine)


def fails_at_the_twelfth(answer: Sequence[int], row: torch.Tensor) -> torch.Tensor:
    if len(answer) > 10:
        raise ValueError(f"no token {len(answer)} after {answer[-1]}")
    return row


@pytest.mark.parametrize("right", [1.0, 0.5])
@pytest.mark.parametrize("as_tree", [False, True])
def test_an_answer_ends_with_the_error_of_its_own_token_and_not_with_one_of_a_draft(
    tiny: Engine, right: float, as_tree: bool
) -> None:
    prompt = ids(20)
    params = greedy(30, logits_processors=[fails_at_the_twelfth])
    expected = answer(engine_with(tiny, Scripted(lambda *_: chain([]))), prompt, params)
    assert expected.error == f"ValueError: no token 11 after {expected.token_ids[-1]}"
    whole = known(tiny, prompt)

    def tree(history: Any, limit: int) -> Any:
        tokens, parents = following(whole, right).script(history, limit - 2)
        return [*tokens, 5, 6], [*parents, -1, len(tokens)]

    engine = engine_with(tiny, Scripted(tree) if as_tree else following(whole, right))
    output = answer(engine, prompt, params)
    assert (output.token_ids, output.error) == (expected.token_ids, expected.error)
    assert_nothing_held(engine)


@pytest.mark.parametrize("right", [1.0, 0.5])
def test_drafts_end_where_memory_ends_and_requests_are_retracted_as_ever(tiny: Engine, right: float) -> None:
    prompts = [ids(30, seed=seed) for seed in range(4)]
    answers = known(tiny, *prompts)
    engine = engine_with(tiny, following(answers, right), pages=14, states=12)
    outputs = engine.generate(prompts, greedy(60), progress=False)
    assert [output.token_ids for output in outputs] == list(answers.values())
    assert engine.scheduler.num_retractions > 0
    assert_nothing_held(engine)


def test_an_abort_between_steps_gives_back_the_memory_of_drafts(tiny: Engine) -> None:
    prompt = ids(20)
    answers = known(tiny, prompt)
    engine = engine_with(tiny, following(answers, 0.5))
    request = engine.add_request(prompt, greedy(60))
    for _ in range(4):
        engine.step()
    engine.abort(request)
    run_to_end(engine)
    assert_nothing_held(engine)
    assert answer(engine, prompt, greedy(60)).token_ids == answers[tuple(prompt)]


def test_pages_of_drafts_that_are_not_accepted_are_free_again(tiny: Engine) -> None:
    prompt = ids(GRID - 2)
    engine = engine_with(tiny, Scripted(lambda history, limit: chain([0] * limit)), deterministic=True)
    engine.add_request(prompt, greedy(4))
    engine.step()
    assert engine.cache.stats().pages_private == 1
    engine.step()  # 7 drafts from position 14 on: two pages, of which the second is not needed yet
    assert engine.cache.stats().pages_private == 1
    assert run_to_end(engine)


def test_drafts_then_none_then_drafts_within_one_request(tiny: Engine) -> None:
    prompt = ids(20)
    answers = known(tiny, prompt)
    right = following(answers)
    asked = iter(range(1000))
    engine = engine_with(tiny, Scripted(lambda *args: right.script(*args) if next(asked) % 3 != 1 else chain([])))
    assert answer(engine, prompt, greedy(60)).token_ids == answers[tuple(prompt)]
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    "lie",
    [
        ([], []),
        (range(500), range(-1, 499)),
        ([5, 5, 5, 5], [-1, -1, 0, 1]),
        ([5000], [-1]),
        ([-3], [-1]),
        ([5, 6], [1, 0]),
        ([5, 6], [-1, 1]),
        ([5, 6], [-1]),
        ([5.5], [-1]),
        (["5"], [-1]),
        (None, None),
        "ab",
        None,
        7,
    ],
    ids=str,
)
def test_a_drafter_may_lie_in_every_way(tiny: Engine, lie: Any) -> None:
    prompt = ids(20)
    engine = engine_with(tiny, Scripted(lambda *_: lie))
    assert answer(engine, prompt, greedy(6)).token_ids == cold(tiny, prompt, greedy(6)).token_ids
    assert_nothing_held(engine)


def test_a_drafter_that_raises_is_as_one_without_drafts(tiny: Engine) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no idea")

    engine = engine_with(tiny, Scripted(fail))
    assert answer(engine, ids(20), greedy(6)).token_ids == cold(tiny, ids(20), greedy(6)).token_ids
    assert engine.stats().speculation["Scripted"].refused == 4  # for the last token none is asked


def test_an_abort_while_its_drafts_are_computed_ends_that_request_alone(tiny: Engine) -> None:
    prompts = [ids(20, seed=seed) for seed in range(3)]
    answers = known(tiny, *prompts)
    right, gone = following(answers), tuple(prompts[1])

    def script(history: Any, limit: int) -> Any:
        if tuple(history[: history.prompt_len]) == gone and len(history) > 28:
            engine.abort(names[1])  # a step is under way: it ends with the step
            return chain([5000]) if len(history) % 2 else right.script(history, limit)
        return right.script(history, limit)

    engine = engine_with(tiny, Scripted(script))
    names = [engine.add_request(prompt, greedy(40)) for prompt in prompts]
    outputs = run_to_end(engine)
    assert [outputs[name].finish_reason for name in names] == ["length", "abort", "length"]
    assert outputs[names[1]].token_ids == answers[gone][: len(outputs[names[1]].token_ids)]
    assert [outputs[name].token_ids for name in names[::2]] == [answers[tuple(p)][:40] for p in prompts[::2]]
    assert_nothing_held(engine)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_that_change_hands_keep_nothing_of_those_before(tiny: Engine, deterministic: bool, seed: int) -> None:
    """Requests start, end and are aborted in every step, so that rows, pages and states go from one to the other."""
    rng = random.Random(seed)
    prompts = [ids(rng.randrange(5, 40), seed=100 * seed + at) for at in range(14)]
    answers = known(tiny, *prompts, count=40)
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=deterministic)
    own = SpeculationConfig(drafters=(following(answers, 0.8, seed),), adaptive=False)
    limits = EngineConfig(max_num_seqs=3, audit=True)
    engine = tiny.with_cache(settings, size=(24, 14), config=limits, speculation=own)
    waiting, running, done = list(prompts), {}, {}
    while waiting or engine.has_work:
        for _ in range(rng.randrange(3) if waiting else 0):
            if waiting:
                prompt = waiting.pop()
                running[engine.add_request(prompt, greedy(rng.randrange(5, 40)))] = prompt
        for output in engine.step() if engine.has_work else ():
            done[output.request_id] = output
            if output.finish_reason is not None:
                running.pop(output.request_id, None)
        if running and rng.random() < 0.1:
            engine.abort(running.popitem()[0])
    for output in done.values():
        expected = answers[tuple(output.prompt_token_ids)][: len(output.token_ids)]
        if deterministic:  # otherwise rounding depends on the batch, and a token may change
            assert output.token_ids == expected
    assert sum(output.finish_reason == "length" for output in done.values()) > 8
    assert_nothing_held(engine)


@pytest.mark.parametrize("params", [greedy(30, logprobs=2), greedy(30, logprobs=2, temperature=1.0, seed=3)])
@pytest.mark.parametrize("as_tree", [False, True])
def test_answers_to_prompts_with_images_are_drafted_too(tiny: Engine, params: SamplingParams, as_tree: bool) -> None:
    values = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).expand(3, -1).clone()
    positions[:, 19:] += 4  # as are those of what is generated
    prompt = ImagePrompt([*ids(10), *[9] * 9, *ids(5, seed=1)], [Image(10, values)], positions)
    plain = engine_with(tiny, Scripted(lambda *_: chain([])), deterministic=True)
    expected = answer(plain, prompt, params)
    known = {tuple(prompt.token_ids): expected.token_ids}
    drafter = KnownAnswers(known, wrong_every=7, as_tree=True) if as_tree else following(known, 0.8)
    engine = engine_with(tiny, drafter, deterministic=True)
    for _ in range(2):  # computed, and hit
        output = answer(engine, prompt, params)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
        assert output.usage.accepted_tokens > 10
    assert_nothing_held(engine)


def test_other_answers_to_the_same_prompt_have_drafts_of_their_own(tiny: Engine) -> None:
    prompt = ids(20)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, n=3, temperature=1.0, seed=3)
    plain = engine_with(tiny, Scripted(lambda *_: chain([])), deterministic=True)
    expected = [each.token_ids for each in answer(plain, prompt, params).completions]

    def script(history: Any, limit: int) -> Any:
        done = list(history[history.prompt_len :])
        return chain(next((own[len(done) :][:limit] for own in expected if own[: len(done)] == done), []))

    engine = engine_with(tiny, Scripted(script), deterministic=True)
    output = answer(engine, prompt, params)
    assert [each.token_ids for each in output.completions] == expected
    stats = engine.stats().speculation["Scripted"]
    assert stats.accepted_tokens > 60
    assert (output.usage.drafted_tokens, output.usage.accepted_tokens) == (stats.drafted_tokens, stats.accepted_tokens)
    assert_nothing_held(engine)


class Boasting(Drafter):
    """Says of every draft that it is right, and is right in some passes."""

    def __init__(self, right: Drafter) -> None:
        self._right = right
        self._calls = 0

    def propose(self, history: Any, limit: int) -> Any:
        self._calls += 1
        tokens, parents = self._right.propose(history, limit)[:2]
        wrong = self._calls % 5 < 2
        return [token ^ wrong for token in tokens], parents, [1.0] * len(tokens)


@pytest.mark.parametrize("params", [greedy(40), greedy(40, temperature=0.9, seed=4)], ids=["greedy", "sampled"])
def test_what_pays_is_computed_where_drafters_lie_and_requests_are_aborted_and_retracted(
    tiny: Engine, params: SamplingParams
) -> None:
    """The passes are those of `adaptive`: chains and trees of several drafters, few and many rows, passes without any
    between."""
    prompts = [[*ids(24, seed=seed), *[7, 8, 9] * 3] for seed in range(6)]
    answers = {tuple(prompt): cold(tiny, prompt, params).token_ids for prompt in prompts}
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=True)
    drafts = SpeculationConfig(drafters=(Boasting(following(answers, 0.9)), "cache"))
    engine = tiny.with_cache(settings, size=(16, 14), config=EngineConfig(audit=True), speculation=drafts)
    for _ in range(3):
        names = {engine.add_request(prompt, params): prompt for prompt in prompts}
        outputs: dict[str, Any] = {}
        while engine.has_work and not any(len(output.token_ids) > 5 for output in outputs.values()):
            outputs.update({output.request_id: output for output in engine.step()})
        aborted = next(name for name in reversed(names) if name not in outputs or not outputs[name].finish_reason)
        engine.abort(aborted)
        outputs.update(run_to_end(engine))
        for name, prompt in names.items():
            known = answers[tuple(prompt)]
            assert outputs[name].token_ids == (known if name != aborted else known[: len(outputs[name].token_ids)])
        assert_nothing_held(engine)
    stats = engine.stats().speculation
    assert engine.scheduler.num_retractions > 0
    assert stats["Boasting"].accepted_tokens > 50 and sum(own.refused for own in stats.values()) == 0


def test_no_draft_crosses_a_namespace(tiny: Engine) -> None:
    settings = CacheConfig(page_size=GRID, chunk_size=GRID)
    drafts = SpeculationConfig(drafters=("cache",), adaptive=False)
    engine, prompt = tiny.with_cache(settings, size=(96, 24), speculation=drafts), list(range(3, 43))  # none twice
    expected = answer(engine, prompt, greedy(30), namespace="a").token_ids
    for namespace, others in (("b", False), ("", False), ("a", True)):
        output = answer(engine, prompt, greedy(4), namespace=namespace)
        assert output.token_ids == expected[:4]
        assert (output.usage.drafted_tokens > 0) == others


def test_a_drafter_that_fails_when_a_request_ends_holds_up_nothing(tiny: Engine) -> None:
    class Failing(Drafter):
        def propose(self, history: History, limit: int) -> tuple[list[int], list[int]]:
            return [5, 6], [-1, 0]

        def end(self, history: History) -> None:
            raise RuntimeError("planted")

    settings = CacheConfig(page_size=GRID, chunk_size=GRID)
    drafts = SpeculationConfig(drafters=(Failing(), "cache"), adaptive=False)
    engine = tiny.with_cache(settings, size=(96, 24), speculation=drafts)
    prompts = [ids(40), ids(30, seed=1)]
    outputs = engine.generate(prompts, greedy(8), progress=False)
    aborted = engine.add_request(ids(50, seed=2), greedy(20))
    engine.step(), engine.step()
    engine.abort(aborted)
    assert [output.token_ids for output in outputs] == [cold(tiny, own).token_ids for own in prompts]
    assert engine.stats().speculation["Failing"].refused == 3
    run_to_end(engine)
    assert_nothing_held(engine)
