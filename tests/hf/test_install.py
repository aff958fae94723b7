"""`hybrid.hf.PrefixCache` installed in a model, given its own pasts back, and freed."""

import copy
import gc
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, pipeline

from hybrid import ArgumentError, RequestError
from hybrid.hf.installed import as_argument
from hybrid.hf.prefix_cache import PrefixCache
from hybrid.models.torch_functions import use_torch_functions
from support.hf import assert_close, assert_nothing_held, assert_same, cache_on, greedy, ids, tiny_model

TINY = Path(__file__).parents[2] / "models" / "tiny"


@pytest.fixture
def model() -> Any:
    model = tiny_model("qwen3_5_text")
    use_torch_functions(model)
    return model


# Installed


def test_an_installed_cache_is_used_by_the_models_own_generate(model: Any) -> None:
    expected = model.generate(ids(70), **greedy())
    cache = cache_on(model)
    cache.install()
    for _ in range(2):
        assert_close(model.generate(ids(70), **greedy()), expected)
    assert cache.explanations[0].usable_hit == 64
    with pytest.raises(RequestError, match="replaced already"):
        cache_on(model).install()
    cache.uninstall()
    assert_same(model.generate(ids(70), **greedy()), expected)
    assert cache.stats().requests == 2
    cache.uninstall()
    assert_nothing_held(cache)


def test_a_compiled_model_can_have_a_cache_installed(model: Any) -> None:
    compiled = torch.compile(model, backend="eager")
    cache = cache_on(compiled)
    cache.install()
    first = compiled.generate(ids(70), **greedy())
    assert_same(compiled.generate(ids(70), **greedy()), first)
    assert cache.explanations[0].usable_hit == 64
    cache.uninstall()
    compiled.generate(ids(70), **greedy())
    assert cache.stats().requests == 2


def test_calls_that_cannot_use_an_installed_cache_run_without_it(model: Any) -> None:
    cache = cache_on(model)
    embeddings = model.get_input_embeddings()(ids(40)).detach()
    expected = model.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False)
    hidden = {**greedy(), "output_hidden_states": True}
    expected_hidden = model.generate(ids(40), **hidden)
    cache.install()
    assert torch.equal(model.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False), expected)
    assert_same(model.generate(ids(40), **hidden), expected_hidden)
    own = DynamicCache(config=model.config)
    assert_same(model.generate(ids(40), **as_argument(own), **greedy()), expected_hidden)
    assert own.get_seq_length() == 43
    assert cache.stats().requests == 0


def test_a_copy_of_the_model_does_not_use_the_installed_cache(model: Any) -> None:
    cache = cache_on(model)
    cache.install()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(-1)
    output = other.generate(ids(40), **greedy())
    assert cache.stats().requests == 0
    cache.uninstall()
    assert not torch.equal(output.sequences, model.generate(ids(40), **greedy()).sequences)


def test_a_pipeline_uses_the_installed_cache() -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    model.eval()
    use_torch_functions(model)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompt = "A list is a mutable sequence. " * 8
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = pipe(prompt, **options)
    cache = PrefixCache(model, "16MiB", chunk_size=16)
    cache.install()
    for _ in range(2):
        assert pipe(prompt, **options) == expected
    assert cache.explanations[0].usable_hit >= 64
    assert_nothing_held(cache)


# A past that is given back


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_past_that_generate_returns_can_be_given_back(model: Any, deterministic: bool) -> None:
    cache = cache_on(model, deterministic=deterministic)
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = cache.generate(ids(70), **greedy(20))
    for seed in (1, 2):
        turn = torch.cat([output.sequences, ids(9, seed)], 1)
        lengths.clear()
        output = cache.generate(turn, past_key_values=output.past_key_values, **greedy(20))
        assert lengths[:20] == [10, *[1] * 19]  # the last token generated, and the turn
        assert cache.explanations[0].usable_hit == turn.shape[1] - 10
        assert_close(output, model.generate(turn, **greedy(20)))
        assert_nothing_held(cache)
    hook.remove()
    turn = torch.cat([output.sequences, ids(9, 3)], 1)
    assert_close(cache.generate(turn, **greedy()), model.generate(turn, **greedy()))
    assert cache.explanations[0].usable_hit == 144  # the turns were cached too


def test_a_past_that_holds_other_tokens_is_refused(model: Any) -> None:
    cache = cache_on(model)
    output = cache.generate(ids(70), **greedy())
    past = output.past_key_values
    for prompt in (ids(90, 1), output.sequences[:, :60], torch.cat([output.sequences, output.sequences])):
        with pytest.raises(ArgumentError, match="do not begin"):
            cache.generate(prompt, past_key_values=past, **greedy())
    turn = torch.cat([output.sequences, ids(9, 1)], 1)
    with pytest.raises(ArgumentError, match="another cache"):
        cache_on(model).generate(turn, **past.as_argument, **greedy())
    with pytest.raises(ArgumentError, match="namespace"):
        cache.generate(turn, past_key_values=past, namespace="other", **greedy())
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(ArgumentError, match="has changed"):
        cache.generate(turn, past_key_values=past, **greedy())


# Freed


def test_a_deleted_cache_is_freed_at_once(model: Any) -> None:
    """Without a run of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        cache = cache_on(model)
        output = cache.generate(ids(70), **greedy(20))
        with cache.session(output.sequences) as past:
            past.fork()
            model.generate(output.sequences, **past.as_argument, **greedy())
        cache.install()
        cache.uninstall()
        memory = weakref.ref(cache.memory)
        del cache, output, past
        assert memory() is None
    finally:
        gc.enable()


def test_a_call_that_is_left_alone_says_why(model: Any) -> None:
    cache = cache_on(model)
    cache.install()
    for option, words in (
        ({"use_cache": False}, "use_cache=False"),
        ({"output_attentions": True}, "output_attentions"),
    ):
        with pytest.warns(RuntimeWarning, match=f"runs without the cache.*{words}"):
            model.generate(ids(20), **greedy(), **option)
        assert words in cache.explanations[0].reason and cache.explanations[0].asked == 20
        with warnings.catch_warnings(action="error", category=RuntimeWarning):
            model.generate(ids(20), **greedy(), **option)  # each reason is warned of once
    cache.uninstall()


def test_a_cache_that_only_the_configuration_names_is_ignored_as_by_transformers(model: Any) -> None:
    expected = model.generate(ids(70), **greedy())
    model.generation_config.cache_implementation = "hybrid"
    cache = cache_on(model)
    assert_close(cache.generate(ids(70), **greedy()), expected)
    cache.install()
    assert_close(model.generate(ids(70), **greedy()), expected)
    assert cache.explanations[0].usable_hit == 64
    cache.uninstall()
    assert model.generation_config.cache_implementation == "hybrid"
