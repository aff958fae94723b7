"""Every field that the server takes changes what it says, is refused by name, or is one of those that change nothing.
The fields are those that the server asks for while the rows run: one without a row fails."""

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hybrid.server.fields import Fields
from support.served import ASKED, Poster

CHAT, LEGACY, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize"

DIFFERS, SAME = "another answer", "the same answer"
ABSENT = object()


class Refused(NamedTuple):
    """The refusal of a value; this is in its message."""

    text: str


class Shown(NamedTuple):
    """The test of another file that shows what a field does."""

    file: str
    name: str


class Row(NamedTuple):
    """A field of a body.

    Attributes:
        name: its path.
        value, otherwise: two values of it.
        more: what else the body has.
        effect: what comes of the one instead of the other.
        seen: what of a response is compared; None: all but ids, times and usage.
    """

    name: str
    value: Any
    otherwise: Any = ABSENT
    more: dict[str, Any] = {}  # noqa: RUF012 - it is read alone
    effect: Any = DIFFERS
    seen: Callable[[Poster, Any], Any] | None = None


def cached(post: Poster, answer: Any) -> Any:
    """Tokens of the prompt that were cached."""
    usage = answer.json()["usage"]
    found = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return found["cached_tokens"] if found else usage["cache_read_input_tokens"]


def num_pins(post: Poster) -> float:
    """Prefixes that are kept from eviction now."""
    found = re.search(r"hybrid:pins\{.*\} (\S+)", post.get("/metrics").text)
    assert found is not None
    return float(found[1])


def pins(post: Poster, answer: Any) -> bool:
    """Whether a prefix is kept from eviction that was not before (`post.pins`: how many were, before the request)."""
    assert answer.status_code == 200, answer.text
    before, post.pins = post.pins, num_pins(post)  # type: ignore[attr-defined]
    return bool(post.pins > before)  # type: ignore[attr-defined]


def size(post: Poster, answer: Any) -> Any:
    """Tokens of the prompt."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    usage = found.get("usage") or found
    if "cache_read_input_tokens" in usage:
        return sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))
    return usage.get("prompt_tokens") or usage.get("input_tokens") or usage["count"]


def shape(post: Poster, answer: Any) -> Any:
    """What was answered, without ids, times and usage."""
    text = re.sub(r'"(id|call_id|item_id|created|created_at)":("[^"]*"|[\d.]+),?', "", answer.text)
    return answer.status_code, re.sub(r'"usage":\{.*?\}\}?,?', "", text)


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
OTHER = SCHEMA | {"properties": {"a": {"enum": [3, 4]}}}
FORMS: dict[str, Any] = {
    "json": SCHEMA,
    "json_object": True,
    "regex": "[0-9]{3}",
    "choice": ["yes", "no"],
    "grammar": 'start: "yes" | "no"',
}
END = {"logit_bias": {"2": 100}}  # with the token that ends a message
HOT = {"temperature": 2.0, "seed": 1}
LONG = "The breakpoint stands after this text. " * 6
PARALLEL = Shown("test_agents.py", "test_without_parallel_calls_an_answer_has_one")
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
    "RU5ErkJggg=="
)


def refused(*names: str, value: Any = "x", more: dict[str, Any] | None = None) -> list[Row]:
    """Fields of which any value is refused."""
    return [Row(name, value, more=more or {}, effect=Refused(name.rpartition(".")[2])) for name in names]


def written(post: Poster, answer: Any) -> str:
    """The text of a stream, however it was cut."""
    return "".join(re.findall(r'"(?:content|text|delta)":"([^"]*)"', answer.text))


def harmless(*names: str, value: Any = "x", more: dict[str, Any] | None = None) -> list[Row]:
    """Fields that change no answer."""
    return [Row(name, value, more=more or {}, effect=SAME) for name in names]


def of_openai(length: str, long: dict[str, Any]) -> list[Row]:
    """What OpenAI's APIs have in common; `long`: a prompt that is worth keeping."""
    some = {length: 40}
    return [
        Row("model", "other", "tiny", effect=Refused("is not served here")),
        Row(length, 3),
        Row("temperature", 2.0, more={"seed": 1}),
        Row("seed", 5, 6, {"temperature": 3.0, length: 24}),
        Row("top_p", 1e-6, more=HOT),
        Row("top_k", 1, more=HOT),
        Row("min_p", 1.0, more=HOT),
        Row("presence_penalty", 2.0, more=some),
        Row("frequency_penalty", 2.0, more=some),
        Row("repetition_penalty", 3.0, more=some),
        Row("logit_bias", {"300": 100}),
        Row("min_tokens", 4, more=END),
        Row("ignore_eos", True, more=END),
        Row("skip_special_tokens", False, more=END | {"ignore_eos": True}),
        Row("stop_token_ids", [300], more={"logit_bias": {"300": 100}}),
        Row("bad_words", [" the", "the", " a", "e"], more=some),
        Row("stop", "e", more=some),
        Row("prompt_cache_retention", "24h", seen=pins),
        Row("prompt_cache_options.ttl", "30m", seen=pins),
        *harmless("prompt_cache_options.mode", value="explicit"),
        Row("prompt_cache_options.prewarm", True),
        Row("kv_hints", {"retain": 60.0}, seen=pins),
        *harmless("session_id"),
        Row("cache_salt", "grain", more=long, seen=cached),
        Row("stream", True),
        *harmless("user", "safety_identifier", "service_tier", "prompt_cache_key"),
        *harmless("metadata", value={"a": "b"}),
        *harmless("store", value=True),
    ]


