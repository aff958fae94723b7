"""Images in the prompts of `hybrid.hf.PrefixCache`: found again by their content, with the positions of plain
`generate`, and a hit bitwise a cold run."""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from hybrid import ArgumentError, PromptError, SpeculationConfig
from support.hf import (
    IMAGE,
    VIDEO,
    WITHOUT_ANSWERS,
    assert_close,
    assert_nothing_held,
    assert_same,
    cache_on,
    greedy,
    image_prompt,
    text,
    tiny_model,
    vision_model,
)

CAT, DOG = (5, 7, 1), (4, 4, 2)
"""Images as rows, columns and seed: 35 and 16 tokens, whose text is 28 and 12 positions less far."""


@pytest.fixture(scope="module")
def vision() -> Any:
    return vision_model()


def plain(model: Any, count: int, prompt: dict[str, torch.Tensor]) -> Any:
    return model.generate(**prompt, **greedy(count))


def with_turn(prompt: dict[str, torch.Tensor], sequences: torch.Tensor, *parts: Any) -> dict[str, torch.Tensor]:
    """The prompt of a next turn, whose parts are those of `image_prompt`."""
    turn = image_prompt(*parts)
    types = prompt["mm_token_type_ids"]
    answer = torch.zeros(1, sequences.shape[1] - types.shape[1], dtype=torch.int)
    joined = {
        "input_ids": torch.cat([sequences, turn["input_ids"]], 1),
        "mm_token_type_ids": torch.cat([types, answer, turn["mm_token_type_ids"]], 1),
    }
    for name in ("pixel_values", "image_grid_thw"):
        joined[name] = torch.cat([part[name] for part in (prompt, turn) if name in part])
    return joined


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_chat_with_images_hits_and_is_that_of_plain_generate(model_type: str, deterministic: bool) -> None:
    model = vision_model(model_type)
    cache = cache_on(model, deterministic=deterministic)
    cold = cache_on(model, deterministic=deterministic, placement=WITHOUT_ANSWERS)
    prompt = image_prompt(9, CAT, 20, DOG, 8)
    no_image = {"suppress_tokens": [IMAGE, VIDEO]}  # transformers takes them for images in the next turn
    first = cache.generate(**prompt, **greedy(20), **no_image)
    assert_close(first, plain(model, 20, prompt))
    for turn in (with_turn(prompt, first.sequences, 12), with_turn(prompt, first.sequences, 5, (3, 2, 3), 6)):
        hit = cache.generate(**turn, **greedy(6))
        assert cache.explanations[0].usable_hit >= 96  # of 108: both images, and the answer
        if deterministic:
            assert_same(hit, cold.generate(**turn, **greedy(6)))
        expected = plain(model, 6, turn)
        assert torch.equal(hit.sequences, expected.sequences)
        assert_close(hit, expected)
    assert_nothing_held(cache)


def test_an_image_is_found_by_its_content_and_no_match_ends_inside_one(vision: Any) -> None:
    cache = cache_on(vision)
    cache.generate(**image_prompt(9, CAT, 40), **greedy())
    for parts, hit in (
        ((9, CAT, 40), 80),
        ((9, CAT, 20, DOG, 3), 64),
        ((9, (5, 7, 2), 40), 0),  # other pixels
        ((9, (7, 5, 1), 40), 0),  # the same numbers in another form
        ((8, CAT, 40), 0),  # at another place
    ):
        prompt = image_prompt(*parts)
        found = cache.generate(**prompt, **greedy())
        assert cache.explanations[0].usable_hit == hit
        assert_close(found, plain(vision, 4, prompt))
    placeholders = image_prompt(9, CAT, 40)["input_ids"]
    cache.generate(placeholders, **greedy())  # the same ids as text
    assert cache.explanations[0].usable_hit == 0
    assert_nothing_held(cache)


def test_an_image_that_ends_anywhere_is_computed_as_in_plain_generate(vision: Any) -> None:
    """Before, at and after the boundaries of chunks; the text after it may be a single token."""
    cache = cache_on(vision)
    for before in range(1, 34, 4):
        for after in (1, 5, 17):
            prompt = image_prompt(before, CAT, after)
            cold = cache.generate(**prompt, **greedy(2))
            assert_close(cold, plain(vision, 2, prompt))
            assert_same(cache.generate(**prompt, **greedy(2)), cold)
    assert_nothing_held(cache)


