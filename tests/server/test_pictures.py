"""Images over HTTP, on a random model that takes them: each API's form is the same prompt."""

import base64
import io
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings

from hybrid import CacheConfig, Engine
from hybrid.server import openai_messages
from hybrid.server.service import Server
from support.bodies import PICTURES, SEED, bodies
from support.served import Poster, served
from support.vision import picture, vision_model, write_vision_checkpoint

Image = pytest.importorskip("PIL.Image", reason="the extra 'images' is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[tuple[Poster, Server]]:
    path = write_vision_checkpoint(tmp_path_factory.mktemp("vision"), vision_model("Qwen3_5"), tokenizer)
    config = CacheConfig(memory="32MiB", page_size=16, chunk_size=16, deterministic=True)
    with served(Engine.from_pretrained(path, device="cpu", cache=config)) as (url, own):
        yield Poster(url), own


@pytest.fixture
def seeing(server: tuple[Poster, Server]) -> Poster:
    return server[0]


def png(seed: int, size: int = 64) -> str:
    file = io.BytesIO()
    Image.fromarray(picture(seed, size, size)).save(file, "PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def test_an_image_is_the_same_prompt_in_each_api(seeing: Poster) -> None:
    def asked(seed: int) -> tuple[str, str, str, int]:
        url = f"data:image/png;base64,{png(seed)}"
        parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]
        chat = seeing.chat(messages=[{"role": "user", "content": parts}]).json()
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is it?"}]
        items = [{"role": "user", "content": parts}]
        response = seeing("/v1/responses", input=items, max_output_tokens=8).json()
        source = {"type": "base64", "media_type": "image/png", "data": png(seed)}
        parts = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 8}
        message = seeing("/v1/messages", **body).json()
        counted = seeing("/v1/messages/count_tokens", messages=body["messages"]).json()["input_tokens"]
        sizes = {chat["usage"]["prompt_tokens"], response["usage"]["input_tokens"], counted}
        assert len(sizes) == 1 and message["usage"]["cache_read_input_tokens"] > 0  # the prompt of the call before
        texts = chat["choices"][0]["message"]["content"], message["content"][0]["text"]
        return *texts, response["output"][0]["content"][0]["text"], counted

    *first, size = asked(1)
    *second, same_size = asked(2)
    assert len({*first}) == len({*second}) == 1 and first[0] != second[0]
    assert (
        size == same_size > seeing("/tokenize", messages=[{"role": "user", "content": "What is it?"}]).json()["count"]
    )


def asked_about(image: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize("where", ["base64", "pixels"])
def test_a_stream_goes_on_while_an_image_is_read(
    server: tuple[Poster, Server], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What reads the image waits until the stream has had 20 more steps: a loop that waits would not deliver them."""
    post, own = server
    is_reading, may_end = threading.Event(), threading.Event()
    waited: list[bool] = []

    def held(read: Any) -> Any:
        def wait_and_read(*args: Any) -> Any:
            is_reading.set()
            waited.append(may_end.wait(60))
            return read(*args)

        return wait_and_read

    if where == "base64":
        monkeypatch.setattr(openai_messages, "decoded", held(openai_messages.decoded))
    else:
        encoder: Any = own.engine.engine.loaded.image_encoder
        monkeypatch.setattr(encoder, "num_positions", held(encoder.num_positions))
    body = {"model": "tiny", "prompt": "import os", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    url = f"{post.address}/v1/completions"
    with ThreadPoolExecutor() as pool, httpx.stream("POST", url, json=body, timeout=60) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)
        image = pool.submit(post.chat, messages=asked_about(png(3, 400)), max_tokens=1)
        while not is_reading.is_set():
            next(lines)
        for _ in range(20):
            next(lines)
        may_end.set()
        assert image.result().status_code == 200
    assert waited and all(waited)


@pytest.fixture
def small(server: tuple[Poster, Server], monkeypatch: pytest.MonkeyPatch) -> Poster:
    """A server to which bodies of more than 50 kB are large: the data of images in them is kept apart."""
    monkeypatch.setattr(server[1], "max_text", 50_000)
    return server[0]


def test_an_image_in_a_large_body_is_answered_by_each_api(small: Poster) -> None:
    data = png(5, 200)
    assert len(data) > 100_000
    url = f"data:image/png;base64,{data}"
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    turns = [{"role": "user", "content": [source]}]
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]
    answers = [
        small.chat(messages=asked_about(data), max_tokens=1),
        small("/v1/messages", messages=turns, max_tokens=1),
        small("/v1/messages", messages=turns, max_tokens=1, diagnostics={"previous_message_id": "x"}),
        small("/v1/messages/count_tokens", messages=turns),
        small("/v1/responses", input=items, max_output_tokens=1),
    ]
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]


def test_data_that_is_no_image_is_refused_in_a_large_body(small: Poster) -> None:
    long = "A" * 60_000
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "title": long}}}
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": long}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": "x"}], "documents": [{"text": long}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": long}]}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": [long]}},
        {"messages": [{"role": "user", "content": "x"}], "stop": [long]},
    ]
    answers = [small.chat(**body) for body in bodies]
    assert [answer.status_code for answer in answers] == [400] * len(bodies), [answer.text for answer in answers]


@pytest.mark.parametrize("path", PICTURES)
def test_no_body_with_images_makes_the_server_fail(small: Poster, path: str) -> None:
    found: Counter[int] = Counter()

    @seed(SEED)
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies(path, with_pictures=True))
    def try_one(body: Any) -> None:
        answer = small.raw(path, body)
        found[answer.status_code] += 1
        assert answer.status_code < 500, answer.text

    print(f"seed {SEED}")
    try_one()
    assert found[200] > sum(found.values()) / 4, found


def test_a_body_may_have_large_images_and_no_large_text(seeing: Poster) -> None:
    assert seeing.chat(messages=asked_about(png(4, 1700)), max_tokens=1).status_code == 200  # 11 MB
    refused = seeing("/v1/completions", prompt="a word, " * 1_200_000)
    assert refused.status_code == 413 and "without the data of images" in refused.json()["error"]["message"]
