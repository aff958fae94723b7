"""An unexpected exception, between any two lines of the bookkeeping: one request ends with it, and what is
computed afterwards is right."""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import hybrid
from hybrid import AuditError, Engine, RequestOutput
from support.engines import answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end
from support.planted import Planted, PlantedError

SHARED = ids(64, seed=5)
PROMPTS = [SHARED[: 16 * n] + ids(21 + 5 * n, seed=n) for n in range(5)]


def steps(engine: Engine) -> dict[str, RequestOutput]:
    """Run what waits, whatever steps raise; the last output of each request."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(200):
        with suppress(PlantedError):
            if not engine.has_work:
                break
            outputs.update({output.request_id: output for output in engine.step()})
    assert not engine.has_work
    return outputs


def assert_one_failed_at_most(
    tiny: Engine, engine: Engine, names: list[str], outputs: dict[str, RequestOutput]
) -> None:
    assert set(outputs) == set(names)
    assert sum(output.finish_reason == "error" for output in outputs.values()) <= 1
    for output in outputs.values():
        if output.finish_reason != "error":
            assert output.token_ids == cold(tiny, output.prompt_token_ids, greedy(len(output.token_ids))).token_ids
    assert_nothing_held(engine)
    for prompt in PROMPTS:
        assert answer(engine, prompt, greedy(4)).token_ids == cold(tiny, prompt, greedy(4)).token_ids
    assert_nothing_held(engine)


def after(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, which raises in one call when its work is done: nobody gets what it returns."""
    calls = []

    def raising(*arguments: Any, **named: Any) -> Any:
        returned = function(*arguments, **named)
        calls.append(returned)
        if len(calls) == call:
            raise PlantedError
        return returned

    return raising


@pytest.mark.parametrize("where", ["tree.insert", "tree.unlock", "tree.lock_pages", "memory.pages.allocate"])
@pytest.mark.parametrize(("call", "overlap"), [(1, False), (3, True), (4, False)])
def test_a_page_has_one_owner_after_an_unexpected_exception(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, where: str, call: int, overlap: bool
) -> None:
    engine = engine_on(tiny, pages=40, states=10, overlap=overlap)
    answer(engine, PROMPTS[1], greedy(4))
    owner: Any = engine.cache
    *path, name = where.split(".")
    for each in path:
        owner = getattr(owner, each)
    monkeypatch.setattr(owner, name, after(getattr(owner, name), call))
    names = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS]
    outputs = steps(engine)
    monkeypatch.undo()
    assert engine.cache.stats().resets == 1 or where == "tree.unlock"  # which had done all of it
    assert_one_failed_at_most(tiny, engine, names, outputs)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("elastic", [True, False])
def test_an_exception_at_any_line_costs_one_request_at_most(tiny: Engine, elastic: bool) -> None:
    rng = random.Random(elastic)
    for _ in range(5):
        engine = engine_on(tiny, pages=40, states=10, overlap=rng.random() < 0.5)
        if elastic:
            engine = tiny.with_cache(hybrid.CacheConfig(page_size=16, chunk_size=16, memory="2MiB", host="1MiB"))
        answer(engine, PROMPTS[1], greedy(4))
        names = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS]
        with Planted(rng.randint(1, 4000), "cache", "tree", "memory", "tiers").traced():
            outputs = steps(engine)
        assert_one_failed_at_most(tiny, engine, names, outputs)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("overlap", [True, False])
def test_an_exception_at_any_line_of_the_engine_costs_one_request_at_most(tiny: Engine, overlap: bool) -> None:
    rng = random.Random(overlap)
    for _ in range(12):
        engine = engine_on(tiny, pages=rng.choice((26, 40)), states=10, overlap=overlap)
        answer(engine, PROMPTS[1], greedy(4))
        names = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS]
        rooms = ("scheduler", "requests", "loops", "waiting")  # not what catches it
        with Planted(rng.randint(1, 1500), *(f"engine/{name}.py" for name in rooms)).traced():
            outputs = steps(engine)
        assert_one_failed_at_most(tiny, engine, names, outputs)


