"""`hybrid.hf` with host memory: what is evicted comes back, with the bits that it had."""

import gc
import weakref
from typing import Any

import pytest
import torch

from hybrid import ArgumentError, MemoryBudgetError
from hybrid.hf.prefix_cache import PrefixCache
from support.hf import assert_nothing_held, assert_same, cache_on, greedy, ids, tiny_model

SMALL = 60_000
"""Bytes for one of the prompts of these tests, and not for two."""


@pytest.fixture
def model() -> Any:
    return tiny_model("qwen3_5_text")


def fill(cache: PrefixCache, seeds: range) -> None:
    for seed in seeds:
        cache.generate(ids(120, seed), **greedy(2))


@pytest.mark.parametrize(
    ("name", "memory"),
    [("qwen3_5_text", SMALL), ("falcon_h1", 200_000), ("gemma3_text", 300_000), ("deepseek_v32", 250_000)],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_what_was_evicted_is_restored_from_host_memory(name: str, memory: int, deterministic: bool) -> None:
    model = tiny_model(name)
    cache = cache_on(model, memory, host="8MiB", deterministic=deterministic)
    first = cache.generate(ids(120), **greedy(2))
    fill(cache, range(1, 12))
    again = cache.generate(ids(120), **greedy(2))
    assert cache.stats().restored_tokens >= 96
    assert cache.explanations[0].usable_hit == 112
    assert "host memory" in str(cache.explanations[0])
    if deterministic:
        assert_same(again, first)
    assert torch.equal(again.sequences, model.generate(ids(120), **greedy(2)).sequences)
    assert_nothing_held(cache)


def test_without_host_memory_it_is_computed_again(model: Any) -> None:
    cache = cache_on(model, SMALL)
    cache.generate(ids(120), **greedy(2))
    fill(cache, range(1, 12))
    assert cache.explain(ids(120)).usable_hit < 112
    assert cache.stats().host_bytes_total == 0


def test_copies_of_former_weights_are_forgotten(model: Any) -> None:
    cache = cache_on(model, SMALL, host="8MiB")
    cache.generate(ids(120), **greedy(2))
    fill(cache, range(1, 12))
    assert cache.stats().host_checkpoints > 0
    model.load_state_dict(tiny_model("qwen3_5_text", seed=1).state_dict())
    found = cache.generate(ids(120), **greedy(2))
    assert cache.explanations[0].usable_hit == 0
    assert cache.stats().restored_tokens == 0
    assert_same(found, cache_on(model).generate(ids(120), **greedy(2)))
    model.bfloat16()
    cache.generate(ids(120), **greedy(2))
    assert cache.explanations[0].usable_hit == 0
    assert_nothing_held(cache)


def test_an_adapter_of_its_own_has_copies_of_its_own(model: Any) -> None:
    cache = cache_on(model, SMALL, host="8MiB")
    first = cache.generate(ids(120), **greedy(2))
    fill(cache, range(1, 12))
    model.set_attn_implementation("eager")
    cache.generate(ids(120), **greedy(2))
    assert cache.explanations[0].usable_hit == 0
    model.set_attn_implementation("sdpa")
    assert_same(cache.generate(ids(120), **greedy(2)), first)
    assert cache.explanations[0].usable_hit == 112


def test_the_memory_is_freed_with_the_cache(model: Any) -> None:
    cache = cache_on(model, SMALL, host="8MiB")
    fill(cache, range(4))
    memory = weakref.ref(cache.memory.tensors)
    gc.disable()
    try:
        del cache
        assert memory() is None
    finally:
        gc.enable()


def test_host_memory_that_cannot_be_is_refused(model: Any) -> None:
    with pytest.raises(ArgumentError, match="host"):
        cache_on(model, host="much")
    with pytest.raises(MemoryBudgetError, match="host"):
        cache_on(model, host="4000TiB")
