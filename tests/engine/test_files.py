"""Prefixes that one engine saves and another loads: the answers are those of a cold run, to the bit."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid import CacheConfig, CacheFileError, Engine, PromptError
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids

PARAMS = greedy(8, logprobs=3)


@pytest.fixture
def engine(tiny: Engine) -> Iterator[Engine]:
    made = engine_on(tiny, pages=96, states=40, deterministic=True)
    yield made
    assert_nothing_held(made)


def another(tiny: Engine, **config: Any) -> Engine:
    return engine_on(tiny, pages=96, states=40, **{"deterministic": True, **config})


def test_a_prompt_saved_by_one_engine_is_a_hit_of_another_and_bitwise_a_cold_run(
    tiny: Engine, engine: Engine, tmp_path: Path
) -> None:
    prompt = ids(5 * GRID + 7)
    answer(engine, prompt, PARAMS)
    saved = engine.save(tmp_path / "a.hybrid", [prompt])
    assert saved.pages == 5
    other = another(tiny)
    assert other.load(tmp_path / "a.hybrid").checkpoints == saved.checkpoints
    assert other.explain(prompt).usable_hit == 5 * GRID
    expected, warm = cold(tiny, prompt, PARAMS), answer(other, prompt, PARAMS)
    assert warm.usage.cached_tokens == 5 * GRID
    assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)
    assert_nothing_held(other)


def test_a_turn_that_one_engine_has_computed_continues_in_another(tiny: Engine, engine: Engine) -> None:
    first = answer(engine, ids(3 * GRID + 3), greedy(20))
    prompt = first.prompt_token_ids + first.token_ids + ids(9, seed=1)
    other = another(tiny)
    other.load(engine.dump())
    expected, warm = cold(tiny, prompt, PARAMS), answer(other, prompt, PARAMS)
    assert warm.usage.cached_tokens > 3 * GRID
    assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)


def test_an_engine_hands_over_a_state_and_the_pages_that_the_other_lacks(tiny: Engine, engine: Engine) -> None:
    shared = ids(4 * GRID)
    other = another(tiny)
    answer(other, shared + ids(GRID, seed=1), PARAMS)
    prompt = shared + ids(3 * GRID + 1, seed=2)
    answer(engine, prompt, PARAMS)
    hit = other.explain(prompt)
    assert hit.page_hit == 4 * GRID
    part, whole = engine.dump([prompt], after=hit.page_hit), engine.dump([prompt])
    assert len(part) < len(whole)
    assert other.load(part).pages == 3
    expected, warm = cold(tiny, prompt, PARAMS), answer(other, prompt, PARAMS)
    assert warm.usage.cached_tokens == 7 * GRID
    assert (warm.token_ids, warm.logprobs) == (expected.token_ids, expected.logprobs)


def test_namespaces_stay_apart(tiny: Engine, engine: Engine) -> None:
    prompt = ids(3 * GRID)
    engine.generate([prompt], PARAMS, namespace="tenant", progress=False)
    with pytest.raises(PromptError, match="prompt 0 of 48 tokens has no checkpoint in the cache in namespace ''"):
        engine.dump([prompt])
    other = another(tiny)
    other.load(engine.dump([prompt], namespace="tenant"))
    assert other.explain(prompt).usable_hit == 0
    assert other.explain(prompt, namespace="tenant").usable_hit == 2 * GRID


def test_a_namespace_of_which_nothing_is_cached_is_refused_and_no_file_is_written(
    engine: Engine, tmp_path: Path
) -> None:
    engine.generate([ids(3 * GRID)], PARAMS, namespace="tenant", progress=False)
    with pytest.raises(PromptError, match="no checkpoint in the cache in namespace 'nobody'"):
        engine.save(tmp_path / "file", namespace="nobody")
    assert not [*tmp_path.iterdir()]
    assert engine.save(tmp_path / "file", namespace="tenant").checkpoints
    engine.cache.clear()
    assert engine.save(tmp_path / "all").checkpoints == 0  # what is not restricted may be empty


def test_what_was_computed_with_other_settings_is_refused(tiny: Engine, engine: Engine) -> None:
    answer(engine, ids(3 * GRID), PARAMS)
    data = engine.dump()
    with pytest.raises(CacheFileError, match="page_size is 16 there and 32 here"):
        tiny.with_cache(CacheConfig(page_size=32, chunk_size=GRID, deterministic=True)).load(data)
    loose = another(tiny, deterministic=False)
    answer(loose, ids(3 * GRID), PARAMS)
    with pytest.raises(CacheFileError, match="deterministic is False there and True here"):
        engine.load(loose.dump())
    assert loose.load(data).skipped == {}


def test_another_model_is_refused(tiny: Engine, engine: Engine) -> None:
    """One weight is another one: all that was computed before is of no use."""
    answer(engine, ids(3 * GRID), PARAMS)
    data = engine.dump()
    weight = tiny.model.model.norm.weight
    former = weight.data.clone()
    try:
        weight.data[3] += 0.5
        other = another(tiny)
        with pytest.raises(CacheFileError, match=r"model is '\w+' there and '\w+' here"):
            other.load(data)
    finally:
        weight.data.copy_(former)
    assert other.explain(ids(3 * GRID)).page_hit == 0


def test_a_file_is_loaded_while_requests_run(tiny: Engine, engine: Engine, tmp_path: Path) -> None:
    prompt = ids(5 * GRID + 1)
    answer(engine, prompt, PARAMS)
    engine.save(tmp_path / "a", [prompt])
    other = another(tiny)
    running = ids(4 * GRID + 2, seed=3)
    other.add_request(running, PARAMS, request_id="one")
    other.step()
    other.load(tmp_path / "a")
    outputs = []
    while other.has_work:
        outputs += other.step()
    assert outputs[-1].token_ids == cold(tiny, running, PARAMS).token_ids
    assert answer(other, prompt, PARAMS).usage.cached_tokens == 5 * GRID
    assert_nothing_held(other)


def test_a_file_that_is_larger_than_the_memory_is_loaded_as_far_as_it_fits(tiny: Engine, engine: Engine) -> None:
    for seed in range(4):
        answer(engine, ids(5 * GRID, seed=seed), PARAMS)
    small = engine_on(tiny, pages=12, states=8, deterministic=True)
    loaded = small.load(engine.dump())
    assert loaded.checkpoints > 0
    assert loaded.skipped["there is no memory for it"] > 0
    assert_nothing_held(small)
    prompt = ids(5 * GRID)
    assert answer(small, prompt, PARAMS).token_ids == cold(tiny, prompt, PARAMS).token_ids


def test_an_engine_that_was_closed_saves_nothing(tiny: Engine, tmp_path: Path) -> None:
    closed = another(tiny)
    closed.close()
    for call in (closed.dump, lambda: closed.save(tmp_path / "a"), lambda: closed.load(tmp_path / "a")):
        with pytest.raises(Exception, match="was closed"):
            call()


def test_settings_are_part_of_a_fingerprint_and_the_size_of_the_memory_is_not(tiny: Engine, engine: Engine) -> None:
    answer(engine, ids(3 * GRID), PARAMS)
    config = replace(engine.cache.config, memory="8MiB", eviction="lru", seed=3)
    assert tiny.with_cache(config).load(engine.dump()).skipped == {}
