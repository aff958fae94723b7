"""Random bodies: right ones, each field from its domain, and the same with one value replaced by anything, by what is
nested deep, or by what is long; and headers that are any."""

import base64
import datetime
import zlib
from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(max_size=20) | st.sampled_from(["<|im_end|>", "The with statement", "x" * 3000])
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-2, 40) | st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from(["", "\ud83d", "\x00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def nested(depth: int, inner: Any, is_list: bool) -> Any:
    """A value within as many lists or objects."""
    for _ in range(depth):
        inner = [inner] if is_list else {"a": inner}
    return inner


DEEP = st.builds(nested, st.sampled_from([20, 90, 130, 300, 600]), st.sampled_from([1, "x", {}]), st.booleans())
DEEP_TEXT = st.sampled_from([30, 300, 900, 20_000]).flatmap(
    lambda depth: st.sampled_from(["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "(" * depth])
)
LONG = st.one_of(
    st.sampled_from(["x", "A", "ab ", "\ud83d\ude00", '"', "\\"]).map(lambda text: text * 20_000),
    st.integers(0, 900).map(lambda number: [number] * 20_000),
    st.just({f"k{number}": 1 for number in range(3000)}),
    st.just(10**300),
)
WORDS = st.text(min_size=1, max_size=20) | st.sampled_from(["<|im_end|>", "The with statement"])
NAMES = st.sampled_from(["add", "clock", "look_up"])
SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        {"type": "object", "properties": {"a": {"enum": [1, "x", None]}}, "required": ["a"]},
        {"type": "object", "properties": {}, "additionalProperties": False},
    ]
)


def png() -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = chunk(b"IHDR", bytes([0, 0, 0, 1, 0, 0, 0, 1, 8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0\1\2\3")) + chunk(b"IEND", b"")


DATA = st.sampled_from([b"", b"", bytes(60_000)]).map(lambda more: base64.b64encode(png() + more).decode())
"""The base64 of a picture; a long one has more after its end, which is no part of it."""
URLS = DATA.map("data:image/png;base64,{}".format)


def some(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with all of the required fields and a few of the others."""

    @st.composite
    def make(draw: st.DrawFn) -> dict[str, Any]:
        names = [*required, *(draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True)))]
        return {name: draw((required | optional)[name]) for name in names}

    return make()


def parts(kind: str, *more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A text, or a list of parts."""
    text = st.fixed_dictionaries({"type": st.just(kind), "text": WORDS})
    return WORDS | st.lists(st.one_of(text, text, *more), min_size=1, max_size=3)


TTL = {
    "cache_control": st.fixed_dictionaries({"type": st.just("ephemeral")}, optional={"ttl": st.sampled_from(["5m"])})
}
BLOCKS = parts("text", st.fixed_dictionaries({"type": st.just("text"), "text": WORDS, **TTL}))
ARGUMENTS = st.sampled_from(['{"a": 1}', "{}", '{"a": '])
CALLS = st.fixed_dictionaries(
    {
        "id": WORDS,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS}),
    }
)
CHAT = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": parts("text")}
    )
    | st.fixed_dictionaries({"role": st.just("tool"), "content": WORDS, "tool_call_id": WORDS})
    | CALLS.map(lambda call: {"role": "assistant", "content": None, "tool_calls": [call]}),
    min_size=1,
    max_size=4,
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": BLOCKS})
    | st.fixed_dictionaries({"name": NAMES, "id": WORDS, "input": st.just({"a": 1}), "type": st.just("tool_use")}).map(
        lambda block: {"role": "assistant", "content": [block]}
    )
    | st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": WORDS, "content": WORDS}).map(
        lambda block: {"role": "user", "content": [block]}
    )
    | st.fixed_dictionaries({"type": st.just("text"), "text": WORDS, "citations": st.just([{"a": 1}])}).map(
        lambda block: {"role": "user", "content": [block]}
    ),
    min_size=1,
    max_size=4,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "developer"]), "content": parts("input_text")},
        optional={"id": WORDS},
    )
    | CALLS.map(lambda call: {"type": "function_call", "call_id": call["id"], **call["function"]})
    | st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": WORDS, "output": WORDS})
    | st.fixed_dictionaries({"type": st.just("reasoning"), "summary": st.just([])}),
    min_size=1,
    max_size=3,
).map(lambda items: [*items, {"role": "user", "content": "Hello"}])
FUNCTION = {"name": NAMES, "parameters": SCHEMAS}
NESTED = st.fixed_dictionaries({"type": st.just("function"), "function": st.fixed_dictionaries(FUNCTION)})
FLAT = st.fixed_dictionaries({"type": st.just("function"), **FUNCTION})
FORM = st.sampled_from([{"type": "text"}, {"type": "json_object"}]) | st.fixed_dictionaries(
    {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"name": WORDS, "schema": SCHEMAS})}
)
SAMPLED: dict[str, Any] = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(1, 50),
    "stream": st.booleans(),
}
OWN: dict[str, Any] = SAMPLED | {
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**60),
    "stop": WORDS | st.lists(WORDS, min_size=1, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 900), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 900).map(str), st.floats(-100, 100), max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "ignore_eos": st.booleans(),
    "bad_words": st.lists(WORDS, max_size=2),
    "cache_salt": WORDS,
    "user": WORDS,
    "prompt_cache_key": WORDS,
    "prompt_cache_options": st.fixed_dictionaries({}, optional={"ttl": st.just("30m"), "prewarm": st.booleans()}),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
}
CALLED = {"tools": st.lists(NESTED, min_size=1, max_size=2), "tool_choice": st.sampled_from(["required", "none"])}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "/v1/chat/completions": (
        {"messages": CHAT, "max_tokens": st.integers(1, 5)},
        OWN
        | CALLED
        | {"n": st.integers(1, 3), "logprobs": st.booleans(), "response_format": FORM, "metadata": st.just({"a": "b"})},
    ),
    "/v1/completions": (
        {"prompt": WORDS | st.lists(WORDS, min_size=1, max_size=2), "max_tokens": st.integers(0, 5)},
        OWN | {"n": st.integers(1, 3), "logprobs": st.integers(0, 3), "echo": st.booleans()},
    ),
    "/v1/messages": (
        {"messages": TURNS, "max_tokens": st.integers(0, 5)},
        SAMPLED
        | {"system": BLOCKS, "stop_sequences": st.lists(WORDS, max_size=2), "metadata": st.just({"user_id": "a"})},
    ),
    "/v1/messages/count_tokens": ({"messages": TURNS}, {"system": BLOCKS}),
    "/v1/responses": (
        {"input": WORDS | ITEMS, "max_output_tokens": st.integers(1, 5)},
        {name: OWN[name] for name in ("temperature", "top_p", "stream", "user", "prompt_cache_key")}
        | {
            "instructions": WORDS,
            "tools": st.lists(FLAT, min_size=1, max_size=2),
            "tool_choice": CALLED["tool_choice"],
        },
    ),
    "/tokenize": ({"prompt": WORDS}, {"add_special_tokens": st.just(True), "return_token_strs": st.booleans()}),
    "/detokenize": ({"tokens": st.lists(st.integers(0, 900), max_size=6)}, {"model": st.just("tiny")}),
}
PATHS = tuple(OPTIONS)