def of_functions(where: str, parameters: str = "parameters", more: dict[str, Any] | None = None) -> list[Row]:
    """The description of a function, in a body that must call it."""
    return [
        Row(f"{where}name", "subtract", "add", more or {}),
        Row(f"{where}description", "It adds.", more=more or {}, seen=size),
        Row(f"{where}{parameters}", SCHEMA, OTHER, more or {}),
        *harmless(f"{where}strict", value=False, more=more),
    ]


def of_openai_tools(inner: str) -> list[Row]:
    """Tools of OpenAI's APIs; `inner`: the object that a function stands in."""
    function = {"name": "add", "parameters": SCHEMA}
    tool = {"type": "function"} | ({"function": function} if inner else function)
    named = {"type": "function"} | ({"function": {"name": "add"}} if inner else {"name": "add"})
    forced = {"tools": [tool], "tool_choice": "required"} | ({"max_tokens": 60} if inner else {"max_output_tokens": 60})
    found = [
        Row("tools", [tool], seen=size),
        Row("tools[0].type", "web_search", "function", forced, Refused("tools[0].type")),
        *of_functions(f"tools[0].{inner}", more=forced),
        Row("tool_choice", "required", more={"tools": [tool]}),
        Row(
            "tool_choice.type",
            "hosted",
            "function",
            {"tools": [tool], "tool_choice": named},
            Refused("tool_choice.type"),
        ),
        Row(f"tool_choice.{inner}name", "sub", "add", {"tools": [tool], "tool_choice": named}, Refused("'sub'")),
        Row("parallel_tool_calls", False, effect=PARALLEL),
    ]
    if inner:
        found += [Row("tools[0].function", ABSENT, function, forced, Refused("tools[0].function"))]
        found += [
            Row(
                "tool_choice.function",
                ABSENT,
                {"name": "add"},
                {"tools": [tool], "tool_choice": named},
                Refused("names"),
            )
        ]
    return found


def of_forms() -> list[Row]:
    """The forms of an answer that chat completions and completions take."""
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    return [
        *(Row(f"structured_outputs.{name}", value) for name, value in FORMS.items()),
        Row("response_format.type", "json_object", "text", {"response_format": {}}),
        Row("response_format.json_schema", ABSENT, SCHEMA, form, Refused("json_schema")),
        Row("response_format.json_schema.schema", SCHEMA, OTHER, form),
        *harmless("response_format.json_schema.name", "response_format.json_schema.description", more=form),
        *harmless("response_format.json_schema.strict", value=True, more=form),
    ]


def streamed(*names: str) -> list[Row]:
    """Options of a stream that change it."""
    stream = {"stream": True}
    found = [
        Row(
            f"stream_options.{name}",
            True,
            more=stream,
            seen=lambda post, answer: len(re.findall('"usage"', answer.text)),
        )
        for name in names
    ]
    return [*found, Row("stream_options.include_obfuscation", True, ABSENT, stream, SAME, written)]


