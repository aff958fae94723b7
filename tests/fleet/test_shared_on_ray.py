"""Replicas that share memory, or a Redis server, on a real Ray: what one computed, another restores."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
httpx = pytest.importorskip("httpx")

from hybrid import CacheConfig  # noqa: E402
from hybrid.commands.fleet import shared_directory  # noqa: E402
from hybrid.engine.config import EngineConfig  # noqa: E402
from hybrid.fleet import deployment  # noqa: E402
from hybrid.fleet.settings import FleetSettings  # noqa: E402
from support.redis_server import redis_at  # noqa: E402


def live(cache: CacheConfig, store: str | None) -> int:
    """Have two replicas compute 28 documents, end the one with more of them, and return the tokens that are hit when
    all are asked about again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = EngineConfig(max_num_seqs=16, max_waiting=64)
    rng = random.Random(1)
    documents = [[rng.randrange(3, 1000) for _ in range(400)] for _ in range(28)]
    deployment.connect(None, num_cpus=2)
    try:
        settings = FleetSettings(model="tiny", name="tiny", cache=cache, engine=engine, threads=1, store=store)
        deployment.start(settings, 2, "127.0.0.1", port, num_cpus=0.0)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:

            def hit(document: list[int]) -> int:
                prompt = document + [rng.randrange(3, 1000) for _ in range(30)]
                answer = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 4})
                assert answer.status_code == 200, answer.text
                cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                return cached

            for document in documents * 2:
                hit(document)
            time.sleep(6)  # what is evicted is written after two seconds, and others look every two
            sent = {one["replica"]: one["sent"] for one in client.get("/fleet").json()["replicas"]}
            assert sum(sent.values()) == 56 and min(sent.values()) > 16
            most = max(sent, key=lambda name: sent[name])
            actors = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if most in one["name"]]
            ray.kill(ray.get_actor(actors[0], namespace="serve"), no_restart=False)
            time.sleep(2)
            return sum(hit(document) for document in documents)
    finally:
        deployment.stop("tiny")


def test_what_a_replica_has_written_to_shared_memory_another_one_restores_after_it_was_killed() -> None:
    cache = CacheConfig(memory="4MiB", disk="256MiB", directory=shared_directory())  # most must leave the device
    assert live(cache, None) >= 24 * 384  # each replica has had about half of them


def test_what_a_replica_has_put_into_a_redis_server_another_one_fetches_after_it_was_killed(tmp_path: Path) -> None:
    with redis_at(tmp_path) as url:
        assert live(CacheConfig(memory="16MiB"), url) >= 27 * 384
