"""Several passes with drafts in one call: the tokens, states and pages are those of one pass after another."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hybrid import CacheConfig, Engine, EngineConfig, SamplingParams, SpeculationConfig
from hybrid.engine import rounds as rounds_module
from hybrid.engine.rounds import Rounds
from hybrid.speculation.cached import GramDrafter
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.speculator import Speculator
from support.engines import GRID, assert_nothing_held, greedy, ids, run_to_end

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


@pytest.fixture(autouse=True)
def without_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(rounds_module, "MAX_SECONDS", 60.0)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Rounds]:
    """The rounds of each step from now on."""
    found, run = list[Rounds](), Rounds.run

    def noted(self: Rounds, captured: Any) -> None:
        run(self, captured)
        found.append(self)

    monkeypatch.setattr(Rounds, "run", noted)
    return found


def engine_of(
    predicting: Engine, *drafters: str | Drafter, eager: bool = False, pages: int = 96, most: int = 3, **cache: Any
) -> Engine:
    """An engine that computes all that is proposed, audited after every step."""
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, verify_contents=True, **cache)
    drafts = SpeculationConfig(drafters=drafters, adaptive=False, max_drafts=most) if drafters else None
    config = EngineConfig(audit=True, enforce_eager=eager)
    engine = predicting.with_cache(settings, size=(pages, 24), config=config, speculation=drafts)
    if drafters:
        assert engine.scheduler.drafting is not None
        engine.scheduler.drafting.seconds_of_round = 0.0  # as if they had been measured
    return engine


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    return [engine.tokenizer(text).input_ids for text in TEXTS[:count]]  # type: ignore[misc]


def most_of(computed: Sequence[Rounds]) -> int:
    return max([each.count for each in computed], default=0)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
@pytest.mark.parametrize("drafter", ["mtp", "cache"])
@pytest.mark.parametrize("count", [1, 3])
def test_answers_states_and_counts_are_those_of_one_pass_after_another(
    predicting: Engine, deterministic: bool, drafter: str, count: int, computed: list[Rounds]
) -> None:
    params, found = greedy(70), []
    for eager in (True, False):
        engine = engine_of(predicting, drafter, eager=eager, deterministic=deterministic)
        prompts = prompts_of(engine, count)
        outputs = engine.generate(prompts, params, progress=False)
        outputs += engine.generate(prompts, params, progress=False)  # they are known
        longer = [output.prompt_token_ids + output.token_ids + [5] for output in outputs[:count]]
        outputs += engine.generate(longer, params, progress=False)  # hits: of what was computed
        assert bool(computed) is not eager
        usage = [output.usage for output in outputs]
        found.append(([output.token_ids for output in outputs], usage, engine.stats().speculation))
        assert_nothing_held(engine)
        engine.cache.audit(contents=True)
    assert found[0] == found[1]
    assert most_of(computed) > (2 if deterministic or drafter == "mtp" else 1)
    plain = engine_of(predicting, deterministic=deterministic)
    assert [output.token_ids for output in plain.generate(prompts, params, progress=False)] == found[0][0][:count]


@pytest.mark.parametrize("length", [2, 9, 10, 11, 64])
def test_an_answer_ends_where_there_is_no_more_room(predicting: Engine, length: int, computed: list[Rounds]) -> None:
    engine, plain = engine_of(predicting, "mtp"), engine_of(predicting)
    prompts = prompts_of(engine, 2)
    for params in (greedy(length), SamplingParams(max_new_tokens=length, temperature=0)):
        expected = plain.generate(prompts, params, progress=False)
        outputs = engine.generate(prompts, params, progress=False)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert [output.finish_reason for output in outputs] == [output.finish_reason for output in expected]
    assert length < 64 or most_of(computed) > 2
    assert_nothing_held(engine)


@pytest.mark.parametrize("drafter", ["mtp", "cache"])
def test_an_answer_ends_at_any_token(predicting: Engine, drafter: str, computed: list[Rounds]) -> None:
    """Chosen or drafted, in whatever round; nothing is counted that comes after it."""
    engine, plain = engine_of(predicting, drafter, most=2), engine_of(predicting)
    (prompt,) = prompts_of(engine, 1)
    whole = plain.generate([prompt], greedy(40), progress=False)[0].token_ids
    engine.generate([prompt], greedy(40), progress=False)
    for at, token in enumerate(whole):
        if token in whole[:at]:
            continue
        params = greedy(40, stop_token_ids=[token, *range(1000, 1000 + at % 9)])  # not all of them can be looked for
        output = engine.generate([prompt], params, progress=False)[0]
        assert output.token_ids == whole[: at + 1] and output.finish_reason == "stop"
        assert output.usage.accepted_tokens <= at + 1
    assert most_of(computed) > 2
    assert_nothing_held(engine)


def test_stop_texts_and_log_probabilities_are_looked_at_after_each_pass(
    predicting: Engine, computed: list[Rounds]
) -> None:
    engine, plain = engine_of(predicting, "mtp"), engine_of(predicting)
    (prompt,) = prompts_of(engine, 1)
    text = plain.generate([prompt], greedy(40), progress=False)[0].text
    for params in (greedy(40, stop=[text[30:34]]), greedy(40, logprobs=2)):
        expected = plain.generate([prompt], params, progress=False)[0]
        output = engine.generate([prompt], params, progress=False)[0]
        assert (output.token_ids, output.text, output.logprobs) == (
            expected.token_ids,
            expected.text,
            expected.logprobs,
        )
    assert computed and most_of(computed) == 1
    assert_nothing_held(engine)


def test_a_step_that_also_computes_known_tokens_is_one_pass(predicting: Engine, computed: list[Rounds]) -> None:
    """Requests that were retracted compute the tokens of their answers again: which follow is known."""
    engine, params = engine_of(predicting, "mtp", pages=8), greedy(60)
    plain = engine_of(predicting)
    prompts = prompts_of(engine, 3)
    expected = [plain.generate([prompt], params, progress=False)[0].token_ids for prompt in prompts]
    names = [engine.add_request(prompt, params) for prompt in prompts]
    for _ in range(5):
        engine.step()
    engine.abort(names[1])
    outputs = run_to_end(engine)
    assert [outputs[names[at]].token_ids for at in (0, 2)] == [expected[0], expected[2]]
    assert expected[1][: len(outputs[names[1]].token_ids)] == outputs[names[1]].token_ids
    assert engine.scheduler.num_retractions > 0 and computed
    assert_nothing_held(engine)


def test_pages_for_further_rounds_are_free_ones_and_given_back(predicting: Engine, computed: list[Rounds]) -> None:
    """Nothing is evicted for them."""
    engine, params = engine_of(predicting, "mtp", pages=12, deterministic=True), greedy(40)
    prompts = prompts_of(engine, 3)
    engine.generate([ids(6 * GRID)], greedy(1), progress=False)
    cached = engine.cache.tree.num_pages
    name = engine.add_request(prompts[0], params)
    most = 0
    while engine.has_work:
        engine.step()
        running = [request for request in engine.scheduler.running if request.request_id == name]
        for request in running:
            assert request.lease is not None
            most = max(most, len(request.lease.block_table) * GRID - len(request.ids))
        assert engine.cache.tree.num_pages >= cached
    assert most_of(computed) > 2
    assert most < 2 * GRID, "what no round has used is given back"
    assert_nothing_held(engine)


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "fast"])
def test_where_a_source_was_left_another_one_follows_or_a_token_without_drafts(
    predicting: Engine, deterministic: bool, computed: list[Rounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts are chosen by what they cost, and one request is computed."""
    asked, beyond = list[int](), GramDrafter.beyond

    def noted(self: GramDrafter, history: History, tokens: Any, limit: int) -> Sequence[int]:
        assert tokens[: len(history)] == history[:] and len(tokens) > len(history)
        found = beyond(self, history, tokens, limit)
        asked.append(len(found))
        return found

    monkeypatch.setattr(GramDrafter, "beyond", noted)
    settings = CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=deterministic, verify_contents=True)
    drafts = SpeculationConfig(drafters=("cache",), max_drafts=3)
    engine = predicting.with_cache(settings, size=(96, 24), config=EngineConfig(audit=True), speculation=drafts)
    assert engine.scheduler.drafting is not None
    engine.scheduler.drafting.seconds_of_round = 0.0
    source = engine.tokenizer("def first(self):\n    return self.items[0]\n\n").input_ids  # type: ignore[misc]
    prompts = [source * 3, [*source, *source[:4]], *prompts_of(engine, 3)]
    expected = [output.token_ids for output in engine_of(predicting).generate(prompts, greedy(60), progress=False)]
    for prompt, answer in zip(prompts, expected, strict=True):
        output = engine.generate([prompt], greedy(60), progress=False)[0]
        assert output.token_ids == answer and output.usage.accepted_tokens <= output.usage.drafted_tokens
    without = [each for each in computed if each.may_continue and each.count > len(each.followed[0].accepted)]
    assert without and 0 in asked and any(asked)
    assert_nothing_held(engine)
    engine.cache.audit(contents=True)


