"""The engine in one budget of memory: pieces that change hands, stored checkpoints, pins, declared positions."""

import math
import random
from typing import Any

import pytest

from hybrid import (
    ArgumentError,
    CacheConfig,
    Engine,
    Hints,
    Key,
    MemoryBudgetError,
    PromptError,
    SamplingError,
    SamplingParams,
)
from hybrid.commands.checkpoints import check_checkpoints
from support.engines import GRID, answer, assert_nothing_held, cold, engine_on, greedy, ids, run_to_end

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests


def in_one_budget(tiny: Engine, pieces: int, **config: Any) -> Engine:
    """An engine whose pages and states share this many pieces."""
    page_bytes, state_bytes = engine_on(tiny).cache.unit_bytes
    config = {"page_size": GRID, "chunk_size": GRID, **config}
    memory = pieces * (-(-state_bytes // page_bytes) * page_bytes)
    engine = tiny.with_cache(CacheConfig(memory=memory, **config))
    assert engine.cache.memory.arena is not None
    return engine


@pytest.mark.parametrize(("eviction", "deterministic"), [("lhd", True), ("lru", False)])
def test_memory_changes_hands_and_moves_while_answers_stay_those_of_a_cold_run(
    tiny: Engine, eviction: str, deterministic: bool
) -> None:
    engine = in_one_budget(tiny, 14, eviction=eviction, deterministic=deterministic)
    rng = random.Random(3)
    history: list[list[int]] = []
    params = greedy(GRID + 3)
    for turn in range(14):
        start = rng.choice(history) if history and rng.random() < 0.6 else ids(rng.randrange(20, 160), seed=turn)
        prompts = [start[: rng.randrange(10, len(start) + 1)] + ids(7, seed=100 + 2 * turn + n) for n in range(2)]
        outputs = engine.generate(prompts, params, progress=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == cold(tiny, prompt, params).token_ids
            if len(prompt) < 16 * GRID:
                history.append(output.prompt_token_ids + output.token_ids)
    stats = engine.cache.stats()
    assert stats.evicted_checkpoints > 0
    assert stats.evicted_pages > 0
    assert stats.moved_pages > 0
    assert check_checkpoints(engine)[1] == 0
    assert_nothing_held(engine)


def test_the_logits_in_one_budget_are_those_of_a_cold_run_bit_by_bit(tiny: Engine) -> None:
    engine = in_one_budget(tiny, 12)
    document, params = ids(6 * GRID), greedy(4, logprobs=5)
    answer(engine, document, params)
    for seed in range(4):
        prompt = document[: 4 * GRID] + ids(9, seed=seed + 1)
        output = answer(engine, prompt, params)
        assert output.usage.cached_tokens > 0
        assert output.logprobs == cold(tiny, prompt, params).logprobs


def test_one_request_may_have_all_the_memory_but_its_states(tiny: Engine) -> None:
    engine = in_one_budget(tiny, 8)
    answer(engine, ids(5 * GRID, seed=1))
    most = engine.cache.largest_request * GRID
    prompt = ids(most - 1, seed=2)
    output = answer(engine, prompt, greedy(1))
    assert output.token_ids == cold_in(tiny, prompt, most)
    with pytest.raises(MemoryBudgetError, match=r"smallest memory that suffices is .* \(CacheConfig\(memory=[0-9]+\)"):
        answer(engine, ids(most, seed=2), greedy(1))
    assert_nothing_held(engine)


def cold_in(tiny: Engine, prompt: list[int], num_tokens: int) -> list[int]:
    engine = engine_on(tiny, pages=num_tokens // GRID + 2, enabled=False)
    return answer(engine, prompt, greedy(1)).token_ids


# Declared positions


def test_a_declared_position_has_a_checkpoint_for_the_first_that_leaves_there(tiny: Engine) -> None:
    engine = engine_on(tiny, placement=("prompt_end",))
    document = ids(10 * GRID)
    answer(engine, document, greedy(1, checkpoint_at=[5 * GRID + 3, -3 * GRID]))
    for position in (5 * GRID, 7 * GRID):
        other = answer(engine, document[: position + 5] + ids(9, seed=position), greedy(1))
        assert other.usage.cached_tokens == position
    without = answer(engine, document[: 3 * GRID + 5] + ids(9, seed=8), greedy(1))
    assert (without.usage.page_tokens, without.usage.cached_tokens) == (3 * GRID, 0)
    assert_nothing_held(engine)


@pytest.mark.parametrize("position", [41, -41])
def test_a_position_outside_the_prompt_is_refused(tiny: Engine, position: int) -> None:
    engine = engine_on(tiny)
    with pytest.raises(PromptError, match=f"checkpoint_at={position} is outside the prompt of 40 tokens"):
        answer(engine, ids(40), greedy(1, checkpoint_at=(position,)))
    assert_nothing_held(engine)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"checkpoint_at": [1.5]}, "checkpoint_at"),
        ({"checkpoint_at": 3}, "checkpoint_at"),
        ({"pin_for": 0}, "pin_for"),
        ({"pin_for": "long"}, "pin_for"),
        ({"priority": 0.5}, "priority"),
        ({"priority": 1000}, "priority"),
    ],
)
def test_parameters_of_the_cache_are_checked(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(SamplingError, match=says):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("names", "turn", "branch"), [(("turn_end",), True, False), (("branch",), False, True), ((), False, False)]
)
def test_checkpoints_are_put_where_the_placement_says(
    tiny: Engine, names: tuple[str, ...], turn: bool, branch: bool
) -> None:
    engine = engine_on(tiny, placement=names)
    document = ids(4 * GRID + 3)
    output = answer(engine, document, greedy(2 * GRID))
    follow_up = answer(engine, document + output.token_ids + ids(5, seed=1), greedy(1))
    assert (follow_up.usage.cached_tokens > 4 * GRID) == turn
    for seed in (2, 3):
        last = answer(engine, document[: 2 * GRID + 1] + ids(20, seed=seed), greedy(1))
    assert (last.usage.cached_tokens == 2 * GRID) == branch


