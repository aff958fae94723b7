"""Prompts with images in an engine: cut over several steps at every position, shared, pinned, and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Engine, EngineConfig, Image, ImagePrompt, PromptError, SamplingParams
from hybrid.commands.random_checkpoints import write_random_checkpoint
from support.engines import GRID, answer, assert_nothing_held, engine_on, greedy, ids, run_to_end

SIZE = 256
"""Of the embeddings of the model inside the package."""

PARAMS = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)


def of_image(seed: int, start: int, count: int, after: int = 5, content: Any = None) -> ImagePrompt:
    """A text of `start` tokens, an image, and a text."""
    values = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))
    tokens = [*ids(start), *[9] * count, *ids(after, seed=1)]
    return ImagePrompt(tokens, [Image(start, values, content)])


def narrow(tiny: Engine, **cache: Any) -> Engine:
    """An engine whose steps have two chunks at most."""
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=2 * GRID + 4, audit=True)
    return tiny.with_cache(CacheConfig(page_size=GRID, chunk_size=GRID, **cache), size=(100, 40), config=config)


def test_an_image_longer_than_a_step_is_cut_at_every_position_and_changes_no_answer(tiny: Engine) -> None:
    """A part that ended before the prompt raised in every step, and blocked the requests of texts beside it."""
    prompts = [of_image(start, start, 3 * GRID + 1) for start in range(0, 2 * GRID, 3)]
    text = ids(2 * GRID, seed=3)
    whole, cut = engine_on(tiny, pages=400, states=100, enabled=False), narrow(tiny)
    expected = whole.generate([*prompts, text], PARAMS, progress=False)
    for _ in range(2):  # computed, and hit
        outputs = cut.generate([*prompts, text], PARAMS, progress=False)
        for output, other in zip(outputs, expected, strict=True):
            assert (output.token_ids, output.logprobs) == (other.token_ids, other.logprobs)
    assert any(output.usage.cached_tokens >= 3 * GRID for output in outputs)
    assert_nothing_held(cut)


@pytest.mark.parametrize("count", [1, GRID + 3])
def test_an_image_that_ends_between_two_commits_is_shared_when_it_is_complete(count: int, tiny: Engine) -> None:
    engine = narrow(tiny)
    first = of_image(0, 2 * GRID - 1, count, after=2 * GRID)
    answer(engine, first)
    again = answer(engine, first)
    assert again.usage.page_tokens >= 3 * GRID
    assert again.token_ids == answer(narrow(tiny, enabled=False), first).token_ids
    other = answer(engine, of_image(1, 2 * GRID - 1, count, after=2 * GRID))
    assert other.usage.page_tokens == GRID  # the text before the page in which the image begins
    engine.cache.audit()


@pytest.mark.parametrize("family", ["bamba", "gemma3_text", "qwen3_next"])
def test_an_image_with_the_embeddings_of_a_text_is_answered_as_the_text(family: str, tmp_path: Path) -> None:
    """In families without a vision tower, too: windows have rotary angles of their own, and every pass raised."""
    config = CacheConfig(page_size=GRID, chunk_size=GRID, memory="16MiB")
    path = write_random_checkpoint(tmp_path, family)
    engine = Engine.from_pretrained(path, device="cpu", dtype="float32", cache=config)
    text = [token % 300 for token in ids(4 * GRID + 3)]
    begin, end = GRID - 3, 2 * GRID + 5
    image = Image(begin, engine.model.embed(torch.tensor(text[begin:end])))
    prompt = ImagePrompt([*text[:begin], *[9] * (end - begin), *text[end:]], [image])
    expected = answer(engine, text, PARAMS)
    for cached in (0, 4 * GRID):
        found = answer(engine, prompt, PARAMS)
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert found.usage.cached_tokens >= cached
    assert_nothing_held(engine)


def test_tensors_of_a_prompt_may_be_written_to_once_it_is_added(tiny: Engine) -> None:
    """A caller's buffer for the next image: what was cached under the first image's digest was computed from the second
    one, and given to all who asked for the first."""
    engine, prompt = engine_on(tiny), of_image(0, GRID, GRID, after=GRID)
    prompt = ImagePrompt(prompt.token_ids, prompt.images, torch.arange(3 * GRID).expand(3, -1).contiguous())
    expected = answer(engine_on(tiny, enabled=False), prompt, PARAMS)
    name = engine.add_request(prompt, PARAMS)
    prompt.images[0].embeddings.neg_()
    prompt.positions.zero_()  # type: ignore[union-attr]
    assert run_to_end(engine)[name].logprobs == expected.logprobs
    again = answer(engine, of_image(0, GRID, GRID, after=GRID), PARAMS)
    assert (again.logprobs, again.usage.cached_tokens) == (expected.logprobs, 2 * GRID)


def test_many_images_of_one_position_get_their_own_answers(tiny: Engine) -> None:
    engine, cold = engine_on(tiny), engine_on(tiny, enabled=False)
    prompts = [of_image(seed, GRID - 1, 1, after=GRID) for seed in range(6)]
    expected = [output.logprobs for output in cold.generate(prompts, PARAMS, progress=False)]
    for _ in range(2):
        assert [output.logprobs for output in engine.generate(prompts, PARAMS, progress=False)] == expected


@pytest.mark.parametrize("page_size", [1, 4])
def test_images_in_small_pages_share_the_text_before_them_only(page_size: int, tiny: Engine) -> None:
    config = CacheConfig(page_size=page_size, chunk_size=GRID)
    engine = tiny.with_cache(config, size=(600, 20), config=EngineConfig(audit=True))
    prompt = of_image(0, 2 * GRID + 1, 3, after=GRID)
    expected = answer(engine_on(tiny, enabled=False), prompt, PARAMS)
    for _ in range(2):
        output = answer(engine, prompt, PARAMS)
        assert (output.token_ids, output.logprobs) == (expected.token_ids, expected.logprobs)
    assert output.usage.page_tokens == (2 * GRID + 1) // page_size * page_size
    assert_nothing_held(engine)


def test_an_image_under_the_name_of_the_hash_of_another_is_another(tiny: Engine) -> None:
    engine = engine_on(tiny)
    values = of_image(0, 3, GRID).images[0].embeddings
    answer(engine, of_image(0, 3, 2 * GRID))
    own = answer(engine, of_image(1, 3, 2 * GRID, content=values.numpy().tobytes()))
    assert own.usage.page_tokens == 0


def test_an_image_prompt_that_is_not_finite_or_too_large_starts_nothing(tiny: Engine) -> None:
    engine = engine_on(tiny)
    prompt = of_image(0, 3, 5)
    prompt.images[0].embeddings[2, 7] = torch.nan
    with pytest.raises(PromptError, match="NaN or infinity"):
        engine.generate([ids(20), prompt], greedy(2), progress=False)
    with pytest.raises(PromptError, match="outside the vocabulary"):
        engine.add_request(ImagePrompt([5, 1024], []))
    with pytest.raises(PromptError, match="outside the vocabulary"):
        engine.pin([-5] * 40)  # ids below 0 are those of images
    assert_nothing_held(engine)
    assert len(answer(engine, of_image(0, 3, 5), greedy(2)).token_ids) == 2


def never(*_: Any, **options: Any) -> Any:
    raise AssertionError("tokenized")


@pytest.mark.parametrize("text", ["a" * 4_000_000, " " * 12_000_000], ids=["4 MB", "12 MB of spaces"])
def test_a_huge_text_costs_an_engine_nothing(text: str, tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_on(tiny, pages=20)
    monkeypatch.setattr(type(engine.tokenizer), "__call__", never)
    monkeypatch.setattr(type(engine.tokenizer), "apply_chat_template", never)
    for prompt in (text, {"messages": [{"role": "user", "content": text}]}):
        for call in (engine.add_request, engine.generate, engine.stream, engine.pin):
            with pytest.raises(PromptError, match=r"takes up to 10240: .*largest request .* 320 tokens"):
                call(prompt)  # type: ignore[operator]
    assert_nothing_held(engine)
