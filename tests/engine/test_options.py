"""The options of requests: what each does, and that hits, overlap and retraction do not change its answers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hybrid
from hybrid import Engine, EngineConfig, PromptError, SamplingError, SamplingParams
from hybrid.engine.build import generation_defaults
from hybrid.engine.constraints import Constraints, Edits
from hybrid.engine.sampler import NO_TOKEN, choose
from hybrid.models.loading import open_checkpoint
from hybrid.prompts.encode import load_tokenizer
from hybrid.tree.node import Tenant
from support.engines import (
    GRID,
    answer,
    assert_nothing_held,
    engine_on,
    greedy,
    ids,
    no_even_tokens,
    not_twice_in_a_row,
    run_to_end,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.3},
    "sampled": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 1.5, "seed": 5, "top_p": 0.9},
    "bias": {"logit_bias": {7: 40.0, "11": 39.5, 3: -100}},
    "bad words": {"bad_words": ["e", "the", " a"]},
    "minimum": {"min_tokens": 10, "ignore_eos": False, "stop_token_ids": list(range(3, 500))},
    "functions": {"logits_processors": [no_even_tokens, not_twice_in_a_row]},
}


@pytest.fixture(scope="module")
def expected(tiny: Engine) -> dict[str, list[list[int]]]:
    """The answers of an engine that keeps nothing, each computed alone."""
    engine = engine_on(tiny, pages=256, enabled=False)
    prompts = [ids(2 * GRID + 5, seed=n) for n in range(3)]
    return {name: [answer(engine, p, params_of(name)).token_ids for p in prompts] for name in OPTIONS}


def params_of(name: str, count: int = 20) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": count, "ignore_eos": True, **OPTIONS[name]})


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_answers_do_not_depend_on_hits_overlap_and_retraction(
    tiny: Engine, expected: dict[str, list[list[int]]], name: str, overlap: bool
) -> None:
    engine = engine_on(tiny, pages=10, states=12, overlap=overlap)
    prompts = [ids(2 * GRID + 5, seed=n) for n in range(3)]
    found = engine.generate(prompts, params_of(name), progress=False)
    assert [output.token_ids for output in found] == expected[name]
    assert name == "minimum" or engine.scheduler.num_retractions > 0
    again = answer(engine, prompts[0], params_of(name))
    assert again.usage.cached_tokens > 0
    assert again.token_ids == expected[name][0]
    assert_nothing_held(engine)


def test_every_option_changes_the_answer(tiny: Engine, expected: dict[str, list[list[int]]]) -> None:
    plain = answer(engine_on(tiny), ids(2 * GRID + 5), greedy(20)).token_ids
    for name, answers in expected.items():
        assert answers[0] != plain, name
        assert set(answers[0]) != {answers[0][0]} or name == "bias", name


def test_different_options_in_one_batch_do_not_meet(tiny: Engine, expected: dict[str, list[list[int]]]) -> None:
    engine = engine_on(tiny, pages=256, states=64)
    prompt = ids(2 * GRID + 5)
    plain = answer(engine, prompt, greedy(20)).token_ids
    found = engine.generate([prompt] * 9, [*map(params_of, OPTIONS), greedy(20)], progress=False)
    assert [output.token_ids for output in found] == [*(answers[0] for answers in expected.values()), plain]


# What each does, by its definition


LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0, 1.0, -2.0]])


def edited(params: SamplingParams, prompt: list[int], answer: list[int], **more: Any) -> list[float]:
    constraints = Constraints(params, prompt, frozenset(), **more)
    for token in answer:
        constraints.accept(token)
    edits = Edits.of([constraints.after()])
    assert edits is not None
    return edits.apply(LOGITS)[0].tolist()


def test_penalties_are_those_of_their_definition() -> None:
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0)
    found = edited(params, [0, 1], [3, 3, 5])
    assert found == [2.0 / 2, -1.0 * 2, 0.5, 3.0 / 2 - 0.5 - 2 * 0.25, 1.0, -2.0 * 2 - 0.5 - 0.25]


def test_penalties_agree_with_those_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    prompt, said = [0, 1], [3, 3, 5]
    theirs = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *said]]), LOGITS.clone())
    torch.testing.assert_close(torch.tensor([edited(SamplingParams(repetition_penalty=1.7), prompt, said)]), theirs)


def test_bias_comes_before_penalties_and_exclusions_come_last() -> None:
    params = SamplingParams(logit_bias={1: 3.0}, repetition_penalty=2.0, logits_processors=[lambda _, row: row + 1])
    assert edited(params, [1], [], bad_words=[[0]]) == [-torch.inf, (-1.0 + 3.0) / 2 + 1, 1.5, 4.0, 2.0, -1.0]


def test_a_bad_word_of_several_tokens_excludes_its_last_one_after_the_others() -> None:
    constraints = Constraints(SamplingParams(), [2, 4], frozenset(), [[2, 4, 1]])
    assert constraints.after().excluded == []  # the prompt does not count
    assert constraints.after([2, 4]).excluded == [1]
    assert constraints.after([4, 2]).excluded == []


def test_asking_along_a_path_of_drafts_changes_nothing() -> None:
    """Row i of a path is what the request would do had it accepted the tokens before it."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.1, repetition_penalty=1.5, min_tokens=3)
    words = [[4, 5]]

    def rows(constraints: Constraints, drafts: list[int]) -> list[float]:
        edits = Edits.of([constraints.after(drafts)])
        assert edits is not None
        return edits.apply(LOGITS)[0].tolist()

    asked, path = Constraints(params, [0], frozenset([2]), words), [4, 5, 4, 4]
    before = [rows(asked, path[:n]) for n in range(5)]
    walked = Constraints(params, [0], frozenset([2]), words)
    for n in range(5):
        assert rows(walked, []) == before[n] == rows(asked, path[:n])
        if n < 4:
            walked.accept(path[n])