PICTURES: dict[str, st.SearchStrategy[Any]] = {
    "/v1/chat/completions": URLS.map(
        lambda url: {"messages": [user({"type": "image_url", "image_url": {"url": url}})]}
    ),
    "/v1/messages": DATA.map(lambda data: {"messages": [user(source(data))]}),
    "/v1/messages/count_tokens": DATA.map(lambda data: {"messages": [user(source(data))]}),
    "/v1/responses": URLS.map(lambda url: {"input": [user({"type": "input_image", "image_url": url})]}),
}
"""What a body has with a picture, by paths that take one."""


def user(part: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [part]}


def source(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def bodies(path: str, *, with_pictures: bool = False) -> st.SearchStrategy[Any]:
    """Bodies for a path: two of three are right, as far as their fields do not contradict each other.

    Args:
        with_pictures: each has one, for models that take them.
    """
    required, optional = OPTIONS[path]
    right = some(required, optional)

    @st.composite
    def make(draw: st.DrawFn) -> Any:
        body = draw(right) | (draw(PICTURES[path]) if with_pictures else {})
        wrong = draw(st.sampled_from([None, None, None, None, None, None, ANYTHING, DEEP, DEEP_TEXT, LONG]))
        if wrong is None:
            return body
        at: Any = body
        name: Any = draw(st.sampled_from([*body, "unknown"]))
        while isinstance(inner := at[name] if isinstance(name, int) or name in at else None, dict | list) and inner:
            if draw(st.booleans()):
                break
            at, name = inner, draw(st.sampled_from([*inner] if isinstance(inner, dict) else [*range(len(inner))]))
        at[name] = draw(wrong)
        return body

    return make()


ANY_HEADER = st.binary(max_size=30).map(
    lambda value: bytes(byte for byte in value if byte >= 32 and byte != 127).strip()
)
HEADERS = st.dictionaries(
    st.sampled_from(["accept", "origin", "authorization", "x-api-key", "x-session-id", "content-type", "connection"]),
    st.one_of(
        ANY_HEADER,
        st.builds(
            "{}; version={}; escaping={}".format,
            st.sampled_from(["application/openmetrics-text", "text/plain"]),
            st.sampled_from(["", "abc", "1.x.0", "1.0.0", "0.0.4", "9" * 5000, "-1", "1.0.0\xb2"]),
            st.sampled_from(["", "allow-utf-8", "underscores", "dots", "values", "x"]),
        ).map(lambda text: text.encode("latin-1")),
    ),
    max_size=3,
)
"""Headers of any kind."""

SEEN = ("/health", "/ready", "/", "/live", "/tree", "/metrics", "/v1/models", "/v1/models/tiny", "/explain/x", "/none")
"""Paths that are looked at."""

SEED = datetime.date.today().toordinal()
"""Of the random bodies of a day."""
