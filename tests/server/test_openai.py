"""OpenAI's API: streams are whole responses, what is wrong is refused by name, and its own client reads it all."""

import base64
import json
import re
from typing import Any

import httpx
import pytest

from support.served import ASKED, Poster, events

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def test_a_stream_has_the_answers_of_a_whole_response(post: Poster) -> None:
    settings = {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer = post.chat(**settings).json()
    response = post.chat(**settings, stream=True, stream_options={"include_usage": True})
    assert response.text.endswith("data: [DONE]\n\n")
    *chunks, last = events(response)
    texts, reasons, logprobs = ["", ""], [None, None], [[], []]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
            logprobs[choice["index"]] += (choice["logprobs"] or {"content": []})["content"]
    assert texts == [choice["message"]["content"] for choice in answer["choices"]] and texts[0] != texts[1]
    assert reasons == [choice["finish_reason"] for choice in answer["choices"]]
    assert logprobs == [choice["logprobs"]["content"] for choice in answer["choices"]]
    assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert {chunk["id"] for chunk in chunks} == {response.headers["x-request-id"]}


def test_completions_of_several_prompts_keep_their_order(post: Poster) -> None:
    body = {"prompt": ["The with statement", [260, 261, 262]], "n": 2, "max_tokens": 5, "temperature": 1, "seed": 1}
    answer = post("/v1/completions", **body, logprobs=1).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    streamed = [""] * 4
    for chunk in events(post("/v1/completions", **body, stream=True)):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts and texts[0] != texts[1]
    known = answer["choices"][0]["logprobs"]
    assert len(known["tokens"]) == len(known["token_logprobs"]) == len(known["text_offset"]) == 5
    echoed = post("/v1/completions", prompt="The with", echo=True, max_tokens=2).json()["choices"][0]["text"]
    assert echoed.startswith("The with") and len(echoed) > len("The with")


def test_an_answer_has_the_form_that_is_asked_for(post: Poster) -> None:
    schema = WEATHER["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema, "strict": True}}
    answer = post.chat(response_format=form, max_tokens=60).json()["choices"][0]
    assert set(json.loads(answer["message"]["content"])) == {"city"}
    choice = post.chat(structured_outputs={"choice": ["yes", "no"]}).json()["choices"][0]["message"]["content"]
    assert choice in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, CLOCK]], ids=["one", "two"])
def test_a_call_that_must_be_made_is_made(post: Poster, tools: Any, choice: Any) -> None:
    settings = {"tools": tools, "tool_choice": choice, "max_tokens": 80, "temperature": 0.5, "seed": 4}
    answer = post.chat(**settings).json()["choices"][0]
    call = answer["message"]["tool_calls"][0]["function"]
    assert answer["finish_reason"] == "tool_calls" and call["name"] in ("weather", "clock")
    parts = [
        part["function"]
        for chunk in events(post.chat(**settings, stream=True))
        for part in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert [part["name"] for part in parts if "name" in part] == [call["name"]]
    assert json.loads("".join(part["arguments"] for part in parts)) == json.loads(call["arguments"])


OTHER = {"type": "function", "function": WEATHER["function"] | {"name": "climate"}}


@pytest.mark.parametrize("tools", [[WEATHER], [WEATHER, OTHER]], ids=["one", "two"])
def test_a_call_that_was_cut_says_so_and_has_what_was_written(post: Poster, tools: Any) -> None:
    settings = {"tools": tools, "tool_choice": "required", "temperature": 0.5, "seed": 4}
    whole = post.chat(**settings, max_tokens=80).json()
    length = whole["usage"]["completion_tokens"] - 2
    cut = post.chat(**settings, max_tokens=length).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(post.chat(**settings, max_tokens=length, stream=True))]
    assert cut["finish_reason"] == chunks[-1]["finish_reason"] == "length"
    (call,), (full,) = cut["message"]["tool_calls"], whole["choices"][0]["message"]["tool_calls"]
    parts = [part["function"] for chunk in chunks for part in chunk["delta"].get("tool_calls", [])]
    written = "".join(part["arguments"] for part in parts)
    assert call["function"] == {"name": full["function"]["name"], "arguments": written}
    assert full["function"]["arguments"].startswith(written) and written not in ("", full["function"]["arguments"])


PICTURE = "data:image/png;base64," + base64.b64encode(b"no picture").decode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temprature", 1),
        ("max_tokens", -1),
        ("messages", []),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]),
        ("messages", [{"role": "user", "name": "ann", "content": "x"}]),
        ("response_format", {"type": "xml"}),
        ("tool_choice", "required"),
        ("tools", [WEATHER]),
        ("logit_bias", {"x": 1}),
        ("stream_options", {"include": True}),
        ("reasoning_effort", "high"),
        ("top_logprobs", 2),
        ("functions", []),
        ("prompt_cache_options", {"ttl": "1y"}),
        ("kv_hints", {"retain": -1}),
        ("kv_hints", {"keep": True}),
        ("session_id", 3),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(post: Poster, field: str, value: Any) -> None:
    refused = post.chat(**{field: value})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert field in error["message"] or field in error["param"]
    assert error["type"] == "invalid_request_error" and error["code"]


def test_other_models_and_bodies_are_refused(post: Poster) -> None:
    assert post.chat(model="another").json()["error"]["code"] == "model_not_found"
    assert post("/v1/completions", prompt="x" * 500_000).json()["error"]["code"] == "context_length_exceeded"
    assert post("/v1/completions", prompt=[1] * 9000).json()["error"]["code"] == "context_length_exceeded"
    assert post("/v1/completions", prompt=[99999]).status_code == 400
    assert post("/v1/completions", prompt=["x"] * 1000).status_code == 400


def test_texts_become_tokens_and_come_back(post: Poster) -> None:
    found = post("/tokenize", prompt="hello é", return_token_strs=True).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert post("/detokenize", tokens=found["tokens"]).json() == {"prompt": "hello é"}
    asked = post("/tokenize", messages=ASKED).json()["count"]
    assert post.chat().json()["usage"]["prompt_tokens"] == asked
    assert post("/detokenize", tokens=[-1]).status_code == 400


def test_the_client_of_openai(post: Poster) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{post.address}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=8)
    chunks = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(openai.BadRequestError, match="unknown field 'frob'"):
        client.chat.completions.create(model="tiny", messages=ASKED, extra_body={"frob": 1})
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_hints_and_sessions_come_in_the_body_or_as_a_header(address: str, post: Poster) -> None:
    """The body has the envelope of vLLM and SGLang, or hints by name; actions that are not known change nothing."""
    action = {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0"}
    retain = action | {"payload": {"directives": [{"priority": 50, "duration": 600.0}]}}
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [retain, action | {"action_type": "kv.other"}]}
    long, pins = [{"role": "user", "content": "The with statement " * 20}], [pins_of(post)]
    for session, hints in ({"session_id": "a"}, envelope), ({}, {"end_session": True}), ({"session_id": "b"}, None):
        headers = {} if session else {"X-Session-ID": "a"}
        body = {"model": "tiny", "messages": long, "max_tokens": 4, **session, "kv_hints": hints}
        assert httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers).status_code == 200
        pins.append(pins_of(post))
    assert [count - pins[0] for count in pins] == [0, 1, 0, 0]


def pins_of(post: Poster) -> int:
    return int(re.search(r"^hybrid:pins(?:{.*})? (\d+)", post.get("/metrics").text, re.M)[1])  # type: ignore[index]