CALLED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TURNS = {"messages": [*ASKED, {"role": "assistant", "content": "A tuple."}, *ASKED]}
RESULT = {
    "messages": [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "content": "7"},
    ]
}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}
PART = "messages[0].content[0]"
IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]}
OPENAI_MESSAGES = [
    Row("messages", [{"role": "user", "content": "Another one"}], ASKED),
    Row("messages[0].role", "system", "user", seen=size),
    Row("messages[0].content", "Another one", "The with statement"),
    *refused("messages[0].name"),
    *harmless("messages[1].annotations", value=[], more=TURNS),
    Row("messages[1].tool_calls", [CALLED], more=TURNS, seen=size),
    Row(
        "messages[1].refusal",
        "I cannot say that.",
        "No.",
        {"messages": [*ASKED, {"role": "assistant"}, *ASKED]},
        seen=size,
    ),
    Row("messages[1].reasoning_content", "A list of thoughts", more=TURNS, seen=size),
    Row("messages[1].reasoning", "A list of thoughts", more=TURNS, seen=size),
    Row("messages[1].tool_calls[0].function.name", "subtract_them_all", "add", RESULT, seen=size),
    Row("messages[1].tool_calls[0].function.arguments", '{"a":"one and another"}', "{}", RESULT, seen=size),
    *harmless("messages[1].tool_calls[0].id", more=RESULT),
    Row("messages[1].tool_calls[0].type", "hosted", "function", RESULT, Refused("type")),
    *refused("messages[1].audio", "messages[1].function_call", more=TURNS),
    *harmless("messages[2].tool_call_id", "messages[2].name", more=RESULT),
    Row(f"{PART}.type", "file", "text", PARTS, Refused(f"{PART}.type")),
    Row(f"{PART}.text", "Another one", LONG, PARTS),
    Row(
        f"{PART}.refusal",
        "No, not at all.",
        "No.",
        {"messages": [{"role": "user", "content": [{"type": "refusal"}]}]},
        seen=size,
    ),
    Row(f"{PART}.image_url", ABSENT, "x", IMAGE, Refused("image_url")),
    Row(f"{PART}.image_url.url", "https://example.org/a.png", PNG, IMAGE, Refused("data URL")),
    Row(f"{PART}.image_url.detail", "low", more=IMAGE, effect=SAME),
    Row(f"{PART}.prompt_cache_breakpoint.ttl", "30m", more=PARTS, seen=pins),
    Row(f"{PART}.prompt_cache_breakpoint.mode", "x", more=PARTS, effect=SAME),
    Row(f"{PART}.prompt_cache_breakpoint.type", "x", more=PARTS, effect=SAME),
]
TEMPLATE = [
    Row("add_generation_prompt", False, seen=size),
    Row("continue_final_message", True, more={"messages": TURNS["messages"][:2]}, seen=size),
    Row("chat_template_kwargs", {"enable_thinking": True}, seen=size),
    *refused("documents", value=[{"text": "x"}]),
    Row("chat_template", "x", effect=Refused("chat_template")),
]
THINK = Shown("test_agents.py", "test_thinking_is_turned_off_in_each_api")

FORCED = {"tools": [{"name": "add", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}
NAMED = FORCED | {"tool_choice": {"type": "tool", "name": "add"}}
BLOCKS = {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}
USED = {
    "messages": [
        *ASKED,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "7"}]}],
        },
    ]
}
THOUGHT = {
    "messages": [
        *ASKED,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "So.", "signature": "s"}, {"type": "text", "text": "A."}],
        },
        *ASKED,
    ]
}
PICTURE = {
    "messages": [
        {
            "role": "user",
            "content": [
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]},
                }
            ],
        }
    ]
}
CONFIG = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}


