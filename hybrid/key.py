"""Keys of the tree: token ids as bytes, in a namespace; and the names of their prefixes.

Ids are stored as the bytes of 32-bit integers. A child of a node is looked up by the bytes of its first page, and an
edge is compared with one `bytes.startswith`, which is one memcmp without a copy.

A prefix is named by a hash that is chained from page to page. Its name is the same in every process and on every
machine: the tree remembers by it what it has evicted, tiers find their copies by it, and events tell it to others.
"""

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hybrid.checks import shown, text
from hybrid.errors import ArgumentError

TOKEN_BYTES: int = array("i").itemsize
"""Bytes of one token id in a key."""

NAME_BYTES: int = 16
"""Bytes of the name of a prefix: 128 bits, so that two prefixes with the same name are not found."""

PAIRS: str = "\0pairs "
"""The beginning of namespaces of keys of pairs; no other namespace begins with it."""


MAX_NAMESPACE_CHARACTERS = 1024
"""The maximum length of the name of a namespace, or of a tenant, that comes with a request: thousands are kept."""


@dataclass(frozen=True, slots=True)
class Key:
    """A sequence of token ids in a namespace. Equal ids in different namespaces share nothing.

    Attributes:
        ids: the token ids, `TOKEN_BYTES` bytes each.
        namespace: a LoRA adapter, a cache salt, a tenant; a string.
        units: spans `(start, end)` of tokens that are one unit, such as the positions of an image: no match and no
            checkpoint ends inside one. They rise and do not overlap.
    """

    ids: bytes
    namespace: str = ""
    units: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.namespace != "":
            _check_text(self.namespace)

    @classmethod
    def of(cls, ids: Sequence[int], namespace: str = "", units: Iterable[tuple[int, int]] = ()) -> "Key":
        """Create the key of token ids. Create it once per request: 128k ids from a list take 2 ms.

        Args:
            ids: token ids.
            namespace: keys in different namespaces share nothing.
            units: spans `(start, end)` that no match and no checkpoint may end inside, in any order. Equal ids must
                mean equal content, page by page: `PagedUnits` makes such ids from the contents of units.

        Raises:
            ArgumentError: the ids are not integers of 32 bits, or the namespace is not a string, or begins as those of
                pairs do.
        """
        check_namespace(namespace)
        return cls(_integers(ids).tobytes(), namespace, joined(units))

    @classmethod
    def of_pairs(cls, ids: Sequence[int], namespace: str = "", units: Iterable[tuple[int, int]] = ()) -> "Key":
        """Create the key of pairs of consecutive tokens: its position n stands for tokens n and n + 1.

        For caches of a drafter of the EAGLE kind, whose keys and values at a position are computed from the token there
        and the one after it: n equal positions are n + 1 equal tokens. Such a key shares nothing with keys of tokens.

        Args:
            ids: token ids, one more than the key has positions.
            namespace: keys in different namespaces share nothing.
            units: spans `(start, end)` of tokens, as in `of`.

        Raises:
            ArgumentError: there is no token, the ids are not integers of 32 bits, or the namespace is not a string, or
                begins as those of pairs do.
        """
        check_namespace(namespace)
        ids = _integers(ids)
        if not ids:
            raise ArgumentError("a key of pairs needs at least one token")
        spans = ((max(start - 1, 0), end - 1) for start, end in units if end > 1)
        # exact, with 4 bytes a position: the pairs of a sequence are its first token, and then each later one
        return cls(ids[1:].tobytes(), f"{PAIRS}{ids[0]} {namespace}", joined(spans))

    def whole(self, num_tokens: int, step: int) -> int:
        """The largest multiple of `step`, up to `num_tokens`, that is not inside a unit."""
        num_tokens -= num_tokens % step
        while (at := bisect_left(self.units, (num_tokens,)) - 1) >= 0:
            start, end = self.units[at]
            if end <= num_tokens:
                break
            num_tokens = start - start % step
        return num_tokens

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids) // TOKEN_BYTES


def check_key(call: str, key: object) -> None:
    """Check that a key is one.

    Args:
        call: that it was given to.

    Raises:
        ArgumentError: it is not a `Key`.
    """
    if not isinstance(key, Key):
        raise ArgumentError(f"{call}: key must be a hybrid.Key, as Key.of(ids) makes it; got {shown(key)}")


