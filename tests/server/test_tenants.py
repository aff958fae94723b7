"""Tenants do not see each other: a secret in every field of what one sends is in no view of the others."""

import asyncio
import base64
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid import CacheConfig
from hybrid.engine.adapters import MARK, split_namespace
from hybrid.events.vllm import namespace_of as vllm_namespace
from hybrid.events.wire import encode_snapshot
from hybrid.key import joined_names
from hybrid.server.service import Server
from hybrid.server.tenants import Caller, split_salt
from support.served import Poster, served

KEYS = {name[0]: name for name in ("ann", "bob", "eve", "ops")}
"""Ann and bob share a namespace; eve has one of her own; ops sees the requests of all."""

OTHERS = [(who, other) for who, other in product("abe", "abeo") if who != other]


@pytest.fixture(scope="module")
def tenants(tiny: Any) -> Iterator[tuple[str, Server, dict[str, list[str]]]]:
    """A server to which each tenant has sent its secrets, and the ids of the answers."""
    keys = {
        key: Caller(f"{name}-NAME", "team" if name in ("ann", "bob") else f"{name}-SPACE", sees_all=name == "ops")
        for key, name in KEYS.items()
    }
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, keys=keys) as (url, server):
        yield url, server, {key: send_everything(Poster(url, key), secret(key)) for key in "abe"}


def secret(key: str) -> str:
    """The text that is in every field of a tenant."""
    return f"S3CRET{KEYS[key]}"


def send_everything(post: Poster, text: str) -> list[str]:
    """Send every kind of request, with a text in each of its fields. Returns the ids of the answers."""
    schema = {"type": "object", "properties": {text: {"enum": [text]}}, "additionalProperties": False, "title": text}
    tool = {"type": "function", "function": {"name": text, "description": text, "parameters": schema}}
    form = {"type": "json_schema", "json_schema": {"name": text, "schema": schema}}
    common = {"prompt_cache_key": text, "user": text, "cache_salt": f"{text}\0{text}"}
    own = {"metadata": {text: text}, "prompt_cache_key": text}
    long = f"{text} is what the statement wraps. " * 8
    turn = [{"role": "user", "content": text}]
    chat = [{"role": "system", "content": long}, *turn]
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {"messages": chat, "max_tokens": 3, "stop": [text], "bad_words": [text], **common}),
        ("chat/completions", {"messages": chat, "max_tokens": 60, "tools": [tool], "tool_choice": "required", **own}),
        ("chat/completions", {"messages": chat, "max_tokens": 60, "response_format": form}),
        ("completions", {"prompt": long, "max_tokens": 3, "echo": True, **common}),
        ("completions", {"prompt": long, "max_tokens": 3}),
        ("messages", {"system": long, "messages": turn, "max_tokens": 3, "metadata": {"user_id": text}}),
        ("responses", {"instructions": long, "input": text, "max_output_tokens": 3, **own}),
    ]
    sent = [post(f"/v1/{path}", **body) for path, body in bodies]
    assert all(answer.status_code == 200 for answer in sent), [answer.text for answer in sent]
    others = [
        post("/v1/chat/completions", messages=chat, model=text),
        post("/v1/chat/completions", messages=chat, **{text: 1}),
        post("/v1/messages", messages=chat, max_tokens=1, diagnostics={"previous_message_id": text}),
        post("/v1/completions", prompt="a", structured_outputs={"regex": f"({text}"}),
        post.get(f"/explain/{text}"),
        post.get(f"/v1/models/{text}"),
    ]
    assert all(answer.status_code < 500 for answer in others), [answer.text for answer in others]
    return [answer.json()["id"] for answer in sent]