def of_anthropic(seen: Callable[[Poster, Any], Any] | None, kept: Any) -> list[Row]:
    """What makes the prompt of Anthropic's messages. `seen`, `kept`: what of a response shows a change, or a pin."""
    block, use, result = "messages[0].content[0]", "messages[1].content[0]", "messages[2].content[0]"
    rows = [
        Row("model", "other", "tiny", effect=Refused("is not served here")),
        Row("system", "You know all of it.", seen=size),
        Row("system[0].type", "image", "text", {"system": [{"type": "text", "text": "x"}]}, Refused("system[0].type")),
        Row("system[0].text", "You know all of it.", "You", {"system": [{"type": "text"}]}, seen=size),
        *harmless("system[0].citations", value=[], more={"system": [{"type": "text", "text": "x"}]}),
        Row("messages", [{"role": "user", "content": "Another one, and one more"}], ASKED, seen=size),
        Row("messages[0].role", "tool", "user", effect=Refused("messages[0].role")),
        Row("messages[0].content", "Another one, and one more", "The with statement", seen=size),
        Row(f"{block}.type", "document", "text", BLOCKS, Refused(f"{block}.type")),
        Row(f"{block}.text", "Another one", LONG, BLOCKS, seen=size),
        *harmless(f"{block}.citations", value=[], more=BLOCKS),
        Row(f"{block}.source", ABSENT, "x", PICTURE, Refused("source")),
        Row(f"{block}.source.type", "url", "base64", PICTURE, Refused("source.type")),
        Row(f"{block}.source.data", "no picture", more=PICTURE, effect=Refused("source.data")),
        *harmless(f"{block}.source.media_type", value="image/gif", more=PICTURE),
        Row(f"{use}.name", "subtract_them_all", "add", USED, seen=size),
        Row(f"{use}.input", {"a": "one and another one"}, {}, USED, seen=size),
        *harmless(f"{use}.id", f"{use}.caller", more=USED),
        *harmless(f"{result}.tool_use_id", more=USED),
        Row(f"{result}.content", "seven and one more", "7", USED, seen=size),
        Row(f"{result}.content[0].type", "image", "text", USED, Refused("tool's result is text")),
        Row(f"{result}.content[0].text", "seven and one more", "7", USED, seen=size),
        *harmless(f"{result}.content[0].citations", value=[], more=USED),
        Row(f"{result}.is_error", True, more=USED, seen=size),
        Row(f"{use}.thinking", "A list of many thoughts", "So.", THOUGHT, seen=size),
        *harmless(f"{use}.signature", more=THOUGHT),
        Row("tools", FORCED["tools"], seen=size),
        Row("tools[0].type", "web_search", "custom", FORCED, Refused("tools[0].type")),
        Row("tools[0].name", "subtract_them_all", "add", FORCED, seen=size),
        Row("tools[0].description", "It adds.", more=FORCED, seen=size),
        Row("tools[0].input_schema", {"type": "object"}, SCHEMA, FORCED, seen=size),
        *harmless("tools[0].strict", value=False, more=FORCED),
        Row("tool_choice", {"type": "none"}, {"type": "any"}, FORCED, effect=DIFFERS if seen is None else SAME),
        Row("tool_choice.type", "some", "any", FORCED, Refused("tool_choice.type")),
        Row("tool_choice.name", "sub", "add", NAMED, Refused("'sub'")),
        Row("tool_choice.disable_parallel_tool_use", True, effect=PARALLEL),
        Row("thinking.type", "enabled", "disabled", {"thinking": {}}, seen=size),
        Row("thinking.budget_tokens", 2048, more={"thinking": {"type": "enabled"}}, effect=Refused("budget_tokens")),
        Row(
            "thinking.display", "omitted", effect=Shown("test_agents.py", "test_thinking_may_be_left_out_of_a_message")
        ),
        *refused("output_config.effort"),
        Row("output_config.format.type", "text", "json_schema", CONFIG, Refused("output_config.format.type")),
        Row("output_config.format.schema", SCHEMA, OTHER, CONFIG, effect=DIFFERS if seen is None else SAME),
        *refused("speed", value="fast"),
    ]
    for number, (where, more) in enumerate(
        [
            ("", BLOCKS),
            ("system[0].", {"system": [{"type": "text", "text": LONG}]}),
            (f"{block}.", BLOCKS),
            ("tools[0].", FORCED),
            (f"{use}.", USED),
            (f"{result}.", USED),
            (f"{result}.content[0].", USED),
        ]
    ):
        own = deepcopy(more)  # a prompt that no other row has
        own.setdefault("messages", [{}])[0] |= {
            "role": "user",
            "content": [{"type": "text", "text": f"{number} {LONG}"}],
        }
        is_kept = kept is not None and "content[0].content" not in where
        effect = DIFFERS if is_kept else SAME
        rows += [Row(f"{where}cache_control", {"type": "ephemeral"}, ABSENT, own, effect, kept if is_kept else None)]
        rows += [Row(f"{where}cache_control.type", "x", "ephemeral", own, Refused("cache_control.type"))]
        rows += [Row(f"{where}cache_control.ttl", "2h", "5m", own, Refused("cache_control.ttl"))]
    return rows


