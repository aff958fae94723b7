"""OpenAI's API, by its own client where that is installed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="the extra 'server' is not installed")

import httpx

from hybrid import CacheConfig
from support.served import served

ASKED = [{"role": "user", "content": "The with statement"}]


@pytest.fixture(scope="module")
def address(tiny: Any) -> Iterator[str]:
    with served(tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))) as (url, _):
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def post(address: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    return httpx.post(address + path, json={"model": "tiny"} | body, timeout=60)


def test_a_stream_has_the_answer_of_a_whole_response(address: str) -> None:
    settings = {"messages": ASKED, "max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 2}
    answer = post(address, **settings).json()
    lines = post(address, **settings, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    texts, reasons = ["", ""], [None, None]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]
    assert reasons == [choice["finish_reason"] for choice in answer["choices"]]
    assert texts[0] != texts[1]
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("temperature", -1, 400),
        ("frobnicate", 1, 400),
        ("max_tokens", 0, 400),
        ("messages", [], 400),
        ("messages", [{"role": "user"}], 400),
        ("response_format", {"type": "xml"}, 400),
        ("tool_choice", "required", 400),
        ("logit_bias", {"x": 1}, 400),
        ("model", "another", 404),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(address: str, field: str, value: Any, status: int) -> None:
    refused = post(address, **{"messages": ASKED, field: value})
    assert refused.status_code == status
    error = refused.json()["error"]
    assert field in error["message"] or field in (error["param"] or "")
    assert error["type"] and error["code"]


def test_the_client_of_openai(client: Any) -> None:
    answer = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=8)
    chunks = client.chat.completions.create(model="tiny", messages=ASKED, max_completion_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert [model.id for model in client.models.list()] == ["tiny"]
