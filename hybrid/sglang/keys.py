"""Keys of the tree from SGLang's keys.

SGLang's token ids have 64 bits, and stand-ins for images use them all; ids of the tree have 32. So a token of SGLang is
`WORDS` ids of the tree, and every position there is that many times as large. Nothing is looked at token by token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from hybrid.key import TOKEN_BYTES, Key

WORDS = array("q").itemsize // TOKEN_BYTES
"""Ids of the tree per token of SGLang."""


def key_of(key: Any, page_size: int) -> Key:
    """The key of the whole pages of one of SGLang's `RadixKey`.

    Args:
        key: its ids, up to its limit, in the namespace of its extra key and its salt.
        page_size: tokens per page.
    """
    return key_of_ids(key.token_ids, len(key), page_size, key.extra_key, key.cache_salt)


def key_of_ids(
    ids: Sequence[int], num_tokens: int, page_size: int, extra_key: str | None, cache_salt: str | None
) -> Key:
    """The key of the whole pages of the first `num_tokens` ids."""
    if not (isinstance(ids, array) and ids.typecode == "q"):
        ids = array("q", ids)
    view = memoryview(ids)[: num_tokens - num_tokens % page_size]
    return Key(view.tobytes(), namespace_of(extra_key, cache_salt))


def namespace_of(extra_key: str | None, cache_salt: str | None) -> str:
    """One name for both, which no other pair has."""
    if not cache_salt:
        return "" if extra_key is None else f"+{extra_key}"
    return f"{'' if extra_key is None else len(extra_key)}:{extra_key or ''}{cache_salt}"
