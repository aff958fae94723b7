"""What clients that do not read, or do not end what they send, keep of the memory. `bench/serve_unread.py` has more."""

from typing import Any

import psutil
import pytest

from hybrid import CacheConfig
from hybrid.server.connections import ConnectionLimits
from support.served import Poster, served
from support.unread import largest, unread


def test_clients_that_do_not_read_keep_little_memory(tiny: Any) -> None:
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    with served(engine, connections=ConnectionLimits(send_seconds=1.0)) as (url, _):
        process = psutil.Process()
        with unread(url, 8, 20):
            largest(url, process, 60.0)
        before = process.memory_info().rss
        with unread(url, 100, 20):
            most = largest(url, process, 120.0)
        assert not Poster(url).get("/live").json()["live"]
        assert most - before < 100 * 2**19


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_log_probabilities_beyond_what_a_server_keeps_are_refused(post: Poster, path: str) -> None:
    asked: dict[str, Any] = {"prompt": "a", "logprobs": 20}
    if path == "/v1/chat/completions":
        asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20}
    answer = post(path, **asked, n=100, max_tokens=1000)
    assert answer.status_code == 400 and "log-probabilities" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "logprobs"
    assert post(path, **asked, n=2, max_tokens=2).status_code == 200
