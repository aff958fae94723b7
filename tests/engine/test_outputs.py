"""The outputs that a caller gets beside the whole answer: deltas, own ids, figures, and an engine that can be
closed."""

import asyncio
import gc
import random
import re
import threading
import weakref
from collections import defaultdict
from typing import Any

import pytest

import hybrid
from hybrid import ArgumentError, ClosedError, Engine, EngineConfig, Histogram, OwnershipError, RequestOutput
from hybrid.engine.request import Request
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids, run_to_end
from support.scheduling import Counting, engine_without_model

TEXTS = ("def add(a, b):", "class Foo:", "The with statement", "import")


def assert_deltas_add_up(seen: dict[str, list[RequestOutput]]) -> None:
    """Every output's deltas are the ends of its whole answer, and together they are the answer."""
    for outputs in seen.values():
        for output in outputs:
            assert output.text.endswith(output.delta)
            assert output.token_ids[len(output.token_ids) - len(output.delta_token_ids) :] == output.delta_token_ids
        assert "".join(output.delta for output in outputs) == outputs[-1].text
        assert [token for output in outputs for token in output.delta_token_ids] == outputs[-1].token_ids
        assert outputs[-1].finish_reason is not None


@pytest.mark.parametrize("overlap", [True, False])
def test_the_deltas_of_many_requests_are_their_answers(tiny: Engine, overlap: bool) -> None:
    engine = engine_on(tiny, overlap=overlap)
    names = [engine.add_request(text, greedy(10 + n, stop=("zz",))) for n, text in enumerate(TEXTS)]
    seen = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            seen[output.request_id].append(output)
    assert set(seen) == set(names)
    assert_deltas_add_up(seen)
    assert all(len(output.delta_token_ids) == 1 for outputs in seen.values() for output in outputs)
    assert_nothing_held(engine)


