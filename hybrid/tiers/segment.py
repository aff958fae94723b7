"""Segments: several copies in one safetensors file, written once.

A copy is a tensor of bytes named by its kind and the digest of its prefix. The data begin at a multiple of 4096 bytes,
and each copy at one of 64 (what is in between are tensors too), so that a file can be mapped and read by any tool.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybrid.tiers.tier import Contents, Name, Note

CHECKSUM_BYTES = 16
DATA_ALIGNMENT = 4096
COPY_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Record:
    """A copy that is to be written.

    Attributes:
        name: of the copy.
        contents: its bytes.
        note: as a text; empty: it has none.
    """

    name: Name
    contents: Contents
    note: str


class Span(NamedTuple):
    """Where a copy is in its segment, and what it must hold.

    Attributes:
        start: of its bytes.
        num_bytes: how many they are.
        checksum: of them, its name and its note.
    """

    start: int
    num_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """A file that is to be written.

    Attributes:
        parts: its bytes in order.
        num_bytes: of all of them.
        spans: where the copies are, in order.
    """

    parts: list[Contents]
    num_bytes: int
    spans: list[Span]


def checksum(origin: str, name: Name, note: str, contents: Contents) -> bytes:
    """The checksum of a copy. It covers all that is known of it: nothing can be taken for something else.

    SHA-256: a processor with instructions for it hashes three times as fast as with blake2b.

    Args:
        origin: the digest of the fingerprint.
    """
    whole = hashlib.sha256(json.dumps([origin, name[0], name[1].hex(), note]).encode())
    whole.update(contents)
    return whole.digest()[:CHECKSUM_BYTES]


def note_text(note: Note | None) -> str:
    """A note as it is kept outside of memory: without ids and namespace."""
    return (
        "" if note is None else json.dumps([note.kind, note.turn, note.priority, note.num_tokens, note.end, note.group])
    )


def note_of(text: str) -> Note | None:
    """The note of a text.

    Raises:
        ValueError: it is none.
    """
    if not text:
        return None
    kind, turn, priority, num_tokens, end, group = json.loads(text)
    texts, numbers = (kind, group), (turn, priority, num_tokens, end)
    if not all(isinstance(one, str) for one in texts) or any(type(number) is not int for number in numbers):
        raise ValueError("the note of a checkpoint has fields of other types")
    return Note(kind, turn, priority, num_tokens, end, group)


def layout(records: Sequence[Record], origin: str) -> Segment:
    """Put copies into a segment.

    Args:
        origin: the digest of the fingerprint.
    """
    tensors: dict[str, object] = {}
    body: list[Contents] = []
    placed: list[tuple[int, int]] = []
    end = 0
    for number, record in enumerate(records):
        gap = -end % COPY_ALIGNMENT
        if gap:
            tensors[f"gap.{number}"] = _tensor(end, gap)
            body.append(bytes(gap))
            end += gap
        kind, digest = record.name
        tensors[f"{kind}.{digest.hex()}"] = _tensor(end, len(record.contents))
        body.append(record.contents)
        placed.append((end, len(record.contents)))
        end += len(record.contents)
    head = json.dumps({"__metadata__": {"hybrid": "segment", "fingerprint": origin}, **tensors}).encode()
    head += b" " * (-(8 + len(head)) % DATA_ALIGNMENT)
    first = 8 + len(head)
    spans = [
        Span(first + start, size, checksum(origin, record.name, record.note, record.contents))
        for (start, size), record in zip(placed, records, strict=True)
    ]
    return Segment([len(head).to_bytes(8, "little"), head, *body], first + end, spans)


def _tensor(start: int, num_bytes: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [num_bytes], "data_offsets": [start, start + num_bytes]}
