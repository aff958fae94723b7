"""What takes long is done beside the event loop: streams go on while the largest body of each path is read."""

import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from hybrid import CacheConfig
from hybrid.checks import shown
from hybrid.server import fields
from hybrid.server.body import Body, has_more_values
from hybrid.server.service import Server
from support.large_bodies import large_bodies
from support.served import Poster, served

MAX_TEXT, MAX_VALUES = 300_000, 60_000


@pytest.fixture(scope="module")
def own(tiny: Any) -> Iterator[tuple[Poster, Server]]:
    """A server for bodies that a test has many of."""
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="32MiB"))
    with served(engine, body=MAX_TEXT) as (url, server):
        yield Poster(url), server


def test_a_stream_goes_on_while_the_largest_body_of_each_path_is_read(
    own: tuple[Poster, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads it waits until the stream has had 20 more steps: a loop that waits would not deliver them."""
    post, server = own
    is_held, may_go_on = threading.Event(), threading.Event()

    def held(function: Any) -> Any:
        def wait(given: Any, *more: Any) -> Any:
            if not isinstance(given, list) or len(given) > 100:
                is_held.set()
                assert may_go_on.wait(60)
            return function(given, *more)

        return wait

    monkeypatch.setattr(Body, "json", held(Body.json))
    monkeypatch.setattr(server.tokenizer, "decode", held(server.tokenizer.decode))
    body = {"model": "tiny", "prompt": "import os", "max_tokens": 8000, "ignore_eos": True, "stream": True}
    may_go_on.set()
    bodies = {path: content for name, path, content in large_bodies(MAX_TEXT, MAX_VALUES) if "what it takes" in name}
    bodies["/detokenize"] = json.dumps({"tokens": [7] * 8000}).encode()
    with ThreadPoolExecutor() as pool, httpx.stream("POST", f"{post.address}/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        for path, content in bodies.items():
            is_held.clear()
            may_go_on.clear()
            answer = pool.submit(post.text, path, content.decode())
            while not is_held.is_set() and not answer.done():
                next(lines)
            for _ in range(20):
                next(lines)
            may_go_on.set()
            assert answer.result().status_code in (200, 400, 404), answer.result().text
            assert is_held.is_set() or "lora" in path  # where adapters are loaded at run time


def test_what_a_body_has_too_many_of_is_refused(own: tuple[Poster, Server]) -> None:
    post, _ = own
    many = post.text("/v1/completions", f'{{"prompt":[{"[]," * 60_000}0]}}')
    assert (many.status_code, many.json()["error"]["code"]) == (413, "body_too_large")
    text = post("/tokenize", prompt="[1, {2}], " * 9_000)
    assert text.json()["error"]["code"] == "context_length_exceeded"  # it was read
    most = post("/detokenize", tokens=[7] * 8193)
    assert "a list of up to 8192 token ids" in most.json()["error"]["message"]


def test_large_bodies_fail_no_path(own: tuple[Poster, Server]) -> None:
    post, _ = own
    for name, path, content in large_bodies(MAX_TEXT, MAX_VALUES):
        if not name.startswith("a grammar"):
            assert post.text(path, content.decode()).status_code < 500, name


@pytest.mark.parametrize("seed", range(30))
def test_values_are_counted_outside_of_texts(seed: int) -> None:
    rng = random.Random(seed)

    def value(depth: int) -> Any:
        kind = rng.randrange(3 if depth else 1)
        if kind == 1:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 2:
            return {f'a"{n}\\': value(depth - 1) for n in range(rng.randrange(4))}
        return rng.choice([1, None, "", "a, [b", '"', "\\", '\\"', 'x\\\\",{', "\\\\\\"])

    raw = json.dumps([value(4) for _ in range(6)]).encode()
    texts = re.compile(rb'"(?:[^"\\]|\\.)*"')
    outside = texts.sub(b"", raw)
    expected = len(texts.findall(raw)) + outside.count(b",") + 4 * len(re.findall(rb"[\[{:]", outside))
    cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(30)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert has_more_values(pieces, expected - 1)
    assert not has_more_values(pieces, expected)


def test_names_are_compared_by_their_beginning_and_no_keys_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(fields, "get_close_matches", lambda name, *_: compared.append(name) or [])
    read = fields.Fields({"tempratura" * 100_000: 1})
    read.take("temperature")
    with pytest.raises(fields.HttpError, match="unknown field"):
        read.close()
    assert len(compared[0]) <= 100

    class Unsortable(str):
        def __lt__(self, other: object) -> bool:
            raise AssertionError

    assert shown({Unsortable(n): n for n in range(2, 1000)}).endswith("...}")