def test_the_deltas_of_several_answers_are_those_answers(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine.add_request(TEXTS[0], greedy(12, n=3, temperature=1.5, seed=5))
    texts, tokens = ["", "", ""], [list[int](), list[int](), list[int]()]
    rng, last = random.Random(1), None
    while engine.has_work:
        if rng.random() < 0.4:
            answer(engine, ids(20), greedy(3))  # several steps: the next deltas are longer
        for output in engine.step():
            again = output.since(last)
            for completion, same in zip(output.outputs, again.outputs, strict=True):
                assert (completion.delta, completion.delta_token_ids) == (same.delta, same.delta_token_ids)
                texts[completion.index] += completion.delta
                tokens[completion.index] += completion.delta_token_ids
            last = output
    assert last is not None
    assert len({*texts}) == 3
    assert texts == [completion.text for completion in last.outputs]
    assert tokens == [completion.token_ids for completion in last.outputs]


def test_an_output_says_what_ended_it_and_when(tiny: Engine) -> None:
    engine = engine_on(tiny)
    plain = answer(engine, TEXTS[0], greedy(6))
    assert (plain.finish_reason, plain.stop_reason) == ("length", None)
    stopped = answer(engine, TEXTS[0], greedy(6, stop=("zz", plain.text[2:5])))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", plain.text[2:5])
    third = answer(engine, TEXTS[0], greedy(6, stop_token_ids=[plain.token_ids[2]]))
    assert (third.finish_reason, third.stop_reason) == ("stop", plain.token_ids[2])
    assert third.outputs[0].stop_reason == third.stop_reason
    assert third.time_queued is not None
    assert third.time_to_first_token is not None
    assert third.time_to_end is not None
    assert 0 <= third.time_queued <= third.time_to_first_token <= third.time_to_end
    engine.add_request(TEXTS[0], greedy(6), request_id="waits")
    engine.abort("waits")
    (ended,) = engine.step()
    assert (ended.finish_reason, ended.time_queued) == ("abort", None)
    assert str(ended.explain).endswith("not started yet")
    assert ended.time_to_end is not None


def test_log_probabilities_come_with_the_bytes_of_their_tokens(tiny: Engine) -> None:
    engine = engine_on(tiny)
    text = "naïve — 東京 def"
    output = answer(engine, text, greedy(6, logprobs=3, prompt_logprobs=2))
    assert output.token_bytes is not None
    assert output.logprobs is not None
    assert b"".join(output.token_bytes[token] for token in output.token_ids).decode() == output.text
    assert b"".join(output.token_bytes[token] for token in output.prompt_token_ids[1:]).decode() in text
    assert {token for known in output.logprobs for token in known} <= output.token_bytes.keys()
    assert answer(engine, text, greedy(2)).token_bytes is None


def test_a_stream_of_text_has_its_output_and_works_in_with(tiny: Engine) -> None:
    engine = engine_on(tiny)
    expected = answer(engine, TEXTS[0], greedy(9))
    with engine.stream(TEXTS[0], greedy(9)) as stream:
        assert stream.output.finish_reason is None
        text = "".join(stream)
    assert stream.output.text == text == expected.text
    assert stream.output.usage.completion_tokens == 9
    with engine.stream(TEXTS[0], greedy(9)) as stream:
        first = next(stream)
    assert stream.output.finish_reason == "abort"
    assert stream.output.text == first
    assert_nothing_held(engine)


def test_an_engine_and_its_cache_say_what_they_are(tiny: Engine) -> None:
    engine = engine_on(tiny)
    answer(engine, ids(40), greedy(2))
    assert re.fullmatch(r"HybridCache\(.+iB, .+iB free, \d+ pages, \d+ checkpoints cached\)", repr(engine.cache))
    assert repr(engine).startswith("Engine(tiny, cpu, float32, HybridCache(")
    engine.close()
    assert repr(engine) == "Engine(tiny, cpu, float32, closed)"
    assert repr(engine_without_model(10, 4)).startswith("Engine(EngineModel, cpu, HybridCache(0 pages")


def test_the_progress_bar_shows_tokens_per_second(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybrid.engine.engine.PROGRESS_SECONDS", 0.0)
    engine_on(tiny).generate([TEXTS[0], TEXTS[1]], greedy(9), progress=True)
    assert re.search(r"\d+ tokens/s", capsys.readouterr().err)


def test_errors_have_codes_for_programs(tiny: Engine) -> None:
    codes = {name: thing.code for name in hybrid.__all__ if hasattr(thing := getattr(hybrid, name), "code")}
    assert codes["QueueFullError"] == "queue_full"
    assert codes["PromptError"] == "invalid_prompt"
    assert codes["UnsupportedModelError"] == codes["CheckpointError"]

    def fails(tokens: list[int], logits: Any) -> Any:
        raise ValueError("mine")

    assert answer(engine_on(tiny), TEXTS[0], greedy(3, logits_processors=[fails])).error_code == "invalid_parameters"
    assert answer(engine_on(tiny), TEXTS[0], greedy(3)).error_code is None


def test_a_late_caller_gets_all_that_is_new_in_one_delta(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine.add_request(TEXTS[0], greedy(20))
    seen = defaultdict(list)
    rng = random.Random(3)
    while engine.has_work:
        if rng.random() < 0.4:
            answer(engine, ids(20), greedy(5))  # steps whose outputs `step` returns later
        for output in engine.step():
            seen[output.request_id].append(output)
    assert_deltas_add_up(seen)
    assert max(len(output.delta_token_ids) for outputs in seen.values() for output in outputs) > 4


def test_generate_makes_one_output_of_each_request(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of unfinished requests would be thrown away."""
    made = []
    whole = Request.output
    monkeypatch.setattr(Request, "output", lambda request, *args: made.append(request) or whole(request, *args))
    for params in (greedy(10), greedy(10, n=2)):
        made.clear()
        outputs = engine_on(tiny).generate(list(TEXTS), params, progress=False)
        assert [output.delta for output in outputs] == [output.text for output in outputs]
        assert [output.delta_token_ids for output in outputs] == [output.token_ids for output in outputs]
        assert len(made) <= len(TEXTS) * (1 if params.n == 1 else 1 + params.n)


def test_deltas_survive_steps_that_raise_and_retractions() -> None:
    runner = Counting(rng=random.Random(4), fails=0.05)
    engine = engine_without_model(30, 12, config=EngineConfig(max_num_seqs=8), runner=runner)
    for n in range(24):
        engine.add_request(ids(20 + n, seed=n), greedy(60))
    seen = defaultdict(list)
    while engine.has_work:
        try:
            outputs = engine.step()
        except RuntimeError:
            assert engine.is_retrying
            continue
        assert not engine.is_retrying
        for output in outputs:
            seen[output.request_id].append(output)
    assert len(seen) == 24
    assert engine.stats().retractions > 0
    assert_deltas_add_up(seen)


# Own ids


def test_requests_may_have_ids_of_their_own(tiny: Engine) -> None:
    engine = engine_on(tiny)
    assert engine.add_request(ids(20), greedy(3), request_id="mine") == "mine"
    assert engine.add_request(ids(20), greedy(3), request_id="request-0") == "request-0"
    assert engine.add_request(ids(20), greedy(3)) == "request-1"
    engine.abort("request-0")
    outputs = run_to_end(engine)
    assert {name: output.finish_reason for name, output in outputs.items()} == {
        "mine": "length",
        "request-0": "abort",
        "request-1": "length",
    }
    assert_nothing_held(engine)


def test_an_id_is_in_use_until_its_last_output_was_taken(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine.add_request(ids(20), greedy(2), request_id="mine")
    with pytest.raises(ArgumentError, match="'mine' is in use"):
        engine.add_request(ids(20), greedy(2), request_id="mine")
    answer(engine, ids(30), greedy(9))  # `mine` ends meanwhile
    with pytest.raises(ArgumentError, match=r"step\(\) did not return yet"):
        engine.add_request(ids(20), greedy(2), request_id="mine")
    assert run_to_end(engine)["mine"].finish_reason == "length"
    engine.add_request(ids(20), greedy(4), request_id="mine")
    assert len(run_to_end(engine)["mine"].token_ids) == 4


def test_ids_that_look_like_those_of_replays_mix_nothing_up(tiny: Engine) -> None:
    """The answers of one id are replayed while requests of that id, and of the replay's, come again."""
    engine = engine_on(tiny)
    for turn in range(4):
        engine.add_request(ids(40, seed=turn), greedy(40), request_id="mine")
        engine.add_request(ids(40, seed=10 + turn), greedy(20), request_id="mine/replay")
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < 2:
            outputs |= {output.request_id: output for output in engine.step() if output.finish_reason}
        assert len(outputs["mine"].token_ids) == 40
        assert len(outputs["mine/replay"].token_ids) == 20
    run_to_end(engine)
    again = answer(engine, [*ids(40, seed=1), *outputs["mine"].token_ids[:0], 5], greedy(2))
    assert again.usage.cached_tokens >= 2 * GRID
    assert_nothing_held(engine)


@pytest.mark.parametrize("wrong", ["", 7, b"mine", "x" * 257, ["mine"]])
def test_an_id_that_is_no_text_is_refused(tiny: Engine, wrong: Any) -> None:
    engine = engine_on(tiny)
    with pytest.raises(ArgumentError, match="request_id must be a text of 1 to 256 characters"):
        engine.add_request(ids(20), greedy(2), request_id=wrong)
    assert not engine.has_work


# Figures


def test_the_figures_of_an_engine_are_those_of_its_requests(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=60, states=12)
    empty = engine.stats()
    assert (empty.waiting, empty.running, empty.completion_tokens, empty.tokens_per_second) == (0, 0, 0, 0.0)
    assert empty.time_to_first_token.mean is None
    assert empty.bytes_free < empty.bytes_total  # the state of the empty prefix
    for n in range(12):
        engine.add_request(ids(30, seed=n), greedy(5), request_id=f"r{n}")
    assert engine.stats().waiting == 12
    engine.step()
    during = engine.stats()
    assert during.waiting + during.running == 12
    assert 0 < during.running <= 8
    assert during.bytes_used > empty.bytes_used
    engine.abort("r11")
    run_to_end(engine)
    after = engine.stats()
    assert (after.waiting, after.running, after.replays) == (0, 0, 0)
    assert after.finished == {"stop": 0, "length": 11, "abort": 1, "error": 0}
    assert (after.prompt_tokens, after.completion_tokens) == (11 * 30, 11 * 5)
    assert after.time_to_first_token.count == 11
    assert after.time_between_tokens.count == 11 * 4
    assert after.tokens_per_second > 0
    stats = engine.cache.stats()
    page, state = engine.cache.unit_bytes
    used = stats.pages_cached * page + (stats.checkpoints + 1) * state
    assert after.bytes_used == used
    assert after.bytes_free == after.bytes_total - used


def test_the_bytes_of_an_elastic_memory_add_up(tiny: Engine) -> None:
    engine = tiny.with_cache(tiny.cache.config)
    memory = engine.cache.memory
    assert memory.tensors is not None
    before = engine.stats()
    assert before.bytes_total == memory.tensors.kv.nbytes
    answer(engine, ids(100))
    stats, after = engine.cache.stats(), engine.stats()
    page, state = engine.cache.unit_bytes
    assert after.bytes_used - before.bytes_used >= stats.pages_cached * page
    engine.cache.clear()
    assert engine.stats().bytes_free == before.bytes_free
    assert page
    assert state


def test_quantiles_are_interpolated_within_their_bucket() -> None:
    histogram = Histogram(bounds=(1.0, 2.0, 4.0), counts=(2, 4, 2, 2), total=30.0)
    assert histogram.count == 10
    assert histogram.mean == 3.0
    assert histogram.quantile(0.1) == 0.5
    assert histogram.quantile(0.4) == 1.5
    assert histogram.quantile(0.8) == 4.0
    assert histogram.quantile(1.0) == 4.0
    assert Histogram(bounds=(1.0,), counts=(0, 0), total=0.0).quantile(0.5) is None


def test_figures_are_read_from_another_thread_while_the_engine_works() -> None:
    engine = engine_without_model(200, 40, config=EngineConfig(max_num_seqs=16))
    failures: list[BaseException] = []
    ended = threading.Event()

    def read() -> None:
        before = engine.stats()
        try:
            while not ended.is_set():
                stats = engine.stats()
                assert 0 <= stats.waiting <= 60
                assert 0 <= stats.running <= 16
                assert stats.completion_tokens >= before.completion_tokens
                assert stats.time_between_tokens.count >= before.time_between_tokens.count
                before = stats
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    engine.generate([ids(40, seed=n) for n in range(60)], greedy(20), progress=False)
    ended.set()
    reader.join()
    assert failures == []


# Threads, and the end


def test_generate_in_other_threads_says_what_to_use_instead(tiny: Engine) -> None:
    engine = engine_on(tiny)

    async def together() -> list[Any]:
        calls = [asyncio.to_thread(engine.generate, [ids(30, seed=n)], greedy(4), progress=False) for n in range(4)]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = asyncio.run(together())
    refused = [answer for answer in answers if isinstance(answer, BaseException)]
    assert len(refused) < 4  # one thread owns the engine, and may use it
    assert refused
    for error in refused:
        assert isinstance(error, OwnershipError)
        assert "use hybrid.AsyncEngine" in str(error)
    engine.cache.adopt()
    assert_nothing_held(engine)
    assert len(answer(engine, ids(20), greedy(3)).token_ids) == 3


def test_an_engine_that_is_dropped_frees_its_memory_at_once(tiny: Engine) -> None:
    engine = engine_on(tiny)
    tensors = weakref.ref(engine.cache.kv.untyped_storage())
    answer(engine, ids(60), greedy(4))
    gc.collect()
    gc.disable()
    try:
        del engine
        assert tensors() is None
    finally:
        gc.enable()


def test_closing_aborts_what_runs_and_frees_the_memory(tiny: Engine) -> None:
    engine = engine_on(tiny)
    tensors = weakref.ref(engine.cache.kv.untyped_storage())
    answer(engine, ids(60), greedy(20, pin_for=60.0))
    stream = engine.stream(TEXTS[0], greedy(50))
    pieces = [next(stream)]
    waiting = engine.add_request(ids(30), greedy(9))
    engine.close()
    engine.close()
    gc.collect()
    assert tensors() is None
    rest = list(stream)
    assert len(pieces + rest) < 50
    assert [(output.request_id, output.finish_reason) for output in engine.step()] == [(waiting, "abort")]
    assert not engine.has_work
    assert engine.stats().finished["abort"] == 2
    for call in (
        lambda: engine.add_request(ids(9)),
        lambda: engine.generate([ids(9)], progress=False),
        lambda: engine.stream("a"),
        lambda: engine.pin(ids(9)),
    ):
        with pytest.raises(ClosedError, match="was closed"):
            call()


def test_with_closes_an_engine_whatever_happens(tiny: Engine) -> None:
    engine = engine_on(tiny)

    def fail() -> None:
        with engine:
            engine.add_request(ids(30), greedy(9))
            engine.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert engine.stats().running == 0
    with pytest.raises(ClosedError):
        engine.add_request(ids(9))


def test_only_the_owner_closes(tiny: Engine) -> None:
    engine = engine_on(tiny)
    request = engine.add_request(ids(30), greedy(4))
    errors: list[BaseException] = []

    def close() -> None:
        try:
            engine.close()
        except OwnershipError as error:
            errors.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert run_to_end(engine)[request].finish_reason == "length"
