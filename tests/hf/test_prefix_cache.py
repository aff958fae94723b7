"""`hybrid.hf.PrefixCache`: what it keeps and gives back, and what it refuses."""

import copy
import importlib.util
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, TextStreamer
from transformers.models.qwen3_5 import modeling_qwen3_5

import hybrid
from hybrid import ArgumentError, MemoryBudgetError, PromptError, RequestError
from hybrid.hf.installed import as_argument
from hybrid.hf.prefix_cache import PrefixCache
from hybrid.models.torch_functions import TORCH_FUNCTIONS
from support.hf import (
    WITHOUT_ANSWERS,
    assert_close,
    assert_nothing_held,
    assert_same,
    cache_on,
    greedy,
    ids,
    tiny_model,
)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5_text")


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def sliding() -> Any:
    return tiny_model("mistral")


def cut_by_hand(model: Any, prompt: Any, cuts: list[int], **options: Any) -> Any:
    """transformers alone: the prompt computed in parts, and `generate` on top."""
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in zip([0, *cuts], cuts, strict=False):
            positions = torch.arange(start, end).unsqueeze(0)
            model(prompt[:, start:end], **as_argument(past), position_ids=positions, logits_to_keep=1)
    return model.generate(prompt, **as_argument(past), **options)


# Hits


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_hit_is_bitwise_transformers_run_cut_at_the_same_places(model: Any, deterministic: bool) -> None:
    cache = cache_on(model, deterministic=deterministic, placement=("prompt_end", "turn_end"))
    prompt = ids(100)
    cuts = list(range(16, 97, 16)) if deterministic else [96]
    by_hand = cut_by_hand(model, prompt, cuts, **greedy(6))
    assert_same(cache.generate(prompt, **greedy(6)), by_hand)
    assert_same(cache.generate(prompt, **greedy(6)), by_hand)
    assert cache.explanations[0].usable_hit == 96


def test_the_answer_is_kept_and_the_next_turn_begins_after_it(model: Any) -> None:
    cache = cache_on(model)
    first = cache.generate(ids(40), **greedy(30))
    cache.generate(torch.cat([first.sequences, ids(5)], 1), **greedy())
    assert cache.explanations[0].usable_hit == 64
    cache = cache_on(model, placement=WITHOUT_ANSWERS)
    other = cache.generate(ids(40, 1), **greedy(30))
    cache.generate(torch.cat([other.sequences, ids(5)], 1), **greedy())
    assert cache.explanations[0].usable_hit == 32


def test_a_branch_inside_a_prompt_is_hit(model: Any) -> None:
    cache = cache_on(model)
    shared = ids(50)
    for seed, hit in ((1, 0), (2, 48), (3, 48)):
        cache.generate(torch.cat([shared, ids(30, seed)], 1), **greedy())
        assert cache.explanations[0].usable_hit == hit


def test_every_hit_is_explained_and_counted(model: Any) -> None:
    cache = cache_on(model)
    prompt = ids(40)
    assert "empty" in cache.explain(prompt).reason
    cache.generate(prompt, **greedy())
    assert cache.explain(prompt).usable_hit == 32
    cache.generate(prompt, **greedy())
    assert str(cache.explanations[0]).startswith("32 of 40 tokens cached, pages up to 32")
    stats = cache.stats()
    assert (stats.requests, stats.prompt_tokens, stats.usable_tokens) == (2, 80, 32)


