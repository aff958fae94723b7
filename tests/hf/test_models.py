"""`hybrid.hf` on a tiny random model of every kind: a hit is bitwise a cold run, and close to transformers' own."""

import random
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybrid import UnsupportedModelError
from hybrid.hf.layers import LINEAR
from hybrid.hf.prefix_cache import PrefixCache
from support.hf import (
    NEWER,
    REFUSED,
    SUPPORTED,
    VOCAB,
    WITHOUT_ANSWERS,
    assert_close,
    assert_nothing_held,
    assert_same,
    cache_on,
    greedy,
    having,
    ids,
    tiny_model,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_hit_is_bitwise_a_cold_run_and_transformers_own_within_rounding(name: str) -> None:
    """Two turns of a chat."""
    model = tiny_model(name)
    cache, cold = cache_on(model), cache_on(model, placement=WITHOUT_ANSWERS)
    prompt = ids(70)
    first = cache.generate(prompt, **greedy(14))
    assert_close(first, model.generate(prompt, **greedy(14)))
    turn = torch.cat([first.sequences, ids(25, 1)], 1)
    hit = cache.generate(turn, **greedy())
    assert cache.explanations[0].usable_hit == 80  # the answer too
    assert_same(hit, cold.generate(turn, **greedy()))
    assert_close(hit, model.generate(turn, **greedy()))
    assert_nothing_held(cache)


@pytest.mark.parametrize("name", having("qwen3_5_text", "falcon_h1", "zamba2", "lfm3", "gemma3_text", "llama"))
def test_a_left_padded_batch_is_that_of_each_prompt_alone(name: str) -> None:
    model = tiny_model(name)
    cache = cache_on(model)
    batch, mask = ids(50, rows=3), torch.ones(3, 50, dtype=torch.long)
    for row, pad in ((0, 21), (1, 0), (2, 3)):
        batch[row, :pad], mask[row, :pad] = 0, 0
    cold = cache.generate(batch, attention_mask=mask, **greedy())
    hit = cache.generate(batch, attention_mask=mask, **greedy())
    assert [explanation.usable_hit for explanation in cache.explanations] == [16, 48, 32]
    assert_same(hit, cold)
    for row, pad in ((0, 21), (1, 0), (2, 3)):
        alone = model.generate(batch[row : row + 1, pad:], **greedy())
        assert torch.equal(hit.sequences[row, 50:], alone.sequences[0, 50 - pad :])
    assert_close(hit, model.generate(batch, attention_mask=mask, **greedy()))
    assert_nothing_held(cache)


@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "gemma3_text"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_hit_is_bitwise_a_cold_run_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model = tiny_model(name).to(dtype)
    cache = cache_on(model)
    cold = cache.generate(ids(70), **greedy(10))
    assert_same(cache.generate(ids(70), **greedy(10)), cold)
    assert cache.explanations[0].usable_hit == 64
    assert_close(cold, model.generate(ids(70), **greedy(10)), 0.05)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_with_the_reason(name: str) -> None:
    model = tiny_model(name)
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]):
        cache_on(model)


def test_the_document_lists_the_models_that_are_tested() -> None:
    text = (ROOT / "docs" / "transformers.md").read_text(encoding="utf-8")
    for name in (*SUPPORTED, *NEWER, *REFUSED):
        assert f"`{name}`" in text, name
    refused = re.findall(r"^\| (`.*`) \|", text.split("These models are refused")[1].split("\n## ")[0], re.MULTILINE)
    assert {name for row in refused for name in re.findall(r"`(\w+)`", row)} <= {*REFUSED, *NEWER, "mamba", "mamba2"}


def test_every_language_model_of_transformers_with_states_is_tested_or_refused() -> None:
    """The models are those of the installed version, found by the layers of their cache. Two are named after their text
    part, and two have no attention at all, as `falcon_mamba`."""
    found = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            layers = DynamicCache(config=CONFIG_MAPPING[name]()).layers
        except (
            AttributeError,
            KeyError,
            ValueError,
            StrictDataclassError,
        ):  # no text model, or layers of its own
            continue
        if any(isinstance(layer, LINEAR) for layer in layers):
            found.add(name if f"{name}_text" not in {*SUPPORTED, *NEWER} else f"{name}_text")
    assert {"qwen3_5_text", "bamba", "zaya"} < found
    assert found <= {*SUPPORTED, *NEWER, *REFUSED, "mamba", "mamba2"}


MANY_EXPERTS = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 4}


@pytest.mark.parametrize("kind", ["qwen3_next", "gpt_oss"])
def test_prompts_that_share_a_part_of_a_chunk_get_the_bits_of_cold_runs(kind: str) -> None:
    """The default page, 64 tokens, is smaller than the default chunk, 128."""
    model, rng = tiny_model(kind, **MANY_EXPERTS), random.Random(1)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    document = ids(256 + 192)
    prompts = [document + ids(100), document + ids(90), document[:320] + ids(230), document[:300] + ids(240)]
    cache, hits = PrefixCache(model, "64MiB"), 0
    for prompt in [*prompts, *prompts]:
        warm = cache.generate(torch.tensor([prompt]), **greedy(3))
        cold = PrefixCache(model, "64MiB").generate(torch.tensor([prompt]), **greedy(3))
        assert_same(warm, cold)
        hits += cache.explanations[0].usable_hit
    assert hits >= 4 * 512