def test_a_batch_of_images_and_text_is_that_of_each_prompt_alone(vision: Any) -> None:
    cache = cache_on(vision)
    prompts = [image_prompt(9, CAT, 20), image_prompt(30), image_prompt(4, DOG, 20, DOG, 9)]
    width = max(prompt["input_ids"].shape[1] for prompt in prompts)
    batch: dict[str, list[torch.Tensor]] = {"input_ids": [], "mm_token_type_ids": [], "attention_mask": []}
    for prompt in prompts:
        pad = width - prompt["input_ids"].shape[1]
        for name in ("input_ids", "mm_token_type_ids"):
            batch[name].append(torch.nn.functional.pad(prompt[name], (pad, 0)))
        batch["attention_mask"].append(torch.nn.functional.pad(torch.ones(1, width - pad, dtype=torch.long), (pad, 0)))
    joined = {name: torch.cat(tensors) for name, tensors in batch.items()}
    joined["pixel_values"] = torch.cat([prompts[0]["pixel_values"], prompts[2]["pixel_values"]])
    joined["image_grid_thw"] = torch.cat([prompts[0]["image_grid_thw"], prompts[2]["image_grid_thw"]])
    cold = cache.generate(**joined, **greedy())
    assert_close(cold, plain(vision, 4, joined))
    assert_same(cache.generate(**joined, **greedy()), cold)
    assert [explanation.usable_hit for explanation in cache.explanations] == [48, 16, 64]
    for at, prompt in enumerate(prompts):
        alone = plain(vision, 4, prompt)
        assert torch.equal(cold.sequences[at, width:], alone.sequences[0, prompt["input_ids"].shape[1] :])
    assert_nothing_held(cache)


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}, {"do_sample": True, "temperature": 2.0}],
    ids=str,
)
def test_beams_and_samples_of_images_are_those_of_plain_generate(vision: Any, options: dict[str, Any]) -> None:
    prompt, cache = image_prompt(9, CAT, 20), cache_on(vision)
    torch.manual_seed(0)
    is_split = "do_sample" in options and "num_return_sequences" not in options
    if is_split or Version(transformers.__version__) >= Version("5.17"):
        expected = vision.generate(**prompt, max_new_tokens=8, **options)
    else:  # transformers 5.16 cannot split the images of several sequences
        with pytest.raises(RuntimeError):
            vision.generate(**prompt, max_new_tokens=8, **options)
        torch.manual_seed(0)
        expected = cache_on(vision).generate(**prompt, max_new_tokens=8, **options)
    for _ in range(2):
        torch.manual_seed(0)
        assert torch.equal(cache.generate(**prompt, max_new_tokens=8, **options), expected)
    assert cache.explanations[0].usable_hit == 48


