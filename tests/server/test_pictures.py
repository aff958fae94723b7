"""Images over HTTP, on a random model that takes them: each API's form is the same prompt."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest

from hybrid import CacheConfig, Engine
from support.served import Poster, served
from support.vision import picture, vision_model, write_vision_checkpoint

Image = pytest.importorskip("PIL.Image", reason="the extra 'images' is not installed")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[Poster]:
    path = write_vision_checkpoint(tmp_path_factory.mktemp("vision"), vision_model("Qwen3_5"), tokenizer)
    config = CacheConfig(memory="32MiB", page_size=16, chunk_size=16, deterministic=True)
    with served(Engine.from_pretrained(path, device="cpu", cache=config)) as (url, _):
        yield Poster(url)


def png(seed: int) -> str:
    file = io.BytesIO()
    Image.fromarray(picture(seed, 64, 64)).save(file, "PNG")
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