def test_rows_without_a_token_left_are_recognised() -> None:
    params = SamplingParams(logits_processors=[lambda _, row: row * float("nan")])
    rows = [Constraints(SamplingParams(), [], frozenset(range(6))), Constraints(params, [], frozenset())]
    edits = Edits.of(
        [None, Constraints(SamplingParams(min_tokens=1), [], frozenset(range(6))).after(), rows[1].after()]
    )
    assert edits is not None
    assert choose(LOGITS.expand(3, -1), edits, None).tokens.tolist() == [3, NO_TOKEN, NO_TOKEN]


def test_a_request_without_a_token_left_ends_and_the_others_do_not(tiny: Engine) -> None:
    engine = engine_on(tiny)
    none_left = greedy(8, logits_processors=[lambda _, row: row * float("nan")])
    wrong = greedy(8, logits_processors=[lambda _, row: row[:5]])
    prompts = [ids(2 * GRID, seed=n) for n in range(3)]
    first, second, third = engine.generate(prompts, [none_left, greedy(8), wrong], progress=False)
    assert first.finish_reason == third.finish_reason == "error"
    assert first.error is not None
    assert "no token can be chosen" in first.error
    assert third.error is not None
    assert "must return the row of logits, [1024]" in third.error
    assert second.token_ids == answer(engine, prompts[1], greedy(8)).token_ids
    assert_nothing_held(engine)


def test_bad_words_are_not_in_the_text(tiny: Engine) -> None:
    plain = answer(engine_on(tiny), "The module is", greedy(40)).text
    word = max(plain.split(), key=len)
    text = answer(engine_on(tiny), "The module is", greedy(40, bad_words=word)).text
    assert word in plain.split()
    assert word not in text.split()


def test_an_answer_has_its_minimum_of_tokens_whatever_would_end_it(tiny: Engine) -> None:
    engine = engine_on(tiny)
    plain = answer(engine, ids(GRID), greedy(30))
    stop, end = plain.text[:2], plain.token_ids[0]
    assert answer(engine, ids(GRID), greedy(30, stop=stop)).usage.completion_tokens < 5
    longer = answer(engine, ids(GRID), greedy(30, stop=stop, stop_token_ids=[end], min_tokens=20))
    assert longer.usage.completion_tokens >= 20
    assert end not in longer.token_ids[:20]


