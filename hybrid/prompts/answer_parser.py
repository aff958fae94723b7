"""An answer in its parts, as it is generated: reasoning, content, and calls of tools.

The streaming parser of transformers finds the parts, by a response template: the checkpoint's own, if its tokenizer has
one, or that of the form which its chat template writes.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid.errors import PromptError, VersionError
from hybrid.prompts.cut_calls import PARAMETER, cut_call, written_arguments
from hybrid.prompts.tool_schemas import types_of

Template = dict[str, Any]

Tool = Mapping[str, Any]
"""The description of a tool, as `{"type": "function", "function": {"name": ..., "parameters": JSON schema}}`."""

THINKING = "<think>", "</think>"
"""The marks around reasoning."""

TOOL_CALL = "<tool_call>"
"""The mark before the call of a tool."""

REASONING, CONTENT, CALLS = "reasoning_content", "content", "tool_calls"
"""The fields of a response template, as transformers names them."""

JSON_CALLS: Template = {
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "content_args": {"allow_non_json": True},
    "transform": {"function": "{content}"},
}
"""Calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

XML_CALLS: Template = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": PARAMETER},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}
"""Calls as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

PLAIN: Template = {"start_anchor": "\0", "fields": {CONTENT: {"content": "text"}}}
"""Answers without parts."""

ENDS = 64
"""Characters at the end of an answer in which the mark that ends a call is looked for."""

TAIL_TOKENS = 64
"""Tokens at the end of a prompt in which the beginning of the answer's message is looked for first."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: of this call, for the message with its result.
        name: of the tool.
        arguments: by name, of the types that the tool's schema gives them. Of a call that was cut, the whole ones.
        cut: the JSON of the arguments up to where the answer ended within the call; None: the call is whole.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    cut: str | None = None

    @property
    def json_arguments(self) -> str:
        """The arguments as JSON, as far as they were written."""
        if self.cut is not None:
            return self.cut
        return json.dumps(self.arguments, ensure_ascii=False, separators=(",", ":"))

    def message(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` of an assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The parts of an answer up to now, and what of them is new.

    Attributes:
        reasoning, content: texts without the marks around them, and without white space at their ends.
        tool_calls: those that are complete; at the end of the answer also one that was cut (`ToolCall.cut`).
        delta_reasoning, delta_content: the ends of the texts that the output before this one did not have.
        delta_tool_calls: the calls that it did not have.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    delta_reasoning: str = ""
    delta_content: str = ""
    delta_tool_calls: tuple[ToolCall, ...] = ()

    def since(self, previous: ParsedAnswer | None) -> ParsedAnswer:
        """The same parts for a reader whose last ones were `previous`, or None if it had none."""
        before = previous if previous is not None else ParsedAnswer()
        return replace(
            self,
            delta_reasoning=self.reasoning[len(before.reasoning) :],
            delta_content=self.content[len(before.content) :],
            delta_tool_calls=self.tool_calls[len(before.tool_calls) :],
        )

    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message[REASONING] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


class _Text:
    """A text that grows, without white space at its ends."""

    def __init__(self) -> None:
        self.text = ""
        self._held = ""

    def add(self, piece: str) -> None:
        whole = self._held + piece
        kept = whole.rstrip()
        self._held = whole[len(kept) :]
        self.text += kept if self.text else kept.lstrip()


class AnswerParser:
    """Takes one answer apart while it grows.

    Args:
        template: a response template.
        prefix: the end of the prompt, from the beginning of the answer's message on or before it.
        tools: what the answer may call: their schemas give the types of arguments.

    Raises:
        PromptError: the template or the tools cannot be used.
        VersionError: the installed transformers has no such parser.
    """

    def __init__(self, template: Template, prefix: str, tools: Sequence[Tool] = ()) -> None:
        try:
            self._parser: Any = _parser_class()(template, prefix=prefix, tools=[_with_types(tool) for tool in tools])
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise PromptError(f"the answer cannot be taken apart: {error!s:.300}") from error
        self._texts = {REASONING: _Text(), CONTENT: _Text()}
        self._form: Template = template.get("fields", {}).get(CALLS, {})
        self._properties = dict(map(_name_and_properties, map(_with_types, tools)))
        self._calls: list[ToolCall] = []
        self._raw = ""  # of a call that is not complete
        self._end = ""  # of the text
        self._failed = False
        self._field: str | None = None
        self._take(self._parser.initial_events)

    @property
    def is_thinking(self) -> bool:
        """Tell whether the text up to now ends within reasoning."""
        return self._field == REASONING

    def feed(self, text: str) -> None:
        """Record that the answer continues with this text."""
        self._end = (self._end + text)[-ENDS:]
        self._run(lambda: self._parser.feed(text), text)

    def finish(self) -> None:
        """Record that the answer has ended: what was kept back, as the beginning of a mark, is part of it."""
        self._run(lambda: self._parser.finalize()[1], "", is_end=True)

    def parts(self) -> ParsedAnswer:
        """The parts up to now."""
        return ParsedAnswer(self._texts[REASONING].text, self._texts[CONTENT].text, tuple(self._calls))

    def _run(self, step: Any, text: str, is_end: bool = False) -> None:
        if self._failed:
            self._texts[CONTENT].add(text)
            return
        try:
            self._take(step(), is_end)
        except (ValueError, TypeError, KeyError):  # a model wrote it: from here on it is the text that it is
            self._failed = True
            self._texts[CONTENT].add(self._raw + text)

    def _take(self, events: list[dict[str, Any]], is_end: bool = False) -> None:
        for at, event in enumerate(events, 1):
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                self._field, self._raw = field, ""
            elif kind == "region_chunk":
                if field in self._texts:
                    self._texts[field].add(event["text"])
                else:
                    self._raw += event["text"]
            else:
                self._field = None
                if field == CALLS:
                    is_cut = is_end and at == len(events) and not self._is_closed()
                    if not is_cut or not self._add_cut(event["value"]):
                        self._add_calls(event["value"], "" if is_cut else "</tool_call>")

    def _is_closed(self) -> bool:
        """Tell whether the text ends with the mark that ends a call."""
        close = self._form.get("close_pattern") or re.escape(str(self._form.get("close")))
        return re.search(rf"(?:{close})\s*\Z", self._end) is not None

    def _add_cut(self, value: Any) -> bool:
        """Add the call in which the answer ended. Returns whether that much of it can be read."""
        if self._form is XML_CALLS:
            name, arguments = value["function"]["name"], value["function"]["arguments"]
            cut = written_arguments(self._raw, arguments, self._properties.get(name, {}))
        elif self._form is JSON_CALLS and (found := cut_call(self._raw)) is not None:
            name, arguments, cut = found
        else:
            return False
        self._calls.append(ToolCall(_new_id(), name, arguments, cut))
        return True

    def _add_calls(self, value: Any, end: str) -> None:
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            arguments = function.get("arguments") or {} if isinstance(function, dict) else None
            if not isinstance(name, str) or not isinstance(arguments, dict):
                self._texts[CONTENT].add(f"{TOOL_CALL}{self._raw}{end}")
                return
            self._calls.append(ToolCall(_new_id(), name, arguments))


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _name_and_properties(tool: Tool) -> tuple[str, Mapping[str, Any]]:
    """The name of a tool, and the schemas of its arguments by name."""
    function = _mapping(tool.get("function", tool))
    return str(function.get("name")), _mapping(_mapping(function.get("parameters")).get("properties"))


def _with_types(tool: Tool) -> dict[str, Any]:
    """A tool whose arguments have types alone, as far as they are known: the parser does not follow references."""
    function = _mapping(tool.get("function", tool))
    parameters = {"type": "object", **_mapping(function.get("parameters"))}
    types = {key: {"type": list(types_of(schema, parameters))} for key, schema in _name_and_properties(tool)[1].items()}
    own = {**function, "parameters": {**parameters, "properties": types}}
    return {**tool, "function": own} if "function" in tool else own


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _parser_class() -> Any:
    """Return the parser of transformers.

    Raises:
        VersionError: the installed one has none.
    """
    import transformers

    try:
        from transformers.utils.chat_parsing import ResponseParser
    except ImportError as error:
        raise VersionError(
            f"taking answers apart needs transformers.utils.chat_parsing, which transformers 5.16.1 and 5.23.0 have; "
            f"found {transformers.__version__} ({error}): install one of these, or leave parse_response out"
        ) from error
    return ResponseParser


def template_of(tokenizer: Any) -> Template | None:
    """The response template of a tokenizer: its own, or that of the form that its chat template writes. None if its
    answers have no parts."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, dict):
        return own
    chat = tokenizer.chat_template
    text = chat if isinstance(chat, str) else json.dumps(chat)
    fields: Template = {CONTENT: {"content": "text"}}
    if THINKING[1] in text:
        fields[REASONING] = {"open": THINKING[0], "close": THINKING[1], "content": "text"}
    if TOOL_CALL in text:
        fields[CALLS] = XML_CALLS if "<function=" in text else JSON_CALLS
    if len(fields) == 1 or "<|im_start|>" not in text:
        return None
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


def tools_of(prompt: Any) -> tuple[Tool, ...]:
    """The tools that come with a prompt."""
    tools = prompt.get("tools") if isinstance(prompt, Mapping) else None
    return tuple(tool for tool in tools if isinstance(tool, Mapping)) if isinstance(tools, list | tuple) else ()


def prefix_of(tokenizer: Any, prompt: Sequence[int], template: Template) -> str | None:
    """The text of the end of a prompt, from before the beginning of the answer's message. None if it has none."""
    anchor = template.get("start_anchor")
    for count in (TAIL_TOKENS, len(prompt)):
        text: str = tokenizer.decode(prompt[-count:], skip_special_tokens=False)
        if not isinstance(anchor, str) or anchor in text:
            return text
    return None
