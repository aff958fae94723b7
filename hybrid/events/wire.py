"""Changes as bytes: MessagePack, in arrays. Token ids do not leave the process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from hybrid.events.change import CHECKPOINT, EVERYTHING, PAGES, Change
from hybrid.events.feed import FeedSnapshot
from hybrid.key import NAME_BYTES

VERSION = 1

KINDS = (PAGES, CHECKPOINT, EVERYTHING)


class WireError(ValueError):
    """Bytes that are no message, or one of another version. Nothing was changed."""


class Message(NamedTuple):
    """Changes of a feed, in order.

    Attributes:
        feed_id: of the feed.
        number: of the last change.
        is_snapshot: they are all that there is, and stand for every change up to `number`; else they are the changes
            just before and with that number.
        changes: in order.
    """

    feed_id: str
    number: int
    is_snapshot: bool
    changes: Sequence[Change]


class Question(NamedTuple):
    """The question of a follower: the changes after one.

    Attributes:
        feed_id: of the feed that it has followed; empty: none.
        number: of the last change that it knows.
    """

    feed_id: str
    number: int


_Row = tuple[bool, int, bytes, int, str, int, float | None]

_encode = msgspec.msgpack.Encoder().encode
_message = msgspec.msgpack.Decoder(tuple[int, str, int, bool, list[_Row]]).decode
_question = msgspec.msgpack.Decoder(tuple[int, str, int]).decode


def encode(message: Message) -> bytes:
    """Encode a message."""
    rows = [
        (one.born, KINDS.index(one.kind), one.names, one.num_tokens, one.tier, one.num_bytes, one.value)
        for one in message.changes
    ]
    return _encode((VERSION, message.feed_id, message.number, message.is_snapshot, rows))


def encode_snapshot(snapshot: FeedSnapshot) -> bytes:
    """Encode a snapshot."""
    return encode(Message(snapshot.feed_id, snapshot.number, True, snapshot.changes))


def decode(content: bytes) -> Message:
    """Decode a message.

    Raises:
        WireError: it is none.
    """
    version, feed_id, number, is_snapshot, rows = _checked(_message, content)
    _check_version(version)
    changes = []
    for born, kind, names, num_tokens, tier, num_bytes, value in rows:
        if not 0 <= kind < len(KINDS) or len(names) % NAME_BYTES or num_tokens < 0 or num_bytes < 0:
            raise WireError("a change that makes no sense")
        changes.append(Change(born, KINDS[kind], names, num_tokens, tier, num_bytes, value))
    if number < 0 or (not is_snapshot and len(changes) > number):
        raise WireError("numbers that make no sense")
    return Message(feed_id, number, is_snapshot, changes)


def encode_question(question: Question) -> bytes:
    """Encode a question."""
    return _encode((VERSION, *question))


def decode_question(content: bytes) -> Question:
    """Decode a question.

    Raises:
        WireError: it is none.
    """
    version, feed_id, number = _checked(_question, content)
    _check_version(version)
    return Question(feed_id, number)


def _checked(decoder: Any, content: bytes) -> Any:
    try:
        return decoder(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # texts that are not UTF-8 are ValueErrors
        raise WireError(f"no message of events: {error!s:.200}") from None


def _check_version(version: int) -> None:
    if version != VERSION:
        raise WireError(f"events of version {version}; this is version {VERSION}")
