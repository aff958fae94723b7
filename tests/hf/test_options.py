"""Options of `hybrid.hf.PrefixCache.generate`: those of transformers work as they do without the cache."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from hybrid import ArgumentError, PromptError
from hybrid.hf.prefix_cache import PrefixCache
from support.hf import VOCAB, assert_close, assert_nothing_held, assert_same, cache_on, greedy, ids, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5_text")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "tiny")


@pytest.mark.parametrize(
    "options",
    [
        {"past_key_values": None},
        {"use_cache": None},
        {"use_cache": True},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": None},
        {"generation_config": GenerationConfig(max_new_tokens=5, cache_implementation="dynamic")},
        {"logits_to_keep": 1},
        {"logits_to_keep": 0},
        {"max_time": 60.0},
        {"stop_strings": ["never to be seen"]},
    ],
    ids=str,
)
def test_an_option_that_changes_nothing_is_accepted(model: Any, tokenizer: Any, options: dict[str, Any]) -> None:
    if "stop_strings" in options:
        options = {**options, "tokenizer": tokenizer}
    cache = cache_on(model)
    expected = model.generate(ids(40), max_new_tokens=5, do_sample=False)
    limit = {} if "generation_config" in options else {"max_new_tokens": 5}
    for _ in range(2):
        assert torch.equal(cache.generate(ids(40), **limit, **options), expected)
    assert cache.explanations[0].usable_hit == 32
    assert_nothing_held(cache)


def test_a_stop_string_ends_the_answer(model: Any, tokenizer: Any) -> None:
    cache = cache_on(model)
    free = model.generate(ids(40), max_new_tokens=10, do_sample=False)
    stop = tokenizer.decode(free[0, 45:46])
    options = {"max_new_tokens": 10, "do_sample": False, "stop_strings": stop, "tokenizer": tokenizer}
    expected = model.generate(ids(40), **options)
    assert expected.shape[1] < 50
    assert torch.equal(cache.generate(ids(40), **options), expected)


def test_a_generation_config_may_be_the_second_argument(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    assert torch.equal(cache_on(model).generate(ids(40), config), model.generate(ids(40), config))


def test_a_time_limit_counts_the_prefill(model: Any) -> None:
    cache = cache_on(model)

    def be_slow(*_: object) -> None:
        time.sleep(0.1)

    hook = model.register_forward_pre_hook(be_slow)
    found = cache.generate(ids(70), max_new_tokens=20, min_new_tokens=20, do_sample=False, max_time=0.35)
    hook.remove()
    assert found.shape[1] - 70 <= 2  # four chunks take 0.4 s
    assert_nothing_held(cache)


def test_a_cache_made_in_inference_mode_works_outside_of_it_and_the_other_way_round(model: Any) -> None:
    with torch.inference_mode():
        cache = cache_on(model)
        first = cache.generate(ids(70), **greedy(30))
    turn = torch.cat([first.sequences, ids(30, 1)], 1)
    found = cache.generate(turn, **greedy(30))
    assert cache.explanations[0].usable_hit == 96
    with torch.inference_mode():
        assert_same(cache.generate(turn, **greedy(30)), found)
        with cache.session(turn) as past:
            past.fork()
            past.rewind(3)
    assert_close(found, model.generate(turn, **greedy(30)))
    assert_nothing_held(cache)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_accepts_a_good_model_whatever_its_weights(seed: int, dtype: torch.dtype) -> None:
    PrefixCache(tiny_model("qwen3_5_text", seed).to(dtype), "4MiB")


def test_a_device_that_there_is_not_is_refused(model: Any) -> None:
    with pytest.raises(ArgumentError, match="device must be such as 'cpu' or 'cuda:0'; got 'gpu'"):
        PrefixCache(model, device="gpu")


@pytest.mark.parametrize("deterministic", [True, False])
def test_ids_outside_the_vocabulary_and_what_are_no_ids_are_refused(model: Any, deterministic: bool) -> None:
    """Before the model sees them: on a GPU they would end the process."""
    cache = cache_on(model, deterministic=deterministic)
    cache.generate(ids(40), **greedy(3))
    before = cache.stats()
    for wrong in (-1, VOCAB, 2**40):
        prompt = torch.tensor([[5, wrong, 6]])
        for call in (cache.generate, cache.explain, cache.pin, cache.dump, lambda given: cache.keep(given[0])):
            with pytest.raises(PromptError, match=f"outside the vocabulary: ids go from 0 to {VOCAB - 1}"):
                call(prompt)
        with pytest.raises(PromptError, match="outside the vocabulary"), cache.session(prompt):
            pass
    with pytest.raises(PromptError, match="give tokenizer"):
        cache.generate("text")  # type: ignore[arg-type]
    for given in (None, 5, "text", [[1, 2]], [1.5], torch.ones(2, 2), torch.ones(3)):
        with pytest.raises(PromptError, match="token_ids must be a list of token ids"):
            cache.keep(given)  # type: ignore[arg-type]
    for namespace in (None, 5, b"x"):
        with pytest.raises(ArgumentError, match="namespace"):
            cache.generate(ids(40), namespace=namespace)  # type: ignore[arg-type]
    for name in ("eos_token_id", "pad_token_id"):
        for value in (2.5, "x", [[3]], {"a": 1}):
            with pytest.raises(ArgumentError, match=f"{name} must be a token id"):
                cache.generate(ids(40), **{name: value})
    assert cache.stats() == before
    assert_nothing_held(cache)
