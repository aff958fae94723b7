"""The largest bodies that a server reads: of text, of values, of names, and of what each path takes many of."""

import json
from collections.abc import Iterator
from typing import Any

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
)
"""Paths that take a body."""


def in_path(path: str, size: int) -> dict[str, Any]:
    """What a path takes, as small things of about so many values."""
    turns = [{"role": "user", "content": "a"}] * (size // 20)
    tools = [{"name": f"f{n}", "input_schema": {"type": "object"}} for n in range(size // 32)]
    functions = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(size // 32)]
    ask = {"role": "user", "content": "a"}
    return {
        "/v1/chat/completions": {"messages": turns, "max_tokens": 1},
        "/v1/completions": {"prompt": [5] * (size - 99), "max_tokens": 1},
        "/v1/responses": {"input": turns, "max_output_tokens": 1},
        "/v1/messages": {"messages": turns, "max_tokens": 1, "diagnostics": {"previous_message_id": "x"}},
        "/v1/messages/count_tokens": {"messages": [ask], "tools": tools},
        "/tokenize": {"messages": [ask], "tools": functions},
        "/detokenize": {"tokens": [7] * (size - 99)},
        "/v1/load_lora_adapter": {"lora_name": "a" * size, "lora_path": "a"},
    }[path]


def large_bodies(max_text: int, max_values: int) -> Iterator[tuple[str, str, bytes]]:
    """Large bodies, as names, paths and bytes.

    Args:
        max_text: bytes of a body.
        max_values: of a body.
    """
    size, values = max_text - 2000, max_values - 1000
    schema = {"enum": [f"v{n}" for n in range(values // 2 - 99)]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path in PATHS:
        for name, body in (
            ("what it takes", json.dumps(in_path(path, values), separators=(",", ":"))),
            ("a text", json.dumps({"prompt": "uvw, [x] " * (size // 9), "messages": "a"})),
            ("lists", f'{{"prompt":[{"[]," * (values // 5)}0],"messages":[]}}'),
            ("an unknown name", json.dumps({"uvw xyz" * (size // 7): 1})),
            ("names", json.dumps({f"n{n}": n for n in range(values // 6)})),
        ):
            yield f"{path}, {name}", path, body.encode()
    yield "a schema", "/v1/chat/completions", json.dumps(chat | {"response_format": form}).encode()
    grammar = {
        "prompt": "a",
        "max_tokens": 1,
        "structured_outputs": {"grammar": 'start: "a" | ' + '"b" | ' * (size // 9)},
    }
    yield "a grammar", "/v1/completions", json.dumps(grammar).encode()
