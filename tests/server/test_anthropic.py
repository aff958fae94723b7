"""Anthropic's API: streams are whole responses, and what the cache had is in the usage."""

from typing import Any

import pytest

from support.served import ASKED, Poster, events

SYSTEM = [{"type": "text", "text": "You are a reference of Python. " * 12, "cache_control": {"type": "ephemeral"}}]
WEATHER = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def message(post: Poster, **body: Any) -> Any:
    return post("/v1/messages", **{"messages": ASKED, "max_tokens": 12} | body)


def whole(response: Any) -> dict[str, Any]:
    """The message that a stream of events makes."""
    made: dict[str, Any] = {}
    kinds = []
    for event in events(response):
        kinds.append(event["type"])
        if event["type"] == "message_start":
            made = event["message"]
        elif event["type"] == "content_block_start":
            made["content"].append({**event["content_block"], "pieces": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            made["content"][event["index"]]["pieces"] += delta.get("text", "") + delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            made |= event["delta"] | {"usage": event["usage"]}
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    return made


def test_a_stream_has_the_message_of_a_whole_response(post: Poster) -> None:
    first = message(post).json()
    made = whole(message(post, stream=True))
    assert made["content"][0]["pieces"] == first["content"][0]["text"]
    assert made["stop_reason"] == first["stop_reason"] in ("end_turn", "max_tokens")
    assert made["usage"]["output_tokens"] == first["usage"]["output_tokens"]


def test_the_stop_sequence_that_ended_it_is_named(post: Poster) -> None:
    text = message(post).json()["content"][0]["text"]
    ended = message(post, stop_sequences=["never", text[4:8]]).json()
    assert ended["stop_reason"] == "stop_sequence" and ended["stop_sequence"] == text[4:8]
    assert ended["content"][0]["text"] == text[: text.index(text[4:8])]
    assert whole(message(post, stop_sequences=[text[4:8]], stream=True))["stop_sequence"] == text[4:8]


def test_the_usage_adds_up_and_has_the_hit(post: Poster) -> None:
    total = post("/v1/messages/count_tokens", messages=ASKED, system=SYSTEM).json()["input_tokens"]
    read, written = [], []
    for _ in range(2):
        usage = message(post, system=SYSTEM).json()["usage"]
        read.append(usage["cache_read_input_tokens"])
        written.append(usage["cache_creation_input_tokens"])
        assert sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_")) == total
    assert read[1] >= 96 > read[0] and read[1] == read[0] + written[0] and written[1] == 0


def test_what_changed_since_another_message_is_named(post: Poster) -> None:
    def reason(previous: str | None, **body: Any) -> tuple[str, Any]:
        made = message(post, **{"system": SYSTEM} | body, diagnostics={"previous_message_id": previous}).json()
        found = made["diagnostics"]["cache_miss_reason"]
        return made["id"], found and found["type"]

    first, found = reason(None)
    assert found is None
    again = [*ASKED, {"role": "assistant", "content": "x"}, *ASKED]
    assert reason(first, messages=again)[1] is None
    assert reason(first, system="Another.")[1] == "system_changed"
    assert reason(first, messages=[{"role": "user", "content": "Another."}])[1] == "messages_changed"
    assert reason(first, tools=[WEATHER], tool_choice={"type": "none"})[1] == "tools_changed"
    assert reason("msg_never")[1] == "previous_message_not_found"


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, {**WEATHER, "name": "clock"}]], ids=["one", "two"])
def test_a_call_that_must_be_made_is_made(post: Poster, tools: Any, is_stream: bool) -> None:
    response = message(post, tools=tools, tool_choice={"type": "any"}, max_tokens=80, stream=is_stream)
    made = whole(response) if is_stream else response.json()
    assert made["stop_reason"] == "tool_use"
    (block,) = made["content"]
    assert block["type"] == "tool_use" and block["name"] in ("weather", "clock")
    assert "city" in (block["pieces"] if is_stream else block["input"])


def test_a_call_that_was_cut_says_so_and_has_what_is_whole(post: Poster) -> None:
    two = WEATHER["input_schema"] | {"properties": {"city": {"enum": ["Rome"]}, "more": {"type": "string"}}}
    tool = {"name": "weather", "input_schema": two | {"required": ["city", "more"]}}
    made = message(post, tools=[tool], tool_choice={"type": "any"}, max_tokens=24).json()
    (block,) = made["content"]
    assert made["stop_reason"] == "max_tokens" and block["input"] == {"city": "Rome"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("messages", [{"role": "user", "content": [{"type": "document"}]}]),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("thinking", {"type": "enabled", "budget_tokens": 1024}),
        ("tools", [WEATHER]),
        ("stop_sequence", ["x"]),
        ("cache_control", {"type": "ephemeral", "ttl": "2h"}),
        ("container", "c"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(post: Poster, field: str, value: Any) -> None:
    refused = message(post, **{field: value})
    assert refused.status_code == 400
    error = refused.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert field in error["error"]["message"]


def test_the_client_of_anthropic(post: Poster) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=post.address, api_key="none", max_retries=0)
    answer = client.messages.create(model="tiny", max_tokens=8, messages=ASKED)
    with client.messages.stream(model="tiny", max_tokens=8, messages=ASKED) as stream:
        assert "".join(stream.text_stream) == answer.content[0].text
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(model="tiny", max_tokens=8, messages=ASKED, stop_sequences=[""] * 2)


def test_a_breakpoint_keeps_what_is_before_it(post: Poster) -> None:
    """Both APIs name the end of a text: the prompt is the same, and a checkpoint is pinned there."""
    long = "The breakpoint stands after this text. " * 12
    plain = {"role": "user", "content": [{"type": "text", "text": long}, {"type": "text", "text": "One?"}]}
    marked = {"role": "user", "content": [{"type": "text", "text": long, "cache_control": {"type": "ephemeral"}}]}
    marked["content"].append({"type": "text", "text": "One?"})
    other = {"role": "user", "content": long + "Two?"}
    counted = [post("/v1/messages/count_tokens", messages=[one]).json()["input_tokens"] for one in (plain, marked)]
    assert counted[0] == counted[1]
    pins = post.get("/metrics").text.split('hybrid:pins{engine="0",model_name="tiny"} ')[1].split()[0]
    assert message(post, messages=[marked]).status_code == 200
    after = post.get("/metrics").text.split('hybrid:pins{engine="0",model_name="tiny"} ')[1].split()[0]
    assert float(after) == float(pins) + 1
    usage = message(post, messages=[other]).json()["usage"]
    assert usage["cache_read_input_tokens"] >= len(long) // 8


def test_a_prompt_is_computed_in_advance(post: Poster) -> None:
    body = {"messages": [{"role": "user", "content": "To be asked later on. " * 20}]}
    made = message(post, **body, max_tokens=0).json()
    assert made["content"] == [] and made["usage"]["output_tokens"] == 0 and made["stop_reason"] == "max_tokens"
    again = message(post, **body).json()["usage"]
    assert again["cache_read_input_tokens"] == made["usage"]["cache_creation_input_tokens"] > 0