def test_a_source_that_cannot_be_looked_for_is_none(predicting: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: GramDrafter, history: History, tokens: Any, limit: int) -> Sequence[int]:
        raise MemoryError("planted")

    monkeypatch.setattr(GramDrafter, "beyond", failing)
    drafts = SpeculationConfig(drafters=("cache",), max_drafts=3)
    settings = CacheConfig(page_size=GRID, chunk_size=GRID)
    engine = predicting.with_cache(settings, size=(96, 24), config=EngineConfig(audit=True), speculation=drafts)
    assert engine.scheduler.drafting is not None
    engine.scheduler.drafting.seconds_of_round = 0.0
    prompt = [*ids(24), *[7, 8, 9] * 3]
    expected = engine_of(predicting).generate([prompt], greedy(40), progress=False)[0].token_ids
    for _ in range(3):
        assert engine.generate([prompt], greedy(40), progress=False)[0].token_ids == expected
    assert engine.stats().speculation["ngrams"].refused > 0
    assert_nothing_held(engine)


class Once(Drafter):
    """Right for some tokens, then silent, so that the next drafts are those of another drafter."""

    def __init__(self, answer: Sequence[int], every: int) -> None:
        self.answer, self.every = answer, every

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        done = len(history) - history.prompt_len
        if done % self.every:
            return [], []
        own = list(self.answer[done : done + 2])
        return own, range(-1, len(own) - 1)


