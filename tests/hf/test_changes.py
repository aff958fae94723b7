"""`hybrid.hf.PrefixCache` when the model changes, or remembers something outside of its cache."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid import PromptError, RequestError
from hybrid.hf.installed import as_argument
from support.hf import (
    IMAGE,
    assert_close,
    assert_nothing_held,
    assert_same,
    cache_on,
    greedy,
    ids,
    text,
    tiny_model,
    vision_model,
)

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests


@pytest.fixture
def model() -> Any:
    return tiny_model("qwen3_5_text")


# Positions


@pytest.fixture(scope="module")
def vision() -> Any:
    return vision_model()


def show_an_image(model: Any) -> Any:
    """Have the model answer a prompt with an image of 64 tokens, so that the text after it has smaller positions."""
    prompt = ids(80)
    prompt[prompt == IMAGE] = 7
    prompt[:, 8:72] = IMAGE
    return model.generate(
        prompt,
        pixel_values=torch.randn(256, 96, generator=torch.Generator().manual_seed(0)),
        image_grid_thw=torch.tensor([[1, 16, 16]]),
        mm_token_type_ids=(prompt == IMAGE).int(),
        **greedy(),
    )


def test_an_image_before_changes_no_text_prompt(vision: Any) -> None:
    cache = cache_on(vision)
    first = cache.generate(text(70), **greedy())
    for _ in range(2):
        show_an_image(vision)
        found = cache.generate(text(70), **greedy())
        assert cache.explanations[0].usable_hit == 64
        assert_same(found, first)
    assert_close(first, vision.generate(text(70), **greedy()))
    show_an_image(vision)
    with cache.session(text(70)) as past:
        assert_same(vision.generate(text(70), **past.as_argument, **greedy()), first)


def test_a_batch_before_changes_no_text_prompt(vision: Any) -> None:
    cache = cache_on(vision)
    first = cache.generate(text(70), **greedy())
    cache.generate(text(40, rows=3), **greedy())
    vision.generate(text(40, rows=3), **greedy())
    assert_same(cache.generate(text(70), **greedy()), first)


def test_a_text_prompt_between_changes_no_image_prompt(vision: Any) -> None:
    """Whose answer goes on with the positions that the model remembers."""
    turn = torch.cat([show_an_image(vision).sequences, text(5)], 1)

    def go_on(between: Callable[[], object]) -> Any:
        past = show_an_image(vision).past_key_values
        between()
        return vision.generate(turn, **as_argument(past), **greedy())

    cache = cache_on(vision)
    assert_same(go_on(lambda: cache.generate(text(70), **greedy())), go_on(lambda: None))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_prompts_whose_length_changes_all_frequencies_are_refused(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)
    cache = cache_on(model, deterministic=False)
    answer = cache.generate(ids(60), **greedy(40))  # it crosses the limit, as transformers' own
    assert torch.equal(answer.sequences, model.generate(ids(60), **greedy(40)).sequences)
    with pytest.raises(PromptError, match="frequencies"):
        cache.generate(answer.sequences, **greedy())
    assert cache.explain(answer.sequences).usable_hit <= 64
    turn = torch.cat([answer.sequences[:, :50], ids(10, 1)], 1)
    assert_close(cache.generate(turn, **greedy(2)), model.generate(turn, **greedy(2)))
    assert cache.explanations[0].usable_hit == 48
    assert_nothing_held(cache)


# Weights and settings


def load_other_weights(model: Any) -> None:
    model.load_state_dict(tiny_model("qwen3_5_text", seed=1).state_dict())


def take_a_step(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=ids(8), labels=ids(8)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def replace_a_parameter(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(weight.detach() * 1.5)


def assign_data(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data * 1.5


def assign_a_view_of_itself(model: Any) -> None:
    weight = model.model.layers[1].self_attn.o_proj.weight  # square
    weight.data = weight.data.t()


def parametrize(model: Any) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 1.5 * weight

    torch.nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Scaled())


def replace_a_module(model: Any) -> None:
    other = copy.deepcopy(model.model.layers[0].mlp)
    with torch.no_grad():
        other.up_proj.weight *= 1.5
    model.model.layers[0].mlp = other


def change_precision(model: Any) -> None:
    model.bfloat16()


def change_precision_twice(model: Any) -> None:
    model.bfloat16().float()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        load_other_weights,
        take_a_step,
        replace_a_parameter,
        assign_data,
        assign_a_view_of_itself,
        parametrize,
        replace_a_module,
        change_precision,
        change_precision_twice,
    ],
)
def test_what_former_weights_computed_is_not_used(
    model: Any, change: Callable[[Any], None], deterministic: bool
) -> None:
    cache = cache_on(model, deterministic=deterministic)
    cache.generate(ids(70), **greedy())
    pin = cache.pin(ids(70))
    change(model)
    assert cache.explain(ids(70)).usable_hit == 0
    found = cache.generate(ids(70), **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert_same(found, cache_on(model, deterministic=deterministic).generate(ids(70), **greedy()))
    if deterministic:
        assert_same(cache.generate(ids(70), **greedy()), found)
    assert cache.explain(ids(70)).usable_hit == 64
    if pin is not None and change is not change_precision:
        cache.unpin(pin)
    assert_nothing_held(cache)


def test_weights_that_are_replaced_are_freed_at_once(model: Any) -> None:
    cache = cache_on(model)
    cache.generate(ids(20), **greedy())
    former = [weakref.ref(weight) for weight in model.model.layers[0].mlp.parameters()]
    replace_a_module(model)
    model.model.layers[1].self_attn.o_proj.weight = torch.nn.Parameter(torch.ones(32, 32))
    assert all(weight() is None for weight in former)
    cache.generate(ids(20), **greedy())
    assert cache.explanations[0].usable_hit == 0


def test_a_model_that_did_not_change_keeps_what_is_cached(model: Any) -> None:
    """Reading weights, sharing them and computing with gradients change nothing."""
    cache = cache_on(model)
    cache.generate(ids(70), **greedy())
    model(input_ids=ids(8), labels=ids(8)).loss.backward()
    model.zero_grad()
    model.to("cpu", torch.float32).eval()
    torch.nn.utils.parameters_to_vector(model.parameters())
    cache.generate(ids(70), **greedy())
    assert cache.explanations[0].usable_hit == 64


def test_another_attention_implementation_has_its_own_prefixes(model: Any) -> None:
    cache = cache_on(model)
    first = cache.generate(ids(70), **greedy())
    model.set_attn_implementation("eager")
    found = cache.generate(ids(70), **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert_same(found, cache_on(model).generate(ids(70), **greedy()))
    model.set_attn_implementation("sdpa")
    assert_same(cache.generate(ids(70), **greedy()), first)
    assert cache.explanations[0].usable_hit == 64


def test_a_session_during_which_the_model_changed_is_not_cached(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    with cache.session(ids(40)) as past:
        load_other_weights(model)
        output = model.generate(ids(40), **past.as_argument, **greedy(30))
        with pytest.raises(RequestError, match="has changed"):
            past.rewind(20)
    assert cache.explain(torch.cat([output.sequences, ids(5)], 1)).usable_hit == 0
    assert_nothing_held(cache)


# Adapters


@pytest.fixture
def adapters() -> Any:
    """A PEFT model with the adapters "default" and "other"."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["up_proj", "q_proj", "in_proj_qkv"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen3_5_text"), config)
    model.add_adapter("other", config)
    return model.eval()


