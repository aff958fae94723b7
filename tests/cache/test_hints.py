"""Hints at a cache: pins within their limits, and sessions by tenant."""

import math

import pytest

from hybrid import ArgumentError, Hints
from support.caches import AuditedCache, audited_cache, key_of, release, serve


@pytest.fixture
def cache() -> AuditedCache:
    return audited_cache(num_pages=16, num_states=8)


def left(cache: AuditedCache, text: str, hints: Hints, session: str | None = None, namespace: str = "") -> None:
    """A request has left a text."""
    serve(cache, key := key_of(cache, text, namespace))
    cache.hint(key, hints, session=session)


def cached(cache: AuditedCache, text: str, namespace: str = "") -> int:
    key = key_of(cache, text, namespace)
    return cache.tree.peek(key, len(key)).num_tokens


def test_what_is_to_be_retained_is_pinned_and_one_pin_is_that_of_a_session(cache: AuditedCache) -> None:
    for text in ("ab", "abcd"):
        left(cache, text, Hints(retain=math.inf), "s")
    assert cache.stats().pins == 1
    cache.clear()
    assert cached(cache, "abcd") == 8
    assert cache.hint_session("s", Hints(end_session=True), namespace="")
    cache.clear()
    assert (cached(cache, "abcd"), cache.stats().pins) == (0, 0)
    release(cache)


def test_only_the_first_tokens_are_retained_if_that_is_said(cache: AuditedCache) -> None:
    serve(cache, key_of(cache, "ab"))
    left(cache, "abcd", Hints(retain=60.0, retain_tokens=5))
    cache.clear()
    assert cached(cache, "abcd") == 4
    assert [pin.num_tokens for pin in cache.pins] == [4]


def test_hints_pin_no_more_than_pins_may(cache: AuditedCache) -> None:
    for letter in "abcd":
        left(cache, letter * 5, Hints(retain=math.inf))
    assert cache.stats().pins == 1
    serve(cache, key_of(cache, "z" * 10))
    assert cached(cache, "z" * 10) == 20


def test_a_session_that_has_ended_goes_first(cache: AuditedCache) -> None:
    left(cache, "abcd", Hints(), "s")
    serve(cache, key_of(cache, "wxyz"))
    left(cache, "abef", Hints(end_session=True), "s")
    serve(cache, key_of(cache, "k" * 10))
    assert cached(cache, "wxyz") == 8
    assert max(cached(cache, "abcd"), cached(cache, "abef")) == 4


def test_a_session_is_its_tenants_own(cache: AuditedCache) -> None:
    left(cache, "abcd", Hints(), "s", "theirs")
    assert not cache.hint_session("s", Hints(end_session=True), namespace="mine")
    assert not cache.hint_session("s", Hints(end_session=True), namespace="theirs", tenant="mine")
    assert cache.hint_session("s", Hints(expect_resume=30.0), namespace="theirs")


def test_what_are_no_hints_is_refused(cache: AuditedCache) -> None:
    with pytest.raises(ArgumentError, match=r"hybrid\.Hints"):
        cache.hint(key_of(cache, "ab"), {"retain": 3})  # type: ignore[arg-type]
