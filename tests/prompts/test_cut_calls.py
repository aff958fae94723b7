"""Calls of tools that were cut: what is whole of them."""

import json
from typing import Any

import pytest

from hybrid.prompts.cut_calls import name_and_arguments, read_json, whole_part


def test_what_is_whole_of_arguments_that_were_cut() -> None:
    given = {"city": 'R"o}me,', "days": [1, {"a": 2}, None], "more": {"x": [True, "]"]}, "n": -2.5}
    text = json.dumps(given)
    assert whole_part(text) == given

    def is_part(part: Any, of: Any) -> bool:
        if isinstance(of, dict) and isinstance(part, dict):
            return all(name in of and is_part(value, of[name]) for name, value in part.items())
        if isinstance(of, list) and isinstance(part, list):
            return len(part) <= len(of) and all(map(is_part, part, of))
        return bool(part == of)

    parts = [whole_part(text[:end]) for end in range(len(text))]
    assert all(is_part(part, given) for part in parts)
    assert parts[0] == parts[12] == {} and parts[-1] == {name: given[name] for name in ("city", "days", "more")}
    sizes = [len(json.dumps(part)) for part in parts]
    assert sizes == sorted(sizes)


def test_the_name_of_a_call_that_was_cut() -> None:
    text = '{"name": "a\\"b", "arguments": {"x": 1}}'
    assert name_and_arguments(text) == ('a"b', '{"x": 1}')
    assert name_and_arguments(text.replace(": ", ":").replace(", ", ",")) == ('a"b', '{"x":1}')
    assert name_and_arguments(text[:-3]) == ('a"b', '{"x": ')
    assert name_and_arguments(text[:12]) is None


def test_what_is_no_json_is_an_error_of_values() -> None:
    for text in ("[" * 100_000, "NaN", '{"a": Infinity}', "{", ""):
        with pytest.raises(ValueError, match=r"JSON|double quotes|Expecting"):
            read_json(text)