def test_without_detokenizing_there_is_no_text(tiny: Engine) -> None:
    engine = engine_on(tiny)
    output = answer(engine, ids(GRID), greedy(8, detokenize=False))
    assert output.text == ""
    assert output.token_ids == answer(engine, ids(GRID), greedy(8)).token_ids


# Prompts


def test_prompts_may_be_dicts_and_arrays(tiny: Engine) -> None:
    engine = engine_on(tiny)
    tokens = engine.tokenizer("The import statement").input_ids
    forms: list[Any] = [
        "The import statement",
        {"prompt": "The import statement"},
        {"prompt_token_ids": tokens},
        {"prompt_token_ids": np.array(tokens)},
        np.array(tokens, np.int32),
        {"prompt": tokens},
    ]
    outputs = engine.generate(forms, greedy(4), progress=False)
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(tokens)}
    assert engine.generate({"prompt": "The import statement"}, greedy(4), progress=False)[0].text == outputs[0].text


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "a", "prompt_token_ids": [1]},
        {"prompt": "a", "tools": []},
        {"prompt_token_ids": [1], "cache_salt": "x"},
        {"messages": [], "temperature": 1},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": ["enable_thinking"]},
        {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tokenize": True}},
    ],
)
def test_a_dict_that_is_no_prompt_is_refused(tiny: Engine, prompt: dict[str, Any]) -> None:
    with pytest.raises(PromptError):
        engine_on(tiny).generate([prompt], greedy(4), progress=False)


def test_the_chat_template_gets_tools_and_variables(copy: Path) -> None:
    file = copy / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m['content'] }};{% endfor %}{% for t in tools or [] %}<{{ t['name'] }}>{% endfor %}"
        "{% if not enable_thinking | default(true) %}quiet{% endif %}{% if add_generation_prompt %}:{% endif %}"
    )
    file.write_text(json.dumps(config))
    engine = Engine.from_pretrained(copy, device="cpu", cache=hybrid.CacheConfig(memory="8MiB", page_size=16))
    messages = [{"role": "user", "content": "hi"}]

    def text_of(**more: Any) -> str:
        output = answer(engine, {"messages": messages, **more}, greedy(1))
        return str(engine.tokenizer.decode(output.prompt_token_ids))

    assert text_of() == "hi;:"
    assert text_of(tools=[{"name": "look"}]) == "hi;<look>:"
    assert text_of(chat_template_kwargs={"enable_thinking": False}) == "hi;quiet:"
    assert text_of(add_generation_prompt=False) == "hi;"
    own = "{{ messages[0]['role'] }}"
    for more in ({"chat_template": own}, {"chat_template_kwargs": {"chat_template": own}}):
        with pytest.raises(PromptError, match="prompt_templates=True"):
            text_of(**more)
        allowed = engine.with_cache(engine.cache.config, config=EngineConfig(prompt_templates=True))
        output = answer(allowed, {"messages": messages, **more}, greedy(1))
        assert engine.tokenizer.decode(output.prompt_token_ids) == "user"


def test_a_long_prompt_is_truncated_to_its_last_tokens(tiny: Engine) -> None:
    engine, prompt = engine_on(tiny), ids(5 * GRID)
    output = answer(engine, prompt, greedy(4, truncate_prompt_tokens=20))
    assert output.prompt_token_ids == prompt[-20:]
    assert answer(engine, prompt[:10], greedy(4, truncate_prompt_tokens=20)).prompt_token_ids == prompt[:10]
    text = "The import statement combines two operations. " * 3
    tokens = engine.tokenizer(text).input_ids
    assert answer(engine, text, greedy(4, truncate_prompt_tokens=7)).prompt_token_ids == tokens[-7:]


