"""Random bodies: right ones, each field from its domain, and the same with one value replaced by anything."""

from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(max_size=20) | st.sampled_from(["<|im_end|>", "The with statement", "x" * 3000])
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-2, 40) | st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from(["", "\ud83d", "\x00"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
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
    return WORDS | st.lists(st.one_of(text, *more), min_size=1, max_size=3)


TTL = {
    "cache_control": st.fixed_dictionaries({"type": st.just("ephemeral")}, optional={"ttl": st.sampled_from(["5m"])})
}
BLOCKS = parts("text", st.fixed_dictionaries({"type": st.just("text"), "text": WORDS, **TTL}))
CHAT = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "developer"]), "content": parts("text")}
    )
    | st.fixed_dictionaries({"role": st.just("tool"), "content": WORDS, "tool_call_id": WORDS}),
    min_size=1,
    max_size=4,
)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": BLOCKS}), min_size=1, max_size=4
)
ITEMS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": parts("input_text")})
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


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Bodies for a path: four of five are right, as far as their fields do not contradict each other."""
    required, optional = OPTIONS[path]
    right = some(required, optional)

    @st.composite
    def make(draw: st.DrawFn) -> Any:
        body = draw(right)
        if draw(st.integers(0, 4)) < 4:
            return body
        at: Any = body
        name: Any = draw(st.sampled_from([*body, "unknown"]))
        while isinstance(inner := at[name] if isinstance(name, int) or name in at else None, dict | list) and inner:
            if draw(st.booleans()):
                break
            at, name = inner, draw(st.sampled_from([*inner] if isinstance(inner, dict) else [*range(len(inner))]))
        at[name] = draw(ANYTHING)
        return body

    return make()
