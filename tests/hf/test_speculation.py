"""`hybrid.hf.PrefixCache` with drafts from the cache, prompt lookup and assistant models: the same answers."""

import gc
import sys
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessor, TextStreamer

from hybrid import ArgumentError, Drafter, History, SpeculationConfig
from hybrid.speculation.speculator import Speculator
from support.drafters import Scripted, chain
from support.hf import SUPPORTED, VOCAB, assert_nothing_held, assert_same, cache_on, greedy, ids, tiny_model

WAYS: list[dict[str, Any]] = [
    {"speculation": "cache"},
    {"speculation": SpeculationConfig(drafters=("cache",), adaptive=False)},
    {"prompt_lookup_num_tokens": 5},
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3_5_text")


def assert_equal(one: Any, other: Any) -> None:
    """The same tokens, and logits within rounding."""
    assert torch.equal(one.sequences, other.sequences)
    for a, b in zip(one.logits, other.logits, strict=True):
        assert float((a - b).abs().max()) <= 1e-4 * float(b.abs().max())


def half_right(answer: list[int], prompt_len: int, step: int = 3) -> Scripted:
    """Drafts the known answer, with a wrong token at every position that is a multiple of `step`."""

    def script(history: Any, limit: int) -> Any:
        at = len(history) - prompt_len
        known = answer[at : at + limit]
        return chain([token if (at + n) % step else (token + 1) % VOCAB for n, token in enumerate(known)])

    return Scripted(script)


def lies(history: Any, limit: int) -> Any:
    """Every way to be wrong, one after the other."""
    n = len(history)
    return [
        chain([n % VOCAB] * limit),
        chain([VOCAB]),
        chain([-1]),
        chain(list(range(3, 60))),
        ([4, 4, 5], [-1, -1, 0]),
        ([4, 5], [1, 0]),
        ([4], [-1, 0]),
        "four",
        None,
        ([4.5], [-1]),
    ][n % 10]


@pytest.mark.parametrize("name", SUPPORTED)
def test_answers_are_the_same_with_drafts(name: str) -> None:
    model = tiny_model(name)
    cache = cache_on(model, deterministic=False)
    expected = model.generate(ids(70), **greedy(14))
    half = SpeculationConfig(drafters=(half_right(expected.sequences[0, 70:].tolist(), 70),), adaptive=False)
    for options in (
        {"speculation": half},
        {"speculation": "cache"},
        {"assistant_model": tiny_model(name, 1), "assistant_confidence_threshold": 0.0, "num_assistant_tokens": 4},
    ):
        output = cache.generate(ids(70), **greedy(14), **options)
        assert_equal(output, expected)
        assert output.past_key_values.get_seq_length() == 83
        assert_nothing_held(cache)
    stats = cache.speculation_stats()
    assert all(stats[drafter].accepted_tokens > 0 for drafter in ("Scripted", "continuation"))
    assert stats["Scripted"].accepted_tokens < stats["Scripted"].drafted_tokens
    assert all(drafter.refused == 0 for drafter in stats.values())
    turn = torch.cat([expected.sequences, ids(20, 1)], 1)
    found, plain = cache.generate(turn, **greedy(4)), model.generate(turn, **greedy(4))
    assert cache.explanations[0].usable_hit == 80
    assert_equal(found, plain)


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 3.0, "top_k": 0}, {"top_p": 0.9, "repetition_penalty": 1.3}])
def test_sampled_tokens_are_those_of_the_same_seed_without_drafts(
    model: Any, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    cache = cache_on(model, deterministic=False)
    prompt = torch.cat([ids(20)] * 3, 1)
    torch.manual_seed(0)
    expected = model.generate(prompt, do_sample=True, max_new_tokens=40, **sampling)
    for _ in range(2):
        torch.manual_seed(0)
        found = cache.generate(prompt, do_sample=True, max_new_tokens=40, **sampling, **options)
        assert torch.equal(found, expected)
    assert sum(drafter.drafted_tokens for drafter in cache.speculation_stats().values()) > 0
    assert_nothing_held(cache)


def test_a_drafter_that_lies_changes_nothing(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    config = SpeculationConfig(drafters=(Scripted(lies),), adaptive=False)
    expected = model.generate(ids(70), **greedy(60))
    assert_equal(cache.generate(ids(70), **greedy(60), speculation=config), expected)
    stats = cache.speculation_stats()["Scripted"]
    assert stats.refused > 20
    assert stats.drafted_tokens > 20
    assert_nothing_held(cache)


def test_drafts_save_passes(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    first = cache.generate(ids(64), **greedy(49))
    lengths.clear()
    config = SpeculationConfig(drafters=("cache",), adaptive=False)
    assert torch.equal(cache.generate(ids(64), **greedy(49), speculation=config).sequences, first.sequences)
    hook.remove()
    assert len(lengths) <= 2 + 48 // 7  # of up to 7 drafts, and none beyond a boundary
    assert cache.speculation_stats()["continuation"].accepted_tokens >= 40


def test_what_was_not_accepted_is_computed_again_and_never_without_bound(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    lengths: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    wrong = Scripted(lambda history, limit: chain([0] * limit))
    cache.generate(ids(64), **greedy(60), speculation=SpeculationConfig(drafters=(wrong,), adaptive=False))
    hook.remove()
    assert lengths[:2] == [48, 16]
    assert max(lengths[2:]) == 16
    assert len(lengths) <= 2 + 59 + 2
    assert_nothing_held(cache)


# What happens inside drafts


def known_answer(model: Any, count: int = 40) -> tuple[Any, SpeculationConfig]:
    """An answer, and drafts of it."""
    expected = model.generate(ids(70), **greedy(count))
    drafter = half_right(expected.sequences[0, 70:].tolist(), 70, step=1000)
    return expected, SpeculationConfig(drafters=(drafter,), adaptive=False)


@pytest.mark.parametrize("end", range(2, 12, 3))
def test_an_end_token_inside_drafts_ends_the_answer(model: Any, end: int) -> None:
    expected, config = known_answer(model)
    token = int(expected.sequences[0, 70 + end])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": token, "pad_token_id": 2}
    plain = model.generate(ids(70), **options)
    cache = cache_on(model, deterministic=False)
    assert torch.equal(cache.generate(ids(70), **options, speculation=config), plain)
    assert cache.explain(torch.cat([expected.sequences, ids(5)], 1)).page_hit <= plain.shape[1]
    assert_nothing_held(cache)


def test_a_stop_string_inside_drafts_ends_the_answer(model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "tiny")
    expected, config = known_answer(model)
    stop = tokenizer.decode(expected.sequences[0, 75:76])
    for options in (
        {"stop_strings": stop, "max_new_tokens": 40},
        {"generation_config": GenerationConfig(stop_strings=stop, max_new_tokens=40)},
    ):
        plain = model.generate(ids(70), tokenizer=tokenizer, **options)
        assert plain.shape[1] < 110
        found = cache_on(model, deterministic=False).generate(
            ids(70), tokenizer=tokenizer, speculation=config, **options
        )
        assert torch.equal(found, plain)


@pytest.mark.parametrize("count", range(1, 12))
def test_an_answer_has_as_many_tokens_as_asked_for(model: Any, count: int) -> None:
    expected, config = known_answer(model)
    cache = cache_on(model, deterministic=False)
    found = cache.generate(ids(70), **greedy(count), speculation=config)
    assert torch.equal(found.sequences, expected.sequences[:, : 70 + count])
    assert len(found.logits) == count
    assert found.past_key_values.get_seq_length() == 69 + count


def test_a_processor_with_state_sees_each_token_once(model: Any) -> None:
    class Counting(LogitsProcessor):
        def __init__(self) -> None:
            self.lengths: list[int] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.lengths.append(input_ids.shape[1])
            scores[:, (7 * len(self.lengths)) % VOCAB] += 100.0
            return scores

    plain, drafted = Counting(), Counting()
    expected = model.generate(ids(70), **greedy(30), logits_processor=[plain])
    _, config = known_answer(model)
    cache = cache_on(model, deterministic=False)
    found = cache.generate(ids(70), **greedy(30), logits_processor=[drafted], speculation=config)
    assert torch.equal(found.sequences, expected.sequences)
    assert drafted.lengths == plain.lengths == list(range(70, 100))


def test_a_streamer_receives_every_token(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "tiny")
    expected, config = known_answer(model)
    cache_on(model, deterministic=False).generate(
        ids(70), **greedy(40), speculation=config, streamer=TextStreamer(tokenizer, skip_prompt=True)
    )
    assert capsys.readouterr().out.strip() == tokenizer.decode(expected.sequences[0, 70:]).strip()


def test_a_padded_prompt_and_a_returned_past_work_with_drafts(model: Any) -> None:
    prompt, mask = ids(70), torch.ones(1, 70, dtype=torch.long)
    prompt[:, :11], mask[:, :11] = 0, 0
    cache = cache_on(model, deterministic=False)
    expected = model.generate(prompt, attention_mask=mask, **greedy(30))
    for options in WAYS:
        assert_equal(cache.generate(prompt, attention_mask=mask, **greedy(30), **options), expected)
    first = cache.generate(ids(70), **greedy(30), speculation="cache")
    turn = torch.cat([first.sequences, ids(9, 1)], 1)
    found = cache.generate(turn, past_key_values=first.past_key_values, **greedy(30), speculation="cache")
    assert cache.explanations[0].usable_hit == 99
    assert_equal(found, model.generate(turn, **greedy(30)))
    assert_nothing_held(cache)


# Where drafts come from


def test_no_draft_crosses_a_namespace(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    config = SpeculationConfig(drafters=("cache",), adaptive=False)
    prompt = torch.arange(3, 73).unsqueeze(0)  # no token twice
    expected = cache.generate(prompt, **greedy(30), namespace="a")
    for namespace, drafts in (("b", False), ("a", True)):
        assert torch.equal(
            cache.generate(prompt, **greedy(8), namespace=namespace, speculation=config).sequences,
            expected.sequences[:, :78],
        )
        assert (cache.speculation_stats()["continuation"].drafted_tokens > 0) == drafts


def test_what_former_weights_answered_is_not_drafted() -> None:
    model = tiny_model("qwen3_5_text")
    cache = cache_on(model, deterministic=False)
    config = SpeculationConfig(drafters=("cache",), adaptive=False)
    cache.generate(ids(70), **greedy(30), speculation=config)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    expected = model.generate(ids(70), **greedy(30))
    assert_equal(cache.generate(ids(70), **greedy(30), speculation=config), expected)
    assert cache.speculation_stats()["continuation"].drafted_tokens == 0


def test_an_assistant_that_is_the_model_itself_is_always_right(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    expected = model.generate(ids(70), **greedy(30))
    found = cache.generate(
        ids(70), **greedy(30), assistant_model=tiny_model("qwen3_5_text"), assistant_confidence_threshold=0.0
    )
    assert_equal(found, expected)
    stats = cache.speculation_stats()["assistant"]
    assert stats.accepted_tokens == stats.drafted_tokens > 20


def test_a_hit_is_bitwise_a_cold_run_with_the_drafts_of_a_prompt(model: Any) -> None:
    """In deterministic mode; they depend on the tokens alone."""
    prompt = torch.cat([ids(20)] * 4, 1)
    for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": tiny_model("qwen3_next")}):
        cache = cache_on(model)
        cold = cache.generate(prompt, **greedy(30), **options)
        assert_same(cache.generate(prompt, **greedy(30), **options), cold)
        assert cache.explanations[0].usable_hit == 64
        assert_equal(cold, model.generate(prompt, **greedy(30)))
        assert_nothing_held(cache)


def test_an_installed_cache_drafts(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    expected = model.generate(ids(70), **greedy(30))
    cache.install(speculation="cache")
    try:
        for _ in range(2):
            assert_equal(model.generate(ids(70), **greedy(30)), expected)
        assert_equal(model.generate(ids(70), **greedy(30), prompt_lookup_num_tokens=3), expected)
    finally:
        cache.uninstall()
    stats = cache.speculation_stats()
    assert stats["continuation"].accepted_tokens > 0
    assert stats["prompt_lookup"].drafted_tokens > 0


def test_several_sequences_are_computed_without_drafts(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    for options in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        cache.generate(ids(40), max_new_tokens=5, speculation="cache", **options)
    cache.generate(ids(40, rows=2), max_new_tokens=5, speculation="cache")
    assert cache.speculation_stats() == {}
    for options in ({"num_beams": 2}, {"inputs": ids(40, rows=2)}):
        with pytest.raises(ArgumentError, match="one sequence"):
            cache.generate(**{"inputs": ids(40), "prompt_lookup_num_tokens": 3, **options})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"speculation": "mind reading"}, "drafters must each be one of cache"),
        ({"speculation": 7}, "must be None, the name of a drafter"),
        ({"speculation": "cache+mtp"}, "Engine alone runs"),
        ({"prompt_lookup_num_tokens": 0}, "integer from 1"),
        ({"prompt_lookup_num_tokens": True}, "prompt_lookup_num_tokens must be an integer"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1}, "max_matching_ngram_size must be an integer"),
        (
            {"assistant_model": tiny_model("llama"), "num_assistant_tokens": 0},
            "num_assistant_tokens must be an integer",
        ),
        ({"prompt_lookup_num_tokens": 3, "dola_layers": "high"}, "dola_layers asks for another search"),
        ({"assistant_model": tiny_model("llama"), "penalty_alpha": 0.6}, "penalty_alpha asks for another search"),
        ({"assistant_model": object()}, "a model of transformers, got object"),
        ({"assistant_model": tiny_model("llama", vocab_size=64)}, "the same tokenizer"),
        ({"use_mtp": True}, "does not work with a prefix cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_drafts_that_cannot_be_are_refused(model: Any, options: dict[str, Any], reason: str) -> None:
    cache = cache_on(model, deterministic=False)
    with pytest.raises(ArgumentError, match=reason):
        cache.generate(ids(40), max_new_tokens=4, **options)
    assert_nothing_held(cache)


@pytest.mark.parametrize(
    "options", [{"penalty_alpha": 0.6, "top_k": 4}, {"dola_layers": "high"}, {"force_words_ids": [[5]]}], ids=str
)
def test_searches_that_are_neither_greedy_nor_sampled_are_those_of_transformers(
    model: Any, options: dict[str, Any]
) -> None:
    """Transformers loads them if it may; with drafts they are not answered greedily."""
    cache = cache_on(model, deterministic=False)
    for more in ({}, {"speculation": "cache"}):
        with pytest.raises(ValueError, match="trust_remote_code"):
            cache.generate(ids(40), max_new_tokens=4, do_sample=False, **options, **more)
    assert_nothing_held(cache)


def test_a_predictor_is_refused_when_a_cache_is_installed(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    with pytest.raises(ArgumentError, match="Engine alone runs"):
        cache.install(speculation="mtp")
    assert "generate" not in vars(model)


def test_a_deterministic_cache_drafts_nothing_from_what_it_holds(model: Any) -> None:
    cache = cache_on(model)
    with pytest.raises(ArgumentError, match="deterministic=False"):
        cache.generate(ids(40), max_new_tokens=4, speculation="cache")
    with pytest.raises(ArgumentError, match="deterministic=False"):
        cache.install(speculation="cache")
    assert "generate" not in vars(model)


def test_a_pass_over_drafts_that_fails_leaves_nothing_behind(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    calls = 0

    def script(history: Any, limit: int) -> Any:
        return chain([5] * limit)

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += kwargs["input_ids"].shape[1] > 1
        if calls == 9:
            raise RuntimeError("out of memory")

    config = SpeculationConfig(drafters=(Scripted(script),), adaptive=False)
    hook = model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.generate(ids(70), **greedy(30), speculation=config)
    hook.remove()
    assert_nothing_held(cache)
    assert_equal(cache.generate(ids(70), **greedy(30), speculation=config), model.generate(ids(70), **greedy(30)))


def test_a_pass_is_timed_by_what_it_computes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by what else the machine does meanwhile: here it sleeps."""
    seconds: list[float] = []
    timed = Speculator.timed

    def noted(self: Speculator, rows: int, spent: float, drafts: int = 0) -> None:
        seconds.append(spent)
        timed(self, rows, spent, drafts)

    monkeypatch.setattr(Speculator, "timed", noted)
    hook = model.register_forward_hook(lambda *_: time.sleep(0.1))
    cache_on(model, deterministic=False).generate(ids(10), speculation="cache", **greedy(4))
    hook.remove()
    assert len(seconds) == 3
    assert max(seconds) < 0.09


def test_each_call_asks_its_own_drafter_though_another_one_is_equal(model: Any) -> None:
    @dataclass
    class Counting(Drafter):  # which makes it equal to others, and not hashable
        calls: list[int] = field(default_factory=list, compare=False)

        def propose(self, history: History, limit: int) -> tuple[list[int], list[int]]:
            self.calls.append(limit)
            return [4], [-1]

    cache, drafters = cache_on(model, deterministic=False), [Counting(), Counting()]
    for drafter in (*drafters, drafters[0]):
        config = SpeculationConfig(drafters=(drafter,), adaptive=False)
        cache.generate(ids(10), speculation=config, **greedy(4))
    assert [len(drafter.calls) for drafter in drafters] == [4, 2]


@pytest.mark.usefixtures("untraced")  # 40 calls through the same lines
def test_a_drafter_of_its_own_for_each_call_is_not_kept_for_ever(model: Any) -> None:
    cache, made = cache_on(model, deterministic=False), []
    for _ in range(40):
        drafter = Scripted(lambda history, limit: chain([4]))
        made.append(weakref.ref(drafter))
        config = SpeculationConfig(drafters=(drafter,), adaptive=False)
        cache.generate(ids(10), speculation=config, **greedy(3))
        del drafter, config
    gc.collect()
    assert sum(drafter() is not None for drafter in made) == 16
    assert cache.speculation_stats()["Scripted"].proposals == 40


def test_the_counts_of_drafters_may_be_read_while_others_generate(model: Any) -> None:
    cache = cache_on(model, deterministic=False)
    failed: list[BaseException] = []
    interval = sys.getswitchinterval()

    def generate() -> None:
        for _ in range(10):
            config = SpeculationConfig(drafters=(Scripted(lambda history, limit: chain([4])),), adaptive=False)
            cache.generate(ids(10), speculation=config, **greedy(3))

    def read() -> None:
        try:
            while generating.is_alive():
                cache.speculation_stats()
        except BaseException as error:
            failed.append(error)

    generating, reading = threading.Thread(target=generate), threading.Thread(target=read)
    sys.setswitchinterval(1e-6)
    try:
        generating.start()
        reading.start()
        generating.join()
        reading.join()
    finally:
        sys.setswitchinterval(interval)
    assert failed == []
    assert cache.speculation_stats()["Scripted"].proposals == 10
