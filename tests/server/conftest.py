"""One server on the model inside the package, and a way to post to it."""

import os
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm asks no address for prices when it is imported

pytest.importorskip("uvicorn", reason="the extra 'server' is not installed")

from hybrid import CacheConfig, Engine
from support.served import Poster, served

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def address(tiny: Any) -> Iterator[str]:
    """A server of a model whose chat template writes roles and contents alone."""
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))
    tokenizer = deepcopy(tiny.tokenizer)
    tokenizer.chat_template = PLAIN
    with served(Engine(replace(tiny.loaded, tokenizer=tokenizer), engine.cache, engine.config)) as (url, _):
        yield url


@pytest.fixture(scope="session")
def post(address: str) -> Poster:
    return Poster(address)


@pytest.fixture(scope="session")
def post_tiny(tiny: Any) -> Iterator[Poster]:
    """Of a server of the small model as it is, whose chat template writes tools and thinking."""
    with served(tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))) as (url, _):
        yield Poster(url)
