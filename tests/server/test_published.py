"""Requests as the documentation of both APIs shows them, in other words: each is answered, or refused by the name of
what this server does not have."""

import base64
import io
from typing import Any

import pytest

from support.served import Poster

CHAT, LEGACY, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Hello!"}


def picture() -> str:
    from PIL import Image

    data = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


PICTURE = picture()
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 6}, "unit": {"enum": ["c", "f"]}},
    "required": ["place", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "description": "The weather at a place.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"place":"Rome","unit":"c"}'},
}
CUSTOM = {"name": "weather", "description": "The weather at a place.", "input_schema": SCHEMA}


def asks(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


OPENAI: list[tuple[str, dict[str, Any], str | None]] = [
    (CHAT, {"messages": [{"role": "developer", "content": "You are helpful."}, USER]}, None),
    (CHAT, {"messages": [USER], "stream": True}, None),
    (CHAT, {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}, None),
    (CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 2}, None),
    (CHAT, {"messages": [USER], "n": 3, "temperature": 1.2, "top_p": 0.9, "seed": 7}, None),
    (CHAT, {"messages": [USER], "stop": ["\n\n", "END"], "presence_penalty": 0.5, "frequency_penalty": 0.5}, None),
    (
        CHAT,
        {"messages": [USER], "logit_bias": {"50": -100}, "user": "u-1", "metadata": {"a": "b"}, "store": True},
        None,
    ),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}, "prompt_cache_key": "k"}, None),
    (
        CHAT,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": SCHEMA}},
        },
        None,
    ),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "auto"}, "tools"),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}, None),
    (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "call_1", "content": "22 degrees"},
            ]
        },
        None,
    ),
    (
        CHAT,
        {
            "messages": asks(
                {"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "https://x.example"}}
            )
        },
        "image_url",
    ),
    (
        CHAT,
        {"messages": asks({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}})},
        "vision",
    ),
    (CHAT, {"messages": asks({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})}, "text"),
    (CHAT, {"messages": [USER], "modalities": ["text", "audio"], "audio": {"voice": "alloy"}}, "modalities"),
    (CHAT, {"messages": [USER], "reasoning_effort": "high"}, "reasoning_effort"),
    (CHAT, {"messages": [USER], "reasoning_effort": "none"}, None),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": "Hi.", "reasoning_content": "A greeting."}, USER]},
        None,
    ),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "reasoning_content": "A"}, USER]}, None),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER]}, None),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}, None),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {"mood": "kind"}}, "chat_template_kwargs.mood"),
    (CHAT, {"messages": [USER], "documents": [{"title": "x", "text": "y"}]}, "documents"),
    (CHAT, {"messages": [USER], "prediction": {"type": "content", "content": "x"}}, "prediction"),
    (CHAT, {"messages": [USER], "web_search_options": {}}, "web_search_options"),
    (CHAT, {"messages": [USER], "functions": [FUNCTION]}, "functions"),
    (LEGACY, {"prompt": "Say this is a test", "temperature": 0}, None),
    (LEGACY, {"prompt": "def f(", "suffix": "return"}, "suffix"),
    (RESPONSES, {"input": "Tell me a story of a unicorn."}, None),
    (RESPONSES, {"input": "Hello!", "instructions": "Be kind.", "stream": True}, None),
    (RESPONSES, {"input": "News?", "tools": [{"type": "web_search"}]}, "function"),
    (RESPONSES, {"input": "And then?", "previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"input": "Think.", "reasoning": {"effort": "high"}}, "effort"),
    (RESPONSES, {"input": "Think not.", "reasoning": {"effort": "none"}}, None),
]

ANTHROPIC: list[tuple[str, dict[str, Any], str | None]] = [
    (MESSAGES, {"messages": [USER]}, None),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "Hello."}, USER]}, None),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}, None),
    (MESSAGES, {"messages": [USER], "system": "Today is a Friday."}, None),
    (MESSAGES, {"messages": [USER], "stop_sequences": ["END"], "temperature": 0.7, "top_k": 5, "top_p": 0.7}, None),
    (MESSAGES, {"messages": [USER], "stream": True, "metadata": {"user_id": "u-1"}, "service_tier": "auto"}, None),
    (MESSAGES, {"messages": asks({"type": "text", "text": "Hello, you"})}, None),
    (
        MESSAGES,
        {"messages": [USER], "system": [{"type": "text", "text": "Long.", "cache_control": {"type": "ephemeral"}}]},
        None,
    ),
    (MESSAGES, {"messages": [USER], "cache_control": {"type": "ephemeral", "ttl": "1h"}}, None),
    (
        MESSAGES,
        {
            "messages": [USER],
            "tools": [CUSTOM | {"cache_control": {"type": "ephemeral"}}],
            "tool_choice": {"type": "tool", "name": "weather"},
        },
        None,
    ),
    (MESSAGES, {"messages": [USER], "tools": [CUSTOM], "tool_choice": {"type": "any"}, "stream": True}, None),
    (MESSAGES, {"messages": [USER], "tools": [CUSTOM]}, "tools"),
    (
        MESSAGES,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "text", "text": "Looking."},
                        {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Rome"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "22 degrees"},
                        {"type": "text", "text": "Well?"},
                    ],
                },
            ]
        },
        None,
    ),
    (
        MESSAGES,
        {
            "messages": asks(
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
                {"type": "text", "text": "What is it?"},
            )
        },
        "vision",
    ),
    (MESSAGES, {"messages": asks({"type": "image", "source": {"type": "url", "url": "https://x.example"}})}, "base64"),
    (MESSAGES, {"messages": asks({"type": "document", "source": {"type": "text", "data": "x"}})}, "type"),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 2048}}, "budget_tokens"),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "adaptive"}}, "thinking"),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "disabled"}}, None),
    (
        MESSAGES,
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "A greeting.", "signature": ""},
                        {"type": "text", "text": "Hello."},
                    ],
                },
                USER,
            ]
        },
        None,
    ),
    (MESSAGES, {"messages": [USER], "mcp_servers": [{"type": "url", "url": "https://x.example"}]}, "mcp_servers"),
    (MESSAGES, {"messages": [USER], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "type"),
    (MESSAGES, {"messages": [USER], "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, None),
    (MESSAGES, {"messages": [USER], "output_config": {"effort": "low"}}, "effort"),
    (f"{MESSAGES}/count_tokens", {"messages": [USER], "system": "Be kind."}, None),
]


@pytest.mark.parametrize(("path", "body", "named"), OPENAI + ANTHROPIC)
def test_a_published_request_is_answered_or_refused_by_name(
    post: Poster, path: str, body: dict[str, Any], named: str | None
) -> None:
    length = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    needs = {} if path.endswith("count_tokens") else {length: 40 if "schema" in str(body) else 6}
    answer = post(path, **needs, **body)
    if named is None:
        assert answer.status_code == 200, answer.text
        assert '"error":{' not in answer.text
    else:
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