def test_namespaces_share_nothing(model: Any) -> None:
    cache = cache_on(model)
    cache.generate(ids(40), namespace="a", **greedy())
    cache.generate(ids(40), namespace="b", **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert cache.explain(ids(40), namespace="a").usable_hit == 32


def test_cleared_is_forgotten_but_for_pins(model: Any) -> None:
    cache = cache_on(model)
    for seed in (0, 1):
        cache.generate(ids(40, seed), **greedy())
    pin = cache.pin(ids(40))
    assert pin is not None
    cache.clear()
    assert [cache.explain(ids(40, seed)).usable_hit for seed in (0, 1)] == [32, 0]
    cache.unpin(pin)
    cache.clear()
    assert cache.explain(ids(40)).usable_hit == 0
    assert_nothing_held(cache)


# Memory


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", ["qwen3_5_text", "mistral"])
def test_too_little_memory_evicts_and_never_changes_results(name: str, deterministic: bool) -> None:
    model = tiny_model(name)
    small = cache_on(model, 40_000, deterministic=deterministic)
    large = cache_on(model, deterministic=deterministic, placement=WITHOUT_ANSWERS)
    for seed in (0, 1, 2, 1):
        prompt = torch.cat([ids(80), ids(60, seed)], 1) if seed % 2 else ids(130, seed)
        found = small.generate(prompt, **greedy())
        if deterministic:
            large.clear()
            assert_same(found, large.generate(prompt, **greedy()))
        else:
            assert_close(found, model.generate(prompt, **greedy()))
        assert_nothing_held(small)
    assert small.stats().evicted_pages > 0


def test_what_is_moved_to_make_room_stays_what_it_was(model: Any) -> None:
    """One budget: pages are moved together where a state needs a piece."""
    small, cold = cache_on(model, 40_000), cache_on(model, placement=WITHOUT_ANSWERS)
    for seed in (0, 1, 2, 3, 1, 0, 4, 5, 1, 3, 0):
        prompt = torch.cat([ids(80), ids(60, seed)], 1) if seed % 2 else ids(130, seed)
        cold.clear()
        assert_same(small.generate(prompt, **greedy(1)), cold.generate(prompt, **greedy(1)))
        assert_nothing_held(small)
    assert small.stats().moved_pages > 0
    assert small.stats().hit_rate > 0.3


def test_a_prompt_larger_than_the_memory_is_computed_all_the_same(model: Any) -> None:
    cache = cache_on(model, 30_000)
    found = cache.generate(ids(300), **greedy())
    assert_same(found, cut_by_hand(model, ids(300), list(range(16, 289, 16)), **greedy()))
    passes: list[int] = []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    cache.generate(ids(300), **greedy(30))
    hook.remove()
    assert len(passes) <= 18 + 1 + 29  # nor is it computed again for the answer
    assert_nothing_held(cache)


def test_memory_that_is_not_there_or_too_little_is_refused(model: Any) -> None:
    with pytest.raises(MemoryBudgetError, match="does not suffice"):
        cache_on(model, 1000)
    with pytest.raises(MemoryBudgetError, match="is free"):
        cache_on(model, "900TiB")


# Failures


@pytest.mark.parametrize("pass_number", [1, 2, 4])
def test_a_pass_that_fails_leaves_nothing_behind(model: Any, pass_number: int) -> None:
    cache = cache_on(model)
    cache.generate(ids(40), **greedy())
    passes = []

    def fail(*_: object) -> None:
        passes.append(1)
        if len(passes) == pass_number:
            raise RuntimeError("out of luck")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        cache.generate(torch.cat([ids(40), ids(40, 1)], 1), **greedy())
    hook.remove()
    assert_nothing_held(cache)
    cold = cache_on(model)
    prompt = torch.cat([ids(40), ids(40, 1)], 1)
    assert_same(cache.generate(prompt, **greedy()), cold.generate(prompt, **greedy()))


def test_an_exception_inside_a_session_keeps_nothing_and_leaks_nothing(model: Any) -> None:
    cache = cache_on(model)
    answers, pasts = [], []

    def work() -> None:
        with cache.session(ids(40)) as past:
            pasts.append(past)
            answers.append(model.generate(ids(40), **past.as_argument, max_new_tokens=40, min_new_tokens=40))
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert_nothing_held(cache)
    assert cache.explain(answers[0]).usable_hit == 32  # of the prompt, which was cached when the session began
    model.generate(torch.cat([answers[0], ids(5)], 1), **pasts[0].as_argument, max_new_tokens=1)
    assert pasts[0].known_rows() is None  # it is not followed any more


def test_a_model_in_training_mode_is_refused(model: Any) -> None:
    cache = cache_on(model)
    model.train()
    with pytest.raises(ArgumentError, match="eval"):
        cache.generate(ids(40))
    model.eval()


def test_threads_take_turns(model: Any) -> None:
    cache = cache_on(model)
    expected = [cache_on(model).generate(ids(60, seed), **greedy()) for seed in range(3)]
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        found[seed] = cache.generate(ids(60, seed), **greedy())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert_same(found[seed], expected[seed])
    assert_nothing_held(cache)


# Options of generate


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.7, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"generation_config": GenerationConfig(max_new_tokens=5, do_sample=False)},
        {"eos_token_id": list(range(3, 40))},
    ],
    ids=str,
)
def test_options_of_generate_work_as_they_do_without_the_cache(model: Any, options: dict[str, Any]) -> None:
    cache = cache_on(model)
    cache.generate(ids(60), **greedy())
    options = {"max_new_tokens": 5, **options} if "generation_config" not in options else options
    torch.manual_seed(0)
    expected = model.generate(ids(60), **options)
    torch.manual_seed(0)
    assert torch.equal(cache.generate(ids(60), **options), expected)
    assert cache.explanations[0].usable_hit == 48
    assert_nothing_held(cache)


