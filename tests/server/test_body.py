"""Bodies that come in pieces: what is parsed is what was sent, and the data of images is kept apart from it."""

import base64
import binascii
import json
import random
from typing import Any

import pytest

from hybrid.server.body import Body, LongData, decoded

MAX_BYTES, MAX_TEXT = 400_000, 100_000


def read(body: Any, seed: int) -> Body:
    """A body that came in pieces of any size."""
    rng, found, rest = random.Random(seed), Body(MAX_BYTES, MAX_TEXT), json.dumps(body).encode()
    while rest:
        size = rng.choice([1, 7, 1000, 5000, 20_000, 65_536]) if seed % 2 else 500
        found.add(rest[:size])
        rest = rest[size:]
    return found


def plain(value: Any) -> Any:
    """A value in which what was kept apart is in its place."""
    if isinstance(value, LongData):
        return b"".join(value).decode()
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [*map(plain, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(20))
def test_a_body_in_pieces_is_what_was_sent(seed: int) -> None:
    rng = random.Random(seed)
    images = [base64.b64encode(rng.randbytes(rng.randrange(60_000, 90_000))).decode() for _ in range(3)]
    urls = [f"data:image/png;base64,{image}" for image in images]
    body = {"messages": [{"content": [{"url": url}, {"text": "What is ~this~?\n" * 50}]} for url in urls], "n": None}
    whole = read(body, seed)
    assert not whole.is_too_large and whole.size == len(json.dumps(body))
    parsed = whole.json()
    assert plain(parsed) == body
    found = [message["content"][0]["url"] for message in parsed["messages"]]
    assert any(isinstance(url, LongData) for url in found)
    for url, image in zip(found, images, strict=True):
        head, comma, data = url.partition(",")
        assert (head, comma) == ("data:image/png;base64", ",")
        assert decoded(data).read() == base64.b64decode(image)
    small = {"text": "word " * 1000, "data": images[0][:50_000]}
    assert read(small, seed).json() == small


def test_a_body_has_limits_with_the_data_of_images_and_without() -> None:
    assert read({"text": "a word " * 15_000}, 0).is_too_large  # more text than `MAX_TEXT`
    assert read({"url": "A" * 450_000}, 0).is_too_large
    assert not read({"url": "A" * 350_000}, 0).is_too_large
    with pytest.raises(ValueError, match="empty document"):
        Body(MAX_BYTES, MAX_TEXT).json()


@pytest.mark.parametrize("seed", range(60))
def test_data_is_decoded_in_parts_as_at_once(seed: int) -> None:
    rng = random.Random(seed)
    text = [*base64.b64encode(rng.randbytes(rng.randrange(1200))).decode()]
    for _ in range(rng.randrange(3)):
        text.insert(rng.randrange(len(text) + 1), rng.choice("=A-\n"))
    data = "".join(text).encode()
    at = sorted(rng.randrange(len(data) + 1) for _ in range(4))
    parts = [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True)]
    long = LongData(parts[0].decode(), tuple(parts[1:-1]), parts[-1].decode())
    try:
        expected = base64.b64decode(data, validate=True)
    except binascii.Error:
        with pytest.raises(binascii.Error):
            decoded(long)
    else:
        assert decoded(long).read() == decoded(data.decode()).read() == expected
