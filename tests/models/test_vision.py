"""Images in prompts: against transformers' own vision-language model, and what the cache shares of them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import fromarray
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import hybrid
from hybrid.models.loading import open_checkpoint
from hybrid.models.vision import VisionTower
from hybrid.prompts.images import Media
from support.tensors import same_bits
from support.vision import PAD, chat, picture, vision_model, write_vision_checkpoint

GRID = 16
PARAMS = hybrid.SamplingParams(max_new_tokens=10, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module", params=["Qwen3_5", "Qwen3_5Moe"])
def theirs(request: pytest.FixtureRequest) -> Any:
    return vision_model(request.param)


@pytest.fixture(scope="module")
def path(theirs: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("vision"), theirs, tokenizer)


def load(path: Path, dtype: str) -> hybrid.Engine:
    config = hybrid.CacheConfig(memory="64MiB", page_size=GRID, chunk_size=GRID, deterministic=True)
    return hybrid.Engine.from_pretrained(path, device="cpu", dtype=dtype, cache=config)


@pytest.fixture(scope="module")
def loaded(path: Path) -> hybrid.Engine:
    return load(path, "float32")


def fresh(loaded: hybrid.Engine, **changes: Any) -> hybrid.Engine:
    config = hybrid.CacheConfig(page_size=GRID, chunk_size=GRID, deterministic=True, **changes)
    return loaded.with_cache(config, size=(200, 40))


def answer(engine: hybrid.Engine, prompt: Any) -> hybrid.RequestOutput:
    return engine.generate([prompt], PARAMS, progress=False)[0]


def logprobs(output: hybrid.RequestOutput) -> Tensor:
    """Return log-probabilities of the tokens of an answer."""
    assert output.logprobs is not None
    return torch.tensor([known[token] for known, token in zip(output.logprobs, output.token_ids, strict=True)])


def test_answers_about_images_are_those_of_transformers(theirs: Any, path: Path, loaded: hybrid.Engine) -> None:
    images = [picture(0), picture(1, 23, 90)]
    output = answer(fresh(loaded), chat(*images))
    processor = Qwen2VLImageProcessorPil.from_pretrained(path, patch_size=4)
    seen = processor(images=images, return_tensors="pt")
    ids = torch.tensor([output.prompt_token_ids])
    assert int((ids == PAD).sum()) == int(seen["image_grid_thw"].prod(1).sum()) // 4 == 35 + 33
    whole = torch.cat((ids, torch.tensor([output.token_ids])), dim=1)
    with torch.inference_mode():
        logits = theirs(
            input_ids=whole,
            **seen,
            mm_token_type_ids=(whole == PAD).int(),
        ).logits[0, ids.shape[1] - 1 : -1]
    assert logits.argmax(-1).tolist() == output.token_ids
    assert len(set(output.token_ids)) > 4
    expected = logits.log_softmax(-1)[torch.arange(len(logits)), output.token_ids]
    torch.testing.assert_close(logprobs(output), expected, rtol=0, atol=1e-3)


def test_the_same_image_shares_and_another_does_not(loaded: hybrid.Engine) -> None:
    engine, cold = fresh(loaded), fresh(loaded, enabled=False)
    first = answer(engine, chat(picture(0)))
    start, end = first.prompt_token_ids.index(PAD), first.prompt_token_ids.index(PAD) + 35
    assert first.usage.cached_tokens == 0
    again = answer(engine, chat(picture(0), text="What is to be seen behind it?"))
    assert again.usage.page_tokens >= end - GRID
    other = answer(engine, chat(picture(3)))
    assert other.usage.page_tokens <= start
    assert other.prompt_token_ids == first.prompt_token_ids
    assert other.token_ids != first.token_ids
    text = answer(engine, first.prompt_token_ids)  # the placeholders as they are: no image at all
    assert text.usage.page_tokens <= start
    repeated = answer(engine, chat(picture(0)))
    assert repeated.usage.cached_tokens > 0
    for output, prompt in (
        (again, chat(picture(0), text="What is to be seen behind it?")),
        (repeated, chat(picture(0))),
    ):
        expected = answer(cold, prompt)
        assert expected.usage.cached_tokens == 0
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    engine.cache.audit()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_turn_about_an_image_is_hit_by_the_next_one_bitwise_in_a_busy_batch(path: Path, dtype: str) -> None:
    loaded = load(path, dtype)
    engine, cold = fresh(loaded), fresh(loaded, enabled=False)
    prompts = [chat(picture(0)), chat(picture(0), picture(1)), "some text without any image", chat(picture(2))]
    for _ in range(2):
        outputs = engine.generate(prompts, PARAMS, progress=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = answer(cold, prompt)
            assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert outputs[1].usage.cached_tokens > 35


def embedded(seed: int, start: int = 10, count: int = 40, changed_from: int | None = None) -> hybrid.ImagePrompt:
    values = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    if changed_from is not None:
        values[changed_from:] += 1
    ids = [50 + at % 200 for at in range(start)] + [PAD] * count + [90 + at % 100 for at in range(30)]
    return hybrid.ImagePrompt(ids, [hybrid.Image(start, values)])


def test_no_match_ends_inside_an_image(loaded: hybrid.Engine) -> None:
    """The image lies in pages 0 to 3; one whose second half differs shares nothing of it."""
    engine = fresh(loaded)
    assert answer(engine, embedded(0, start=20)).usage.page_tokens == 0
    assert answer(engine, embedded(0, start=20)).usage.page_tokens >= 80
    assert answer(engine, embedded(0, start=20, changed_from=30)).usage.page_tokens == 16
    assert answer(engine, embedded(1, start=20)).usage.page_tokens == 16


def test_embeddings_and_positions_that_are_given_are_used_as_they_are(theirs: Any, loaded: hybrid.Engine) -> None:
    prompt = embedded(0)
    positions = torch.arange(80).expand(3, -1).clone()
    positions[1:, 10:50] = torch.stack((torch.arange(40) // 8, torch.arange(40) % 8)) + 10
    prompt = hybrid.ImagePrompt(prompt.token_ids, prompt.images, positions)
    output = answer(fresh(loaded), prompt)
    whole = torch.tensor([[*prompt.token_ids, *output.token_ids]])
    embeddings = theirs.get_input_embeddings()(whole)
    embeddings[0, 10:50] = prompt.images[0].embeddings
    rows = torch.cat((positions, torch.arange(80, 90).expand(3, -1)), dim=1).unsqueeze(1)
    with torch.inference_mode():
        logits = theirs(inputs_embeds=embeddings, position_ids=rows).logits[0, 79:-1]
    assert logits.argmax(-1).tolist() == output.token_ids
    other = hybrid.ImagePrompt(prompt.token_ids, prompt.images)  # the same image, in another shape: another one
    known, shaped = (
        memoryview(Media.of(p, 64, GRID).key(p.token_ids, "").ids).cast("i").tolist() for p in (other, prompt)
    )
    assert all(a != b and a < 0 and b < 0 for a, b in zip(known[:64], shaped[:64], strict=True))
    assert known[64:] == shaped[64:] == list(prompt.token_ids[64:])


def test_an_image_is_embedded_with_the_same_bits_whoever_asks_and_in_any_size(path: Path) -> None:
    towers = [VisionTower(path, open_checkpoint(path).whole, torch.float32, torch.device("cpu")) for _ in range(2)]
    towers[1].embed(picture(1, 200, 100), "")
    for size in ((40, 56), (41, 57), (9, 9), (300, 100)):
        (one, grid, content), (two, _, _) = (tower.embed(picture(7, *size), "") for tower in towers)
        assert same_bits(one, two)
        assert one.shape == (grid[0] * grid[1], 64)
        assert grid[0] * grid[1] * 64 <= 4096
        assert content != towers[0].embed(picture(8, *size), "")[2]


def test_embeddings_are_kept_for_their_namespace_alone(path: Path) -> None:
    tower = VisionTower(path, open_checkpoint(path).whole, torch.float32, torch.device("cpu"))
    kept = [tower.embed(picture(1), namespace)[0] for namespace in ("a", "a", "b", "a", "b")]
    assert kept[0] is kept[1] is kept[3] and kept[2] is kept[4]
    assert kept[0] is not kept[2] and same_bits(kept[0], kept[2])


def test_images_of_pillow_are_their_pixels(path: Path) -> None:
    tower = VisionTower(path, open_checkpoint(path).whole, torch.float32, torch.device("cpu"))
    pixels = picture(0, 41, 57)
    content = tower.embed(pixels, "")[2]
    image = fromarray(pixels)
    assert tower.embed(image, "")[2] == tower.embed(torch.from_numpy(pixels), "")[2] == content
    image.putalpha(255)
    assert tower.embed(image, "")[2] == content
    assert tower.patches(image.convert("L"))[1] == tower.patches(pixels)[1]


def test_without_a_file_of_settings_qwens_own_hold(path: Path, tmp_path: Path) -> None:
    config = open_checkpoint(path).whole
    patches, grid = VisionTower(tmp_path, config, torch.float32, torch.device("cpu")).patches(picture(0, 64, 64))
    assert (grid, patches.min(), patches.max()) == ((16, 16), -1.0, 1.0)


def test_without_pillow_images_are_refused_with_the_remedy(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = VisionTower(path, open_checkpoint(path).whole, torch.float32, torch.device("cpu"))
    monkeypatch.setitem(sys.modules, Qwen2VLImageProcessorPil.__module__, None)
    with pytest.raises(hybrid.PromptError, match="pip install"):
        tower.embed(picture(0), "")


def with_images(*images: hybrid.Image) -> hybrid.ImagePrompt:
    return hybrid.ImagePrompt([1, 2, 3], images)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (with_images(hybrid.Image(1, torch.zeros(2, 63))), "[positions, 64]"),
        (with_images(hybrid.Image(2, torch.zeros(2, 64))), "outside the prompt"),
        (
            with_images(hybrid.Image(0, torch.zeros(2, 64)), hybrid.Image(1, torch.zeros(2, 64))),
            "over",
        ),
        (hybrid.ImagePrompt([1, 2, 3], [], torch.zeros(3, 2)), "positions must be [3, 3]"),
        (chat(np.zeros((4, 4), np.uint8)), "[height, width, 3]"),
        (chat(np.zeros((4, 4, 3))), "float64"),
        (chat("picture.png"), "load_image"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "http://x/y.png"}]}]}, "load_image"),
        (chat(np.zeros((1, 300, 3), np.uint8)), "smaller than 200"),
    ],
)
def test_images_that_do_not_fit_are_refused(prompt: Any, words: str, loaded: hybrid.Engine) -> None:
    with pytest.raises(hybrid.PromptError) as raised:
        loaded.generate([prompt], PARAMS)
    assert words in str(raised.value)


def test_a_checkpoint_without_a_tower_refuses_images(checkpoint: Path) -> None:
    engine = hybrid.Engine.from_pretrained(checkpoint, device="cpu", cache=hybrid.CacheConfig(memory="8MiB"))
    with pytest.raises(hybrid.PromptError, match="no vision tower"):
        engine.generate([chat(picture(0))])
