"""The lines of `hybrid parity` on drafts: the small model, pages of 64 tokens, and the kernels of this CPU."""

import pytest

from hybrid import CacheConfig, Engine
from hybrid.commands.judge import Judge
from hybrid.commands.parity import memory_pressure
from hybrid.commands.parity_drafts import drafts, under_pressure


def test_drafts_of_every_kind_change_no_bit() -> None:
    engine = Engine.from_pretrained("tiny", dtype="float32", cache=CacheConfig(memory="256MiB", deterministic=True))
    checks = drafts(Judge(engine))
    assert [f"{check.name}: {check.detail}" for check in checks if not check.passed] == []
    assert len(checks) == 16


@pytest.mark.parametrize("page_size", [16, 32])
def test_requests_are_retracted_where_pages_are_small_compared_with_a_state(page_size: int) -> None:
    """One budget is divided into pieces of a state's size, of which a request needs several: the scenarios do not ask
    for less than these."""
    config = CacheConfig(memory="64MiB", deterministic=True, page_size=page_size)
    judge = Judge(Engine.from_pretrained("tiny", dtype="float32", cache=config))
    for scenario in (under_pressure, memory_pressure):
        check = scenario(judge)
        assert check.passed, check.detail
