"""Turns: requests of one namespace do not delay those of another, and the queue is bounded on request."""

from dataclasses import replace
from typing import Any

import pytest

from hybrid import CacheConfig, Engine, EngineConfig, QueueFullError, RequestError
from hybrid.engine.waiting import MAX_OVERTAKING, MAX_SERVED, WaitingQueue
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end
from support.scheduling import engine_without_model


def steps_to_first_token(engine: Engine, request: str) -> int:
    """Steps until a request has its first token."""
    steps = 0
    while True:
        steps += 1
        if any(output.request_id == request and output.token_ids for output in engine.step()):
            return steps


def test_many_requests_of_one_namespace_do_not_delay_another_s_first_token() -> None:
    """Scenario 36: 200 requests came before."""
    engine = engine_without_model(pages=400, states=40, config=EngineConfig(max_num_seqs=8))
    for seed in range(200):
        engine.add_request(ids(40, seed=seed), greedy(20), namespace="crowd")
    late = engine.add_request(ids(40, seed=1000), greedy(20), namespace="alone")
    assert steps_to_first_token(engine, late) <= 22  # a seat is free once the first eight have their 20 tokens


def test_a_long_prompt_of_one_namespace_does_not_delay_another_s_first_token() -> None:
    engine = engine_without_model(pages=4000, states=40, config=EngineConfig(max_num_batched_tokens=256))
    for seed in range(3):
        engine.add_request(ids(10_000, seed=seed), greedy(2), namespace="crowd")
    engine.step()
    late = engine.add_request(ids(100, seed=9), greedy(2), namespace="alone")
    assert steps_to_first_token(engine, late) <= 2


def test_namespaces_get_equal_shares_of_seats_and_of_a_step() -> None:
    engine = engine_without_model(
        pages=4000, states=80, config=EngineConfig(max_num_seqs=12, max_num_batched_tokens=400)
    )
    for name, count in (("a", 40), ("b", 20), ("c", 20)):
        for seed in range(count):
            engine.add_request(ids(200, seed=seed), greedy(30), namespace=name)
    served = {"a": 0, "b": 0, "c": 0}
    for _ in range(40):
        step = engine.scheduler.schedule()
        for part in step.parts:
            served[part.request.namespace] += part.end - part.start
        engine.scheduler.roll_back(step)
        engine.step()
    assert max(served.values()) <= 1.5 * min(served.values())


def test_within_a_namespace_requests_start_in_the_order_in_which_they_came() -> None:
    engine = engine_without_model(pages=400, states=40, config=EngineConfig(max_num_seqs=3))
    names = [engine.add_request(ids(40, seed=seed), greedy(4), namespace="ab"[seed % 2]) for seed in range(20)]
    first: list[str] = []
    while engine.has_work:
        first += [output.request_id for output in engine.step() if output.request_id not in first]
    assert [name for name in first if name in names[::2]] == names[::2]
    assert [name for name in first if name in names[1::2]] == names[1::2]


def test_namespaces_that_keep_coming_overtake_a_request_a_bounded_number_of_times() -> None:
    """Each of them has been served nothing yet, and would be next for ever."""
    engine = engine_without_model(pages=400, states=40, config=EngineConfig(max_num_seqs=2))
    engine.add_request(ids(300), greedy(30), namespace="served")
    old = engine.add_request(ids(300, seed=1), greedy(30), namespace="served")
    for number in range(4 * MAX_OVERTAKING):
        for more in range(2):
            engine.add_request(ids(10, seed=2), greedy(1), namespace=f"{number}/{more}")
        if any(output.request_id == old for output in engine.step()):
            return
    pytest.fail("the request never started")


def test_a_full_queue_refuses_and_nothing_changes(tiny: Engine) -> None:
    engine = engine_on(tiny)
    engine = Engine(engine.loaded, engine.cache, replace(tiny.config, max_num_seqs=1, max_waiting=3))
    first = engine.add_request(ids(20), greedy(3))
    engine.step()  # it runs, and waits no more
    waiting = [engine.add_request(ids(20, seed=seed), greedy(3)) for seed in (1, 2, 3)]
    with pytest.raises(QueueFullError, match="3 requests wait, and 1 more are too many: max_waiting=3"):
        engine.add_request(ids(20), greedy(3))
    with pytest.raises(QueueFullError):
        engine.generate([ids(20), ids(30)], greedy(3), progress=False)
    assert issubclass(QueueFullError, RequestError)
    outputs = run_to_end(engine)
    assert set(outputs) == {first, *waiting}
    assert outputs[first].token_ids == cold(tiny, ids(20), greedy(3)).token_ids
    assert len(engine.generate([ids(20), ids(30), ids(40)], greedy(3), progress=False)) == 3
    assert_nothing_held(engine)


def test_namespaces_do_not_change_answers(tiny: Engine) -> None:
    engine = engine_on(tiny)
    prompts: dict[str, Any] = {}
    for seed in range(9):
        prompt = ids(30 + 23 * seed, seed=seed)
        prompts[engine.add_request(prompt, greedy(4), namespace="abc"[seed % 3])] = prompt
    outputs = run_to_end(engine)
    for name, prompt in prompts.items():
        assert outputs[name].token_ids == cold(tiny, prompt, greedy(4)).token_ids
    assert_nothing_held(engine)


def test_with_one_namespace_a_step_is_filled_as_before(tiny: Engine) -> None:
    engine = tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID), size=(200, 20))
    for seed in range(3):
        engine.add_request(ids(150, seed=seed), greedy(2))
    step = engine.scheduler.schedule()
    assert [(part.start, part.end) for part in step.parts] == [(0, 150), (0, 96)]
    engine.scheduler.roll_back(step)
    run_to_end(engine)
    assert answer(engine, ids(150), greedy(2)).usage.cached_tokens == 9 * GRID


def test_what_namespaces_were_served_is_forgotten_when_there_are_many_and_the_greediest_last() -> None:
    """A server with a namespace for each conversation kept an entry for every one that there ever was."""
    queue = WaitingQueue()
    queue.serve("greedy", 10**6)
    names = [f"conversation {number}" for number in range(5 * MAX_SERVED)]
    for name in names:
        queue.serve(name, 1)
    assert sum(queue.num_served(name) > 0 for name in names) <= 2 * MAX_SERVED
    assert queue.num_served("greedy") == 10**6