def test_a_batch_with_beams_works_as_it_does_without_the_cache(model: Any) -> None:
    cache = cache_on(model)
    batch, mask = ids(50, rows=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :11] = 0
    options = {"attention_mask": mask, "num_beams": 2, "max_new_tokens": 5}
    expected = model.generate(batch, **options)
    for _ in range(2):
        assert torch.equal(cache.generate(batch, **options), expected)
    assert [explanation.usable_hit for explanation in cache.explanations] == [32, 48]


def test_a_streamer_sees_what_it_always_does(model: Any) -> None:
    seen: list[int] = []

    class Streamer(TextStreamer):
        def __init__(self) -> None:
            pass

        def put(self, value: torch.Tensor) -> None:
            seen.extend(value.flatten().tolist())

        def end(self) -> None:
            pass

    output = cache_on(model).generate(ids(40), max_new_tokens=4, do_sample=False, streamer=Streamer())
    assert seen == output[0].tolist()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"inputs_embeds": torch.zeros(1, 5, 32)}, "embeddings have none"),
        ({"past_key_values": DynamicCache()}, "the cache makes it"),
        ({"cache_implementation": "static"}, "dynamic cache"),
        ({"generation_config": GenerationConfig(cache_implementation="static")}, "dynamic cache"),
        ({"use_cache": False}, "leaves nothing to reuse"),
        ({"position_ids": torch.arange(40)[None]}, "positions are those of the tokens"),
        ({"prefill_chunk_size": 8}, "cuts the prefill itself"),
        ({"output_hidden_states": True}, "cached tokens are not computed"),
        ({"output_attentions": True}, "cached tokens are not computed"),
        ({"custom_generate": "somebody/something"}, "is unknown"),
        ({"pixel_values_videos": torch.zeros(1)}, "not part of what prefixes are matched by"),
        ({"max_new_token": 3}, "is not an option"),
        ({"input_ids": ids(3)}, "given twice"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_right_is_refused_with_the_reason(
    model: Any, options: dict[str, Any], reason: str
) -> None:
    cache = cache_on(model)
    with pytest.raises(ArgumentError, match=reason):
        cache.generate(ids(40), **options)
    assert cache.stats().requests == 0


def test_the_options_that_the_page_says_are_refused_are(model: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    table = text.split("These options are refused:")[1].split("**Images**")[0]
    names = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)\b", row)}
    assert {"inputs_embeds", "use_cache", "token_healing", "use_mtp"} <= names
    values: dict[str, Any] = {"use_cache": False, "past_key_values": DynamicCache(), "cache": DynamicCache()}
    values |= {"prefill_chunk_size": 8, "custom_generate": "some/thing", "assistant_early_exit": 1}
    cache = cache_on(model)
    for name in sorted(names):
        with pytest.raises(ArgumentError, match=name) as caught:
            cache.generate(ids(40), **{name: values.get(name, True)})
        assert "is not an option" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "mask", "reason"),
    [
        (ids(5)[0], None, "integer tensor"),
        (ids(5).float(), None, "integer tensor"),
        ([1, 2, 3], None, "integer tensor"),
        (ids(5)[:, :0], None, "no token"),
        (ids(5), torch.tensor([[1, 1, 1, 1, 0]]), "on the left"),
        (ids(5), torch.tensor([[1, 0, 1, 1, 1]]), "on the left"),
        (ids(5), torch.tensor([[0, 0, 0, 0, 0]]), "at least one token"),
        (ids(5), torch.ones(1, 4), "shape of input_ids"),
    ],
)
def test_what_is_no_prompt_is_refused(model: Any, prompt: Any, mask: Any, reason: str) -> None:
    cache = cache_on(model)
    with pytest.raises(PromptError, match=reason):
        cache.generate(prompt, attention_mask=mask)
    with pytest.raises(PromptError, match=reason), cache.session(prompt, mask):
        pass