def test_drafts_of_a_user_are_one_round_each(predicting: Engine, computed: list[Rounds]) -> None:
    (prompt,) = prompts_of(predicting, 1)
    answer = engine_of(predicting).generate([prompt], greedy(60), progress=False)[0].token_ids
    engine = engine_of(predicting, Once(answer, 3), most=2)
    assert engine.generate([prompt], greedy(60), progress=False)[0].token_ids == answer
    assert computed and most_of(computed) == 1
    both = engine_of(predicting, Once(answer, 3), "cache")
    for _ in range(2):
        assert both.generate([prompt], greedy(60), progress=False)[0].token_ids == answer
    assert_nothing_held(both)


@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_an_exception_between_two_rounds_is_one_of_the_step(
    predicting: Engine, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is computed again: nothing of it is counted, shared or lost."""
    engine, plain = engine_of(predicting, "mtp"), engine_of(predicting)
    prompts = prompts_of(engine, 2)
    expected = [output.token_ids for output in plain.generate(prompts, greedy(60), progress=False)]
    left, run = [at], rounds_module.ChainsAhead.run

    def failing(self: Any, most: int | None = None) -> None:
        run(self, most)
        left[0] -= 1
        if left[0] == -1:
            raise OSError("planted")

    monkeypatch.setattr(rounds_module.ChainsAhead, "run", failing)
    outputs = engine.generate(prompts, greedy(60), progress=False)
    assert left[0] < -1
    assert [output.token_ids for output in outputs] == expected
    assert all(output.usage.accepted_tokens < 60 for output in outputs)
    assert_nothing_held(engine)


def test_what_is_between_two_calls_is_shared_by_all_rounds(
    predicting: Engine, monkeypatch: pytest.MonkeyPatch, computed: list[Rounds]
) -> None:
    """A call in which something was captured says nothing of it."""
    now, seconds, run, timed = [0.0], list[float](), Rounds.run, Speculator.timed

    def runs(self: Rounds, captured: Any) -> None:
        now[0] += 0.01 if computed else 0.5
        run(self, captured)
        self.elapsed = 0.002 * self.count
        now[0] += self.elapsed

    def noted(self: Speculator, rows: int, spent: float, drafts: int = 0) -> None:
        if spent:  # others were not captured
            seconds.append(spent)
        timed(self, rows, spent, drafts)

    monkeypatch.setattr(Rounds, "run", runs)
    monkeypatch.setattr(Speculator, "timed", noted)
    monkeypatch.setattr("hybrid.engine.drafting.clock_of", lambda device: lambda: now[0])
    engine = engine_of(predicting, "cache", deterministic=True)
    for _ in range(4):
        engine.generate(prompts_of(engine, 1), greedy(60), progress=False)
    counts = [each.count for each in computed]
    assert len(seconds) == len(counts) and max(counts) > 2
    assert seconds[0] == pytest.approx(0.002 + 0.5 / counts[0])
    assert max(seconds[1:]) < 0.02
    assert seconds[-1] == pytest.approx(0.002 + 0.01 * len(counts) / sum(counts), rel=0.3)
