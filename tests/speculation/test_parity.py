"""The lines of `hybrid parity` on drafts: the small model, pages of 64 tokens, and the kernels of this CPU."""

from typing import Any

import pytest

from hybrid import CacheConfig, Engine
from hybrid.commands.parity import Judge, memory_pressure, under_pressure

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests


@pytest.fixture(scope="module")
def engine() -> Engine:
    """The small model as `hybrid parity` loads it."""
    return Engine.from_pretrained("tiny", dtype="float32", cache=CacheConfig(memory="256MiB", deterministic=True))


def test_requests_are_retracted_where_pages_are_small_compared_with_a_state() -> None:
    """One budget is divided into pieces of a state's size, of which a request needs several: the scenarios do not ask
    for less than these."""
    config = CacheConfig(memory="64MiB", deterministic=True, page_size=16)
    judge = Judge(Engine.from_pretrained("tiny", dtype="float32", cache=config))
    for check in (*(each.check(judge) for each in under_pressure(judge)), memory_pressure(judge)):
        assert check.passed, check.detail


@pytest.mark.parametrize("with_drafts", [True, False])
def test_the_first_size_of_memory_that_is_tried_retracts_a_request(
    with_drafts: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[object] = []
    warm = Judge.warm

    def noted(judge: Judge, *args: Any, **how: Any) -> Engine:
        sizes.append((*args, *how.values()))
        return warm(judge, *args, **how)

    monkeypatch.setattr(Judge, "warm", noted)
    judge = Judge(engine)
    checks = [each.check(judge) for each in under_pressure(judge)] if with_drafts else [memory_pressure(judge)]
    assert [check.detail for check in checks if not check.passed] == []
    assert len(sizes) == 1


def test_scenarios_ask_for_the_same_prompts_and_each_is_answered_cold_once(engine: Engine) -> None:
    judge = Judge(engine, seed=3)
    prompt = judge.ids(70)
    assert prompt == judge.ids(70) == Judge(engine, seed=3).ids(70)
    assert Judge(engine, seed=4).ids(70) != prompt != judge.ids(71)[:70]
    assert judge.cold(prompt) is judge.cold(prompt)
