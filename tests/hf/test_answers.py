"""`hybrid.hf`: how answers are kept, computed once more or as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hybrid.hf.installed import as_argument
from hybrid.hf.prefix_cache import PrefixCache
from support.hf import (
    SUPPORTED,
    assert_close,
    assert_nothing_held,
    assert_same,
    cache_on,
    greedy,
    having,
    ids,
    tiny_model,
)

WINDOWS = ("inkling_text", "inkling2_text", "lfm3", "lara_mini", "zaya", "mistral", "gemma3_text", "gpt_oss")
"""Model types with layers that keep a window."""


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5_text")


@contextmanager
def passes(model: Any) -> Iterator[list[int]]:
    """The lengths of the passes that the model computes meanwhile."""
    lengths: list[int] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        lengths.append(kwargs["input_ids"].shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield lengths
    finally:
        hook.remove()


def turn_after(output: Any, count: int = 5, seed: int = 1) -> Tensor:
    return torch.cat([output.sequences, ids(count, seed, rows=len(output.sequences))], 1)


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2_moe", "zamba2", "llama", "deepseek_v32"])
def test_with_chunks_of_one_token_a_turn_goes_on_where_the_last_one_was_computed_to(name: str) -> None:
    """After an answer of one token too; bitwise as transformers' own, with the same passes."""
    model = tiny_model(name)
    cache = PrefixCache(model, "4MiB", deterministic=False, placement=("prompt_end", "turn_end"))
    with passes(model) as lengths:
        first = cache.generate(ids(40), **greedy(1))
        turn = turn_after(first)
        hit = cache.generate(turn, **greedy(3))
    assert lengths == [39, 1, 6, 1, 1]
    assert cache.explanations[0].usable_hit == 40
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, end in [(0, 39), (39, 40)]:
            positions = torch.arange(start, end).unsqueeze(0)
            model(turn[:, start:end], **as_argument(past), position_ids=positions, logits_to_keep=1)
    assert_same(hit, model.generate(turn, **as_argument(past), **greedy(3)))
    cache.keep(hit.sequences[0].tolist())
    assert cache.explain(turn_after(hit)).usable_hit == hit.sequences.shape[1]
    assert_nothing_held(cache)


def test_with_chunks_of_one_token_drafts_are_made_and_accepted(model: Any) -> None:
    cache = PrefixCache(model, "4MiB", deterministic=False)
    first = cache.generate(ids(60), **greedy(24))
    again = cache.generate(ids(60), speculation="cache", **greedy(24))
    assert torch.equal(again.sequences, first.sequences)
    assert cache.speculation_stats()["continuation"].accepted_tokens >= 12
    assert cache.explain(turn_after(again)).usable_hit == 83
    assert_nothing_held(cache)


def test_a_prompt_too_short_for_a_pass_of_its_own_is_kept_with_its_answer(model: Any) -> None:
    cache = PrefixCache(model, "4MiB", deterministic=False)
    with passes(model) as lengths:
        first = cache.generate(ids(12), **greedy(3))
    assert lengths == [12, 1, 1]
    assert cache.explain(turn_after(first)).usable_hit == 14


@pytest.mark.parametrize("name", SUPPORTED)
def test_without_determinism_an_answer_is_kept_as_it_was_computed(name: str) -> None:
    """The next turn is bitwise transformers' own, with the same passes."""
    model = tiny_model(name)
    cache = cache_on(model, deterministic=False, placement=("prompt_end", "turn_end"))
    with passes(model) as lengths:
        first = cache.generate(ids(40), **greedy(30))
    turn = turn_after(first)
    if name in WINDOWS:  # what a window has lost is computed again
        assert sum(lengths) == 40 + 29 + 32
        cache.generate(turn, **greedy())
    else:
        assert sum(lengths) == 40 + 29
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            for start, end in [(0, 32), (32, 40), *((at, at + 1) for at in range(40, 64))]:
                positions = torch.arange(start, end).unsqueeze(0)
                model(turn[:, start:end], **as_argument(past), position_ids=positions, logits_to_keep=1)
        assert_same(cache.generate(turn, **greedy()), model.generate(turn, **as_argument(past), **greedy()))
    assert cache.explanations[0].usable_hit == 64
    assert_nothing_held(cache)


