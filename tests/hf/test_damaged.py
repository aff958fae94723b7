"""`hybrid.hf.PrefixCache` when what is cached went bad: it is dropped, and the call computed once without it."""

from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from hybrid import NonFiniteError
from hybrid.hf.prefix_cache import PrefixCache
from support.hf import GRID, assert_close, assert_nothing_held, assert_same, cache_on, greedy, having, ids, tiny_model


@pytest.fixture(scope="module", params=having("qwen3_5_text"))
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


class Stream(BaseStreamer):
    """What was streamed."""

    def __init__(self) -> None:
        self.put_tokens: list[int] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_tokens += value.flatten().tolist()

    def end(self) -> None:
        self.num_ends += 1


def spoil(cache: PrefixCache, prompt: torch.Tensor, what: str, at: int = 1) -> None:
    """A number of what is cached of a prompt goes bad."""
    row = prompt[0].tolist()
    keys = [node for _, node in cache.cache.tree.nodes()]
    if what == "page":
        leaf = max(keys, key=lambda node: node.end)
        page = cache.cache.tree.pages(leaf, len(row) // GRID * GRID)[at]
        next(iter(cache.memory.tensors.tokens.values()))[page].view(-1)[3] = torch.nan
    else:
        deepest = max((node for node in keys if node.slot is not None), key=lambda node: node.end)
        next(iter(cache.memory.tensors.state.values()))[deepest.slot].view(-1)[3] = torch.nan


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("what", ["page", "state"])
@pytest.mark.parametrize("rest", [5, 150], ids=["in generate", "in a prefill"])
def test_a_hit_that_gives_nan_is_computed_once_without_it(
    model: Any, what: str, rest: int, deterministic: bool
) -> None:
    cache = cache_on(model, deterministic=deterministic)
    prompt = torch.cat([ids(5 * GRID), ids(rest, seed=1)], 1)
    expected = cache_on(model, deterministic=deterministic).generate(prompt, **greedy(16))
    cache.generate(ids(5 * GRID), **greedy(2))
    spoil(cache, ids(5 * GRID), what)
    stream = Stream()
    found = cache.generate(prompt, streamer=stream, **greedy(16))
    (assert_same if deterministic else assert_close)(found, expected)
    assert stream.put_tokens == found.sequences[0].tolist() and stream.num_ends == 1
    (explanation,) = cache.explanations
    assert explanation.usable_hit == 0 and "is left out" in explanation.reason
    assert cache.stats().dropped_hits == 1
    assert_nothing_held(cache)
    for _ in range(2):
        (assert_same if deterministic else assert_close)(cache.generate(prompt, **greedy(16)), expected)
    assert cache.explanations[0].usable_hit >= 4 * GRID, "its own is shared again"
    assert_nothing_held(cache)


def test_prompts_of_a_batch_are_computed_without_their_hits(model: Any) -> None:
    cache, batch = cache_on(model), ids(5 * GRID + 3, rows=3)
    expected = cache_on(model).generate(batch, **greedy())
    cache.generate(batch, **greedy())
    spoil(cache, batch, "state")
    for _ in range(2):
        assert_same(cache.generate(batch, **greedy()), expected)
    assert cache.stats().dropped_hits >= 1
    assert_nothing_held(cache)


def test_a_session_with_nan_raises_and_the_next_one_does_not(model: Any) -> None:
    cache, prompt = cache_on(model, deterministic=False), ids(5 * GRID + 5)
    cache.generate(prompt, **greedy(2))
    spoil(cache, prompt, "page")
    with pytest.raises(NonFiniteError), cache.session(prompt) as past:
        model.generate(prompt, **past.as_argument, **greedy())
    with cache.session(prompt) as past:
        model.generate(prompt, **past.as_argument, **greedy())
    assert_nothing_held(cache)


def test_sampled_tokens_are_those_of_the_seed(model: Any) -> None:
    cache, prompt = cache_on(model), ids(5 * GRID + 5)
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
    cache.generate(prompt, max_new_tokens=2, do_sample=False)
    torch.manual_seed(7)
    expected = cache.generate(prompt, **options)
    spoil(cache, prompt, "page")
    torch.manual_seed(7)
    assert torch.equal(cache.generate(prompt, **options), expected)