def views(post: Poster, ids: list[str]) -> Iterator[tuple[str, str]]:
    """All that a tenant can look at."""
    own = post("/v1/messages", messages=[{"role": "user", "content": "Hello"}], max_tokens=1)
    for path in (
        "/",
        "/live",
        "/tree",
        "/metrics",
        "/v1/models",
        f"/explain/{own.json()['id']}",
        *map("/explain/{}".format, ids),
    ):
        yield path, post.get(path).text
    yield "/metrics", post.get("/metrics", accept="application/openmetrics-text; version=1.0.0").text
    for number in ids:
        previous = {"diagnostics": {"previous_message_id": number}}
        yield (
            "messages",
            post("/v1/messages", messages=[{"role": "user", "content": "a"}], max_tokens=1, **previous).text,
        )
        compared = {"prompt_cache_options": {"comparison_response_id": number}}
        yield "responses", post("/v1/responses", input="a", max_output_tokens=1, **compared).text
    yield "refused", post("/v1/chat/completions", messages=[], model="x").text
    yield "refused", post("/v1/completions", prompt="a", unknown=1).text
    yield "stranger", httpx.get(f"{post.address}/tree").text


def forms(text: str) -> list[str]:
    """A text as it may be written."""
    return [text, text.lower(), text.encode().hex(), base64.b64encode(text.encode()).decode()[:-4], text[::-1]]


@pytest.mark.parametrize(("who", "other"), OTHERS, ids=[f"{KEYS[a]}-{KEYS[b]}" for a, b in OTHERS])
def test_no_view_shows_what_another_tenant_sent(
    tenants: tuple[str, Server, dict[str, list[str]]], who: str, other: str
) -> None:
    url, _, ids = tenants
    hidden = forms(secret(who))
    if other != "o":  # ops sees who asks what, and no text of it
        hidden += [f"{KEYS[who]}-NAME", f"{KEYS[who]}-SPACE", *ids[who]]
    for view, text in views(Poster(url, other), ids[who]):
        shown = text
        for number in ids[who]:  # what was asked for may be named in the refusal
            shown = shown if view in ("/live", "/tree", "/metrics") else shown.replace(number, "")
        assert not [form for form in hidden if form in shown], (view, text[:2000])


def test_the_tree_has_digests_of_salts(tenants: tuple[str, Server, dict[str, list[str]]]) -> None:
    url, _, _ = tenants
    snapshots = [
        json.loads(Poster(url, key).get("/tree").text.split("const snapshot = ")[1].split(";\n")[0]) for key in "aeo"
    ]
    ann, eve, ops = ({node["namespace"] for node in snapshot["nodes"]} for snapshot in snapshots)
    assert {name.partition("/")[0] for name in ann} == {"team"} and {name.partition("/")[0] for name in eve} == {
        "eve-SPACE"
    }
    assert len(ann) == 3 and len(eve) == 2 and ann | eve <= ops  # with the salts of ann and of bob


def test_events_show_no_text(tenants: tuple[str, Server, dict[str, list[str]]]) -> None:
    _, server, _ = tenants
    content = encode_snapshot(asyncio.run(server.engine.call(lambda own: own.cache.subscribe().snapshot())))
    assert len(content) > 1000
    for key in "abe":
        assert not [form for form in forms(secret(key)) if form.encode() in content]


NAMES = st.text(max_size=4) | st.text("0123:,/\0a", max_size=6) | st.sampled_from(["team", f"{MARK}ab\0", "x\0eve"])


@given(st.lists(NAMES, max_size=3), st.lists(NAMES, max_size=3))
def test_joined_names_are_those_of_no_others(names: list[str], others: list[str]) -> None:
    assert (joined_names(*names) == joined_names(*others)) == (names == others)
    if len(names) == len(others) == 2 and all(names + others):
        assert (vllm_namespace(*names) == vllm_namespace(*others)) == (names == others)


@given(NAMES.filter(lambda name: name and "/" not in name), NAMES)
def test_no_salt_is_another_namespace(name: str, salt: str) -> None:
    namespace = Caller("x", name).namespace_of(salt)
    assert split_salt(namespace) == (name, salt)
    assert split_namespace(f"{MARK}0a\0{namespace}") == ("0a", namespace)
