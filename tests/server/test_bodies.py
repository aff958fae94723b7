"""Any body gets an answer or a refusal that says what is wrong: no 500. `bench/serve_fuzz.py` tries more."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings

from support.bodies import HEADERS, PATHS, SEED, SEEN, bodies
from support.served import Poster

SHORT = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)


@pytest.mark.parametrize("path", PATHS)
def test_no_body_makes_the_server_fail(post: Poster, path: str) -> None:
    found: Counter[int] = Counter()

    @seed(SEED)
    @SHORT
    @given(bodies(path))
    def try_one(body: Any) -> None:
        answer = post.raw(path, body)
        found[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404, 413), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    print(f"seed {SEED}")
    try_one()
    assert found[200] > sum(found.values()) / 4, found  # many are answered
    assert not post.get("/live").json()["live"]


@pytest.mark.parametrize("path", SEEN)
def test_no_header_makes_the_server_fail(post: Poster, path: str) -> None:
    @seed(SEED)
    @SHORT
    @given(HEADERS)
    def try_one(headers: dict[str, bytes]) -> None:
        answer = post.get(path, **headers)  # type: ignore[arg-type]
        assert answer.status_code < 500, answer.text

    print(f"seed {SEED}")
    try_one()


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version=1.x.0"])
def test_metrics_come_to_who_accepts_what_is_none(post: Poster, accept: str) -> None:
    answer = post.get("/metrics", accept=accept)
    assert answer.status_code == 200 and "# HELP vllm:num_requests_running" in answer.text


def test_a_form_that_fails_while_it_runs_is_the_fault_of_the_request(post: Poster) -> None:
    schema = {"type": "object", "properties": {f"k{number}": {"type": "integer"} for number in range(900)}}
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 40, "structured_outputs": {"json": schema}}
    answer = post("/v1/completions", **asked)
    assert answer.status_code == 400 and "structured" in answer.json()["error"]["message"]
    assert '"invalid_request_error"' in post("/v1/completions", **asked, stream=True).text


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "call",
    [1, None, "a", CALL | {"id": [1]}, CALL | {"function": None}, CALL | {"function": {"name": 1}}]
    + [CALL | {"function": {"name": "f", "arguments": arguments}} for arguments in (1, ["a"])],
)
def test_calls_that_are_none_are_refused_by_name(post: Poster, call: Any) -> None:
    turns = [{"role": "assistant", "content": "x", "tool_calls": [CALL, call]}, {"role": "user", "content": "y"}]
    answer = post("/v1/chat/completions", messages=turns, max_tokens=1)
    assert answer.status_code == 400 and "messages[0].tool_calls[1]" in answer.json()["error"]["message"]


def test_json_within_a_text_has_no_more_values_than_a_body(post: Poster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid.server.fields.MAX_VALUES", 100)

    def statuses(number: int) -> set[tuple[int, bool]]:
        text = '{"enum":[' + "1," * number + "1]}"
        call = CALL | {"function": {"name": "f", "arguments": text}}
        ask = {"role": "user", "content": "y"}
        item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": text}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "a", "max_tokens": 1, "structured_outputs": {"json": text}},
            "/v1/chat/completions": {"messages": [{"role": "assistant", "tool_calls": [call]}, ask], "max_tokens": 1},
            "/v1/responses": {"input": [item, ask], "max_output_tokens": 16},
        }
        answers = [post(path, **body) for path, body in bodies.items()]
        return {(answer.status_code, "in this text has more than" in answer.text) for answer in answers}

    assert statuses(50) == {(200, False)}
    assert statuses(100) == {(413, True)}


DEPTHS = "[" * 300 + "]" * 300


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", '{"input":[{"role":"user","content":"x","id":%s}]}'),
        ("/v1/messages", '{"messages":[{"role":"user","content":[{"type":"text","text":"x","citations":%s}]}]}'),
        ("/v1/messages", '{"messages":[{"role":"user","content":[{"type":"tool_use","name":"f","input":{"a":%s}}]}]}'),
        ("/v1/chat/completions", '{"metadata":%s,"messages":[{"role":"user","content":"x"}]}'),
        ("/tokenize", '{"prompt":"x","a":%s}'),
    ],
)
def test_json_that_is_nested_deep_is_refused(post: Poster, path: str, body: str) -> None:
    answer = post.text(path, body % DEPTHS)
    assert answer.status_code == 400 and "nested more than 100 deep" in answer.json()["error"]["message"]
    assert post.text(path, body % ("[" * 20_000 + "]" * 20_000)).status_code == 400
