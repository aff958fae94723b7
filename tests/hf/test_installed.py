"""`hybrid.hf` on the installed version of transformers: a hook that does not fire is an error, and so is a name that
nothing knows."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import GenerationMixin

from hybrid import ArgumentError, RequestError, VersionError
from hybrid.hf import installed
from hybrid.hf.installed import CACHE_NAMES, as_argument, cache_in, cache_name, refuse_unexpected
from hybrid.models.transformers_types import NEEDED
from support.hf import assert_close, assert_nothing_held, assert_same, cache_on, greedy, ids, tiny_model, vision_model

ROOT = Path(__file__).parents[2]

FOUND = re.escape(f"transformers {transformers.__version__}: ")
"""What an error about the installed version begins with."""


@pytest.fixture(params=["qwen3_5_text", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture
def renamed() -> Iterator[None]:
    """The name of the cache is found out anew in this test, and after it."""
    cache_name.cache_clear()
    yield
    cache_name.cache_clear()


@pytest.fixture
def unseen_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, int], None]:
    """Makes a model run, after some passes, without the hooks on it, as if a version called them otherwise."""

    def unseen_after(model: Any, num_seen: int) -> None:
        passes = 0

        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal passes
            passes += 1
            return nn.Module.__call__(self, *args, **kwargs) if passes <= num_seen else self.forward(*args, **kwargs)

        monkeypatch.setattr(type(model), "__call__", called)

    return unseen_after


# Hooks that do not fire


@pytest.mark.parametrize("num_seen", [0, 3])
def test_an_answer_that_no_hook_has_seen_is_an_error(
    model: Any, num_seen: int, unseen_after: Callable[[Any, int], None]
) -> None:
    cache = cache_on(model)
    cache.generate(ids(40), **greedy(1))
    unseen_after(model, num_seen)
    with pytest.raises(VersionError, match=f"{FOUND}a pass was not seen .*Versions .* are known to work: install one"):
        cache.generate(ids(60), **greedy(30))
    assert_nothing_held(cache)


def test_nothing_of_a_session_that_no_hook_has_seen_is_cached(
    model: Any, unseen_after: Callable[[Any, int], None]
) -> None:
    cache = cache_on(model)
    session = cache.session(ids(40))
    past = session.__enter__()
    unseen_after(model, 0)
    with pytest.raises(VersionError, match=f"{FOUND}a pass was not seen"):
        model.generate(ids(40), **past.as_argument, **greedy(40))
    assert past.known_rows() is None
    session.__exit__(None, None, None)
    assert cache.explain(ids(60)).usable_hit == 32
    assert_nothing_held(cache)


def test_nan_in_a_pass_that_no_hook_has_seen_is_not_cached(unseen_after: Callable[[Any, int], None]) -> None:
    model = tiny_model("qwen3_5_text")
    cache = cache_on(model, deterministic=False)
    session = cache.session(ids(40))
    past = session.__enter__()
    unseen_after(model, 0)
    model.get_input_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(VersionError, match=f"{FOUND}a pass was not seen"):
        model.generate(ids(40), **past.as_argument, **greedy(40))
    session.__exit__(None, None, None)
    assert cache.cache.tree.num_checkpoints == 1
    assert_nothing_held(cache)


def test_a_past_that_was_not_followed_cannot_be_rewound_or_saved(
    model: Any, unseen_after: Callable[[Any, int], None]
) -> None:
    cache = cache_on(model)
    with cache.session(ids(40)) as past:
        unseen_after(model, 0)
        with pytest.raises(VersionError):
            model.generate(ids(40), **past.as_argument, **greedy(5))
        for use in (past.save, lambda: past.rewind(2)):
            with pytest.raises(RequestError, match="does not know"):
                use()


def test_drafts_with_a_pass_that_no_hook_has_seen_are_an_error(unseen_after: Callable[[Any, int], None]) -> None:
    model = tiny_model("qwen3_5_text")
    cache = cache_on(model, deterministic=False)
    unseen_after(model, 2)
    with pytest.raises(VersionError, match=FOUND):
        cache.generate(torch.cat([ids(20), ids(20)], 1), **greedy(30), prompt_lookup_num_tokens=4)
    assert_nothing_held(cache)


def test_a_decoding_loop_that_is_not_called_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = tiny_model("llama"), GenerationMixin.generate

    def generate(self: Any, *args: Any, custom_generate: Any = None, streamer: Any = None, **options: Any) -> Any:
        return own(self, *args, **options)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    cache = cache_on(model)
    with pytest.raises(VersionError, match=f"{FOUND}generate did not call the decoding loop"):
        cache.generate(ids(40), **greedy(), prompt_lookup_num_tokens=3)
    assert_nothing_held(cache)


# Names that nothing knows


def test_an_argument_of_another_name_is_an_error(renamed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def prepare_inputs_for_generation(
        self: Any, input_ids: Any, next_sequence_length: Any, is_first_iteration: Any, memory: Any
    ) -> None: ...

    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", prepare_inputs_for_generation)
    with pytest.raises(VersionError, match=f"{FOUND}GenerationMixin.prepare_inputs_for_generation takes no cache and"):
        cache_on(model)


def test_a_model_that_takes_no_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")

    def forward(input_ids: Any, memory: Any) -> None: ...

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(VersionError, match=f"LlamaForCausalLM.forward takes no {cache_name()}"):
        cache_on(model)


def test_methods_and_arguments_that_are_gone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(installed, "OVERRIDDEN", ("crop", "cut", "reorder_cache", "reorder"))
        with pytest.raises(VersionError, match=f"{FOUND}DynamicCache has no cut and no reorder,"):
            refuse_unexpected(model)
    with monkeypatch.context() as patch:
        patch.setattr(installed, "LOOP_ARGUMENTS", {"generate": ("custom_generate", "loop"), "prepare": ("ids",)})
        with pytest.raises(VersionError, match=f"{FOUND}GenerationMixin.generate takes no loop,"):
            refuse_unexpected(model)
    with monkeypatch.context() as patch:
        patch.setattr(installed, "LOOP_ARGUMENTS", {"prepare": ("ids",)})
        with pytest.raises(VersionError, match=f"{FOUND}GenerationMixin.prepare takes no ids,"):
            refuse_unexpected(model)
    refuse_unexpected(model)


def test_settings_that_are_gone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    kind = next(cls for cls in type(model.config).__mro__ if "_experts_implementation" in vars(cls))
    monkeypatch.delattr(kind, "_experts_implementation")
    with pytest.raises(VersionError, match="LlamaForCausalLM has no _experts_implementation"):
        refuse_unexpected(model)


def test_positions_that_are_kept_elsewhere_are_an_error() -> None:
    model = vision_model()
    for module in model.modules():
        if "rope_deltas" in vars(module):
            module.offsets = vars(module).pop("rope_deltas")
    with pytest.raises(VersionError, match="has no rope_deltas, so the positions of one prompt's images"):
        refuse_unexpected(model)


def test_frequencies_that_change_at_an_unknown_position_are_an_error() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    refuse_unexpected(model)
    del model.model.rotary_emb.rope_type
    with pytest.raises(VersionError, match="no module has a rope_type"):
        refuse_unexpected(model)


# The name of the cache


@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
@pytest.mark.parametrize("name", CACHE_NAMES[CACHE_NAMES.index(cache_name()) :])
def test_a_session_follows_its_past_by_every_name_that_the_model_takes(model: Any, name: str) -> None:
    expected = cache_on(model).generate(ids(40), **greedy(20))
    cache = cache_on(model)
    with cache.session(ids(40)) as past, torch.no_grad():
        assert_same(model.generate(ids(40), **{name: past}, **greedy(20)), expected)
        model(expected.sequences[:, -1:], **{name: past})
        assert past.known_rows() == expected.sequences.tolist()
    assert_nothing_held(cache)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_past_is_given_back_by_every_name(name: str) -> None:
    model = tiny_model("llama")
    cache = cache_on(model)
    first = cache.generate(ids(40), **greedy(20))
    past, turn = first[cache_name()], torch.cat([first.sequences, ids(9, 1)], 1)
    assert past.as_argument == as_argument(past) == {cache_name(): past}
    assert cache_in((turn, past), {}) is cache_in((), {"a": turn, "b": past}) is past
    assert_close(cache.generate(turn, **{name: past}, **greedy()), cache_on(model).generate(turn, **greedy()))
    with pytest.raises(ArgumentError, match="cache and past_key_values are names of one option"):
        cache.generate(turn, **dict.fromkeys(CACHE_NAMES, past), **greedy())


def test_the_document_names_what_needs_a_newer_version() -> None:
    text = " ".join((ROOT / "docs" / "transformers.md").read_text(encoding="utf-8").split())
    for name, first in NEEDED.items():
        assert f"`{name}`" in text
        assert first in text
