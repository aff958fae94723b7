"""Answers in their parts: reasoning, content and calls of tools, however the text comes."""

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hybrid import VersionError
from hybrid.prompts.answer_parser import AnswerParser, ParsedAnswer, template_of

MARKS = "<|im_start|>", "<think>", "</think>", "<tool_call>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
                "required": ["a"],
            },
        },
    }
]
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n"
    "<parameter=note>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
)
JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "note": "two\\nlines"}}\n</tool_call>'


def parser_of(chat_template: str, prefix: str = "<|im_start|>assistant\n") -> AnswerParser:
    template = template_of(SimpleNamespace(chat_template=chat_template, response_template=None))
    assert template is not None
    return AnswerParser(template, prefix, TOOLS)


def parts(parser: AnswerParser, text: str, seed: int) -> ParsedAnswer:
    """The parts of a text that comes in random pieces. They only grow, and their deltas are what is new."""
    rng, before = random.Random(seed), ParsedAnswer()
    reasoning = content = ""
    calls: list[Any] = []
    while text or before != parser.parts():
        now = parser.parts().since(before)
        reasoning, content = reasoning + now.delta_reasoning, content + now.delta_content
        calls += now.delta_tool_calls
        assert (reasoning, content, tuple(calls)) == (now.reasoning, now.content, now.tool_calls)
        before = parser.parts()
        cut = rng.randrange(1, 9)
        parser.feed(text[:cut])
        text = text[cut:]
    parser.finish()
    return parser.parts()


@pytest.mark.parametrize("form", ["xml", "json"])
@pytest.mark.parametrize("seed", range(8))
def test_reasoning_content_and_calls_are_found_in_pieces_of_any_size(form: str, seed: int) -> None:
    chat = " ".join(MARKS) + ("<function=" if form == "xml" else "")
    call = XML if form == "xml" else JSON
    parser = parser_of(chat, "<|im_start|>user\nadd<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert parser.is_thinking
    found = parts(parser, f"First,\n a < b.\n</think>\n\nSo: \n\n{call}\n{call}", seed)
    assert not parser.is_thinking
    assert (found.reasoning, found.content) == ("First,\n a < b.", "So:")
    assert [(one.name, one.arguments) for one in found.tool_calls] == [("add", {"a": 7, "note": "two\nlines"})] * 2
    assert len({one.id for one in found.tool_calls}) == 2
    message = found.message()
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 7, "note": "two\nlines"}}


@pytest.mark.parametrize("form", ["xml", "json"])
def test_a_call_that_was_cut_has_what_was_written_of_it(form: str) -> None:
    chat = " ".join(MARKS) + ("<function=" if form == "xml" else "")
    call = XML if form == "xml" else JSON
    written = []
    for end in range(len(call) + 1):
        parser = parser_of(chat)
        for at in range(0, end, 3):
            parser.feed(call[at : min(end, at + 3)])
        assert parser.parts().tool_calls == () or call[:end].endswith("</tool_call>")
        parser.finish()
        found = parser.parts()
        if not found.tool_calls:
            assert not written and found.content == call[:end].strip()
            continue
        (one,) = found.tool_calls
        assert one.name == "add" and found.content == ""
        assert all({"a": 7, "note": "two\nlines"}[name] == value for name, value in one.arguments.items())
        assert one.cut is not None or one.arguments == json.loads(one.json_arguments)
        written.append("".join(one.json_arguments.split(" ")))
    whole = '{"a":7,"note":"two\\nlines"}'
    assert written[-1] == whole and all(whole.startswith(text) for text in written)
    assert written == sorted(written, key=len) and len({*written}) > 10


def test_a_call_that_was_cut_within_what_is_no_call_is_the_text_that_it_is() -> None:
    for text in (
        '<tool_call>\n{"name": "add", "arguments": ]}',
        '<tool_call>{"name": "add", "arguments": [1, {',
        "<tool_call>",
    ):
        parser = parser_of(" ".join(MARKS))
        parser.feed(text)
        parser.finish()
        assert parser.parts() == ParsedAnswer(content=text)


def test_a_call_that_is_none_is_the_text_that_it_is() -> None:
    parser = parser_of(" ".join(MARKS))
    assert not parser.is_thinking
    parser.feed("Hi\n<tool_call>\nnonsense\n</tool_call> bye <tool_call>{")
    parser.finish()
    found = parser.parts()
    assert found.tool_calls == ()
    assert found.content.startswith("Hi<tool_call>\nnonsense\n</tool_call> bye<tool_call>{")


def test_a_chat_template_without_marks_has_no_parts() -> None:
    assert template_of(SimpleNamespace(chat_template="<|im_start|>", response_template=None)) is None
    own = {"start_anchor": "a", "fields": {"content": {}}}
    assert template_of(SimpleNamespace(chat_template="", response_template=own)) is own


def test_a_transformers_without_the_parser_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    with pytest.raises(VersionError, match=r"which transformers 5\.16\.1 and .* have; found \d"):
        parser_of(" ".join(MARKS))
