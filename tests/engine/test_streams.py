"""Every output reaches its consumer: streams, `generate` and `step` in any order, aborts, failures."""

import gc
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from hybrid import Engine, OwnershipError, RequestError, RequestOutput
from support.engines import answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end
from support.threads import in_a_thread

TEXTS = ("def add(a, b):", "class Foo:", "The with statement", "import")


def whole(tiny: Engine, text: str, count: int = 12) -> str:
    """The answer to a text, of an engine of its own."""
    return answer(engine_on(tiny), text, greedy(count)).text


def test_a_stream_loses_nothing_to_a_generate_in_between(tiny: Engine) -> None:
    engine = engine_on(tiny)
    stream = engine.stream(TEXTS[0], greedy(12))
    pieces = [next(stream)]
    output = answer(engine, ids(30), greedy(30))
    assert output.token_ids == cold(tiny, ids(30), greedy(30)).token_ids
    assert "".join([*pieces, *stream]) == whole(tiny, TEXTS[0])
    assert_nothing_held(engine)


def test_two_streams_drained_in_turns_lose_nothing(tiny: Engine) -> None:
    engine = engine_on(tiny)
    streams = [engine.stream(text, greedy(12)) for text in TEXTS]
    pieces: list[list[str]] = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        for at in list(left):
            piece = next(streams[at], None)
            if piece is None:
                left.remove(at)
            else:
                pieces[at].append(piece)
    assert ["".join(own) for own in pieces] == [whole(tiny, text) for text in TEXTS]
    assert_nothing_held(engine)


def test_a_stream_that_is_not_drained_holds_up_nothing(tiny: Engine) -> None:
    engine = engine_on(tiny)
    stream = engine.stream(TEXTS[0], greedy(40))
    first = next(stream)
    request = engine.add_request(ids(30), greedy(20))
    outputs = run_to_end(engine)  # the stream's request ends, too
    assert list(outputs) == [request]
    assert not engine.has_work
    with pytest.raises(RequestError):
        engine.step()
    assert first + "".join(stream) == whole(tiny, TEXTS[0], 40)
    assert_nothing_held(engine)


def test_every_consumer_gets_its_outputs_in_any_order_of_calls(tiny: Engine) -> None:
    rng = random.Random(5)
    engine = engine_on(tiny)
    expected = {text: whole(tiny, text) for text in TEXTS}
    streams: list[tuple[str, Iterator[str], list[str]]] = []
    wanted: dict[str, list[int]] = {}
    finished: dict[str, RequestOutput] = {}
    for turn in range(60):
        action = rng.random()
        if action < 0.25:
            text = rng.choice(TEXTS)
            streams.append((text, engine.stream(text, greedy(12)), []))
        elif action < 0.5 and streams:
            text, stream, pieces = streams[at := rng.randrange(len(streams))]
            piece = next(stream, None)
            if piece is None:
                assert "".join(pieces) == expected[text]
                streams.pop(at)
            else:
                pieces.append(piece)
        elif action < 0.65:
            prompt = ids(rng.randrange(5, 60), seed=turn)
            wanted[engine.add_request(prompt, greedy(4))] = prompt
        elif action < 0.75:
            assert answer(engine, ids(20, seed=turn), greedy(3)).finish_reason == "length"
        elif engine.has_work:
            finished.update({output.request_id: output for output in engine.step()})
    for text, stream, pieces in streams:
        assert "".join([*pieces, *stream]) == expected[text]
    finished.update(run_to_end(engine))
    assert set(finished) == set(wanted)
    for name, prompt in wanted.items():
        assert finished[name].token_ids == cold(tiny, prompt, greedy(4)).token_ids
    assert_nothing_held(engine)


def test_outputs_survive_a_step_that_raises(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    early = engine.add_request(ids(20, seed=1), greedy(2))
    answer(engine, ids(30, seed=2), greedy(6))  # `early` ends meanwhile
    late = engine.add_request(ids(20, seed=3), greedy(2))

    def broken(plan: Any) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(engine.runner, "launch", broken)
    with pytest.raises(RuntimeError, match="no device"):
        engine.step()
    monkeypatch.undo()
    outputs = run_to_end(engine)
    assert set(outputs) == {early, late}
    assert outputs[early].token_ids == cold(tiny, ids(20, seed=1), greedy(2)).token_ids
    assert_nothing_held(engine)


def test_an_abort_is_an_output(tiny: Engine) -> None:
    engine = engine_on(tiny)
    running = engine.add_request(ids(30), greedy(9))
    engine.step()
    waiting = engine.add_request(ids(20), greedy(9))
    engine.abort(running)
    engine.abort(waiting)
    assert engine.has_work
    outputs = {output.request_id: output for output in engine.step()}
    assert {name: output.finish_reason for name, output in outputs.items()} == {waiting: "abort", running: "abort"}
    assert len(outputs[running].token_ids) == 1
    assert_nothing_held(engine)


def test_a_stream_that_is_collected_within_a_step_is_aborted_after_it(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs anywhere, also while the scheduler walks over its lists."""
    engine = engine_on(tiny)
    circle: list[Any] = [engine.stream(TEXTS[0], greedy(30))]
    circle.append(circle)
    next(circle[0])
    other = engine.add_request(ids(40), greedy(5))
    reserve = engine.cache.reserve

    def collecting(lease: Any, num_tokens: int) -> bool:
        gc.collect()
        return reserve(lease, num_tokens)

    monkeypatch.setattr(engine.cache, "reserve", collecting)
    del circle
    outputs = run_to_end(engine)
    assert outputs[other].token_ids == cold(tiny, ids(40), greedy(5)).token_ids
    assert_nothing_held(engine)


def close(streams: list[Any]) -> None:
    streams[0].close()


def test_another_thread_gets_no_piece_of_a_stream_and_may_close_or_collect_it(tiny: Engine) -> None:
    engine = engine_on(tiny)
    text = whole(tiny, TEXTS[0], 30)
    streams = [engine.stream(TEXTS[0], greedy(30))]
    piece = next(streams[0])
    assert isinstance(in_a_thread(lambda: next(streams[0])), OwnershipError)
    engine.cache.audit()
    assert piece + "".join(streams[0]) == text
    for leave in (close, list[Any].clear):
        streams = [engine.stream(TEXTS[0], greedy(30))]
        piece = next(streams[0])
        assert in_a_thread(partial(leave, streams)) is None
        other = engine.add_request(ids(40), greedy(5))
        engine.step()
        assert engine.stats().running == 1
        assert len(run_to_end(engine)[other].token_ids) == 5
        rest = "".join(streams[0] if streams else ())  # what was computed before it was closed
        assert text.startswith(piece + rest)
        assert len(piece + rest) < len(text) / 2
        assert_nothing_held(engine)


def test_a_stream_whose_request_fails_says_so(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    monkeypatch.setattr(engine.scheduler, "finish", lambda request: 1 // 0)
    stream = engine.stream(TEXTS[0], greedy(5))
    with pytest.raises(RequestError, match="failed: ZeroDivisionError"):
        list(stream)
    monkeypatch.undo()
    assert_nothing_held(engine)