def test_padding_without_a_mask_is_read_as_generate_reads_it(model: Any) -> None:
    cache = cache_on(model)
    batch = ids(40, rows=2)
    batch[0, :7] = 1
    options = {"pad_token_id": 1, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(cache.generate(batch, **options), model.generate(batch, **options))
    batch[1, 20] = 1
    with pytest.raises(PromptError, match="ones_like"):
        cache.generate(batch, **options)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32])
def test_short_prompts_work(model: Any, length: int) -> None:
    cache = cache_on(model)
    for _ in range(2):
        assert_close(cache.generate(ids(length), **greedy()), model.generate(ids(length), **greedy()))
    assert cache.explanations[0].usable_hit == (length - 1) // 16 * 16
    batch = torch.cat([ids(length), ids(length, 1)])
    assert_close(cache.generate(batch, **greedy()), model.generate(batch, **greedy()))


# Sessions


def test_a_session_gives_a_past_for_transformers_own_generate_and_keeps_the_answer(model: Any) -> None:
    cache = cache_on(model)
    for hit in (0, 32):
        with cache.session(ids(40)) as past:
            assert past.explanations[0].usable_hit == hit
            assert isinstance(past, DynamicCache)
            output = model.generate(ids(40), **past.as_argument, **greedy(30))
        assert_same(output, cut_by_hand(model, ids(40), [16, 32], **greedy(30)))
    assert cache.explain(torch.cat([output.sequences, ids(5)], 1)).usable_hit == 64
    assert_nothing_held(cache)


def test_a_session_follows_passes_by_hand(model: Any) -> None:
    cache = cache_on(model)
    with cache.session(ids(40)) as past, torch.no_grad():
        model(ids(40)[:, 32:], **past.as_argument)
        model(ids(30, 1), **past.as_argument)
        assert past.known_rows() == [[*ids(40)[0].tolist(), *ids(30, 1)[0].tolist()]]
    assert cache.explain(torch.cat([ids(40), ids(30, 1), ids(5)], 1)).usable_hit == 64


def test_what_came_as_embeddings_is_not_kept_and_not_taken_back(model: Any) -> None:
    cache = cache_on(model)
    with cache.session(ids(40)) as past:
        with torch.no_grad():
            model(inputs_embeds=model.get_input_embeddings()(ids(30, 1)), **past.as_argument)
        with pytest.raises(RequestError, match="does not know"):
            past.rewind(3)
    assert cache.stats().pages_cached == 32


def test_a_session_takes_a_batch_and_beams(model: Any) -> None:
    cache = cache_on(model)
    batch, mask = ids(50, rows=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :11] = 0
    expected = model.generate(batch, attention_mask=mask, num_beams=2, max_new_tokens=5)
    with cache.session(batch, mask) as past:
        past.batch_repeat_interleave(2)
        found = model.generate(batch, attention_mask=mask, **past.as_argument, num_beams=2, max_new_tokens=5)
    assert torch.equal(found, expected)
    assert_nothing_held(cache)


