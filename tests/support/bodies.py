"""Random bodies: right ones of which a few fields were replaced by anything."""

from typing import Any

from hypothesis import strategies as st

TEXTS = st.text(max_size=20) | st.sampled_from(["", "<|im_end|>", "\ud83d", "\x00", "The with statement", "x" * 3000])
NUMBERS = st.integers(-(2**70), 2**70) | st.integers(-2, 40) | st.floats(allow_nan=False, allow_infinity=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "image_url", "image", "tool_use", "tool_result", "input_text", "file"])},
        optional={"text": TEXTS, "image_url": ANYTHING, "source": ANYTHING, "content": ANYTHING, "name": TEXTS},
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]), "content": TEXTS | PARTS},
        optional={"tool_calls": ANYTHING, "name": TEXTS, "tool_call_id": TEXTS, "reasoning": TEXTS, "refusal": TEXTS},
    ),
    max_size=4,
)
MESSAGES = st.just([{"role": "user", "content": "Hello"}]) | MESSAGES  # of which half can be answered
SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        {"type": "nothing"},
        {"$ref": "#/nowhere"},
        {"anyOf": []},
        {},
        {"type": "string", "pattern": "("},
    ]
)
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.just("function"), "function": st.fixed_dictionaries({"name": TEXTS, "parameters": SCHEMAS})}
    )
    | st.fixed_dictionaries({"name": TEXTS, "input_schema": SCHEMAS})
    | st.fixed_dictionaries({"type": st.just("function"), "name": TEXTS, "parameters": SCHEMAS}),
    max_size=2,
)
COMMON: dict[str, Any] = {
    "temperature": NUMBERS,
    "top_p": st.floats(0, 1),
    "seed": st.integers(-1, 2**64),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "n": st.integers(0, 4),
    "logit_bias": st.dictionaries(st.integers(-1, 2000).map(str), NUMBERS, max_size=3),
    "presence_penalty": NUMBERS,
    "stream": st.booleans(),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "continuous_usage_stats"]), st.booleans()),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["auto", "none", "required", "any", {"type": "any"}, {"type": "function"}]),
    "logprobs": st.booleans() | st.integers(0, 3),
    "top_logprobs": st.integers(-1, 30),
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "json_object", "json_schema"])},
        optional={"json_schema": st.fixed_dictionaries({"name": TEXTS, "schema": SCHEMAS})},
    ),
    "structured_outputs": st.dictionaries(
        st.sampled_from(["regex", "choice", "grammar", "json"]), ANYTHING, max_size=1
    ),
    "cache_salt": TEXTS,
    "chat_template": TEXTS,
    "chat_template_kwargs": ANYTHING,
    "continue_final_message": st.booleans(),
    "truncate_prompt_tokens": st.integers(-2, 9),
    "prompt_cache_options": ANYTHING,
    "stop_sequences": st.lists(TEXTS, max_size=2),
    "thinking": st.dictionaries(TEXTS, ANYTHING, max_size=2),
    "documents": ANYTHING,
    "echo": st.booleans(),
    "bad_words": st.lists(TEXTS, max_size=2),
}
LENGTH = st.integers(0, 5)
IDS = st.lists(st.integers(-1, 1100), max_size=6)
REQUIRED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": LENGTH},
    "/v1/completions": {"prompt": TEXTS | IDS | st.lists(TEXTS | IDS, max_size=2), "max_tokens": LENGTH},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": LENGTH, "system": TEXTS | PARTS},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {"input": TEXTS | MESSAGES, "max_output_tokens": LENGTH},
    "/tokenize": {"prompt": TEXTS},
    "/detokenize": {"tokens": IDS},
}
PATHS = tuple(REQUIRED)


def bodies(path: str) -> st.SearchStrategy[Any]:
    """Bodies for a path."""

    @st.composite
    def make(draw: st.DrawFn) -> Any:
        body: dict[str, Any] = {name: draw(values) for name, values in REQUIRED[path].items()}
        for name in draw(st.lists(st.sampled_from(sorted(COMMON)), max_size=2, unique=True)):
            body[name] = draw(COMMON[name])
        if draw(st.integers(0, 3)) == 0:
            body[draw(st.sampled_from([*body, "unknown"]))] = draw(ANYTHING)
        return body

    return make() | ANYTHING
