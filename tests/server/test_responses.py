"""OpenAI's responses: streams are whole responses, and items of a conversation are messages."""

import json
from typing import Any

import pytest

from support.served import Poster, events

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def respond(post: Poster, **body: Any) -> Any:
    return post("/v1/responses", **{"input": "The with statement", "max_output_tokens": 8} | body)


def without_ids(response: dict[str, Any]) -> Any:
    """The output and the status of a response, without what is new each time."""
    items = [{name: value for name, value in item.items() if "id" not in name} for item in response["output"]]
    return items, response["status"], response["usage"]["output_tokens"], response["incomplete_details"]


@pytest.mark.parametrize(
    "body", [{}, {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 60}], ids=["text", "call"]
)
def test_a_stream_has_the_response_that_is_whole(post: Poster, body: Any) -> None:
    first = respond(post, **body).json()
    found = events(respond(post, **body, stream=True))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert without_ids(found[-1]["response"]) == without_ids(first)
    pieces = "".join(event["delta"] for event in found if event["type"].endswith(".delta"))
    (item,) = first["output"]
    assert pieces == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])


def test_a_prompt_is_computed_in_advance(post: Poster) -> None:
    prompt = "To be asked after a while. " * 12
    made = respond(post, input=prompt, prompt_cache_options={"prewarm": True, "ttl": "30m"}).json()
    assert made["output"] == [] and made["usage"]["output_tokens"] == 0
    written = made["usage"]["input_tokens_details"]["cache_write_tokens"]
    assert respond(post, input=prompt).json()["usage"]["input_tokens_details"]["cached_tokens"] == written > 0


def test_why_the_prompt_of_another_response_was_not_cached_is_said(post: Poster) -> None:
    def asked(compared: str, text: str = "A question to be compared. " * 12, **body: Any) -> Any:
        options = {"prompt_cache_options": {"comparison_response_id": compared}}
        return respond(post, input=[{"role": "user", "content": text}], **options, **body).json()

    first = respond(post, input="A question to be compared. " * 12).json()
    assert "prompt_cache_diagnostics" not in first
    assert asked(first["id"])["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    for reason, found in {
        "input": asked(first["id"], "Another."),
        "tools": asked(first["id"], tools=[WEATHER], tool_choice="none"),
    }.items():
        why = found["prompt_cache_diagnostics"]
        assert (why["type"], why["reason"]) == ("cache_miss", f"{reason}_changed")
        usage = found["usage"]
        assert why["cache_missed_tokens"] == usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    assert asked("resp_never")["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_items_are_the_messages_of_a_chat(post: Poster) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
        {"role": "user", "content": "And?"},
    ]
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]
    chat += [{"role": "user", "content": "And?"}]
    of_items = respond(post, input=items, instructions="Be short.").json()
    of_chat = post.chat(messages=[{"role": "system", "content": "Be short."}, *chat]).json()
    assert of_items["output"][0]["content"][0]["text"] == of_chat["choices"][0]["message"]["content"]
    assert of_items["usage"]["input_tokens"] == of_chat["usage"]["prompt_tokens"]
    with_call = [*items, call, {"type": "function_call_output", "call_id": "c", "output": "warm"}]
    assert respond(post, input=with_call).json()["status"] in ("completed", "incomplete")
    form = {"type": "json_schema", "name": "w", "schema": WEATHER["parameters"], "strict": True}
    text = respond(post, text={"format": form}, max_output_tokens=60).json()["output"][0]["content"][0]["text"]
    assert set(json.loads(text)) == {"city"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("background", True),
        ("input", []),
        ("input", [{"type": "reasoning"}]),
        ("input", [{"type": "computer_call"}]),
        ("tools", [{"type": "web_search"}]),
        ("max_output_tokens", -1),
        ("text", {"format": {"type": "xml"}}),
        ("include", ["x"]),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(post: Poster, field: str, value: Any) -> None:
    refused = respond(post, **{field: value})
    assert refused.status_code == 400
    assert field in refused.json()["error"]["message"]


def test_the_client_of_openai(post: Poster) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{post.address}/v1", api_key="none", max_retries=0)
    answer = client.responses.create(model="tiny", input="The with statement", max_output_tokens=40)
    with client.responses.stream(model="tiny", input="The with statement", max_output_tokens=40) as stream:
        assert stream.get_final_response().output_text == answer.output_text