REPLY = {
    "input": [
        {"role": "user", "content": "?"},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ]
}
THINKING = {
    "input": [
        {"role": "user", "content": "?"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "A."}]},
        {"role": "user", "content": "?"},
    ]
}
INPUT = {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}]}
SEEN = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PNG}]}]}
FORM = {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
ITEMS = [
    Row("input", "Another one", "One"),
    Row("input[0].type", "web_search_call", "message", INPUT, Refused("input[0].type")),
    *harmless("input[0].id", "input[0].status", "input[0].phase", more=INPUT),
    Row("input[0].role", "tool", "user", INPUT, Refused("input[0].role")),
    Row("input[0].content", "Another one", "x", INPUT),
    Row("input[0].content[0].type", "input_file", "input_text", INPUT, Refused("input[0].content[0].type")),
    Row("input[0].content[0].text", "Another one", "x", INPUT),
    *harmless("input[2].content[0].annotations", "input[2].content[0].logprobs", value=[], more=THINKING),
    Row("input[0].content[0].image_url", "https://example.org/a.png", PNG, SEEN, Refused("data URL")),
    *harmless("input[0].content[0].detail", more=SEEN),
    Row("input[1].name", "subtract_them_all", "add", REPLY, seen=size),
    Row("input[1].arguments", '{"a":"one and another one"}', "{}", REPLY, seen=size),
    *harmless("input[1].call_id", "input[2].call_id", more=REPLY),
    Row("input[2].output", "seven and one more", "7", REPLY, seen=size),
    Row("input[1].content", [], [{"type": "reasoning_text", "text": "So."}], THINKING, seen=size),
    Row("input[1].content[0].type", "text", "reasoning_text", THINKING, Refused("input[1].content[0].type")),
    Row("input[1].content[0].text", "A list of many thoughts", "So.", THINKING, seen=size),
    *harmless("input[1].summary", value=[], more=THINKING),
    *refused("input[1].encrypted_content", more=THINKING),
]

BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "max_tokens": 12},
    LEGACY: {"prompt": "The module defines a", "max_tokens": 12},
    RESPONSES: {"input": "The with statement is used to wrap the execution of a block", "max_output_tokens": 12},
    MESSAGES: {"messages": ASKED, "max_tokens": 12},
    COUNT: {"messages": ASKED},
    TOKENIZE: {"messages": ASKED},
    DETOKENIZE: {"tokens": [300, 301]},
}
ROWS: dict[str, list[Row]] = {
    CHAT: [
        *of_openai("max_tokens", PARTS),
        Row("max_completion_tokens", 3),
        Row("n", 2),
        *OPENAI_MESSAGES,
        *of_openai_tools("function."),
        *of_forms(),
        *TEMPLATE,
        *streamed("include_usage", "continuous_usage_stats"),
        Row("logprobs", True),
        Row("top_logprobs", 2, more={"logprobs": True}),
        Row("reasoning_effort", "none", effect=THINK),
        *refused("modalities", "verbosity", "audio", "function_call", "functions", "moderation", "prediction"),
        *refused("web_search_options"),
    ],
    LEGACY: [
        *of_openai("max_tokens", {"prompt": LONG}),
        Row("n", 2),
        Row("prompt", "Another one", "One"),
        *of_forms(),
        *streamed("include_usage", "continuous_usage_stats"),
        Row("logprobs", 1),
        Row("truncate_prompt_tokens", 3, seen=size),
        Row("best_of", 2, effect=Refused("best_of")),
        Row("echo", True),
        *refused("suffix"),
    ],
    RESPONSES: [
        *of_openai("max_output_tokens", {"input": f"Another: {LONG}"}),
        Row("n", 2, effect=Refused("n")),
        Row("instructions", "Be kind."),
        *ITEMS,
        *of_openai_tools(""),
        *refused("text.verbosity", value="low"),
        Row("text.format.type", "json_object", "text", {"text": {"format": {}}}),
        Row("text.format.schema", SCHEMA, OTHER, FORM),
        *harmless("text.format.name", "text.format.description", more=FORM),
        *harmless("text.format.strict", value=True, more=FORM),
        *streamed(),
        Row("reasoning.effort", "none", effect=THINK),
        *harmless("reasoning.summary", value="auto"),
        Row("prompt_cache_options.comparison_response_id", "resp_never"),
        *refused("background", value=True),
        *refused("truncation", "previous_response_id", "conversation", "prompt", "max_tool_calls"),
        *refused("context_management", "moderation", "include", "top_logprobs"),
    ],
    MESSAGES: [
        *of_anthropic(None, pins),
        Row("max_tokens", 3, 12),
        Row("kv_hints", {"retain": 60.0}, more={"system": "These are the hints of another one. " * 6}, seen=pins),
        *harmless("session_id"),
        Row("temperature", 100.0, more={"top_k": 2}),
        Row("top_p", 1e-6, more={"temperature": 1000.0}),
        Row("top_k", 1, more={"temperature": 1000.0}),
        Row("stop_sequences", ["e"]),
        Row("stream", True),
        Row("diagnostics.previous_message_id", "msg_never"),
        *harmless("metadata", value={"user_id": "x"}),
        *harmless("service_tier", value="auto"),
    ],
    COUNT: of_anthropic(size, None),
    TOKENIZE: [
        Row("model", "other", "tiny", effect=Refused("is not served here")),
        *(row._replace(effect=SAME, seen=size) if row.seen is pins else row for row in OPENAI_MESSAGES),
        *TEMPLATE,
        Row("tools", [{"type": "function", "function": {"name": "add"}}]),
        Row("prompt", "Another one", "The with statement", {"messages": None}),
        *refused("add_special_tokens", value=False),
        Row("return_token_strs", True),
    ],
    DETOKENIZE: [Row("model", "other", "tiny", effect=Refused("is not served here")), Row("tokens", [302], [300])],
}