@pytest.mark.parametrize("kind", ["model", "llama", "sliding"])
def test_a_fork_goes_on_by_itself(kind: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    cache = cache_on(model)
    prompt = ids(40)
    with cache.session(prompt) as past:
        model.generate(prompt, **past.as_argument, **greedy(1))
        branches = [past, past.fork(), copy.deepcopy(past)]
        outputs = []
        for seed, branch in enumerate(branches):
            longer = torch.cat([prompt, ids(20, 10 + seed)], 1)
            outputs.append(model.generate(longer, **branch.as_argument, **greedy(10)))
    for seed, output in enumerate(outputs):
        longer = torch.cat([prompt, ids(20, 10 + seed)], 1)
        assert_same(output, cut_by_hand(model, longer, [16, 32, 40], **greedy(10)))
        assert cache.explain(torch.cat([output.sequences, ids(5)], 1)).usable_hit == 64
    assert_nothing_held(cache)


@pytest.mark.parametrize("kind", ["model", "llama", "sliding"])
def test_rewinding_is_as_if_it_had_never_been(kind: str, request: pytest.FixtureRequest) -> None:
    """The cases are those where transformers' own crop fails, or leaves the state as it was."""
    model = request.getfixturevalue(kind)
    cache = cache_on(model)
    prompt = ids(70)
    with cache.session(prompt) as past:
        output = model.generate(prompt, **past.as_argument, **greedy(12))
        past.rewind(31)
        kept = output.sequences[:, :50]
        assert past.known_rows() == kept.tolist()
        again = torch.cat([kept, ids(9, 1)], 1)
        found = model.generate(again, **past.as_argument, **greedy(6))
        past.crop(-4)
        assert past.get_seq_length() == 60
    by_hand = cut_by_hand(model, again, [16, 32, 48, 50], **greedy(6))
    if kind == "llama":  # what is left of a cut was computed with the prompt
        assert_close(found, by_hand)
    else:
        assert_same(found, by_hand)
    assert_nothing_held(cache)


def test_a_batch_is_rewound_row_by_row(model: Any) -> None:
    cache = cache_on(model)
    batch, mask = ids(50, rows=2), torch.ones(2, 50, dtype=torch.long)
    mask[0, :11] = 0
    with cache.session(batch, mask) as past:
        model.generate(batch, attention_mask=mask, **past.as_argument, **greedy(5))
        past.rewind(24)
        found = model.generate(batch[:, :40], attention_mask=mask[:, :40], **past.as_argument, **greedy(5))
    assert_close(found, model.generate(batch[:, :40], attention_mask=mask[:, :40], **greedy(5)))


@pytest.mark.parametrize("kind", ["model", "llama"])
def test_a_pass_that_does_not_go_on_where_the_past_ends_is_refused(kind: str, request: pytest.FixtureRequest) -> None:
    """transformers' assisted decoding computes the whole prompt, whatever the past holds."""
    model = request.getfixturevalue(kind)
    cache = cache_on(model)
    with cache.session(ids(40)) as past, torch.no_grad():
        with pytest.raises(RequestError, match="ends at position 32, but the pass begins at 0"):
            model(ids(40), **past.as_argument, position_ids=torch.arange(40)[None])
        if kind == "llama":  # transformers itself refuses it for models with states
            with pytest.raises(RequestError, match="assisted decoding"):
                model.generate(ids(40), **past.as_argument, prompt_lookup_num_tokens=3)
        assert_same(
            model.generate(ids(40), **past.as_argument, **greedy()), cut_by_hand(model, ids(40), [16, 32], **greedy())
        )


@pytest.mark.parametrize("count", [-1, 32, 100])
def test_rewinding_too_far_is_refused(model: Any, count: int) -> None:
    with cache_on(model).session(ids(40)) as past:
        with pytest.raises(ArgumentError, match="from 0 to 31"):
            past.rewind(count)
        past.rewind(0)
        assert past.get_seq_length() == 32


def test_a_past_that_moved_on_after_its_session_cannot_be_rewound(model: Any) -> None:
    with cache_on(model).session(ids(40)) as past:
        pass
    past.rewind(5)
    model.generate(ids(40), **past.as_argument, **greedy())
    with pytest.raises(RequestError, match="session"):
        past.rewind(5)


# The house


def test_the_package_imports_it_when_it_is_asked_for() -> None:
    """That `import hybrid` alone does not is a test of the house."""
    assert hybrid.hf is sys.modules["hybrid.hf"]
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = hybrid.no_such_thing


@pytest.fixture
def modeling(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modeling module of Qwen3.5 with the functions that transformers picks when it is imported: another test may
    have replaced them, for the whole process. Restored afterwards."""
    spec = modeling_qwen3_5.__spec__
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    for name in vars(fresh).keys() & set(TORCH_FUNCTIONS):
        monkeypatch.setattr(modeling_qwen3_5, name, getattr(fresh, name))
    return modeling_qwen3_5


def test_functions_picked_for_a_gpu_are_left_to_it(model: Any, modeling: Any) -> None:
    """With flash-linear-attention installed, transformers picks its kernels for every device."""
    PrefixCache(model, "4MiB")
    function = modeling.torch_chunk_gated_delta_rule
    PrefixCache(model, "4MiB")
    assert modeling.torch_chunk_gated_delta_rule is function  # wrapped once
    assert function.__module__ == modeling.__name__
    assert function.__globals__["__name__"] == "hybrid.models.torch_functions"