def test_the_length_of_prompt_and_answer_can_be_limited(tiny: Engine) -> None:
    config = hybrid.CacheConfig(page_size=GRID, chunk_size=GRID)
    engine = tiny.with_cache(config, size=(64, 8), config=replace(tiny.config, max_model_len=50))
    output = answer(engine, ids(40), greedy(30))
    assert (output.usage.completion_tokens, output.finish_reason) == (10, "length")
    with pytest.raises(PromptError, match="takes 50"):
        answer(engine, ids(50), greedy(30))
    assert answer(engine, ids(200), greedy(4, truncate_prompt_tokens=-1)).usage.prompt_tokens == 49
    with pytest.raises(hybrid.ArgumentError, match="more than this model takes"):
        tiny.with_cache(config, size=(64, 8), config=replace(tiny.config, max_model_len=10**6))


# Scheduling


def test_of_one_namespace_lower_priorities_start_earlier(tiny: Engine) -> None:
    engine = engine_on(tiny, states=3)  # one request at a time
    order = {}
    for namespace, priority in [("a", 0), ("a", 5), ("a", -1), ("a", 5), ("b", 9)]:
        params = greedy(2, scheduling_priority=priority)
        order[engine.add_request(ids(GRID, seed=len(order)), params, namespace=namespace)] = (namespace, priority)
    ended = list(run_to_end(engine))
    assert [order[name] for name in ended if order[name][0] == "a"] == [("a", -1), ("a", 0), ("a", 5), ("a", 5)]
    assert [order[name] for name in ended].index(("b", 9)) <= 1  # the other client has its turn


def test_what_a_request_leaves_is_its_tenants_and_without_one_its_namespaces(tiny: Engine) -> None:
    engine = engine_on(tiny)
    for seed, (namespace, tenant, priority) in enumerate([("a", None, 0), ("a", "x", 3), ("b", "x", 0), ("b", "a", 0)]):
        answer(engine, ids(2 * GRID + 5, seed=seed), greedy(2, tenant=tenant, priority=priority), namespace=namespace)
    tenants: dict[str, set[Tenant | None]] = {"a": set(), "b": set()}
    for namespace, node in engine.cache.tree.nodes():
        if node.slot is not None:
            tenants[namespace].add(node.usage.tenant)
    assert tenants["a"] == tenants["b"], "a tenant is the same in all namespaces"
    assert sorted(tenant.has_priorities for tenant in tenants["a"] if tenant is not None) == [False, True]


# The checkpoint's own settings


def test_the_defaults_of_a_checkpoint_are_used_and_those_of_the_class_are_its_own(copy: Path) -> None:
    stated = {"do_sample": False, "repetition_penalty": 1.25, "max_new_tokens": 7, "min_new_tokens": 3}
    (copy / "generation_config.json").write_text(json.dumps(stated))
    engine = Engine.from_pretrained(copy, device="cpu", cache=hybrid.CacheConfig(memory="8MiB", page_size=16))
    assert engine.default_params == SamplingParams(max_new_tokens=7, repetition_penalty=1.25, min_tokens=3)
    prompt = list(range(10, 60))
    by_default = engine.generate([prompt], progress=False)[0].token_ids
    assert len(by_default) <= 7
    assert by_default == answer(engine, prompt, engine.default_params).token_ids
    assert answer(engine, prompt, greedy(12)).usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {True: 1}),
        ("bad_words", [""]),
        ("bad_words", 7),
        ("min_tokens", -1),
        ("min_tokens", 200),
        ("logits_processors", [3]),
        ("logits_processors", no_even_tokens),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("truncate_prompt_tokens", True),
        ("detokenize", "no"),
        ("scheduling_priority", 0.5),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=rf"^SamplingParams: {name}"):
        SamplingParams(**{name: value})


def test_options_that_contradict_each_other_or_the_checkpoint_are_refused(tiny: Engine) -> None:
    with pytest.raises(SamplingError, match="need detokenize=True"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(PromptError, match="logit_bias: token 5000 is outside the vocabulary"):
        answer(engine_on(tiny), ids(GRID), greedy(2, logit_bias={5000: 1}))


def test_arrays_and_numbers_of_numpy_are_lists_and_numbers() -> None:
    params = SamplingParams(
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(0.5)},
        presence_penalty=np.float64(0.5),
        min_tokens=np.int16(2),
        truncate_prompt_tokens=np.int64(9),
    )
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {3: 0.5}
    assert type(params.truncate_prompt_tokens) is int


