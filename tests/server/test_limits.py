"""Who may call, how much, and what each is shown."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from hybrid import ArgumentError, CacheConfig, TenantConfig
from hybrid.doctor.watch import figures_of
from hybrid.server.tenants import Caller, read_keys
from support.served import ASKED, Poster, served

LONG = "The with statement wraps the execution of a block. " * 4


@pytest.fixture(scope="module")
def tenants(tiny: Any) -> Iterator[tuple[Poster, Poster, Poster]]:
    """A server with keys: of two tenants, and of one that sees all."""
    keys = {
        "a": Caller("ann", "ann", config=TenantConfig(max_requests=2, memory_share=0.5)),
        "b": Caller("bob", "bob"),
        "c": Caller("all", "all", sees_all=True),
    }
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, keys=keys, requests=6, body=100_000, body_seconds=0.5) as (url, _):
        yield Poster(url, "a"), Poster(url, "b"), Poster(url, "c")


def test_without_a_key_there_is_nothing_but_health_and_the_page(tenants: tuple[Poster, ...]) -> None:
    stranger = Poster(tenants[0].address, "wrong")
    paths = {"/health": 200, "/ready": 200, "/": 200, "/live": 401, "/metrics": 401, "/tree": 401, "/v1/models": 401}
    assert {path: stranger.get(path).status_code for path in paths} == paths
    assert stranger("/v1/embeddings").json()["error"]["code"] == "unknown_path"
    wrong = [httpx.get(f"{stranger.address}/v1/messages"), httpx.delete(f"{stranger.address}/v1/models")]
    assert [(one.status_code, one.headers["allow"]) for one in wrong] == [(405, "POST"), (405, "GET, HEAD")]
    assert wrong[0].json()["type"] == "error" and wrong[1].json()["error"]["code"] == "method_not_allowed"
    assert httpx.head(f"{stranger.address}/health").status_code == 200
    assert stranger.chat().json()["error"]["type"] == "authentication_error"
    assert stranger("/v1/messages").json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{stranger.address}/v1/models", headers={"x-api-key": "a"}).status_code == 200


def test_a_tenant_sees_its_own_alone(tenants: tuple[Poster, ...]) -> None:
    ann, bob, everything = tenants
    body = {"prompt": LONG, "max_tokens": 2}
    first, again, other = (who("/v1/completions", **body).json() for who in (ann, ann, bob))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, again, other)]
    assert cached[1] > 0 and cached[0] == cached[2] == 0
    path = f"/explain/{again['id']}"
    assert ann.get(path).json()["cached_tokens"] == cached[1]
    assert bob.get(path).status_code == 404 and everything.get(path).status_code == 200
    assert {one["tenant"] for one in ann.get("/live").json()["ended"]} == {"ann"}
    assert {"ann", "bob"} <= {one["tenant"] for one in everything.get("/live").json()["ended"]}
    assert "bob" not in ann.get("/metrics").text and 'tenant="bob"' in everything.get("/metrics").text
    assert 'hybrid:memory_held{engine="0",model_name="tiny",tenant="ann"} 0.' in ann.get("/metrics").text
    figures = figures_of(everything.get("/metrics").text, "/metrics")
    assert (figures.engine, figures.sizes is None) == ("hybrid", False)
    assert "vllm:" not in ann.get("/metrics").text.replace("model_name", "")
    nodes = [
        json.loads(who.get("/tree").text.split("const snapshot = ")[1].split(";\n")[0])["nodes"] for who in tenants
    ]
    assert {node["namespace"] for node in nodes[0]} == {"ann"} and {node["namespace"] for node in nodes[1]} == {"bob"}
    assert len(nodes[2]) >= len(nodes[0]) + len(nodes[1])
    assert all(node["ids"] == [] and node["text"] == "" for node in nodes[2])


def test_a_salt_parts_what_a_tenant_shares(tenants: tuple[Poster, ...]) -> None:
    _, bob, _ = tenants
    body = {"prompt": "A salt parts. " * 20, "max_tokens": 1}
    salts = [None, "x", "x"]
    usages = [bob("/v1/completions", **body, cache_salt=salt).json()["usage"] for salt in salts]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == cached[1] == 0 < cached[2]


def test_a_page_of_another_site_is_refused(post: Poster) -> None:
    assert post.get("/live", origin="http://evil.example").status_code == 403
    assert post.get("/live", origin=post.address).status_code == 200
    assert post.get("/live", host="evil.example").status_code == 403  # a name that was pointed at this machine


def test_a_request_is_refused_when_the_server_is_full_and_not_before(tenants: tuple[Poster, ...]) -> None:
    ann, bob, _ = tenants

    async def statuses(who: Poster, count: int) -> list[int]:
        body = {"model": "tiny", "prompt": "import os", "max_tokens": 200, "ignore_eos": True}
        async with httpx.AsyncClient(headers=who.headers, timeout=60) as client:
            calls = [client.post(f"{who.address}/v1/completions", json=body) for _ in range(count)]
            return sorted(answer.status_code for answer in await asyncio.gather(*calls))

    assert asyncio.run(statuses(bob, 6)) == [200] * 6
    assert asyncio.run(statuses(bob, 9)) == [200] * 6 + [429] * 3
    assert asyncio.run(statuses(ann, 3)) == [200] * 2 + [429]


def test_bodies_have_limits_of_size_and_time(tenants: tuple[Poster, ...]) -> None:
    bob = tenants[1]
    assert bob("/v1/completions", prompt="x" * 200_000).json()["error"]["code"] == "body_too_large"
    assert bob("/v1/messages", x="x" * 200_000).json()["error"]["type"] == "request_too_large"
    url = urlsplit(bob.address)
    with socket.create_connection((url.hostname, url.port)) as slow:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: b\r\ncontent-length: 10\r\n\r\n{"
        slow.sendall(head.encode())
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
    answer = httpx.post(f"{bob.address}/v1/completions", content=b"{", headers=bob.headers)
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_ends_when_its_client_leaves(post: Poster, is_stream: bool) -> None:
    body = {"model": "tiny", "messages": ASKED, "max_tokens": 4000, "ignore_eos": True, "stream": is_stream}
    with httpx.Client(timeout=0.5) as client:
        if is_stream:
            with client.stream("POST", f"{post.address}/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()  # what is dropped closes the connection
                assert "chunk" in next(lines)
                assert post.get("/live").json()["live"]
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(f"{post.address}/v1/chat/completions", json=body)
    for _ in range(400):
        if not post.get("/live").json()["live"]:
            break
        time.sleep(0.05)
    ended = post.get("/live").json()["ended"][0]
    assert ended["state"] == "abort" and ended.get("completion_tokens", 0) < 4000


def test_a_request_has_its_time(tiny: Any) -> None:
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, seconds=0.3) as (url, _):
        late = Poster(url).chat(max_tokens=4000, ignore_eos=True)
        assert late.status_code == 504 and "0.3 seconds" in late.json()["error"]["message"]
        streamed = Poster(url).chat(max_tokens=4000, ignore_eos=True, stream=True).text
        assert "0.3 seconds" in streamed and streamed.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"a": {}}',
        '{"a": {"key": 1}}',
        '{"a": {"key": "x", "max_requests": 0}}',
        '{"a/b": {"key": "x"}}',
        '{"": {"key": "x"}}',
    ],
)
def test_a_file_of_keys_is_checked(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=r"keys\.json"):
        read_keys(path)


def test_keys_are_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"a": {"key": "x"}, "b": {"key": "y", "namespace": "a", "memory_share": 0.5, "sees_all": true}}')
    assert read_keys(path) == {"x": Caller("a", "a"), "y": Caller("b", "a", True, TenantConfig(memory_share=0.5))}
    path.write_text('{"a": {"key": "x"}, "b": {"key": "x"}}')
    with pytest.raises(ArgumentError, match="has the key of 'a'"):
        read_keys(path)
