"""Models of transformers in the engine: answers are transformers' own within rounding, prefixes are shared, and what
cannot be right is refused. `bench/transformers_types.py` tries every type that transformers has."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache

import hybrid
from hybrid import ArgumentError, CacheConfig, Engine, EngineConfig, SamplingParams, UnsupportedModelError
from hybrid.models.loading import ARCHITECTURES
from hybrid.models.transformers_model import TransformersModel
from support.hf import REFUSED, SUPPORTED, tiny_model

REASONS = {
    "qwen4_exp_text": "DynamicIndexedLayer",
    "deepseek_v32": "DynamicIndexedLayer",
    "glm_moe_dsa": "DynamicIndexedLayer",
    "inkling_text": "position_bias",
    "inkling2_text": "position_bias",
    "zamba": "would differ",
    "falcon_mamba": "none of its layers keeps keys and values",
}
"""Types that are refused, and a part of the reason."""

OTHERS = [name for name in SUPPORTED if name not in ARCHITECTURES and name not in REASONS]

SETTINGS = CacheConfig(memory="8MiB", chunk_size=16, page_size=16)

HAS_STATES = hasattr(Cache, "get_conv_state")
"""The installed transformers computes layers with states."""


@pytest.fixture(scope="module")
def open_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, Engine]]]:
    """Make transformers' model of a type, and an engine on its checkpoint."""
    engines: list[Engine] = []

    def make(
        name: str, cache: CacheConfig = SETTINGS, sizes: Mapping[str, Any] = {}, **options: Any
    ) -> tuple[Any, Engine]:
        model = tiny_model(name, **sizes)
        path = tmp_path_factory.mktemp(name)
        model.save_pretrained(path)
        try:
            engines.append(Engine.from_pretrained(path, **{"dtype": "float32", "cache": cache, **options}))
        except UnsupportedModelError as error:
            if HAS_STATES or "from version 5.21 on" not in str(error):
                raise
            pytest.skip(str(error))
        return model, engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompts(*lengths: int) -> list[list[int]]:
    return [[3 + (37 * row + 7 * at * at + at) % 120 for at in range(length)] for row, length in enumerate(lengths)]


def largest_difference(model: Any, output: hybrid.RequestOutput) -> float:
    """Of log-probabilities, from those of transformers' own pass over prompt and answer."""
    assert output.finish_reason == "length", output.outputs[0].error
    start = len(output.prompt_token_ids) - 1
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*output.prompt_token_ids, *output.token_ids]])).logits[0]
    expected = logits.float().log_softmax(-1)
    found = output.outputs[0].logprobs
    assert found is not None
    return max(
        abs(float(expected[start + at, token]) - value) for at, row in enumerate(found) for token, value in row.items()
    )


@pytest.mark.parametrize("name", OTHERS)
def test_answers_are_those_of_transformers_and_a_next_turn_resumes(name: str, open_engine: Any) -> None:
    model, engine = open_engine(name)
    assert isinstance(engine.model, TransformersModel)
    assert not engine.deterministic
    greedy = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=2)
    first = list(engine.generate(prompts(50, 33, 81), greedy))  # prefills and decoded tokens share batches
    turns = [[*output.prompt_token_ids, *output.token_ids, 5, 6, 7] for output in first]
    second = list(engine.generate(turns, greedy))
    assert [output.usage.cached_tokens for output in second] == [48, 32, 80]
    assert max(largest_difference(model, output) for output in (*first, *second)) < 1e-4
    engine.cache.audit()


def test_layers_with_states_say_which_transformers_computes_them(
    open_engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(Cache, "get_conv_state", raising=False)
    tiny_model("zamba2").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"from version 5\.21 on, .*pip install -U"):
        Engine.from_pretrained(tmp_path, dtype="float32", cache=SETTINGS)
    _, engine = open_engine("mistral")  # has none
    assert isinstance(engine.model, TransformersModel)


@pytest.mark.parametrize("name", [name for name in REASONS if name in SUPPORTED or name in REFUSED])
def test_a_model_that_would_be_wrong_is_refused_with_the_reason(name: str, open_engine: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=REASONS[name]):
        open_engine(name)


def test_a_window_longer_than_the_trial_is_the_models_own(open_engine: Any) -> None:
    model, engine = open_engine("mistral")  # 24 tokens of 150
    (output,) = engine.generate(prompts(150), SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2))
    assert largest_difference(model, output) < 1e-4


def test_it_survives_a_memory_that_is_too_small(open_engine: Any) -> None:
    """Requests are retracted and computed again, from checkpoints in stored bytes."""
    model, engine = open_engine("zamba2", CacheConfig(memory="192KiB", chunk_size=16, page_size=16, kv_dtype="int8"))
    greedy = SamplingParams(max_new_tokens=20, ignore_eos=True, logprobs=2)
    outputs = list(engine.generate(prompts(*range(40, 120, 10)), greedy))
    assert max(largest_difference(model, output) for output in outputs) < 0.1  # of keys and values in a byte
    assert engine.stats().retractions > 0
    engine.cache.audit()


def test_bfloat16_is_near_float32(open_engine: Any) -> None:
    model, engine = open_engine("zamba2", dtype="bfloat16")
    (output,) = engine.generate(prompts(60), SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2))
    assert largest_difference(model.to(torch.bfloat16), output) < 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": CacheConfig(memory="8MiB", deterministic=True)}, "deterministic=True needs a family"),
        ({"speculation": "cache"}, "drafts need a family"),
        ({"load_dtype": "int8"}, "cannot be quantized while"),
    ],
)
def test_what_only_own_families_have_is_refused(options: dict[str, Any], message: str, open_engine: Any) -> None:
    with pytest.raises((ArgumentError, UnsupportedModelError), match=message):
        open_engine("zamba2", **options)


def test_a_configuration_that_a_family_lacks_runs_by_transformers(open_engine: Any) -> None:
    model, engine = open_engine("qwen3", sizes={"hidden_act": "gelu"})
    assert isinstance(engine.model, TransformersModel)
    (output,) = engine.generate(prompts(40), SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2))
    assert largest_difference(model, output) < 1e-4


def test_adapters_are_refused(open_engine: Any, tmp_path: Path) -> None:
    _, engine = open_engine("zamba2", config=EngineConfig(max_model_len=64))
    with pytest.raises(UnsupportedModelError, match="adapters need a family"):
        engine.adapters.load("a", tmp_path)


def test_loading_says_who_computes(open_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "hybrid.models.transformers_model"):
        open_engine("zamba2")
    assert "transformers' own layers" in caplog.text
