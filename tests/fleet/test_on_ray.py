"""A fleet of the tiny model on a real Ray on this machine: promises, and what fails. `make fleet` runs it."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
httpx = pytest.importorskip("httpx")

from ray import serve  # noqa: E402

from hybrid import CacheConfig  # noqa: E402
from hybrid.engine.config import EngineConfig  # noqa: E402
from hybrid.fleet import deployment  # noqa: E402
from hybrid.fleet.settings import FleetSettings  # noqa: E402

ONE_ENGINE = """
import json, sys, hybrid, torch
torch.set_num_threads(1)
params = hybrid.SamplingParams(max_new_tokens=6, ignore_eos=True)
with hybrid.Engine.from_pretrained("tiny", cache=hybrid.CacheConfig(memory="64MiB")) as engine:
    print(json.dumps([engine.generate([prompt], params)[0].text for prompt in json.load(sys.stdin)]))
"""
"""A process of its own, as each replica is."""

CACHE = CacheConfig(memory="6MiB")  # documents do not all fit: there are evictions


class Fleet:
    """A fleet that runs, and a client."""

    def __init__(self, settings: FleetSettings, port: int) -> None:
        self.settings = settings
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def ask(self, prompt: list[int], num_tokens: int = 4, **more: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True} | more
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.client.get("/fleet").json()["replicas"]
        return found

    def promises(self) -> tuple[int, int]:
        """Tokens that were promised, and those that were computed all the same."""
        found = self.replicas()
        return sum(one["promised_tokens"] for one in found), sum(one["broken_tokens"] for one in found)

    def kill(self, part: str) -> None:
        """End an actor of Ray by a part of its name."""
        names = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if part in one["name"]]
        ray.kill(ray.get_actor(names[0], namespace="serve"), no_restart=False)

    def scale(self, num_replicas: int) -> None:
        app = deployment.application(self.settings, num_replicas, num_cpus=0.0, drain_seconds=60.0)
        serve.run(app, name=self.settings.name, route_prefix="/")

    def stream(self, prompt: list[int], num_tokens: int) -> Iterator[dict[str, Any]]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        with (
            httpx.Client(base_url=self.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=body) as lines,
        ):
            for line in lines.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    deployment.connect(None, num_cpus=2)
    try:
        settings = FleetSettings(
            model="tiny", name="tiny", cache=CACHE, engine=EngineConfig(max_num_seqs=16, max_waiting=64), threads=1
        )
        settings = deployment.start(settings, 2, "127.0.0.1", port, num_cpus=0.0)
        yield Fleet(settings, port)
    finally:
        deployment.stop("tiny")


def until(holds: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.1)


def documents(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 1000) for _ in range(400)] for _ in range(count)]


def question(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(30)]


def test_what_is_promised_is_hit_under_evictions_and_answers_are_those_of_one_engine(fleet: Fleet) -> None:
    rng, docs = random.Random(2), documents(12)
    asked = [rng.choice(docs) + question(rng) for _ in range(60)]
    answers, hits = [], 0
    for prompt in asked:
        found = fleet.ask(prompt, 6)
        answers.append(found["choices"][0]["text"])
        hits += found["usage"]["prompt_tokens_details"]["cached_tokens"]
        time.sleep(0.02)  # an event takes some milliseconds
    promised, broken = fleet.promises()
    assert hits > 60 * 400 * 0.2
    assert abs(promised - hits) + broken <= 0.01 * hits
    one = subprocess.run(
        [sys.executable, "-c", ONE_ENGINE], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    assert json.loads(one.stdout) == answers


def test_a_session_that_is_named_stays_at_its_replica(fleet: Fleet) -> None:
    rng = random.Random(3)
    before = {one["replica"]: one["sent"] for one in fleet.replicas()}
    prompt = question(rng) * 4
    for _ in range(6):
        fleet.ask(prompt, 2, prompt_cache_key="ann")
        prompt = prompt + question(rng) * 2
        time.sleep(0.05)  # an event takes some milliseconds
    added = [one["sent"] - before.get(one["replica"], 0) for one in fleet.replicas()]
    assert sorted(added) == [0, 6]


def test_bad_requests_are_refused_as_by_hybrid_serve(fleet: Fleet) -> None:
    bad = fleet.client.post("/v1/completions", json={"model": "tiny", "prompt": [10**9], "max_tokens": 1})
    assert bad.status_code == 400 and "vocabulary" in bad.json()["error"]["message"]
    long = fleet.client.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 20000, "max_tokens": 1})
    assert long.status_code == 400
    assert fleet.client.get("/tree").status_code == 200
    assert "vllm:prompt_tokens" in fleet.client.get("/metrics").text


def test_a_replica_that_is_killed_while_it_streams_ends_the_stream_with_an_error_and_others_serve(fleet: Fleet) -> None:
    prompt = documents(1, seed=7)[0]
    before = {one["replica"]: one["sent"] for one in fleet.replicas()}
    pieces = fleet.stream(prompt, 3000)
    first = next(pieces)
    assert "choices" in first
    until(lambda: any(one["sent"] > before[one["replica"]] for one in fleet.replicas()))
    victim = next(one["replica"] for one in fleet.replicas() if one["sent"] > before[one["replica"]])
    fleet.kill(victim)
    last = [*pieces][-1]
    assert "has ended" in last["error"]["message"]
    answer = fleet.ask(prompt)
    assert answer["usage"]["completion_tokens"] == 4
    until(lambda: len(fleet.replicas()) == 2 and all(one["replica"] != victim for one in fleet.replicas()))


def test_a_request_of_which_nothing_was_sent_runs_elsewhere_when_its_replica_is_killed(fleet: Fleet) -> None:
    rng = random.Random(8)
    before = {one["replica"]: one["sent"] for one in fleet.replicas()}
    begins = [rng.randrange(3, 1000) for _ in range(400)]
    fleet.ask(begins, prompt_cache_key="bob")
    home = next(one["replica"] for one in fleet.replicas() if one["sent"] > before[one["replica"]])
    found: list[dict[str, Any]] = []
    for _ in range(5):  # until one is caught while it is computed
        prompt = begins + [rng.randrange(3, 1000) for _ in range(3600)]
        found.clear()
        thread = threading.Thread(target=lambda own=prompt: found.append(fleet.ask(own, 2, prompt_cache_key="bob")))
        thread.start()
        time.sleep(0.1)
        if not found:
            fleet.kill(home)
            break
        thread.join()
    else:
        raise AssertionError("every request had ended after 0.1 seconds")
    thread.join()
    assert found and found[0]["usage"]["prompt_tokens"] == 4000
    until(lambda: len(fleet.replicas()) == 2 and all(one["replica"] != home for one in fleet.replicas()))


def test_a_front_that_is_killed_comes_back_and_promises_what_is_there(fleet: Fleet) -> None:
    doc, rng = documents(1, seed=9)[0], random.Random(9)
    fleet.ask(doc + question(rng))
    time.sleep(1)  # an event takes some milliseconds
    numbers = {one["replica"]: one["events"] for one in fleet.replicas()}
    fleet.kill("#Front#")

    def answers() -> bool:
        try:
            return fleet.client.get("/fleet").status_code == 200
        except httpx.TransportError:
            return False

    time.sleep(1)
    until(answers)
    until(lambda: {one["replica"] for one in fleet.replicas()} == {*numbers})
    until(lambda: all(one.get("events", -1) >= numbers[one["replica"]] for one in fleet.replicas()))
    before = fleet.promises()[0]
    hit = fleet.ask(doc + question(rng))["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert hit == 384
    assert (fleet.promises()[0] - before, fleet.promises()[1]) == (384, 0)


def test_scaling_up_and_down_under_load_fails_no_request(fleet: Fleet) -> None:
    rng, docs = random.Random(10), documents(6, seed=10)
    prompts = [docs[at % 6] + question(rng) for at in range(400)]
    failed: list[str] = []
    is_done = threading.Event()

    def load(own: list[list[int]]) -> None:
        with httpx.Client(base_url=fleet.url, timeout=120) as client:
            for prompt in own:
                if is_done.is_set():
                    return
                answer = client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 3})
                if answer.status_code != 200:
                    failed.append(answer.text)

    threads = [threading.Thread(target=load, args=(prompts[at::2],)) for at in range(2)]
    for thread in threads:
        thread.start()
    for count in (1, 4, 1):
        fleet.scale(count)
        until(lambda count=count: len(fleet.replicas()) == count)
    is_done.set()
    for thread in threads:
        thread.join()
    assert failed == []
    promised, broken = fleet.promises()
    assert broken <= 0.02 * max(promised, 1)


def test_the_command_ends_its_front_at_sigterm_after_the_requests_under_way(tmp_path: Path) -> None:
    """And says nothing of it: Ray prints a stack where Serve as a whole is shut down."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hybrid.commands.main", "fleet", "serve", "tiny", "--replicas", "1"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen([*command, "--port", str(port), "--memory", "64MiB"], stdout=log, stderr=log)
        try:
            answers: list[httpx.Response] = []
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                while "hybrid serves" not in (tmp_path / "log").read_text():
                    assert process.poll() is None
                    time.sleep(0.5)
                body = {"prompt": "The with statement", "max_tokens": 600, "ignore_eos": True}
                thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=body)))
                thread.start()
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                thread.join(120)
            assert process.wait(120) == 0 and answers[-1].json()["usage"]["completion_tokens"] == 600
        finally:
            process.kill()
        log.seek(0)
        assert "failed" not in (text := log.read()) and "Traceback" not in text, text
