"""Structured output: every answer follows its form, alone, in a batch, after a hit and after retraction."""

import json
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from hybrid import ArgumentError, Engine, SamplingError, SamplingParams
from hybrid.engine import forms
from hybrid.engine.constraints import Constraints, Edits
from hybrid.engine.forms import FormProcesses, Grammars
from hybrid.prompts.answer_parser import CALLS, XML_CALLS, AnswerParser
from hybrid.prompts.tool_grammar import call_grammar
from support.engines import GRID, answer, assert_nothing_held, engine_on, ids

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["map", "list"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
LARK = 'start: "[" item ("," item)* "]"\nitem: /[a-c]{2}/\n'
FORMS: list[dict[str, Any]] = [
    {"json_schema": SCHEMA},
    {"json_schema": json.dumps(SCHEMA)},
    {"json_object": True},
    {"regex": "[0-9]{3}-[a-f]+;"},
    {"grammar": LARK},
    {"choice": ["yes, it is", "no", 'ünknown "quoted"']},
]


def params_of(form: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(structured=form, max_new_tokens=100, **{"temperature": 0.8, "seed": 3, **more})


def follows(form: dict[str, Any], text: str) -> bool:
    """Tell whether a text follows a form, by something else than what excluded the tokens."""
    ((kind, value),) = form.items()
    if kind == "json_schema":
        found = json.loads(text)
        return found.keys() == {"name", "size"} and found["name"] in ("map", "list") and 0 <= found["size"] <= 99
    if kind == "json_object":
        return isinstance(json.loads(text), dict)
    pattern = r"\[[a-c]{2}(,[a-c]{2})*\]" if kind == "grammar" else value
    return text in value if kind == "choice" else re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_an_answer_follows_its_form(tiny: Engine, form: dict[str, Any]) -> None:
    output = answer(engine_on(tiny), ids(20), params_of(form, seed=4 if "regex" not in form else 3))
    if output.finish_reason == "stop":
        assert follows(form, output.text), output.text
    else:  # a list may be longer than the answer
        assert "grammar" in form
        assert follows(form, re.sub(r",[^,]*$", "]", output.text))


@pytest.mark.parametrize("deterministic", [True, False])
def test_names_of_control_tokens_in_a_form_are_text(tiny: Engine, deterministic: bool) -> None:
    """Llguidance allows, where only one text can follow, the token that the tokenizer begins it with: an answer that
    was to be "<|im_end|>" ended at once, and was empty."""
    name, both = "<|im_end|>", "<|im_start|>user\n<|im_end|>"
    forms = [{"choice": [name]}, {"choice": [both]}, {"regex": r"<\|im_start\|>user\n<\|im_end\|>"}]
    enum = {"type": "object", "properties": {"a": {"enum": [both]}}, "required": ["a"], "additionalProperties": False}
    engine = engine_on(tiny, deterministic=deterministic)
    prompts = [ids(20)] * 4
    params = [params_of(form, temperature=0) for form in (*forms, {"json_schema": enum})]
    *texts, found = engine.generate(prompts, params, progress=False)
    assert [output.text for output in texts] == [name, both, both]
    assert json.loads(found.text) == {"a": both}


def test_forms_in_one_batch_after_hits_and_retraction_are_those_of_cold_runs(tiny: Engine) -> None:
    long = {"regex": "([a-f][0-9];){25}"}
    forms = [long, FORMS[0], FORMS[4], long]
    prompts = [ids(2 * GRID + 5, seed=n) for n in range(4)]
    cold = [answer(engine_on(tiny, enabled=False), p, params_of(f)) for p, f in zip(prompts, forms, strict=True)]
    engine = engine_on(tiny, pages=12, states=16)
    for _ in range(2):
        found = engine.generate(prompts, [params_of(form) for form in forms], progress=False)
        assert [output.token_ids for output in found] == [output.token_ids for output in cold]
    assert sum(output.usage.cached_tokens for output in found) > 0
    assert engine.scheduler.num_retractions > 0
    for output, form in zip(found, forms, strict=True):
        assert output.finish_reason == "length" or follows(form, output.text)
    assert_nothing_held(engine)


def test_greedy_answers_and_answers_with_penalties_follow_their_form_too(tiny: Engine) -> None:
    engine = engine_on(tiny)
    for more in ({"temperature": 0}, {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {5: 100}}):
        output = answer(engine, ids(20), params_of(FORMS[0], **more))
        assert follows(FORMS[0], output.text)


def test_a_request_without_a_form_is_not_affected_by_those_that_have_one(tiny: Engine) -> None:
    engine = engine_on(tiny)
    free = SamplingParams(max_new_tokens=12, ignore_eos=True)
    alone = answer(engine, ids(20), free).token_ids
    found = engine.generate([ids(20)] * 3, [params_of(FORMS[0]), free, params_of(FORMS[3])], progress=False)
    assert found[1].token_ids == alone


def test_asking_along_a_path_of_drafts_changes_nothing(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "AT_ONCE", 60.0)  # what is late has no mask
    grammars = Grammars(tiny.loaded.forms)
    path = tiny.tokenizer("123-ab;", add_special_tokens=False).input_ids
    form = {"regex": "[0-9]{3}-[a-f]+;"}
    params = SamplingParams(structured=form)

    def constraints() -> Constraints:
        return Constraints(params, [], frozenset(), (), grammars.matcher(form, ""))

    asked, walked = constraints(), constraints()
    for n, token in enumerate(path):
        edits = asked.after(path[:n]), walked.after()
        assert np.array_equal(edits[0].mask, edits[1].mask)  # type: ignore[arg-type]
        made = Edits.of([edits[0]])
        assert made is not None
        assert made.apply(torch.zeros(1, tiny.model.config.vocab_size))[0, token] == 0
        walked.accept(token)
    while walked.is_late:
        walked.wait_for_form(1)
    assert walked.is_complete
    assert not asked.is_complete
    wrong = asked.after([path[0], path[-1], path[0]])  # the second draft is not allowed
    assert np.array_equal(wrong.mask, asked.after([path[0]]).mask)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"json": {}},
        {"regex": "a", "choice": ["a"]},
        {"choice": []},
        {"choice": "yes"},
        {"choice": [1]},
        {"json_object": False},
        {"json_schema": "{"},
        {"json_schema": [1]},
        {"json_schema": {"a": {1, 2}}},
        {"regex": ""},
        {"grammar": 5},
        "regex",
    ],
    ids=repr,
)
def test_a_form_of_another_shape_is_refused(form: Any) -> None:
    with pytest.raises(SamplingError, match=r"^SamplingParams: structured"):
        SamplingParams(structured=form)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"json_schema": {"type": "nonsense"}}, "this json_schema cannot be used: .*nonsense"),
        ({"regex": "[0-9"}, "this regex cannot be used: .*unclosed"),
        ({"grammar": "start: missing"}, "this grammar cannot be used: .*missing"),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_before_it_runs(tiny: Engine, form: Any, reason: str) -> None:
    engine = engine_on(tiny)
    with pytest.raises(SamplingError, match=reason):
        answer(engine, ids(20), params_of(form))
    assert_nothing_held(engine)
    assert answer(engine, ids(20), params_of(FORMS[5])).finish_reason == "stop"


