"""The policy of vLLM's CPU tier, under vLLM's own manager. Needs vLLM 0.31 or later: `make vllm`."""

import logging
import random

import pytest

from support.vllm_needed import require_vllm

require_vllm()

from vllm.v1.kv_offload.base import ReqContext  # noqa: E402
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory  # noqa: E402

from hybrid.tree.lhd import LearnedHitDensity  # noqa: E402
from hybrid.vllm.tier import LearnedCachePolicy  # noqa: E402
from support import vllm_tier as tier  # noqa: E402

if not hasattr(ReqContext, "set_offload_key_position"):
    pytest.skip("a policy of vLLM 0.30 gets no requests: this one is LRU there", allow_module_level=True)

BLOCK = tier.BLOCK


def prompts(seed: int, number: int) -> list[list[int]]:
    """Prompts of which a third begin as others do, and the others never come again."""
    draw = random.Random(seed)
    shared = [[draw.randrange(999) for _ in range(5 * BLOCK)] for _ in range(3)]
    made = []
    for _ in range(number):
        is_shared, length = draw.random() < 0.35, draw.randrange(BLOCK, 5 * BLOCK)
        made.append((draw.choice(shared) if is_shared else []) + [draw.randrange(999) for _ in range(length)])
    return made


def check(served: "tier.Tier") -> None:
    """The policy is whole, and counts what the manager counts."""
    assert not served.policy.check()
    chunks = served.policy.chunks.values()
    assert len({chunk.chunk_id for chunk in chunks}) == len(chunks) <= served.num_chunks


def test_it_finds_more_than_lru_and_arc_where_few_prompts_come_again() -> None:
    hits = {}
    for name in ("lru", "arc", "LearnedCachePolicy"):
        served = tier.Tier(40, name)
        for prompt in prompts(3, 120):
            served.serve(prompt, [])
        hits[name] = served.hit_tokens
    assert served.policy.failure is None
    check(served)
    assert served.policy.states == {1, 2, 3}
    assert hits["LearnedCachePolicy"] > 1.5 * hits["lru"]
    assert hits["LearnedCachePolicy"] > hits["arc"]


def test_it_is_whole_after_every_request() -> None:
    served = tier.Tier(30, "LearnedCachePolicy")
    for prompt in prompts(4, 40):
        served.serve(prompt, prompt[:BLOCK])
        check(served)
    assert served.policy.failure is None
    served.manager.reset_cache()
    check(served)
    prompt = prompts(5, 1)[0]
    assert served.serve(prompt, []) == 0
    assert served.serve(prompt, []) > 0


@pytest.mark.parametrize("name", ["rank", "entered", "hit", "changed"])
def test_after_an_error_it_is_lru(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    given = prompts(3, 80)
    served, plain = tier.Tier(40, "LearnedCachePolicy"), tier.Tier(40, "lru")
    for prompt in given[:30]:
        served.serve(prompt, [])
        plain.serve(prompt, [])
    calls = []

    def broken(*given: object) -> None:
        calls.append(given)
        raise ZeroDivisionError

    monkeypatch.setattr(LearnedHitDensity, name, broken)
    with caplog.at_level(logging.WARNING, logger="vllm.hybrid"):
        for prompt in given[30:]:
            served.serve(prompt, [])
            check(served)
            plain.serve(prompt, [])
    assert isinstance(served.policy.failure, ZeroDivisionError)
    assert len(calls) == 1
    for policy in (served, plain):
        for prompt in given[:30]:
            policy.serve(prompt, [])
    assert [*served.policy.chunks] == [*plain.policy.chunks]


def test_it_is_asked_for_by_the_module_and_evicts_all_or_nothing() -> None:
    assert CachePolicyFactory.get_cache_policy_cls("LearnedCachePolicy", "hybrid.vllm.tier") is LearnedCachePolicy
    served = tier.Tier(20, "LearnedCachePolicy")
    for prompt in prompts(7, 12):
        served.serve(prompt, [])
    policy = served.policy
    chunks = dict(policy.chunks)
    assert policy.evict(len(chunks) - 1, {*[*chunks][:2]}) is None
    assert dict(policy.chunks) == chunks
    gone = policy.evict(len(chunks) - 2, {*[*chunks][:2]})
    assert gone is not None
    assert [*policy.chunks] == [*chunks][:2]
    assert dict(gone) == {key: chunks[key] for key in [*chunks][2:]}
    assert policy.evict(0, set()) == []
