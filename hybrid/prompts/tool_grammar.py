"""The grammar of an answer that is the call of a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hybrid.errors import SamplingError
from hybrid.prompts.answer_parser import CALLS, JSON_CALLS, XML_CALLS, Template, Tool
from hybrid.prompts.tool_schemas import followed, has_reference, moved, types_of

WRITTEN: dict[str, Any] = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""How JSON is written in calls: as chat templates write it."""

PLACE = "#/$defs/tool"
"""Of the schema of a tool's arguments within that of one of them."""

MAX_CHARACTERS = 2**22
"""Of a grammar, about: a larger one is not compiled in the time that a form has."""


def call_grammar(template: Template, tools: Sequence[Tool], name: str | None) -> str:
    """A Lark grammar of llguidance, of an answer that is one call of a tool.

    Args:
        template: the response template, by which the call is read.
        tools: that can be called.
        name: of the one that is called; None: any.

    Raises:
        SamplingError: there is no such tool, or the form of the template's calls is unknown.
    """
    functions: list[Mapping[str, Any]] = [tool.get("function", tool) for tool in tools]
    if not functions:
        raise SamplingError(
            "tool_choice: there are no tools; give them with the messages, or as SamplingParams(tools=)"
        )
    wanted = [function for function in functions if name in (None, function.get("name"))]
    if not wanted:
        known = ", ".join(str(function.get("name")) for function in functions)
        raise SamplingError(f"tool_choice: there is no tool {name!r}; there are {known}")
    calls = template.get("fields", {}).get(CALLS)
    if calls is JSON_CALLS:
        rules = [_json_call(function) for function in wanted]
    elif calls is XML_CALLS:
        rules = [_xml_call(function) for function in wanted]
    else:
        raise SamplingError(
            f"tool_choice: the form in which this checkpoint calls tools is not known; use 'auto' instead of {name!r}"
        )
    names = [f"call_{at}" for at in range(len(rules))]
    body = "".join(f"{rule}: {text}\n" for rule, text in zip(names, rules, strict=True))
    return f'start: "<tool_call>\\n" ({" | ".join(names)}) "\\n</tool_call>"\n{body}'


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters") or {}
    return {"type": "object", **schema} if isinstance(schema, Mapping) else {"type": "object"}


def call_schema(name: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call: the name of its tool, and arguments that have a schema, whose references stay within it."""
    own = {"$id": f"urn:tool:{quote(str(name), safe='')}", **arguments}
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": own},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _json_call(function: Mapping[str, Any]) -> str:
    return f"%json {json.dumps(call_schema(function.get('name'), _schema(function)) | WRITTEN)}"


def _xml_call(function: Mapping[str, Any]) -> str:
    schema = _schema(function)
    required = schema.get("required") or []
    whole = json.dumps(moved({key: value for key, value in schema.items() if key != "$id"}, PLACE))
    parts = [f'"<function={function.get("name")}>\\n"']
    size = 0
    for key in schema.get("properties") or {}:
        part = f'"<parameter={key}>\\n" {_value(key, schema, whole)}'
        parts.append(part if key in required else f"({part})?")
        size += len(part)
        if size > MAX_CHARACTERS:
            raise SamplingError(
                f"tool_choice: the schema of {function.get('name')!r:.100} is too large, with its references in each "
                "parameter; make it smaller"
            )
    return " ".join([*parts, '"</function>"'])


def _value(key: str, arguments: Mapping[str, Any], whole: str) -> str:
    """A parameter's value and the mark after it: a text as it is, without the beginning of a mark; anything else as
    JSON. A text and its mark are one terminal: where they were two, a line end of the text could not begin the mark.

    Args:
        key: its name.
        arguments: the schema of all.
        whole: that as JSON, for a place in another one.
    """
    schema = arguments["properties"][key]
    own = followed(schema, arguments)
    if isinstance(own, Mapping) and own.get("type") == "string" and "enum" in own:
        choices = " | ".join(json.dumps(str(text), ensure_ascii=False) for text in own["enum"])
        return f'({choices}) "\\n</parameter>\\n"'
    if "string" in types_of(schema, arguments):
        return "/([^<\\n]|\\n+[^<\\n]|\\n*<[^\\/])*\\n+<\\/parameter>\\n/"
    if not has_reference(schema):
        return f'%json {json.dumps({**schema, **WRITTEN})} "\\n</parameter>\\n"'
    pointer = quote(key.replace("~", "~0").replace("/", "~1"), safe="~")
    head = json.dumps({"$ref": f"{PLACE}/properties/{pointer}", **WRITTEN})[:-1]
    return f'%json {head}, "$defs": {{"tool": {whole}}}}} "\\n</parameter>\\n"'