@pytest.mark.parametrize("more", [{"min_tokens": 3}, {"ignore_eos": True}])
def test_what_contradicts_a_form_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match="contradicts structured"):
        SamplingParams(structured=FORMS[0], **more)


def test_without_the_library_the_extra_is_named(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ArgumentError, match="extra 'structured'"):
        FormProcesses(tiny.tokenizer, 1024, frozenset()).compile(FORMS[5])


# After reasoning, and calls of tools

THINKS = (
    "{# <think> </think> <tool_call> <function= #}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]},
    },
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "add 1"}], "tools": [ADD]}


def thinking(engine: Engine, text: str = "Let me see.\n</think>\n\n") -> Any:
    """A logits processor by which an answer begins with a text."""
    assert engine.tokenizer is not None
    said = engine.tokenizer(text, add_special_tokens=False).input_ids

    def process(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(answer) < len(said):
            logits.fill_(-1e9)[said[len(answer)]] = 0
        return logits

    return process


@pytest.mark.parametrize("drafts", [None, "cache"])
def test_a_form_begins_after_the_reasoning(tiny: Engine, monkeypatch: pytest.MonkeyPatch, drafts: str | None) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", THINKS)
    engine = engine_on(tiny)
    engine = Engine(engine.loaded, engine.cache, engine.config, speculation=drafts)
    params = params_of({"json_schema": SCHEMA}, logits_processors=[thinking(engine)], parse_response=True)
    for _ in range(2):
        output = answer(engine, CHAT, params)
        assert output.reasoning == "Let me see."
        assert follows({"json_schema": SCHEMA}, output.content)
        assert output.text.startswith("Let me see.\n</think>")
    assert_nothing_held(engine)


@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_forced_call_is_one_with_typed_arguments(tiny: Engine, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    for template in (THINKS, THINKS.replace("<function=", "").replace("<think>\n", "")):
        monkeypatch.setattr(tiny.tokenizer, "chat_template", template)
        engine = engine_on(tiny)
        more = {"logits_processors": [thinking(engine)]} if template is THINKS else {}
        params = SamplingParams(
            max_new_tokens=90, temperature=0.7, seed=2, tool_choice=choice, parse_response=True, **more
        )
        (call,) = answer(engine, CHAT, params).tool_calls
        assert call.name == "add"
        assert call.arguments.keys() >= {"a"}
        assert isinstance(call.arguments["a"], int)


def test_references_of_a_tool_are_within_its_own_schema(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def tool(name: str, number: int) -> Any:
        closed = {"additionalProperties": False}
        number_of = {"type": "object", "properties": {"n": {"const": number}}, "required": ["n"], **closed}
        item = {"$ref": "#/$defs/Item"}
        items = {"type": "array", "items": item, "minItems": 1, "maxItems": 1}
        own = {"properties": {"items": items, "a b/c": item}, "required": ["items", "a b/c"], **closed}
        own["$defs"] = {"Item": number_of}
        return {"type": "function", "function": {"name": name, "parameters": own}}

    chat = {**CHAT, "tools": [tool("one", 1), tool("the other", 2)]}
    for template in (THINKS, THINKS.replace("<function=", "")):
        monkeypatch.setattr(tiny.tokenizer, "chat_template", template.replace("<think>\n", ""))
        for name, number in (("one", 1), ("the other", 2)):
            params = SamplingParams(max_new_tokens=200, tool_choice=name, parse_response=True, seed=2, temperature=0.5)
            (call,) = answer(engine_on(tiny), chat, params).tool_calls
            assert call.name == name
            assert [item["n"] for item in call.arguments["items"]] == [number]
            assert call.arguments["a b/c"] == {"n": number}
    anywhere = SamplingParams(max_new_tokens=1, tool_choice="required")
    assert answer(engine_on(tiny), chat, anywhere).error is None


def test_parameters_as_marks_follow_what_they_refer_to() -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = llguidance.LLTokenizer("byte")
    properties = {
        "name": {"$ref": "#/$defs/Name"},
        "size": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
        "next": {"$ref": "#"},
        "default": {"type": "array", "items": {"$ref": "#/$defs/Size"}},
    }
    defined = {"Name": {"type": "string"}, "Size": {"type": "integer"}}
    own = {"$id": "x:y", "properties": properties, "additionalProperties": False, "$defs": defined}
    tool = {"type": "function", "function": {"name": "f", "parameters": own}}
    grammar = call_grammar({"fields": {CALLS: XML_CALLS}}, [tool], "f")

    def is_call(name: str, size: str, more: str) -> bool:
        written = {"name": name, "size": size, "next": more}
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
        text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())

    assert is_call("a text", "null", '{"next": {"size": 3}, "default": [4]}')
    for wrong in (("a", "x", "{}"), ("a", "1", '{"next": 3}'), ("a", "1", '{"next": {"other": 3}}')):
        assert not is_call(*wrong)
    template = {"start_anchor": "<|im_start|>assistant\n", "fields": {CALLS: XML_CALLS}}
    parser = AnswerParser(template, "<|im_start|>assistant\n", [tool])
    parser.feed('<tool_call>\n<function=f>\n<parameter=size>\n7\n</parameter>\n<parameter=next>\n{"size": 3}\n')
    parser.feed("</parameter>\n</function>\n</tool_call>")
    parser.finish()
    assert parser.parts().tool_calls[0].arguments == {"size": 7, "next": {"size": 3}}


def test_tool_choices_that_cannot_be_are_refused(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.tokenizer, "chat_template", THINKS)
    engine = engine_on(tiny)
    with pytest.raises(SamplingError, match="there is no tool 'sub'; there are add"):
        answer(engine, CHAT, SamplingParams(tool_choice="sub"))
    with pytest.raises(SamplingError, match="there are no tools"):
        answer(engine, "text", SamplingParams(tool_choice="required"))
    with pytest.raises(SamplingError, match="contradicts structured"):
        SamplingParams(tool_choice="required", structured={"json_object": True})
    call = thinking(engine, "</think><tool_call>")
    params = SamplingParams(max_new_tokens=9, parse_response=True, logits_processors=[call], tool_choice="none")
    assert "<tool_call>" not in answer(engine, CHAT, params).text


def test_a_class_of_pydantic_is_a_schema_and_json_is_compact(tiny: Engine) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Thing", name=(str, pydantic.Field(max_length=9)), sizes=(list[int], ...))
    engine = engine_on(tiny)
    for form in (model, {"json_schema": model}, {"json_schema": model.model_json_schema()}):
        output = answer(engine, ids(20), SamplingParams(structured=form, max_new_tokens=200, temperature=1.0, seed=1))
        if output.finish_reason == "stop":
            model.model_validate_json(output.text)
        assert not re.search(r"[\n\t]|  |[{\[] ", re.sub(r'"[^"]*"', '""', output.text))
    with pytest.raises(SamplingError, match="a class of pydantic"):
        SamplingParams(structured={"json_schema": int})
