"""An engine with host memory: what was evicted and came back answers like a cold run, to the bit."""

from typing import Any

import pytest

from hybrid import Engine
from hybrid.cache.config import CacheConfig
from support.engines import GRID, answer, assert_nothing_held, cold, greedy, ids

PARAMS = greedy(8, logprobs=3)


def small(tiny: Engine, pages: int = 30, states: int = 8, **config: Any) -> Engine:
    """An engine whose memory holds few prompts, with host memory for the rest."""
    page_bytes, state_bytes = tiny.cache.unit_bytes
    memory = pages * page_bytes + states * state_bytes
    settings: dict[str, Any] = {"host": "64MiB", "deterministic": True, "verify_contents": True, **config}
    return tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, memory=memory, **settings))


@pytest.mark.parametrize("eviction", ["lhd", "lru", "flop_aware"])
def test_answers_are_those_of_cold_runs_through_evictions_and_restores(tiny: Engine, eviction: str) -> None:
    engine = small(tiny, eviction=eviction)
    prompts = [ids(6 * GRID + 5 * seed, seed=seed) for seed in range(5)]
    for _ in range(2):
        for prompt in prompts:
            expected, warm = cold(tiny, prompt, PARAMS), answer(engine, prompt, PARAMS)
            assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)
            engine.cache.audit(contents=True)
    stats = engine.cache.stats()
    assert stats.restored_checkpoints > 0
    assert stats.tier_failures == 0
    assert_nothing_held(engine)


def test_an_output_says_where_its_hit_came_from(tiny: Engine) -> None:
    engine = small(tiny)
    prompts = [ids(8 * GRID, seed=seed) for seed in range(5)]
    for prompt in prompts:
        answer(engine, prompt, PARAMS)
    again = answer(engine, prompts[0], PARAMS)
    assert again.usage.cached_tokens == 7 * GRID
    assert "tokens restored from host memory" in str(again.explain)


def test_stored_smaller_checkpoints_come_back_as_they_were(tiny: Engine) -> None:
    engine = small(tiny, deterministic=False, state_dtype="int8")
    prompts = [ids(8 * GRID, seed=seed) for seed in range(8)]
    first = [answer(engine, prompt, PARAMS) for prompt in prompts]
    again = [answer(engine, prompt, PARAMS) for prompt in prompts]
    assert engine.cache.stats().restored_checkpoints > 0
    assert [output.token_ids for output in again] == [output.token_ids for output in first]
    engine.cache.audit(contents=True)


def test_requests_that_run_together_restore_together(tiny: Engine) -> None:
    engine = small(tiny, pages=60, states=16)
    prompts = [ids(5 * GRID + 3, seed=seed) for seed in range(10)]
    for prompt in prompts:
        answer(engine, prompt, PARAMS)
    outputs = engine.generate(prompts, PARAMS, progress=False)
    for output, prompt in zip(outputs, prompts, strict=True):
        expected = cold(tiny, prompt, PARAMS)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert engine.cache.stats().restored_checkpoints > 0
    assert_nothing_held(engine)


def test_a_request_that_needs_all_of_the_device_leaves_the_copies_of_others(tiny: Engine) -> None:
    """Something is pinned, and is given up for it."""
    engine = small(tiny)
    pinned, other, large = ids(36 * GRID, seed=1), ids(8 * GRID, seed=2), ids(53 * GRID, seed=3)
    answer(engine, pinned, greedy(8, pin_for=1000.0))
    answer(engine, other, PARAMS)
    assert answer(engine, large, PARAMS).finish_reason == "length"
    assert engine.cache.stats().pins == 0
    again, expected = answer(engine, other, PARAMS), cold(tiny, other, PARAMS)
    assert "tokens restored from host memory" in str(again.explain)
    assert (again.token_ids, again.logprobs) == (expected.token_ids, expected.logprobs)


def test_a_closed_engine_holds_no_copies(tiny: Engine) -> None:
    engine = small(tiny)
    for seed in range(4):
        answer(engine, ids(6 * GRID, seed=seed), PARAMS)
    assert engine.cache.stats().host_bytes_used > 0
    engine.close()
    assert engine.cache.stats().host_bytes_used == 0
