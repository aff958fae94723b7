"""An answer depends on its request alone: what an engine keeps of others' requests changes neither it nor its time."""

import re
from typing import Any

import pytest

from hybrid import Engine, SamplingParams
from hybrid.engine.forms import FormProcesses
from support.engines import answer, engine_on


def schema(order: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in order},
        "required": ["a", "b"],
        "additionalProperties": False,
    }


def test_properties_are_written_in_the_order_of_the_own_schema(tiny: Engine) -> None:
    engine = engine_on(tiny)
    for order in ("ab", "ba", "ab"):
        output = answer(engine, "The data: ", SamplingParams(structured={"json_schema": schema(order)}))
        assert re.findall('"([ab])"', output.text) == list(order)


def test_grammars_are_compiled_once_in_each_namespace(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    compile_form = FormProcesses.compile
    monkeypatch.setattr(FormProcesses, "compile", lambda *given: (compiled.append(given), compile_form(*given))[1])
    engine, params = engine_on(tiny), SamplingParams(max_new_tokens=1, structured={"choice": ["yes", "no"]})
    for namespace, count in (("", 1), ("", 1), ("other", 2), ("", 2), ("other", 2)):
        answer(engine, "a", params, namespace=namespace)
        assert len(compiled) == count


def test_what_an_engine_keeps_of_other_requests_changes_no_answer(tiny: Engine) -> None:
    """Whatever parameters others have, in whatever order of their entries: an engine with a life gives what a new one
    gives."""
    forms: list[dict[str, Any]] = [
        {"structured": {"json_schema": schema("ab")}},
        {"structured": {"json_schema": schema("ba")}},
        {"structured": {"choice": ["b", "a"]}},
        {"structured": {"regex": "[ab]{3}"}},
        {"structured": {"grammar": "start: /[ab]{3}/"}},
        {"stop": ("e", "the")},
        {"stop": ("the", "e")},
        {"bad_words": ("the", "a")},
        {"logit_bias": {70: 3.0, 71: 3.0}},
    ]
    old = engine_on(tiny)
    for more in (*forms, *reversed(forms)):
        params = SamplingParams(max_new_tokens=24, **more)
        assert answer(old, "The data: ", params).text == answer(engine_on(tiny), "The data: ", params).text, more
