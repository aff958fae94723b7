"""Calls of tools that an answer has begun and not ended: what was written of their arguments, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

NAME = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
"""The beginning of a call that is JSON, up to its arguments."""

PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
BEGUN = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*)", re.DOTALL)
"""A parameter of a call that is marks, and one without its end."""

CALL_END, PARAMETER_END = "</tool_call>", "\n</parameter>"


def read_json(text: str) -> Any:
    """Read what a model wrote as JSON.

    Raises:
        ValueError: it is none, or is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("JSON is nested too deep") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def cut_call(raw: str) -> tuple[str, dict[str, Any], str | None] | None:
    """Read a call that is JSON and was cut.

    Args:
        raw: what was written of it.

    Returns:
        Its name, the arguments that are whole, and the JSON of all up to where they end, or None if all are whole. None
        instead of these if it has no name yet, or is no call.
    """
    for text in (_without_begun(CALL_END, raw), raw):  # the mark that ends it may be cut, or be within a text
        if (found := name_and_arguments(text)) is None:
            return None
        name, written = found
        try:
            whole = whole_part(written)
        except (ValueError, IndexError):  # a model wrote it
            continue
        if isinstance(whole, dict):
            return name, whole, None if _is_json(written) else written
    return None


def name_and_arguments(text: str) -> tuple[str, str] | None:
    """The name and the arguments of a call that is JSON, as far as they were written. None if not even the
    name is whole."""
    begun = NAME.match(text)
    if begun is None:
        return None
    try:
        read_json(text)
        end = text.rindex("}")  # the brace that closes the call
    except ValueError:  # the answer ended at its length
        end = len(text)
    name: str = read_json(begun[1])
    return name, text[begun.end() : end]


def whole_part(text: str) -> dict[str, Any]:
    """Read what is whole of a JSON object that may have been cut: members that are not are left out."""
    try:
        found: dict[str, Any] = read_json(text)
        return found
    except ValueError:
        pass
    closers, kept = [], "{}"
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|["{}\[\],]', text):
        if token[0] in "{[":
            closers.append("}" if token[0] == "{" else "]")
        elif token[0] in "}]":
            closers.pop()
        elif token[0] == '"':  # the text in which it was cut
            break
        elif token[0] != ",":
            continue
        end = token.start() if token[0] == "," else token.end()
        kept = text[:end] + "".join(reversed(closers))
    whole: dict[str, Any] = read_json(kept)
    return whole


def written_arguments(raw: str, whole: Mapping[str, Any], properties: Mapping[str, Any]) -> str | None:
    """The JSON of arguments that were written as marks, up to where they end.

    Args:
        raw: what was written after the name of the tool.
        whole: the arguments that are.
        properties: schemas of all.

    Returns:
        The JSON, without what closes it. None if the last mark was written, so that they are whole.
    """
    end = max((match.end() for match in re.finditer(PARAMETER, raw, re.DOTALL)), default=0)
    rest = raw[end:]
    if "</function>" in rest:
        return None
    members = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))[:-1]
    if (begun := BEGUN.match(rest)) is None:
        return members
    value = _without_begun(PARAMETER_END, begun[2])
    if _is_text(properties.get(begun[1])):
        value = json.dumps(value, ensure_ascii=False)[:-1]
    return f"{members}{',' if whole else ''}{json.dumps(begun[1], ensure_ascii=False)}:{value}"


def _without_begun(mark: str, text: str) -> str:
    """A text without the beginning of a mark at its end."""
    return next((text[:-size] for size in range(len(mark), 0, -1) if text.endswith(mark[:size])), text)


def _is_json(text: str) -> bool:
    try:
        read_json(text)
    except ValueError:
        return False
    return True


def _is_text(schema: Any) -> bool:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return kind is None or "string" in kind