@pytest.mark.parametrize(
    "more",
    [
        {"stop_token_ids": [1024]},
        {"logit_bias": {1024: 1.0}},
        {"logit_bias": {3: 1.0, 10**6: 1.0}},
        {"bad_words": ["strange"]},
    ],
    ids=str,
)
def test_a_token_beyond_the_logits_is_refused_when_its_request_is_added(
    tiny: Engine, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the tokenizer makes of a text, which may have more tokens than the model."""
    engine = engine_on(tiny)
    monkeypatch.setattr("hybrid.engine.request_builder.spellings", lambda tokenizer, word: [[3, 1600]])
    with pytest.raises(PromptError, match=f"{next(iter(more))}: token .* outside the vocabulary"):
        engine.add_request([5, 6], greedy(2, **more))
    assert not engine.has_work


def stored(copy: Path, name: str, **changes: Any) -> None:
    """Write entries into a file of a checkpoint; None removes one."""
    file = copy / name
    entries = {**(json.loads(file.read_text()) if file.exists() else {}), **changes}
    file.write_text(json.dumps({key: value for key, value in entries.items() if value is not None}))


def test_end_tokens_are_those_of_all_files_together(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Chat models whose generation config is absent, or names the end of a text alone, end turns by the tokenizer's."""
    config, tokenizer = open_checkpoint(copy).config, load_tokenizer(copy)
    end = tokenizer.eos_token_id
    caplog.set_level("INFO", "hybrid.engine.build")
    for stated, own, found in ((None, None, {end}), ([0], 5, {0, 5, end}), (0, [5, 6], {0, 5, 6, end})):
        stored(copy, "generation_config.json", eos_token_id=stated)
        config.eos_token_id = own
        assert generation_defaults(copy, config, tokenizer)[0] == found
        assert f"{end} (the tokenizer" in caplog.text
    config.eos_token_id = None
    stored(copy, "generation_config.json", eos_token_id=None)
    assert generation_defaults(copy, config, None)[0] == frozenset()
    assert "names no end token" in caplog.text
    assert Engine.from_pretrained(copy, cache=hybrid.CacheConfig(memory="8MiB")).loaded.end_tokens >= {end}


def test_a_top_k_of_minus_one_is_all_tokens(copy: Path) -> None:
    stored(copy, "generation_config.json", do_sample=True, top_k=-1)
    assert generation_defaults(copy, open_checkpoint(copy).config)[1].top_k == 0


def test_a_stop_text_may_be_a_control_token(copy: Path) -> None:
    engine = Engine.from_pretrained(copy, device="cpu", cache=hybrid.CacheConfig(memory="8MiB", page_size=16))
    name, start = "<|im_start|>", engine.tokenizer.convert_tokens_to_ids("<|im_start|>")
    for stop, at in ((name, 2), (f"{name}us", 2), ("zz", None)):
        letters = engine.tokenizer("abuser").input_ids
        wanted = [*letters[:2], start, *letters[2:], *letters, *letters]

        def said(answer: list[int], logits: torch.Tensor, wanted: list[int] = wanted) -> torch.Tensor:
            return torch.full_like(logits, -9.0).index_fill(0, torch.tensor(wanted[len(answer)]), 9.0)

        params = SamplingParams(max_new_tokens=9, ignore_eos=True, logits_processors=[said], stop=stop)
        output = answer(engine, [5, 6], params)
        text = engine.tokenizer.decode(wanted[: at or 9], skip_special_tokens=True)
        assert (output.text, output.finish_reason) == (text, "length" if at is None else "stop")
        shown = answer(engine, [5, 6], replace(params, stop=(), skip_special_tokens=False))
        assert shown.text == engine.tokenizer.decode(wanted[:9])