def test_an_exception_between_steps_leaves_the_cache_consistent(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny, pages=40, states=10)
    answer(engine, PROMPTS[1], greedy(4))
    file = engine.dump()
    running = engine.add_request(PROMPTS[2], greedy(9))
    engine.step()
    engine.cache.clear()
    monkeypatch.setattr(engine.cache.tree, "insert", after(engine.cache.tree.insert, 1))
    with pytest.raises(PlantedError):
        engine.load(file)
    engine.cache.audit()
    assert_one_failed_at_most(tiny, engine, [running], steps(engine))


def test_where_a_recovery_is_broken_off_the_next_step_ends_it(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny, pages=40, states=10)
    names = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS]
    engine.step()
    engine.cache.memory.pages.allocate(1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "close", after(engine.cache.close, 1))
        patch.setattr(engine.cache, "reset", after(engine.cache.reset, 1))
        patch.setattr(engine.runner, "launch", lambda plan: [][1])
        with pytest.raises(PlantedError):
            engine.step()
    assert_one_failed_at_most(tiny, engine, names, steps(engine))


def test_what_is_refused_empties_nothing(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=16, states=10)
    answer(engine, ids(200), greedy(4))
    for seed in range(2):
        answer(engine, ids(90, seed), greedy(2))
    engine.pin(ids(90, 0))
    with pytest.raises(hybrid.MemoryBudgetError):
        engine.pin(ids(90, 1))
    assert engine.cache.stats().resets == 0
    assert engine.cache.stats().pages_cached


def test_a_reset_ends_leases_and_pins_and_keeps_counts(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=12, states=10)
    cache = engine.cache
    for seed in range(4):
        answer(engine, ids(90, seed), greedy(2))
    pin, before = engine.pin(ids(90, 3)), cache.stats()
    lease = cache.open(hybrid.Key.of(ids(90, 3)), limit=89, num_tokens=90)
    assert lease is not None
    cache.reset()
    cache.audit()
    now = cache.stats()
    assert (now.pages_free, now.states_free) == (now.pages_total, now.states_total)
    assert (now.resets, now.pins, now.evicted_pages) == (1, 0, before.evicted_pages)
    assert before.evicted_pages
    engine.unpin(pin)  # it has ended
    with pytest.raises(hybrid.OwnershipError):
        cache.close(lease)
    assert answer(engine, ids(90, 3)).token_ids == cold(tiny, ids(90, 3)).token_ids


def test_an_audit_that_fails_in_a_step_is_raised(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `EngineConfig(audit=True)`: it is what somebody looks for."""
    engine = engine_on(tiny, pages=40, states=10)
    name = engine.add_request(PROMPTS[0], greedy(9))
    engine.step()
    engine.cache.memory.pages.allocate(1)
    with pytest.raises(AuditError, match="leaked"):
        engine.step()
    assert_one_failed_at_most(tiny, engine, [name], steps(engine))


@pytest.mark.parametrize("call", [1, 3])
def test_an_arena_that_lost_count_of_its_free_units_is_noticed(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    engine = tiny.with_cache(hybrid.CacheConfig(page_size=16, chunk_size=16, memory="2MiB"))
    arena = engine.cache.memory.arena
    assert arena is not None
    answer(engine, PROMPTS[1], greedy(4))
    monkeypatch.setattr(arena, "give_back", after(arena.give_back, call))
    names = [engine.add_request(prompt, greedy(9)) for prompt in PROMPTS]
    outputs = steps(engine)
    monkeypatch.undo()
    assert engine.cache.stats().resets <= 1
    assert_one_failed_at_most(tiny, engine, names, outputs)


@pytest.mark.usefixtures("untraced")
def test_a_request_that_cannot_be_queued_leaves_nothing_behind(tiny: Engine) -> None:
    """An exception at any line of queueing: the request runs, or its id can be used again at once."""
    line, planted = 0, Planted(0)
    while not line or planted.was_raised:
        line += 1
        engine = engine_on(tiny, pages=40, states=10)
        engine.add_request(PROMPTS[0], greedy(2), namespace="a")
        planted = Planted(line, "engine/requests.py", "engine/scheduler.py", "engine/waiting.py")
        with suppress(PlantedError), planted.traced():
            engine.add_request(PROMPTS[1], greedy(2), namespace="b", request_id="mine")
        if engine.stats().waiting == 1:
            assert planted.was_raised
            engine.add_request(PROMPTS[1], greedy(2), namespace="b", request_id="mine")
        assert len(run_to_end(engine)) == 2
        assert_nothing_held(engine)
    assert line > 15