# Pins


def fill(engine: Engine, count: int = 8) -> None:
    for seed in range(count):
        answer(engine, ids(9 * GRID, seed=50 + seed), greedy(1))


@pytest.mark.parametrize("deterministic", [True, False])
def test_what_a_request_computed_stays_while_it_is_pinned(tiny: Engine, deterministic: bool) -> None:
    engine = in_one_budget(tiny, 9, deterministic=deterministic)
    prompt = ids(3 * GRID + 2)
    output = answer(engine, prompt, greedy(GRID, pin_for=math.inf))
    pin = output.pin
    assert pin is not None
    run_to_end(engine)
    assert pin.num_tokens == (len(prompt) + GRID) // GRID * GRID
    fill(engine)
    engine.cache.clear()
    again = answer(engine, prompt + output.token_ids + ids(4, seed=1), greedy(1))
    assert again.usage.cached_tokens == pin.num_tokens
    engine.unpin(pin)
    engine.unpin(pin)
    engine.cache.clear()
    assert engine.cache.stats().pages_cached == 0
    assert_nothing_held(engine)


def test_a_prompt_can_be_pinned_later_and_its_pin_ends_by_itself(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny)
    prompt = ids(3 * GRID)
    with pytest.raises(PromptError, match="nothing of this prompt is cached"):
        engine.pin(prompt)
    with pytest.raises(ArgumentError, match="ttl"):
        engine.pin(prompt, ttl=-1)
    answer(engine, prompt)
    pin = engine.pin(prompt, ttl=60)
    engine.cache.clear()
    assert engine.cache.stats().pins == 1
    assert pin.num_tokens == 3 * GRID
    monkeypatch.setattr("time.monotonic", lambda: math.inf)
    answer(engine, ids(5, seed=1))
    assert engine.cache.stats().pins == 0


def test_a_pin_that_asks_for_too_much_is_not_made_and_the_answer_comes_all_the_same(tiny: Engine) -> None:
    engine = engine_on(tiny, pages=12, states=6)
    prompt = ids(8 * GRID)
    with pytest.warns(UserWarning, match="over half of the memory"):
        output = answer(engine, prompt, greedy(1, pin_for=math.inf))
    assert output.pin is None
    assert len(output.token_ids) == 1
    assert_nothing_held(engine)


