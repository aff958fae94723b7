"""Deterministic mode cuts every sequence where turns end: a turn computes itself alone, with the bits of a cold run."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid import ArgumentError
from hybrid.hf import keys as module
from hybrid.hf.keys import MIN_TAIL, Segments
from hybrid.hf.prefix_cache import PrefixCache
from hybrid.key import TOKEN_BYTES, common_prefix
from support.hf import (
    WITHOUT_ANSWERS,
    assert_nothing_held,
    assert_same,
    cache_on,
    greedy,
    ids,
    image_prompt,
    tiny_model,
    vision_model,
)

END = 2
"""Ends a turn: the tiny models' end of a sequence."""

CUT = Segments(16, frozenset({END}))


def turn(count: int, seed: int = 0) -> Tensor:
    """`count` tokens, the last of which ends a turn."""
    return torch.cat([ids(count - 1, seed), torch.tensor([[END]])], 1)


def join(*parts: Tensor) -> Tensor:
    return torch.cat(parts, 1)


def answered(cache: PrefixCache, prompt: Tensor, count: int, **options: Any) -> Any:
    """A call whose answer has `count` tokens and ends its turn."""
    return cache.generate(prompt, **{**greedy(count), "min_new_tokens": None, **options}, forced_eos_token_id=END)


def passes(model: Any) -> Iterator[list[int]]:
    counts: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        counts.append((*args, kwargs.get("input_ids"))[0].shape[1])

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield counts
    handle.remove()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5_text")


@pytest.fixture
def computed(model: Any) -> Iterator[list[int]]:
    """Tokens of each pass of the model."""
    yield from passes(model)


# Where sequences are cut


@pytest.mark.parametrize("seed", range(20))
def test_what_two_sequences_share_in_their_keys_is_the_segments_that_they_share(seed: int) -> None:
    rng = random.Random(seed)
    one = [rng.choice([END, *range(3, 20)]) for _ in range(rng.randint(1, 200))]
    at = rng.randint(0, len(one))
    other = one[:at] + [rng.choice([END, *range(3, 20)]) for _ in range(rng.randint(1, 60))]
    cuts, key, key_of_other = CUT.cuts(one), CUT.key(one, "", None), CUT.key(other, "", None)
    assert all(8 <= end - start <= 16 for start, end in zip([0, *cuts], cuts, strict=False))
    assert CUT.cuts(one[:at]) == [cut for cut in cuts if cut <= at]
    alike = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    common = max(cut for cut in {0, *cuts} & {0, *CUT.cuts(other)} if cut <= alike)
    are_open = common == max([0, *cuts]) == max([0, *CUT.cuts(other)])  # no segment has ended after it
    found = common_prefix(key.ids, key_of_other.ids, 0, 0, TOKEN_BYTES, len(key.ids)) // TOKEN_BYTES
    assert found == (alike if are_open else common)
    for cut in cuts:
        assert CUT.key(one[:cut], "", None).ids == key.ids[: cut * TOKEN_BYTES]
        assert key.whole(cut, 1) == cut
        assert key.whole(cut - 1, 1) == ([0, *cuts])[cuts.index(cut)]


def test_turns_that_end_soon_after_a_cut_are_not_cut() -> None:
    cuts = CUT.cuts(join(turn(7), turn(5, 1), turn(20, 2), turn(3, 3), turn(9, 4))[0].tolist())
    assert cuts == [12, 28, 44]  # 7: too soon; 12; 28: a whole chunk; 32, 35: too soon; 44: a whole chunk


@pytest.mark.parametrize(("rest", "end"), [(1, 16), (MIN_TAIL - 1, 16), (MIN_TAIL, 28)])
def test_a_prompt_that_ends_soon_after_a_turn_is_computed_together_with_it(rest: int, end: int) -> None:
    prompt = join(turn(28), ids(rest))[0].tolist()
    assert CUT.prompt_end(prompt, CUT.key(prompt, "", None)) == end


@pytest.mark.parametrize("size", [0, 4, 7, 8192, 16.0])
def test_chunks_of_other_sizes_are_refused(model: Any, size: Any) -> None:
    with pytest.raises(ArgumentError, match=r"chunk_size .* must be an integer from 8 to 4096; got"):
        PrefixCache(model, "4MiB", chunk_size=size)


# Chats

