"""The tokens after a prefix in the tree: texts of a token per character, in pages of two."""

import random

import pytest

from hybrid import HybridCache, Key
from hybrid.tree.tree import MAX_CHILDREN
from support.pictures import cache_with, serve


def after(cache: HybridCache, text: str, limit: int = 99, namespace: str = "") -> str:
    """Return what follows a text."""
    found = cache.tree.following(Key.of([*map(ord, text)], namespace), limit)
    return "".join(map(chr, found))


def test_what_follows_begins_anywhere_in_a_page_and_ends_with_the_last_one() -> None:
    cache = cache_with("abcdefgh", "abcdxxy")
    assert after(cache, "abcde") == "fgh"
    assert after(cache, "abcdef") == "gh"
    assert after(cache, "abcdex") == after(cache, "abcdefgh") == after(cache, "abcdefghi") == after(cache, "b") == ""
    assert after(cache, "abcdx") == "x"  # the page of "y" was not full
    assert after(cache, "abcdef", 1) == "g"


def test_of_several_continuations_the_one_that_was_inserted_last_follows() -> None:
    cache = cache_with("abcdefgh", "abcdxx")
    assert after(cache, "ab") == after(cache, "a")[1:] == "cdxx"
    serve(cache, "abcdyyzz", "")
    assert after(cache, "ab") == "cdyyzz"
    assert after(cache, "abcde") == "fgh"


def test_nothing_follows_from_another_namespace() -> None:
    cache = cache_with("abcdef", namespace="a")
    assert after(cache, "ab", namespace="a") == "cdef"
    assert after(cache, "ab") == after(cache, "ab", namespace="b") == ""


def test_of_many_continuations_the_latest_are_looked_at() -> None:
    texts = [f"ab{chr(200 + number)}c" for number in range(MAX_CHILDREN + 1)]
    cache = cache_with(*texts)
    assert after(cache, texts[-1][:3]) == after(cache, texts[1][:3]) == "c"
    assert after(cache, texts[0][:3]) == ""


@pytest.mark.parametrize("seed", range(5))
def test_what_follows_is_what_was_served(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choices("ab", k=rng.randrange(2, 14))) for _ in range(12)]
    cache, whole = cache_with(*texts), [text[: len(text) // 2 * 2] for text in texts]
    for _ in range(200):
        start = "".join(rng.choices("ab", k=rng.randrange(1, 9)))
        limit = rng.randrange(1, 8)
        found = after(cache, start, limit)
        known = [text for text in whole if text.startswith(start + found)]
        assert known if found else not any(len(text) > len(start) for text in known)
        assert len(found) == limit or start + found in known or not found