def check_namespace(namespace: object, max_characters: int | None = None) -> None:
    """Refuse a namespace that is not a string, where 1, 1.0 and True would be one, or that keys of pairs have.

    Args:
        max_characters: its length, at most; None: no limit.

    Raises:
        ArgumentError: it is not a string, is longer, has a lone surrogate, or begins with `PAIRS`.
    """
    _check_text(namespace)
    if max_characters is not None and isinstance(namespace, str) and len(namespace) > max_characters:
        raise ArgumentError(
            f"a namespace has up to {max_characters} characters, got {len(namespace)} of them: {namespace!r:.40}...; "
            "use a hash of it"
        )
    if isinstance(namespace, str) and namespace.startswith(PAIRS):
        raise ArgumentError(f"a namespace must not begin with {PAIRS!r}, as those of pairs do; got {namespace!r:.100}")


def joined_names(*names: str) -> str:
    """One name for several, which no others have: each comes after its length. Empty for none.

    Args:
        names: whatever characters they have.
    """
    return "".join(f"{len(name)}:{name}" for name in names)


def _integers(ids: Sequence[int]) -> "array[int]":
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    try:
        return array("i", ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"Key: ids must be integers of 32 bits; got {shown(ids)}: {error}") from error


def _check_text(namespace: object) -> None:
    if not isinstance(namespace, str):
        raise ArgumentError(f"a namespace must be a string, got {namespace!r:.100}; use str() or leave it out")
    text("the namespace", namespace)


def name_of_namespace(namespace: str) -> bytes:
    """Name the empty prefix. Prefixes of different namespaces have different names."""
    return hashlib.blake2b(namespace.encode(), digest_size=NAME_BYTES, person=b"hybrid prefix").digest()


def names_after(last: bytes, ids: bytes | bytearray, page_bytes: int, start: int = 0) -> Iterator[bytes]:
    """Name the prefix up to the end of each whole page: blake2b, chained from page to page.

    Args:
        last: the name of what is before.
        ids: token ids as bytes.
        page_bytes: bytes of the token ids of a page.
        start: byte of `ids` at which the first page begins.
    """
    new = hashlib.blake2b(digest_size=NAME_BYTES).copy  # faster than to make one for each page
    for at in range(start, len(ids) - page_bytes + 1, page_bytes):
        page = new()
        page.update(last + ids[at : at + page_bytes])
        last = page.digest()
        yield last


def names_of(ids: bytes, namespace: str, page_bytes: int) -> list[bytes]:
    """Name the prefixes of token ids from their beginning; arguments as those of `names_after`."""
    return [*names_after(name_of_namespace(namespace), ids, page_bytes)]