def test_an_answer_whose_last_token_would_fill_a_chunk_costs_no_chunk(model: Any) -> None:
    """transformers does not compute that token."""
    cache = cache_on(model, deterministic=False)
    with passes(model) as lengths:
        first = cache.generate(ids(40), **greedy(24))
    assert sum(lengths) == 40 + 23
    assert cache.explain(turn_after(first)).usable_hit == 48


@pytest.mark.parametrize(
    "name", having("qwen3_5_text", "falcon_h1", "lfm3", "gemma3_text", "gpt_oss", "zamba2", "deepseek_v32")
)
def test_a_last_pass_that_is_a_whole_chunk_is_kept_as_it_is(name: str) -> None:
    model = tiny_model(name)
    cache, cold = cache_on(model), cache_on(model)
    with passes(model) as lengths:
        first = cache.generate(ids(48), **greedy(10))
    assert lengths == [16, 16, 16, *[1] * 9, *([16] if name in WINDOWS else [])]
    turn = turn_after(first)
    assert_same(cache.generate(turn, **greedy()), cold.generate(turn, **greedy()))
    assert cache.explanations[0].usable_hit == 48
    assert_nothing_held(cache)


def test_what_follows_another_pass_than_a_whole_chunk_is_computed_again(model: Any) -> None:
    """A chunk of its own length is none where what is before it was decoded."""
    cache, cold = cache_on(model), cache_on(model)
    prompt = ids(40)
    with cache.session(prompt) as past:
        first = model.generate(prompt, **as_argument(past), **greedy(9))
        longer = torch.cat([first.sequences[:, :48], ids(16, 1)], 1)
        with torch.no_grad():
            model(longer[:, 48:], **as_argument(past))
        assert past.known_rows() == longer.tolist()
    turn = torch.cat([longer, ids(5, 2)], 1)
    assert_same(cache.generate(turn, **greedy()), cold.generate(turn, **greedy()))
    assert cache.explanations[0].usable_hit == 64


