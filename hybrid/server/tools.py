"""Tools that a model may or must call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybrid.prompts.tool_grammar import call_schema
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields

NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The arguments of a tool that names none."""


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        functions: their descriptions, as chat templates take them.
        choice: "auto", "none", "required", or "named": `name` must be called.
        name: of the one that must be called.
        is_written: the model's chat template writes tools and calls.
        is_single: an answer has at most one call: others that a model makes are left out.
    """

    functions: tuple[dict[str, Any], ...] = ()
    choice: str = "none"
    name: str | None = None
    is_written: bool = False
    is_single: bool = False

    def params(self, structured: dict[str, Any] | None) -> dict[str, Any]:
        """The parameters that make an answer call what it must.

        Args:
            structured: the form that the answer must have otherwise; None: any.

        Raises:
            HttpError: the answer must have a form and be a call.
        """
        if self.choice in ("required", "named") and structured is not None:
            raise HttpError(400, "an answer that must call a tool has no other form", "tool_choice", "invalid_value")
        if self.forced is not None:
            return {"structured": {"json_schema": self.forced}}
        if not self.is_written:
            return {"structured": structured}
        choice = self.name if self.choice == "named" else self.choice
        return {"structured": structured, "tools": self.functions, "tool_choice": choice if self.functions else "auto"}

    @property
    def in_prompt(self) -> dict[str, Any]:
        """The options of a chat template that writes them."""
        return {"tools": [*self.functions]} if self.functions and self.is_written else {}

    @cached_property
    def forced(self) -> dict[str, Any] | None:
        """The schema of a call that must be made by a model whose template knows no tools: of the arguments of the one
        that it can be, or of the name and the arguments where there are several. None: none must."""
        if self.is_written or self.choice not in ("required", "named"):
            return None
        if (only := self.only) is not None:
            return parameters_of(only)
        return {"anyOf": [call_schema(one["function"]["name"], parameters_of(one)) for one in self.functions]}

    @cached_property
    def only(self) -> dict[str, Any] | None:
        """The one tool that can be called where one must be; None: there are several."""
        found = [function for function in self.functions if self.name in (None, function["function"]["name"])]
        return found[0] if len(found) == 1 else None


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    found: dict[str, Any] = tool["function"]["parameters"]
    return found


def checked_tools(
    functions: list[dict[str, Any]], choice: str, name: str | None, template: str, is_single: bool
) -> Tools:
    """Check that tools can be used with a model.

    Args:
        template: of the model's chats.
        is_single: an answer may have one call.

    Raises:
        HttpError: one is named that is not there, or the model's template writes no tools.
    """
    names = [function["function"]["name"] for function in functions]
    if choice == "named" and name not in names:
        raise HttpError(400, f"tool_choice names {name!r:.100}, which is not in tools", "tool_choice", "invalid_value")
    if choice == "required" and not functions:
        raise HttpError(400, "tool_choice is 'required', and there are no tools", "tool_choice", "invalid_value")
    if functions and choice == "auto" and "tools" not in template:
        text = (
            "tools: this model's chat template does not write tools, so it cannot choose one; name one in tool_choice, "
            "or send 'required'"
        )
        raise HttpError(400, text, "tools", "unsupported_parameter")
    return Tools(tuple(functions), choice, name, "tools" in template, is_single)


def openai_tools(fields: Fields, template: str, *, are_flat: bool = False) -> Tools:
    """Read the tools of OpenAI's chat completions, or of its responses.

    Args:
        are_flat: a function stands in the tool itself, as in responses, and not in an object of its own.

    Raises:
        HttpError: they cannot be used.
    """
    functions = []
    for number, value in enumerate(fields.array("tools") or ()):
        tool = Fields(value, f"{fields.path('tools')}[{number}]")
        if tool.one_of("type", ("function",), "") != "function":
            raise tool.refuse("type", "'function'", None)
        function = tool if are_flat else tool.nested("function")
        if function is None:
            raise tool.refuse("function", "an object with a name", None)
        functions.append(read_function(function))
        function.close()
        tool.close()
    given = fields.take("tool_choice")
    name = None
    if isinstance(given, dict):
        wanted = Fields(given, fields.path("tool_choice"))
        wanted.one_of("type", ("function",), "function")
        inner = wanted if are_flat else wanted.nested("function")
        if inner is not None:
            name = inner.text("name")
            inner.close()
        wanted.close()
        choice = "named"
    elif given in (None, "auto", "none", "required"):
        choice = given or ("auto" if functions else "none")
    else:
        raise fields.refuse("tool_choice", "'auto', 'none', 'required' or a function", given)
    return checked_tools(functions, choice, name, template, not fields.boolean("parallel_tool_calls", True))


def read_function(fields: Fields, parameters: str = "parameters") -> dict[str, Any]:
    """The description of a function as chat templates take it: name, description and parameters.

    Args:
        parameters: name of the field with their schema.

    Raises:
        HttpError: it has no name, or something is of a wrong type.
    """
    name = fields.text("name")
    if not name:
        raise fields.refuse("name", "a text", name)
    found: dict[str, Any] = {"name": name}
    if (description := fields.text("description")) is not None:
        found["description"] = description
    found["parameters"] = fields.dictionary(parameters) or NOTHING
    fields.boolean("strict")  # arguments of a call that must be made follow the schema always
    return {"type": "function", "function": found}
