"""A body as it comes. The data of images in a large one is kept apart, so that what is parsed at once is small."""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from hybrid.checks import MAX_JSON_DEPTH, is_deeper

BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

BEGIN = 4096
"""Characters of base64, one after the other, that are taken for the data of an image."""

AT_ONCE = 256 * 1024
"""Bytes that are decoded without letting other threads run."""

SLICE = 64 * 1024
"""Bytes whose values are counted without letting other threads run."""

MAX_VALUES = 2**18
"""Values of a body, about: a parser does not let other threads run, and takes up to 20 ms for these. A list, an
object or a name counts as four."""

MARK = re.compile("~([0-9a-f]{64})~")
"""Stands for what was kept apart, with its digest. No base64 has a `~`."""


@dataclass(frozen=True, repr=False)
class LongData:
    """A text of a body of which the most is base64 that was kept apart.

    Attributes:
        head, tail: before and after that.
        pieces: of it.
    """

    head: str
    pieces: tuple[bytes, ...]
    tail: str

    def __repr__(self) -> str:
        return f"{self.head[:40]}..."

    def __iter__(self) -> Iterator[bytes]:
        yield self.head.encode()
        yield from self.pieces
        yield self.tail.encode()

    def partition(self, separator: str) -> tuple[str, str, LongData]:
        """As that of a text, whose separator is at its beginning."""
        before, found, after = self.head.partition(separator)
        return before, found, LongData(after, self.pieces, self.tail)

    def digest(self) -> str:
        """A digest of the whole text."""
        return _digest(self)


class TooManyValuesError(ValueError):
    """A body has more values than can be parsed beside streams."""


class Body:
    """The pieces of a body, within limits.

    Args:
        max_bytes: that it may have.
        max_text: that it may have without the data of images.
        max_values: that it may have.

    Attributes:
        size: bytes that have come.
        is_too_large: it is beyond a limit; what came is forgotten.
    """

    def __init__(self, max_bytes: int, max_text: int, max_values: int = MAX_VALUES) -> None:
        self.size: int = 0
        self._max_values = max_values
        self.is_too_large: bool = False
        self._max_bytes = max_bytes
        self._max_text = max_text
        self._parts: list[bytes | list[bytes]] = []  # texts, and pieces of data
        self._data_size = 0
        self._run = 0  # characters of base64 at the end of what has come

    def add(self, piece: bytes) -> None:
        """The next piece has come."""
        self.size += len(piece)
        if self.is_too_large:
            return
        at = 0
        while at < len(piece):
            if self._parts and isinstance(data := self._parts[-1], list):
                num_text = len(piece[at:].lstrip(BASE64))
                self._add_data(data, piece[at : len(piece) - num_text])
                at = len(piece) - num_text
            self._add_text(piece[at : at + BEGIN])  # data is found at the end of such a part
            at += BEGIN
        if self.size > self._max_bytes or self.size - self._data_size > self._max_text:
            self.is_too_large = True
            self._parts = []

    def _add_text(self, piece: bytes) -> None:
        if not piece:
            return
        run = len(piece) - len(piece.rstrip(BASE64))
        self._run = run + self._run if run == len(piece) else run
        if self._run < BEGIN:
            self._parts.append(piece)
            return
        data: list[bytes] = []
        self._parts += [piece[: len(piece) - run], data]
        self._add_data(data, piece[len(piece) - run :])
        self._run = 0

    def _add_data(self, data: list[bytes], piece: bytes) -> None:
        data.append(piece)
        self._data_size += len(piece)

    def json(self) -> Any:
        """The body, read as JSON. Texts whose data was kept apart are `LongData`.

        Raises:
            ValueError: it is none, or is nested too deep.
            TooManyValuesError: it has too many.
        """
        read = (part for part in self._parts if isinstance(part, bytes))
        if 4 * self.size > self._max_values and has_more_values(read, self._max_values):
            raise TooManyValuesError
        if self.size <= self._max_text:
            return _loaded(b"".join(b"".join(part) if isinstance(part, list) else part for part in self._parts))
        texts, kept = [], {}
        for part in self._parts:
            if isinstance(part, list):
                digest = _digest(part)
                kept[digest] = tuple(part)
                part = f"~{digest}~".encode()
            texts.append(part)
        return _with_data(_loaded(b"".join(texts)), kept)


def has_more_values(pieces: Iterable[bytes], most: int) -> bool:
    """Tell whether JSON in pieces has about more values than that; texts count as one whatever they hold."""
    count, num_quotes, rest = 0, 0, b""
    for whole in pieces:
        for start in range(0, len(whole), SLICE):
            piece = rest + whole[start : start + SLICE]
            end = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2  # what it escapes is in the next one
            piece, rest = piece[:end], piece[end:]
            parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
            outside = b"".join(parts[num_quotes % 2 :: 2])
            num_quotes += len(parts) - 1
            count += outside.count(b",") + 4 * sum(map(outside.count, (b"[", b"{", b":")))
            if count + num_quotes // 2 > most:
                return True
    return False


def _loaded(text: bytes) -> Any:
    value = orjson.loads(text)
    if text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH and is_deeper(value):
        raise ValueError(f"objects and lists are nested more than {MAX_JSON_DEPTH} deep")
    return value


def _digest(pieces: Iterable[bytes]) -> str:
    digest = sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _with_data(value: Any, kept: dict[str, tuple[bytes, ...]]) -> Any:
    """A value of JSON with what was kept apart."""
    if isinstance(value, dict):
        return {name: _with_data(inner, kept) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_data(inner, kept) for inner in value]
    if isinstance(value, str) and "~" in value and (mark := MARK.search(value)) is not None and mark[1] in kept:
        return LongData(value[: mark.start()], kept[mark[1]], value[mark.end() :])
    return value


def has_long_data(value: Any) -> bool:
    """Tell whether data that was kept apart is anywhere in a value of JSON."""
    if isinstance(value, dict | list):
        return any(map(has_long_data, value.values() if isinstance(value, dict) else value))
    return isinstance(value, LongData)


def decoded(data: str | LongData) -> io.BytesIO:
    """What base64 says.

    Raises:
        binascii.Error: it is none.
    """
    file, rest = io.BytesIO(), b""
    for piece in _pieces([data.encode()] if isinstance(data, str) else data):
        if b"=" in piece.rstrip(b"=") or (b"=" in rest and piece.strip(b"=")):
            raise binascii.Error("there is data after its padding")
        rest += piece
        whole = len(rest) - len(rest) % 4
        if b"=" not in rest:
            file.write(base64.b64decode(rest[:whole], validate=True))
            rest = rest[whole:]
    file.write(base64.b64decode(rest, validate=True))
    file.seek(0)
    return file


def _pieces(data: Iterable[bytes]) -> Iterator[bytes]:
    for piece in data:
        for start in range(0, len(piece), AT_ONCE):
            yield piece[start : start + AT_ONCE]