def common_prefix(a: bytes, b: bytes | bytearray, a_start: int, b_start: int, step: int, limit: int) -> int:
    """Length in bytes of the common prefix of `a[a_start:]` and `b[b_start:]`: a multiple of `step`, up to `limit`.

    A binary search with memcmp: 128k tokens take a few microseconds.
    """
    at, end = b_start, b_start + min(len(a) - a_start, len(b) - b_start, limit)
    shift = a_start - b_start
    size = step << ((end - at) // step).bit_length()
    with memoryview(b) as view:  # its slices copy nothing; one that an exception keeps would not let `b` grow
        while size > step:
            size >>= 1
            if at + size <= end and a.startswith(view[at : at + size], at + shift):
                at += size
    return at - b_start


@dataclass(frozen=True, slots=True)
class Unit:
    """Tokens of a prompt that are one thing, such as the positions of an image.

    Attributes:
        start, end: its tokens `[start, end)`.
        content: identifies what it is, as a hash of 16 bytes or more. Token ids within it do not count.
    """

    start: int
    end: int
    content: bytes


MIN_UNIT_PAGE = 8
"""The smallest page in which a unit is distinguished from others by at least 128 bits: an id holds 31 of them."""

UNSHARED = 2**62
"""The end of a span after which nothing is shared."""


class PagedUnits:
    """The units of a prompt, and the ids that stand for them in keys.

    The tree shares page by page, and a unit may have a single token in a page. So in a page with a part of a unit every
    id is a hash: up to the end of the last unit in it, of all that is in the page up to there; after that, of all that
    is in the page up to the token itself, so that a key stays the beginning of longer ones. These ids are negative,
    and no text equals them. Pages without a unit are as they are, and are shared as ever.

    In pages of fewer than `MIN_UNIT_PAGE` tokens, which have no room for such a hash, nothing is shared from the first
    unit on.

    Args:
        prompt: its token ids; those within units do not count.
        units: in any order.
        page_size: of the cache.
    """

    def __init__(self, prompt: Sequence[int], units: Iterable[Unit], page_size: int) -> None:
        units = sorted(units, key=lambda unit: (unit.start, unit.end))
        self.spans: tuple[tuple[int, int], ...] = joined((unit.start, unit.end) for unit in units)
        if units and page_size < MIN_UNIT_PAGE:
            self.spans = ((units[0].start, UNSHARED),)
        self._page_size = page_size
        self._runs: list[tuple[int, bytes]] = []  # first token and ids of pages that are hashed, one after the other
        self._last: tuple[int, bytes] | None = None  # where the prompt ends in such a page: its end, and its hash
        in_page: dict[int, list[Unit]] = {}
        for unit in units:
            for page in range(unit.start // page_size, (unit.end - 1) // page_size + 1):
                in_page.setdefault(page, []).append(unit)
        ids = array("i", prompt)
        for page, own in sorted(in_page.items()):
            self._add_page(page * page_size, own, ids)

    def key(self, ids: Sequence[int], namespace: str = "") -> Key:
        """The key of the prompt and the tokens after it.

        Args:
            ids: the prompt's, and those after it up to now.
            namespace: keys in different namespaces share nothing.
        """
        ids = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        data = bytearray(ids.tobytes())
        for start, words in self._runs:
            first = start * TOKEN_BYTES
            data[first : first + len(words)] = words[: max(0, len(data) - first)]
        if self._last is not None:
            end, state = self._last
            start = self._runs[-1][0] + len(self._runs[-1][1]) // TOKEN_BYTES
            data[start * TOKEN_BYTES : end * TOKEN_BYTES] = _chain(state, ids[start:end])[0]
        return Key(bytes(data), namespace, self.spans)

    def _add_page(self, start: int, units: list[Unit], ids: "array[int]") -> None:
        """Hash a page that begins at token `start`."""
        end = start + self._page_size
        last = min(end, max(unit.end for unit in units))
        own = ids[start:last]
        digest = hashlib.blake2b(digest_size=32, person=b"hybrid page")
        for unit in units:
            first, stop = max(unit.start, start), min(unit.end, last)
            own[first - start : stop - start] = array("i", bytes(TOKEN_BYTES * (stop - first)))
            digest.update(b"%d %d %d " % (unit.start - start, unit.end - start, len(unit.content)) + unit.content)
        digest.update(own.tobytes())
        state = digest.digest()
        words = hash_ids(state, len(own))
        rest, state = _chain(state, ids[last:end])
        words += rest
        if self._runs and self._runs[-1][0] + len(self._runs[-1][1]) // TOKEN_BYTES == start:
            start, before = self._runs.pop()
            words = before + words
        self._runs.append((start, words))
        if len(ids) < end:
            self._last = end, state


def joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans in order; those that overlap are one."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return tuple(found)


def hash_ids(content: bytes, count: int) -> bytes:
    """The bytes of `count` ids that stand for a content: a hash of 31 bits each. No text has such ids."""
    return _negative(hashlib.shake_256(content).digest(count * TOKEN_BYTES))


def _chain(state: bytes, ids: "array[int]") -> tuple[bytes, bytes]:
    """An id for each token, a hash of the state and of the tokens up to it; and the state after them."""
    words = []
    for token in ids:
        state = hashlib.blake2b(token.to_bytes(4, "little", signed=True), digest_size=32, key=state).digest()
        words.append(state[:TOKEN_BYTES])
    return _negative(b"".join(words)), state


def _negative(words: bytes) -> bytes:
    """Words of a hash as the bytes of negative ids: 31 bits of each are kept."""
    signs = int.from_bytes(b"\x80\0\0\0" * (len(words) // TOKEN_BYTES), "big")
    made = int.from_bytes(words, "big") | signs
    numbers = array("i", made.to_bytes(len(words), "big"))
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers.tobytes()
