"""Names of prefixes by their content: a digest for every page, of all tokens up to its end."""

from __future__ import annotations

import hashlib

DIGEST_BYTES = 16
"""128 bits: two prefixes with the same digest are not found."""


def of_namespace(namespace: str) -> bytes:
    """The digest of the empty prefix. Prefixes of different namespaces have different digests."""
    return hashlib.blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"hybrid prefix").digest()


def following(last: bytes, ids: bytes | bytearray, page_bytes: int) -> list[bytes]:
    """The digest of the prefix up to the end of each whole page: blake2b, chained from page to page.

    Args:
        last: the digest of what is before.
        ids: token ids as bytes.
        page_bytes: bytes of the token ids of a page.
    """
    names = []
    for start in range(0, len(ids) - page_bytes + 1, page_bytes):
        last = hashlib.blake2b(last + ids[start : start + page_bytes], digest_size=DIGEST_BYTES).digest()
        names.append(last)
    return names


def chain(ids: bytes, namespace: str, page_bytes: int) -> list[bytes]:
    """The digests of the prefixes of token ids from their beginning; arguments as those of `following`."""
    return following(of_namespace(namespace), ids, page_bytes)