def test_drafts_work_after_images(vision: Any) -> None:
    prompt, cache = image_prompt(9, CAT, 20), cache_on(vision, deterministic=False)
    expected = plain(vision, 30, prompt)
    config = SpeculationConfig(drafters=("cache",), adaptive=False)
    for options in ({"speculation": config}, {"speculation": config}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(cache.generate(**prompt, **greedy(30), **options).sequences, expected.sequences)
    assert cache.speculation_stats()["continuation"].accepted_tokens >= 14
    assert_nothing_held(cache)


def test_a_session_takes_images_and_rewinds_them(vision: Any) -> None:
    prompt, cache = image_prompt(9, CAT, 20), cache_on(vision)
    images = {name: value for name, value in prompt.items() if name != "input_ids"}
    expected = cache.generate(**prompt, **greedy(20))
    with cache.session(prompt["input_ids"], **images) as past:
        other = past.fork()
        found = vision.generate(prompt["input_ids"], **past.as_argument, **greedy(20))
        assert_same(found, expected)
        past.rewind(18)
        again = vision.generate(found.sequences[:, :66], **past.as_argument, **greedy(8))
        assert torch.equal(again.sequences, expected.sequences[:, :74])
        assert_same(vision.generate(prompt["input_ids"], **other.as_argument, **greedy(20)), expected)
    with pytest.raises(ArgumentError, match="'audio' is not an argument"), cache.session(text(20), audio=text(3)):
        pass
    assert_nothing_held(cache)


def test_a_past_with_images_can_be_given_back(vision: Any) -> None:
    prompt, cache = image_prompt(9, CAT, 20), cache_on(vision)
    first = cache.generate(**prompt, **greedy(20))
    past = first.past_key_values
    other = dict(prompt, pixel_values=prompt["pixel_values"] + 1)
    for turn in (
        with_turn(other, first.sequences, 12),
        with_turn(prompt, first.sequences, 5, DOG, 6),
        {"input_ids": torch.cat([first.sequences, text(12)], 1)},
    ):
        with pytest.raises(ArgumentError, match="do not begin"):
            cache.generate(**turn, past_key_values=past, **greedy())
    turn = with_turn(prompt, first.sequences, 12)
    found = cache.generate(**turn, past_key_values=past, **greedy(6))
    assert cache.explanations[0].usable_hit == 83
    expected = plain(vision, 6, turn)
    assert torch.equal(found.sequences, expected.sequences)
    assert_close(found, expected)
    assert_nothing_held(cache)


def test_text_before_and_after_images_has_its_own_positions(vision: Any) -> None:
    cache = cache_on(vision)
    expected = cache.generate(text(70), **greedy())
    for _ in range(2):
        cache.generate(**image_prompt(9, CAT, 20), **greedy())
        assert_same(cache.generate(text(70), **greedy()), expected)
    zeros = torch.zeros(1, 70, dtype=torch.int)
    assert_same(cache.generate(text(70), mm_token_type_ids=zeros, **greedy()), expected)
    assert_close(expected, vision.generate(text(70), **greedy()))


def test_an_image_is_embedded_once(vision: Any) -> None:
    cache = cache_on(vision)
    calls = []
    hook = vision.model.visual.register_forward_hook(lambda *_: calls.append(1))
    prompt = image_prompt(9, CAT, 20)
    first = cache.generate(**prompt, **greedy())
    cache.generate(**with_turn(prompt, first.sequences, 5, DOG, 4), **greedy())
    assert len(calls) == 2
    with torch.no_grad():
        vision.model.visual.merger.linear_fc2.weight.mul_(1)
    cache.generate(**prompt, **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert len(calls) == 3
    for times in (4, 4):  # whether another namespace had it is not seen by the time that it takes
        cache.generate(**prompt, **greedy(), namespace="other")
        assert len(calls) == times
    former = vision.config._attn_implementation
    vision.set_attn_implementation("eager" if former != "eager" else "sdpa")  # rounds otherwise: another version
    try:
        cache.generate(**prompt, **greedy())
        assert len(calls) == 5
    finally:
        vision.set_attn_implementation(former)
        hook.remove()


def test_an_installed_cache_takes_images(vision: Any) -> None:
    prompt, cache = image_prompt(9, CAT, 20), cache_on(vision)
    expected = plain(vision, 6, prompt)
    cache.install()
    try:
        for _ in range(2):
            assert torch.equal(plain(vision, 6, prompt).sequences, expected.sequences)
    finally:
        cache.uninstall()
    assert cache.explanations[0].usable_hit == 48


def changed(**changes: Any) -> dict[str, torch.Tensor]:
    prompt = image_prompt(9, CAT, 20)
    return {name: changes.get(name, value) for name, value in prompt.items() if changes.get(name, value) is not None}


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (changed(mm_token_type_ids=None), "needs mm_token_type_ids too"),
        (changed(image_grid_thw=None), "needs image_grid_thw too"),
        (changed(pixel_values=None), "needs pixel_values too"),
        (changed(pixel_values=None, image_grid_thw=None), "pixel_values are not given"),
        (changed(pixel_values=torch.zeros(3, 96)), "describes 140 patches, and pixel_values has 3"),
        (changed(mm_token_type_ids=torch.zeros(1, 3)), "the shape of input_ids"),
        (changed(mm_token_type_ids=2 * image_prompt(9, CAT, 20)["mm_token_type_ids"]), "videos are not cached"),
        (changed(mm_token_type_ids=torch.zeros(1, 64, dtype=torch.int)), "1 more images than places"),
        (changed(mm_token_type_ids=image_prompt(8, CAT, 1, (4, 5, 0))["mm_token_type_ids"]), "places for more images"),
        (changed(mm_token_type_ids=image_prompt(8, (6, 6, 0), 20)["mm_token_type_ids"]), "has 36 places"),
        (changed(pixel_values=image_prompt(CAT, 1)["pixel_values"].fill_(float("nan"))), "NaN or infinity"),
        (image_prompt(9, CAT), "must end with text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_that_do_not_fit_are_refused(vision: Any, prompt: dict[str, torch.Tensor], reason: str) -> None:
    cache = cache_on(vision)
    with pytest.raises(PromptError, match=reason):
        cache.generate(**prompt, **greedy())
    assert_nothing_held(cache)
    assert cache.stats().requests == 0


def test_images_of_a_model_that_is_not_known_are_refused() -> None:
    with pytest.raises(ArgumentError, match="images of llama cannot be cached"):
        cache_on(tiny_model("llama")).generate(**image_prompt(9, CAT, 20), **greedy())
