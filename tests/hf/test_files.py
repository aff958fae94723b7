"""Prefixes that go from one `PrefixCache` to another, by file and in memory: hits are bitwise those of the first."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import ArgumentError, AuditError, CacheFileError, PromptError
from support.hf import GRID, assert_nothing_held, assert_same, cache_on, greedy, having, ids, tiny_model

KINDS = having("qwen3_5_text", "lfm3", "qwen4_exp_text", "kimi_linear", "zaya", "llama", "mistral")
"""Hybrids, with windows, with an index, with latent attention; without states; windows alone."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5_text")


def change(model: Any) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] += 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_cache_has_saved_is_a_hit_of_another(kind: str, tmp_path: Path) -> None:
    made = tiny_model(kind)
    first, second, prompt = cache_on(made, deterministic=True), cache_on(made, deterministic=True), ids(100)
    first.generate(prompt, **greedy())
    warm = first.generate(prompt, **greedy())
    saved = first.save(tmp_path / "a", prompt)
    loaded = second.load(tmp_path / "a")
    assert (loaded.checkpoints, loaded.pages) == (saved.checkpoints, saved.pages)
    assert saved.pages == 96
    assert_same(second.generate(prompt, **greedy()), warm)
    assert second.explanations[0].usable_hit == 96
    assert_nothing_held(second)


def test_another_model_and_one_that_has_changed_are_refused(model: Any) -> None:
    first = cache_on(model)
    first.generate(ids(50), **greedy())
    data = first.dump()
    with pytest.raises(CacheFileError, match="model is"):
        cache_on(tiny_model("qwen3_5_text", seed=1)).load(data)
    other = tiny_model("qwen3_5_text")
    cache = cache_on(other)
    assert cache.load(data).skipped == {}
    change(other)
    with pytest.raises(CacheFileError, match="model is"):
        cache.load(data)
    assert cache.explain(ids(50)).page_hit == 0


def test_a_model_that_has_changed_saves_what_it_computes_now() -> None:
    one, other = tiny_model("qwen3_5_text"), tiny_model("qwen3_5_text")
    cache = cache_on(one)
    cache.generate(ids(50), **greedy())
    change(one)
    change(other)
    with pytest.raises(PromptError, match="has no checkpoint in the cache"):
        cache.dump(ids(50))
    cache.generate(ids(50), namespace="tenant", **greedy())
    target = cache_on(other)
    target.load(cache.dump(namespace="tenant"))
    assert target.explain(ids(50), namespace="tenant").usable_hit == 48
    assert target.explain(ids(50)).usable_hit == 0


def test_a_missing_file_and_other_settings_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="there is no such file"):
        cache_on(model).load(tmp_path / "nothing")
    other = cache_on(model)
    other.generate(ids(50), **greedy())
    with pytest.raises(CacheFileError, match="chunk_size is 16 there and 32 here"):
        type(other)(model, "4MiB", chunk_size=32).load(other.dump())


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_flipped_bit_is_found_once_contents_are_verified(deterministic: bool) -> None:
    cache = cache_on(tiny_model("qwen3_5_text"), deterministic=deterministic)
    first, second = ids(4 * GRID + 3, 0), ids(4 * GRID + 3, 1)
    expected = cache.generate(first, **greedy(4))
    with pytest.raises(ArgumentError, match="verify_contents"):
        cache.audit(contents=True)
    cache.verify_contents()
    assert cache.stats().pages_cached == 0
    for _ in range(2):  # the second call is a hit
        assert_same(cache.generate(first, **greedy(4)), expected)
        cache.generate(second, **greedy(4))
    assert cache.explanations[0].usable_hit == 4 * GRID
    cache.audit(contents=True)
    node = next(node for _, node in cache.cache.tree.nodes() if node.slot is not None)
    for name, tensors, at in (
        ("page", cache.memory.tensors.tokens, node.pages[0]),
        ("checkpoint", cache.memory.tensors.state, node.slot),
    ):
        tensor = next(iter(tensors.values()))[at]
        kept = tensor.clone()
        tensor.view(-1).view(torch.int32)[0] ^= 1
        with pytest.raises(AuditError, match=rf"{name}.*was changed"):
            cache.audit(contents=True)
        tensor.copy_(kept)
    cache.audit(contents=True)
