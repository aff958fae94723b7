"""One server on the model inside the package, and a way to post to it."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm asks no address for prices when it is imported

pytest.importorskip("uvicorn", reason="the extra 'server' is not installed")

from hybrid import CacheConfig
from support.served import Poster, served


@pytest.fixture(scope="session")
def address(tiny: Any) -> Iterator[str]:
    with served(tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB"))) as (url, _):
        yield url


@pytest.fixture(scope="session")
def post(address: str) -> Poster:
    return Poster(address)