def with_field(body: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A body with a value at a path; what is on the way is made."""
    body = deepcopy(body)
    at: Any = body
    *way, last = [int(part) if part.isdigit() else part for part in re.findall(r"[^.\[\]]+", name)]
    for part in way:
        if isinstance(at, dict) and not isinstance(at.get(part), dict | list):
            at[part] = {}
        at = at[part]
    if value is ABSENT:
        at.pop(last, None)
    else:
        at[last] = value
    return body


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths of the fields that the server asks for."""
    names: set[str] = set()
    take = Fields.take

    def noted(self: Fields, name: str) -> Any:
        names.add(re.sub(r"\[\d+\]", "[]", self.path(name)))
        return take(self, name)

    monkeypatch.setattr(Fields, "take", noted)
    return names


def wrong(post: Poster, path: str, row: Row) -> str | None:
    """What of a row does not hold; None: nothing."""
    if isinstance(row.effect, Shown):
        source = (Path(__file__).parent / row.effect.file).read_text(encoding="utf-8")
        return None if f"def {row.effect.name}(" in source else f"there is no {row.effect}"
    body = {"model": "tiny"} | BASE[path] | row.more
    if row.seen is pins:  # some that were made a minute ago have expired
        post.pins = num_pins(post)  # type: ignore[attr-defined]
    answer = post(path, **with_field(body, row.name, row.value))
    if isinstance(row.effect, Refused):
        is_refused = answer.status_code in (400, 404) and row.effect.text in answer.text.replace('\\"', '"')
        return None if is_refused else f"{row.effect}: {answer.status_code} {answer.text[:300]}"
    seen = row.seen or shape
    if seen is cached:  # what is not parted by the field is there
        post(path, **with_field(body, row.name, row.otherwise))
    found = seen(post, answer)
    other = post(path, **with_field(body, row.name, row.otherwise))
    differs = found != seen(post, other)
    if row.effect == DIFFERS and not (answer.status_code == other.status_code == 200):
        return f"{answer.status_code}, {other.status_code}: {answer.text[:300]} {other.text[:300]}"
    return (
        None if differs == (row.effect == DIFFERS) else f"not {row.effect}: {answer.text[:400]}\n    {other.text[:400]}"
    )


@pytest.mark.parametrize("path", ROWS)
def test_every_field_has_a_row_that_holds(post_tiny: Poster, path: str, asked_for: set[str]) -> None:
    post_tiny(path, **BASE[path])  # its prompt is cached
    found = {row.name: wrong(post_tiny, path, row) for row in ROWS[path]}
    assert {name: text for name, text in found.items() if text} == {}
    named = {re.sub(r"\[\d+\]", "[]", row.name) for row in ROWS[path]}
    holders = {name for name in asked_for if any(other.startswith((f"{name}.", f"{name}[")) for other in asked_for)}
    assert asked_for - named - holders == set(), "fields without a row"
