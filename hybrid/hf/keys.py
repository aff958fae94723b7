"""Keys of the tree for the tokens of transformers' sequences, and where these are cut in deterministic mode.

The bits of a token depend on the pass that computes it: on where the pass begins, on its length, and with mixtures of
experts on all of its tokens. So in deterministic mode every sequence is cut into segments, one pass each, at the same
places in every run: where a turn ends, and every `chunk_size` tokens after that. A cut depends on the tokens before it
alone, so what is cached of a sequence is cut as a cold run of any longer one is.

A segment is a unit of the key (`hybrid.key.Key`), and its first ids there stand for all of it: two segments share
nothing unless they are equal.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from hybrid import checks
from hybrid.key import TOKEN_BYTES, UNSHARED, Key, Unit, check_namespace, hash_ids, joined
from hybrid.prompts.images import Media

MIN_SEGMENT = 8
"""The shortest segment, and the number of its ids that stand for it in keys: together 248 bits."""

MAX_CHUNK_SIZE = 4096
"""The longest segment without images."""

MIN_TAIL = 16
"""Fewer tokens between the end of a turn and the end of a prompt, such as those with which an answer begins, are not
worth a pass of their own."""


NUM_KNOWN = 4
"""Keys that are remembered: of the tokens of the latest calls."""


@dataclass(frozen=True)
class Segments:
    """The cuts of sequences in deterministic mode.

    Attributes:
        chunk_size: tokens of a segment, at most.
        turn_ends: ids of the tokens that end a turn.

    Raises:
        ArgumentError: `chunk_size` is out of range.
    """

    chunk_size: int
    turn_ends: frozenset[int] = frozenset()
    _made: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.integer("PrefixCache: chunk_size in deterministic mode", self.chunk_size, MIN_SEGMENT, MAX_CHUNK_SIZE)
        # a call asks several times for the key of its prompt, and of that with its answer
        object.__setattr__(self, "_made", lru_cache(maxsize=NUM_KNOWN)(self._make))

    @property
    def min_turn(self) -> int:
        """Tokens since the last cut from which on the end of a turn is one, too: shorter passes would cost too much."""
        return max(MIN_SEGMENT, self.chunk_size // 4)

    def cuts(self, ids: Sequence[int]) -> list[int]:
        """Find where a sequence is cut, in order."""
        tokens = np.asarray(ids, dtype=np.int32)
        cuts: list[int] = []
        last = 0
        is_end = np.zeros(len(tokens), dtype=bool)
        for token in self.turn_ends:
            is_end |= tokens == token
        for end in (np.flatnonzero(is_end) + 1).tolist():
            cuts += range(last + self.chunk_size, end + 1, self.chunk_size)
            last = cuts[-1] if cuts else 0
            if end - last >= self.min_turn:
                cuts.append(end)
                last = end
        cuts += range(last + self.chunk_size, len(tokens) + 1, self.chunk_size)
        return cuts

    def key(self, ids: Sequence[int], namespace: str, media: Media | None) -> Key:
        """The key of a sequence. Its units are the segments, and what follows the last cut.

        A segment in which an image begins or ends is one unit with it.
        """
        check_namespace(namespace)
        key: Key = self._made(array("i", ids).tobytes(), namespace, () if media is None else tuple(media.units))
        return key

    def _make(self, tokens: bytes, namespace: str, units: tuple[Unit, ...]) -> Key:
        words = bytearray(tokens)
        ends = [0, *self.cuts(array("i", tokens)), UNSHARED]
        spans = joined([*pairwise(ends), *((unit.start, unit.end) for unit in units)])
        for start, end in spans[:-1]:
            content = b"".join(
                b"%d %d %d " % (unit.start - start, unit.end - start, len(unit.content)) + unit.content
                for unit in units
                if unit.start < end and start < unit.end
            )
            own = b"%d " % (end - start) + words[start * TOKEN_BYTES : end * TOKEN_BYTES]
            words[start * TOKEN_BYTES : (start + MIN_SEGMENT) * TOKEN_BYTES] = hash_ids(own + content, MIN_SEGMENT)
        return Key(bytes(words), namespace, spans)

    def prompt_end(self, ids: Sequence[int], key: Key) -> int:
        """The cut up to which a prompt is taken from the cache, and given to it, before it is answered. The tokens
        after it, one or more, are computed in one pass."""
        end = key.whole(len(ids) - 1, 1)
        while end and len(ids) - end < MIN_TAIL and ids[end - 1] in self.turn_ends:
            end = key.whole(end - 1, 1)
        return end


def last_image_end(media: Media | None) -> int:
    """Tokens of a prompt up to the end of its last image."""
    return 0 if media is None else media.images[-1].end


@dataclass(frozen=True)
class KeySpace:
    """The keys of the tokens of several sequences.

    Attributes:
        namespace: of the tree.
        media: per sequence its images; None: it has none.
        segments: how sequences are cut in deterministic mode; None: otherwise.
    """

    namespace: str
    media: tuple[Media | None, ...]
    segments: Segments | None

    def key(self, row: int, ids: Sequence[int]) -> Key:
        """The key of the first tokens of a sequence."""
        media = self.media[row]
        if self.segments is not None:
            return self.segments.key(ids, self.namespace, media)
        return Key.of(ids, self.namespace) if media is None else media.key(ids, self.namespace)

    def of_rows(self, order: Sequence[int]) -> KeySpace:
        """Take these sequences out of it."""
        return KeySpace(self.namespace, tuple(self.media[index] for index in order), self.segments)

    @property
    def shifts(self) -> list[int] | None:
        """Per sequence the rotary position minus the position, after its prompt; None: no sequence has images."""
        if not any(self.media):
            return None
        return [0 if own is None else own.shift for own in self.media]
