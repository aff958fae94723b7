"""Any body gets an answer or a refusal that says what is wrong: no 500. `bench/serve_fuzz.py` tries more."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from support.bodies import PATHS, bodies
from support.served import Poster


@pytest.mark.parametrize("path", PATHS)
def test_no_body_makes_the_server_fail(post: Poster, path: str) -> None:
    found: Counter[int] = Counter()

    @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies(path))
    def try_one(body: Any) -> None:
        answer = post.raw(path, body)
        found[answer.status_code] += 1
        assert answer.status_code in (200, 400, 404, 413), (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]

    try_one()
    assert found[200] > sum(found.values()) / 2, found  # most are answered
    assert not post.get("/live").json()["live"]
