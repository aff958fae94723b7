"""Turns: requests of one namespace do not delay those of another, and the queue is bounded on request."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest

from hybrid import (
    ArgumentError,
    CacheConfig,
    Engine,
    EngineConfig,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
    TenantConfig,
)
from hybrid.engine.waiting import MAX_SERVED, WaitingQueue
from support.calls import calls_of
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
        engine.scheduler.retract_all("a test asks for it")
        engine.step()
    assert max(served.values()) <= 1.5 * min(served.values())


def test_tenants_who_share_a_namespace_get_turns_and_shares_of_their_weights() -> None:
    config = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=200,
        tenants={"a": TenantConfig(weight=3), "c": TenantConfig(max_running=1)},
    )
    engine = engine_without_model(pages=4000, states=80, config=config)
    tenants = {}
    for name, count in (("a", 80), ("b", 80), ("c", 5)):
        for seed in range(count):
            tenants[engine.add_request(ids(60, seed=1000 * ord(name) + seed), greedy(20, tenant=name))] = name
    served = {"a": 0, "b": 0, "c": 0}
    for _ in range(150):
        for output in engine.step():
            served[tenants[output.request_id]] += output.finish_reason is not None
        assert sum(request.tenant == "c" for request in engine.scheduler.running if not request.is_replay) <= 1
    assert served["c"] >= 3
    assert 2 <= served["a"] / served["b"] <= 4
    late = engine.add_request(ids(60, seed=999), greedy(2, tenant="late"))
    assert steps_to_first_token(engine, late) <= 30


def test_a_tenant_has_as_many_requests_as_it_may(tiny: Engine) -> None:
    config = replace(tiny.config, tenants={"a": TenantConfig(max_requests=2)})
    engine = Engine(tiny.loaded, engine_on(tiny).cache, config)
    first = engine.add_request(ids(20), greedy(3, tenant="a"))
    engine.add_request(ids(20), greedy(3), namespace="a")
    engine.step()
    with pytest.raises(QueueFullError, match=r"'a' would have 3 requests: TenantConfig\(max_requests=2\)"):
        engine.add_request(ids(20), greedy(3, tenant="a"))
    engine.add_request(ids(20), greedy(3))
    assert first in run_to_end(engine)
    engine.add_request(ids(20), greedy(3, tenant="a"))
    run_to_end(engine)
    numbers = ({"weight": 0}, {"weight": float("inf")}, {"max_running": 0}, {"max_requests": 1.5}, {"memory_share": 0})
    for wrong in numbers:
        with pytest.raises(ArgumentError, match=f"TenantConfig: {next(iter(wrong))}"):
            TenantConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="tenants must be a dict"):
        EngineConfig(tenants={"a": 2})  # type: ignore[dict-item]


def test_within_a_namespace_requests_start_in_the_order_in_which_they_came() -> None:
    engine = engine_without_model(pages=400, states=40, config=EngineConfig(max_num_seqs=3))
    names = [engine.add_request(ids(40, seed=seed), greedy(4), namespace="ab"[seed % 2]) for seed in range(20)]
    first: list[str] = []
    while engine.has_work:
        first += [output.request_id for output in engine.step() if output.request_id not in first]
    assert [name for name in first if name in names[::2]] == names[::2]
    assert [name for name in first if name in names[1::2]] == names[1::2]


def test_namespaces_that_keep_coming_do_not_starve_one_that_was_served() -> None:
    """Each of them has been served nothing yet."""
    engine = engine_without_model(pages=400, states=40, config=EngineConfig(max_num_seqs=2))
    engine.add_request(ids(300), greedy(30), namespace="served")
    old = engine.add_request(ids(300, seed=1), greedy(30), namespace="served")
    for number in range(500):
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
    engine.scheduler.retract_all("a test asks for it")
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


class Waits:
    """A request as far as the queue sees it."""

    is_replay = False
    prefill_end = 100
    num_computed = 0

    def __init__(self, namespace: str, priority: int = 0) -> None:
        self.tenant = namespace
        self.params = SamplingParams(scheduling_priority=priority)


@pytest.mark.parametrize("seed", range(10))
def test_turns_are_those_of_a_plain_search(seed: int) -> None:
    """The waiting requests are all looked through for each request that starts."""
    rng = random.Random(seed)
    queue, waiting = WaitingQueue(), list[Any]()
    served: dict[str, int] = {}
    for _ in range(60):
        for _ in range(rng.randrange(30)):
            request: Any = Waits(f"n{rng.randrange(6)}", rng.choice((0, 0, 1, -2)))
            queue.add(request)
            waiting.append(request)
        for request in rng.sample(waiting, len(waiting) // 10):  # aborted
            queue.remove(request)
            waiting.remove(request)
        skipped = {f"n{rng.randrange(6)}"}
        passed: set[Any] = set()  # offered, and not started
        served = {request.tenant: queue.num_served(request.tenant) for request in waiting}
        for request, _ in zip(queue.in_turn(skipped), range(rng.randrange(25)), strict=False):
            assert request.tenant not in skipped
            left = [other for other in waiting if other.tenant not in skipped and other not in passed]
            least = min(served[other.tenant] for other in left)
            assert served[request.tenant] == least
            own = [other for other in left if other.tenant == request.tenant]
            assert request is min(own, key=lambda other: other.params.scheduling_priority)
            if rng.random() < 0.7:
                queue.started(request, request.prefill_end - request.num_computed)
                waiting.remove(request)
                served[request.tenant] = queue.num_served(request.tenant)
            else:
                passed.add(request)
        queue.serve(f"n{rng.randrange(6)}", rng.randrange(200))
        assert queue.num_requests == len(waiting)


def test_a_namespace_that_comes_late_is_served_as_the_others_are_from_then_on() -> None:
    """The service of the others before does not make them wait."""
    queue = WaitingQueue()

    def start(count: int) -> list[str]:
        names = []
        for request, _ in zip(queue.in_turn(set()), range(count), strict=False):
            queue.started(request, 100)
            names.append(request.tenant)
        return names

    for _ in range(20):
        queue.add(cast(Any, Waits("early")))
    assert start(10) == ["early"] * 10
    for _ in range(10):
        queue.add(cast(Any, Waits("late")))
    assert sorted(start(6)) == ["early"] * 3 + ["late"] * 3


@pytest.mark.parametrize("num_namespaces", [1, 3000])
def test_a_step_costs_the_same_whatever_waits(num_namespaces: int) -> None:
    queue = WaitingQueue()
    for number in range(6000):
        queue.add(cast(Any, Waits(f"n{number % num_namespaces}", number % 3)))

    def steps() -> None:
        for _ in range(20):
            for request, _ in zip(queue.in_turn(set()), range(3), strict=False):
                queue.started(request, request.prefill_end - request.num_computed)

    assert calls_of(steps) < 60 * 100


def test_answers_that_wait_for_their_replay_are_few_however_long_every_step_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hybrid.engine.scheduler.MAX_REPLAYS", 5)
    engine = engine_without_model(1000, 200, config=EngineConfig(max_num_seqs=4))
    most, ended = 0, list[RequestOutput]()
    for seed in range(60):
        engine.add_request(ids(20, seed), greedy(2 * GRID))
    while engine.has_work:
        ended += [output for output in engine.step() if output.finish_reason is not None]
        most = max(most, engine.scheduler.waiting.num_replays)
    assert most == 5, "none starts before requests that wait"
    turns = [engine.explain([*ended[at].prompt_token_ids, *ended[at].token_ids]).usable_hit for at in (0, 1, -2, -1)]
    assert turns == [GRID, GRID, 3 * GRID, 3 * GRID], "the oldest are given up"
    assert_nothing_held(engine)