KINDS = ("qwen3_5_text", "qwen3_next", "gemma3_text", "gpt_oss", "llama", "falcon_h1", "zaya")
"""Hybrids, dense and with experts; windows, with experts too; attention alone; both in one layer."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_next_turn_begins_where_the_answer_ended_with_the_bits_of_a_cold_run(kind: str) -> None:
    model = tiny_model(kind)
    cache, rng = cache_on(model), random.Random(0)
    chat, end = turn(30), 0
    for number in range(4):
        prompt = join(chat, ids(3, number))
        found = answered(cache, prompt, 13)
        assert_same(found, answered(cache_on(model, placement=WITHOUT_ANSWERS), prompt, 13))
        assert cache.explanations[0].usable_hit == end
        end = CUT.cuts(found.sequences[0].tolist())[-1]
        assert found.sequences.shape[1] - end < 8
        chat = join(found.sequences, turn(rng.randint(16, 40), 10 + number))
    assert_nothing_held(cache)


def test_a_short_turn_is_one_pass_over_its_own_tokens(model: Any, computed: list[int]) -> None:
    cache = PrefixCache(model, "4MiB")
    chat = answered(cache, join(turn(300), ids(4)), 40).sequences
    computed.clear()
    cache.generate(join(chat, turn(60, 1), ids(4, 2)), max_new_tokens=1)
    assert computed[0] == 64
    assert str(cache.explanations[0]).endswith("all but the last 64 tokens, which every run computes")


def test_turns_are_shared_across_chats_as_whole_segments(model: Any) -> None:
    """The system prompt of several chats, and a document that two of them go on with differently."""
    cache, system, document = cache_on(model), turn(27), turn(90, 1)
    for seed, hit in ((2, 0), (3, 27), (4, 27)):
        prompt = join(system, ids(40, seed))
        found = cache.generate(prompt, **greedy())
        assert cache.explanations[0].usable_hit == hit
        assert_same(found, cache_on(model, placement=WITHOUT_ANSWERS).generate(prompt, **greedy()))
    for seed, hit in ((5, 27), (6, 117)):
        prompt = join(system, document, ids(40, seed))
        found = cache.generate(prompt, **greedy())
        assert cache.explanations[0].usable_hit == hit
        assert_same(found, cache_on(model, placement=WITHOUT_ANSWERS).generate(prompt, **greedy()))


def test_the_tree_is_drawn_with_the_text_that_its_ids_hold(model: Any) -> None:
    cache, prompt = cache_on(model), join(turn(40), ids(30))
    cache.generate(prompt, **greedy())
    drawn = cache.cache.draw(decode=lambda tokens: " ".join(map(str, map(chr, tokens))))
    assert chr(int(prompt[0, 8])) in drawn


def test_batches_sessions_and_forks_are_cut_alike(model: Any) -> None:
    cache, first, second = cache_on(model), join(turn(40), ids(20)), join(turn(21), ids(39, 1))
    cold = cache_on(model, placement=WITHOUT_ANSWERS)
    both = torch.cat([first, second])
    for _ in range(2):
        assert_same(cache.generate(both, **greedy()), cold.generate(both, **greedy()))
        cold.clear()
    assert [one.usable_hit for one in cache.explanations] == [56, 48]
    with cache.session(first) as past:
        out = model.generate(first, **past.as_argument, max_new_tokens=9, forced_eos_token_id=END)
        branch = past.fork()
        model.generate(join(out, ids(9, 3)), **branch.as_argument, max_new_tokens=9, forced_eos_token_id=END)
    assert cache.explain(join(out, ids(MIN_TAIL))).usable_hit == out.shape[1]
    assert_nothing_held(cache)


def test_a_pass_of_a_session_over_a_segment_is_kept_as_it_was_computed(model: Any, computed: list[int]) -> None:
    cache, prompt = cache_on(model), join(turn(28), ids(MIN_TAIL))
    with cache.session(prompt) as past:
        computed.clear()
        model(prompt[:, 28:], **past.as_argument)
    assert computed == [MIN_TAIL]
    assert cache.explain(join(prompt, ids(1))).usable_hit == 28 + MIN_TAIL


def test_images_are_units_with_the_segments_around_them() -> None:
    model = vision_model()
    cache, cold = cache_on(model), cache_on(model, placement=WITHOUT_ANSWERS)
    prompts = [image_prompt(20, (2, 2, image), 30) for image in (1, 2, 1, 2)]
    for prompt, hit in zip(prompts, (0, 16, 48, 48), strict=True):
        found = cache.generate(**prompt, **greedy())
        assert cache.explanations[0].usable_hit == hit
        cold.clear()
        assert_same(found, cold.generate(**prompt, **greedy()))
    assert_nothing_held(cache)


def test_segments_whose_keys_begin_alike_share_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 2**31 pairs does: here all of them."""
    hash_ids = module.hash_ids
    monkeypatch.setattr(module, "hash_ids", lambda content, count: b"\1\0\0\x80" + hash_ids(content, count)[4:])
    cache = cache_on(model)
    for seed in (1, 2, 1, 2):
        prompt = join(ids(30, seed), turn(20, seed))
        found = answered(cache, prompt, 13)
        assert_same(found, answered(cache_on(model, placement=WITHOUT_ANSWERS), prompt, 13))
        assert_nothing_held(cache)
    assert cache.explain(join(ids(30, 1), ids(20))).usable_hit == 16
    assert cache.explain(join(ids(30, 2), ids(20))).page_hit == 0


def test_what_was_cut_otherwise_is_not_used(model: Any, tmp_path: Any) -> None:
    """Two caches that know other ends of turns share what both cut alike."""
    other = tiny_model("qwen3_5_text")
    other.generation_config.eos_token_id = [5, 7]
    cache, target = cache_on(model), cache_on(other)
    prompt = join(ids(32), turn(20, 1), ids(40, 2))
    cache.generate(prompt, **greedy())
    target.load(cache.dump())
    options = {**greedy(), "attention_mask": torch.ones_like(prompt)}
    found = target.generate(prompt, **options)
    assert_same(found, cache_on(other, placement=WITHOUT_ANSWERS).generate(prompt, **options))
    assert 0 < target.explanations[0].usable_hit <= 48  # as far as neither knows an end of a turn


# Without determinism


def test_the_token_that_ends_a_turn_is_computed_with_it(model: Any, computed: list[int]) -> None:
    cache = PrefixCache(model, "4MiB", deterministic=False)
    chat = answered(cache, ids(100), 10).sequences
    computed.clear()
    cache.generate(join(chat, ids(20, 1)), max_new_tokens=1)
    assert computed[0] == 20
    assert cache.explanations[0].usable_hit == chat.shape[1]