def test_each_adapter_has_its_own_prefixes(adapters: Any) -> None:
    cache = cache_on(adapters)
    found: dict[str, Any] = {}
    for round_number in range(2):
        for name in ("default", "other"):
            adapters.set_adapter(name)
            output = cache.generate(ids(70), **greedy())
            assert cache.explanations[0].usable_hit == (64 if round_number else 0)
            assert_same(output, found.setdefault(name, output))
            assert_close(output, adapters.generate(ids(70), **greedy()))
        with adapters.disable_adapter():
            output = cache.generate(ids(70), **greedy())
            assert cache.explanations[0].usable_hit == (64 if round_number else 0)
            assert_same(output, found.setdefault("none", output))
    assert not torch.equal(found["default"].logits[0], found["other"].logits[0])
    assert_nothing_held(cache)


def test_an_adapter_that_is_added_or_merged_changes_the_weights(adapters: Any) -> None:
    import peft

    cache = cache_on(adapters)
    cache.generate(ids(70), **greedy())
    adapters.add_adapter("third", peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    adapters.set_adapter("third")
    cache.generate(ids(70), **greedy())
    assert cache.explanations[0].usable_hit == 0
    adapters.merge_adapter()
    found = cache.generate(ids(70), **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert_close(found, adapters.generate(ids(70), **greedy()))


def test_a_session_of_a_wrapped_model_is_followed(adapters: Any) -> None:
    compiled = torch.compile(tiny_model("qwen3_5_text"), backend="eager")
    for model in (adapters, compiled):
        cache = cache_on(model, deterministic=False)
        with cache.session(ids(40)) as past:
            output = model.generate(ids(40), **past.as_argument, **greedy(30))
            assert past.known_rows() == output.sequences[:, :-1].tolist()
            with torch.no_grad():
                model(input_ids=torch.cat([output.sequences[:, -1:], ids(10, 1)], 1), **past.as_argument)
        assert past.known_rows() == torch.cat([output.sequences, ids(10, 1)], 1).tolist()
        assert cache.explain(torch.cat([output.sequences, ids(10, 1), ids(5)], 1)).usable_hit == 80
        assert_nothing_held(cache)


@pytest.mark.parametrize("fails", ["memory", "bookkeeping"])
def test_a_cache_without_memory_for_a_changed_model_has_it_later(
    model: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    cache = cache_on(model, deterministic=True)
    cache.generate(ids(70), **greedy())

    def refused(*args: Any, **more: Any) -> Any:
        raise MemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(f"hybrid.hf.prefix_cache.{'PageMemory' if fails == 'memory' else 'HybridCache'}", refused)
        model.bfloat16()
        for call in (cache.generate, cache.explain, cache.pin):
            with pytest.raises(MemoryError, match="planted"):
                call(ids(70))
        with pytest.raises(MemoryError, match="planted"):
            cache.audit()
        assert cache.stats().pages_cached > 0
    found = cache.generate(ids(70), **greedy())
    assert cache.explanations[0].usable_hit == 0
    assert_same(cache.generate(ids(70), **greedy()), found)
    assert cache.explanations[0].usable_hit > 0
    assert_nothing_held(cache)