def test_each_answer_of_a_batch_is_kept_until_its_end(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    batch, mask = ids(50, rows=3), torch.ones(3, 50, dtype=torch.long)
    mask[0, :21] = mask[2, :3] = 0
    free = model.generate(batch, attention_mask=mask, **greedy(40))
    end = int(free.sequences[1, 60])  # the second sequence ends in the middle
    assert end not in free.sequences[1, 50:60]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": end, "pad_token_id": 2}
    with passes(model) as lengths:
        sequences = cache.generate(batch, attention_mask=mask, **options)
    expected = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(sequences, expected)
    num_steps = sequences.shape[1] - 50
    assert sum(lengths) - (28 + 49 + 46) - num_steps in (0, 16)  # of the second: it went on as padding
    for row, pad in ((0, 21), (1, 0), (2, 3)):
        ends = (sequences[row, 50:] == end).nonzero()
        length = 50 + int(ends[0]) + 1 if len(ends) else 90
        kept = torch.cat([sequences[row : row + 1, pad:length], ids(5)], 1)
        hit = cache.generate(kept, **greedy())
        assert cache.explanations[0].usable_hit >= (length - pad - 1) // 16 * 16
        assert_close(hit, model.generate(kept, **greedy()))
    assert_nothing_held(cache)


def test_the_best_of_several_beams_is_kept(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    options = {"num_beams": 3, "max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}
    found = cache.generate(ids(40), **options)
    assert torch.equal(found, model.generate(ids(40), **options))
    turn = torch.cat([found, ids(5)], 1)
    hit = cache.generate(turn, **greedy())
    assert cache.explanations[0].usable_hit == 64
    assert_close(hit, model.generate(turn, **greedy()))
    assert_nothing_held(cache)


def test_what_was_taken_back_is_not_kept(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    with cache.session(ids(40)) as past:
        first = model.generate(ids(40), **as_argument(past), **greedy(30))
        past.rewind(20)
        again = torch.cat([first.sequences[:, :49], ids(30, 1)], 1)
        second = model.generate(again, **as_argument(past), **greedy(4))
    assert_close(second, model.generate(again, **greedy(4)))
    turn = turn_after(second)
    hit = cache.generate(turn, **greedy())
    assert cache.explanations[0].usable_hit == 80
    assert_close(hit, model.generate(turn, **greedy()))
    assert_nothing_held(cache)


@pytest.mark.parametrize("deterministic", [True, False])
def test_where_turns_are_not_to_be_kept_none_is(model: Any, deterministic: bool) -> None:
    cache = cache_on(model, deterministic=deterministic, placement=("prompt_end",))
    with passes(model) as lengths:
        first = cache.generate(ids(40), **greedy(30))
    assert lengths[-29:] == [1] * 29
    assert cache.explain(turn_after(first)).usable_hit == 32


def test_memory_that_cannot_be_had_keeps_no_answer_and_changes_none(model: Any) -> None:
    small = cache_on(model, 40_000, deterministic=False)
    for seed in range(4):
        prompt = ids(60, seed)
        assert_close(small.generate(prompt, **greedy(40)), model.generate(prompt, **greedy(40)))
        assert_nothing_held(small)


# Short turns


def test_a_short_turn_is_one_pass_and_cached_with_its_answer(model: Any) -> None:
    """Without determinism; up to its last boundary it would be a pass of its own."""
    cache = cache_on(model, deterministic=False)
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    output = cache.generate(ids(70), **greedy(20))
    assert lengths[:2] == [64, 6]
    for seed, hit in ((1, 80), (2, 144), (3, 208)):  # of 90, 154, 218 tokens
        turn = torch.cat([output.sequences, ids(44, seed)], 1)
        lengths.clear()
        output = cache.generate(turn, **greedy(20))
        assert cache.explanations[0].usable_hit == hit
        assert lengths[:2] == [turn.shape[1] - hit, 1]
        assert lengths[20:] == []  # nothing is computed again
        assert_close(output, model.generate(turn, **greedy(20)))
        lengths.clear()
        assert_nothing_held(cache)
    hook.remove()


def test_a_short_turn_with_an_answer_that_reaches_no_boundary_is_cached_too(model: Any) -> None:
    for options in ({"max_new_tokens": 3}, {"max_new_tokens": 60, "eos_token_id": list(range(3, 128))}):
        cache = cache_on(model, deterministic=False)
        first = cache.generate(ids(64), max_new_tokens=16, min_new_tokens=16, do_sample=False)
        turn = torch.cat([first, ids(44, 1)], 1)
        second = cache.generate(turn, **options, do_sample=False)
        assert second.shape[1] < 128
        assert cache.explain(torch.cat([turn, ids(9, 2)], 1)).usable_hit == 112
        assert_nothing_held(cache)


def test_a_long_turn_and_a_new_prompt_are_cached_up_to_their_last_boundary_at_once(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    with cache.session(ids(70)):
        assert cache.explain(ids(70)).usable_hit == 64
    turn = torch.cat([ids(70), ids(200, 1)], 1)
    with cache.session(turn):
        assert cache.explain(turn).usable_hit == 256


def test_a_chunk_that_several_beams_computed_together_is_computed_again_alone() -> None:
    """The bits of a token may depend on all rows of its pass, in mixtures of experts above all."""
    model = tiny_model("granitemoehybrid")
    shapes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    cache, prompt = cache_on(model), ids(32)
    shapes.clear()
    cache.generate(prompt, max_new_tokens=2, num_beams=3)
    hook.remove()
    assert shapes == [(1, 16), (3, 16), (3, 1), (1, 16)]
    turn = torch.cat([prompt, ids(30, 1)], 1)
    hit = cache.generate(turn, **greedy())
    assert cache.explanations[0].usable_hit == 32
    assert_same(hit, cache_on(model).generate(turn, **greedy()))
    assert_nothing_held(cache)