def test_pins_give_way_to_a_request_that_could_not_run_otherwise(tiny: Engine) -> None:
    engine = in_one_budget(tiny, 8)
    for seed in (1, 2):
        answer(engine, ids(2 * GRID, seed=seed), greedy(1, pin_for=1000.0 * seed))
    assert engine.cache.stats().pins == 2
    most = engine.cache.largest_request * GRID
    assert len(answer(engine, ids(most - 1, seed=3), greedy(1)).token_ids) == 1
    assert engine.cache.stats().pins < 2
    assert_nothing_held(engine)


# Stored checkpoints


@pytest.mark.parametrize(("state_dtype", "bound"), [("bfloat16", 0.05), ("int8", 0.1)])
def test_stored_checkpoints_are_smaller_and_answers_nearly_the_same(
    tiny: Engine, state_dtype: str, bound: float
) -> None:
    engine = in_one_budget(tiny, 12, state_dtype=state_dtype)
    assert not engine.deterministic
    full = in_one_budget(tiny, 12, deterministic=False)
    assert engine.cache.stats().checkpoint_bytes < 0.6 * full.cache.stats().checkpoint_bytes
    document, params = ids(6 * GRID), greedy(3, logprobs=0)
    answer(engine, document, params)
    for seed in range(5):
        prompt = document + ids(9, seed=seed + 1)
        output, expected = answer(engine, prompt, params), cold(tiny, prompt, params)
        assert output.usage.cached_tokens == 6 * GRID
        assert output.token_ids == expected.token_ids
        assert output.logprobs is not None and expected.logprobs is not None
        for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
            for token, value in theirs.items():
                assert ours[token] == pytest.approx(value, abs=bound)
    assert_nothing_held(engine)


def test_stored_checkpoints_survive_pressure_and_moves(tiny: Engine) -> None:
    engine = in_one_budget(tiny, 14, state_dtype="int8")
    for seed in range(12):
        answer(engine, ids(3 * GRID, seed=seed % 5) + ids(2 * GRID, seed=20 + seed), greedy(GRID))
    assert engine.cache.stats().evicted_checkpoints > 0
    assert_nothing_held(engine)
    engine.cache.clear()
    stats = engine.cache.stats()
    assert (stats.pages_free, stats.states_free) == (stats.pages_total, stats.states_total)


def test_deterministic_mode_and_a_fixed_split_refuse_stored_checkpoints() -> None:
    with pytest.raises(ArgumentError, match="deterministic mode needs 'float32'"):
        CacheConfig(state_dtype="int8", deterministic=True)
    with pytest.raises(ArgumentError, match="state_share=None"):
        CacheConfig(state_dtype="int8", state_share=0.5)
    with pytest.raises(ArgumentError, match="state_dtype must be one of float32, bfloat16, int8"):
        CacheConfig(state_dtype="int4")
    with pytest.raises(ArgumentError, match="placement has no 'everywhere'"):
        CacheConfig(placement=("branch", "everywhere"))


def test_a_session_that_has_ended_is_released(tiny: Engine) -> None:
    """A request says so of itself, or the client afterwards; until then it is evicted as any other prefix is."""
    engine, prompt = in_one_budget(tiny, 20, eviction="lru"), ids(4 * GRID + 2)

    def is_released() -> bool:
        node = engine.cache.tree.peek(Key.of(prompt), 4 * GRID).checkpoint
        return node is not None and node.usage.last_used == 0

    answer(engine, prompt, greedy(1, session="s"))
    assert engine.hint("s", Hints(expect_resume=5.0)) and not engine.hint("another", Hints(expect_resume=5.0))
    assert not is_released()
    assert engine.hint("s", Hints(end_session=True)) and not engine.hint("s", Hints(end_session=True))
    assert is_released()
    answer(engine, prompt, greedy(1, session="s"))
    assert not is_released()  # it was used again
    answer(engine, prompt, greedy(1, session="s", hints=Hints(end_session=True)))
    assert is_released()
    assert_nothing_held(engine)


def test_what_is_retained_is_pinned_and_refused_beyond_the_limit_of_pins(tiny: Engine) -> None:
    engine = in_one_budget(tiny, 9)
    for seed in range(4):
        answer(engine, ids(2 * GRID + 2, seed=seed), greedy(1, hints=Hints(retain=60.0)))
    assert 0 < engine.cache.stats().pins < 4
