"""The schemas of a tool's arguments: of what types the values are, and what references mean."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

CHOICES = ("anyOf", "oneOf")
"""Keys of a schema whose values are schemas, of which one holds."""

DATA = ("const", "enum", "default", "examples")
"""Keys of a schema whose values are no schemas."""

NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keys of a schema whose values are schemas by name."""


def types_of(schema: Any, root: Any) -> tuple[str, ...]:
    """The types that a value may have, in the order in which the schema names them. What has none may be a text.

    Args:
        schema: of the value.
        root: of the tool's arguments, to which references are.
    """
    found: dict[str, None] = {}
    seen: set[str] = set()
    waiting: deque[Any] = deque([schema])
    while waiting:
        one = waiting.popleft()
        one = one if isinstance(one, Mapping) else {}
        declared = one.get("type")
        kinds = [kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str)]
        choices = [choice for name in CHOICES if isinstance(one.get(name), list) for choice in one[name]]
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            choices.append(_at(root, reference))
        elif not kinds and not choices and reference not in seen:
            kinds = ["string"]
        found.update(dict.fromkeys(kinds + ["null"] * bool(one.get("nullable"))))
        waiting += choices
    return tuple(found) or ("string",)


def followed(schema: Any, root: Any) -> Any:
    """The schema that a schema refers to, or itself."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        schema = _at(root, reference)
    return schema


def moved(schema: Any, place: str) -> Any:
    """A schema that stands at a place of another one, with references that stay within it."""
    if isinstance(schema, list):
        return [moved(inner, place) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[key] = place + value[1:]
        elif key in NAMED and isinstance(value, Mapping):
            found[key] = {name: moved(inner, place) for name, inner in value.items()}
        else:
            found[key] = value if key in DATA else moved(value, place)
    return found


def has_reference(schema: Any) -> bool:
    """Tell whether a reference is anywhere in a schema."""
    if isinstance(schema, list):
        return any(map(has_reference, schema))
    return isinstance(schema, Mapping) and ("$ref" in schema or any(map(has_reference, schema.values())))


def _at(root: Any, reference: str) -> Any:
    """The part of a schema that a reference refers to. None if there is no such part."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(name)
        elif isinstance(root, list) and name.isdecimal() and int(name) < len(root):
            root = root[int(name)]
        else:
            return None
    return root
