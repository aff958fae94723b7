"""An index of n-grams: the places where the last tokens of a history were before."""

from __future__ import annotations

from array import array
from collections import OrderedDict

import numpy as np

GRAMS = (6, 2)
"""Lengths of the n-grams, longest first."""

FACTOR, MIXER = 0x85EBCA77, 0x9E3779B1
"""Numbers of 32 bits: larger ones take Python longer to multiply than all else that a hash is made of."""


def _powers(length: int) -> tuple[tuple[int, ...], int]:
    powers = tuple(pow(FACTOR, exponent, 1 << 32) for exponent in reversed(range(length)))
    return powers, sum(powers)


POWERS: dict[int, tuple[tuple[int, ...], int]] = {length: _powers(length) for length in GRAMS}
"""For each length the powers of the factor, falling, and their sum: a hash is the sum of (token + 1) times power."""

_LONG, _SHORT = GRAMS
_LONG_CONSTANT, _SHORT_CONSTANT = POWERS[_LONG][1], POWERS[_SHORT][1]
_ARRAYS = {length: np.array(powers, np.uint64) for length, (powers, _) in POWERS.items()}
_P5, _P4, _P3, _P2, _P1, _ = POWERS[_LONG][0]  # that of the last token is 1; the short n-gram at the end has the same

FIRST_SLOTS = 1 << 12
"""Slots of the table when it is created. It is doubled until there are as many as tokens."""

SHORT = 128
"""A piece of a sequence that has ended is one of several in an array where it has fewer tokens."""

GATHERED = 1024
"""Tokens of such an array, beyond which another one is begun: it is forgotten as a whole."""

SEPARATOR = -1
"""Between the pieces of such an array. It is no token, so that no draft goes beyond."""

MAX_BACK = 16
"""A match is followed back for this many tokens, at most."""


class Piece:
    """Consecutive tokens of an index.

    Attributes:
        ids: the tokens.
        number: of the piece.
        end: tokens of the sequence up to the end of the piece.
    """

    __slots__ = ("end", "ids", "number")

    def __init__(self, number: int, end: int) -> None:
        self.ids: array[int] = array("i")
        self.number: int = number
        self.end: int = end


class GramIndex:
    """The latest place of every n-gram, in the latest sequences.

    A table of hashes without chains: a newer n-gram takes the slot of an older one. Every match is compared with the
    tokens themselves. It takes 8 to 16 bytes a token, and the tokens 4. Short pieces of sequences that have ended are
    gathered, since each piece takes some 250 bytes beside its tokens.

    Args:
        capacity: number of tokens that it remembers. Beyond that the pieces are forgotten that were not
            extended for longest.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pieces: OrderedDict[int, Piece] = OrderedDict()
        self._num_tokens = 0
        self._next = 0
        self._gathered: Piece | None = None  # the latest array of short pieces
        self._make_table(FIRST_SLOTS)

    @property
    def num_tokens(self) -> int:
        """Tokens that are remembered."""
        return self._num_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of the table and of the tokens."""
        return self._table.nbytes + 4 * self._num_tokens

    def open(self, ids: array[int]) -> Piece:
        """Make a piece for what is not known yet of a sequence that begins with `ids`."""
        known, length = 0, GRAMS[0]
        while (found := self.find(ids[known : known + length])) is not None:
            other, at = found
            if at < length or other[at - length : at] != ids[known : known + length]:
                break
            known += length
            known += common_length(other[at : at + len(ids) - known], ids[known:])
        return Piece(self._number(), known)

    def extend(self, piece: Piece, ids: array[int]) -> None:
        """Index more tokens of a sequence: those after the end of the piece."""
        start, count = len(piece.ids), len(ids)
        if self._pieces.get(piece.number) is not piece:  # it was forgotten, or another index was
            start, count = 0, count + start
            piece.number = self._number()
            self._pieces[piece.number] = piece
        self._pieces.move_to_end(piece.number)
        piece.ids.extend(ids)
        piece.end += len(ids)
        self._num_tokens += count
        while self._num_tokens > self._capacity and len(self._pieces) > 1:
            self._drop(next(iter(self._pieces.values())))
        if self._num_tokens > len(self._table):
            self._grow()
        else:
            self._enter(piece, start)

    def close(self, piece: Piece) -> None:
        """Close a piece whose sequence has ended: it is not extended any more."""
        if len(piece.ids) >= SHORT or self._pieces.get(piece.number) is not piece:
            return
        gathered = self._gathered
        if len(piece.ids) <= _SHORT:  # nothing follows an n-gram in it
            self._drop(piece)
            return
        if gathered is None or gathered.number not in self._pieces or len(gathered.ids) >= GATHERED:
            self._gathered = piece
            return
        self._drop(piece)
        self.extend(gathered, array("i", [SEPARATOR]) + piece.ids)

    def find(self, ids: array[int]) -> tuple[array[int], int] | None:
        """Find where the last tokens of `ids` were before.

        Returns:
            Tokens, and the position after the match in them. None: they are not known.
        """
        gram, slots, pieces = ids[-_LONG:], self._slots, self._pieces
        if len(gram) == _LONG:
            a, b, c, d, e, last = gram
            short = e * _P1 + last
            value = a * _P5 + b * _P4 + c * _P3 + d * _P2 + short + _LONG_CONSTANT
            entry = slots[(value * MIXER >> 20) & self._last_slot]
            piece, at = pieces.get(entry >> 32), entry & 0xFFFFFFFF
            if piece is not None:
                known = piece.ids
                if at < len(known) and known[at - 1] == last and known[at - _LONG : at] == gram:
                    return known, at
        elif len(gram) >= _SHORT:
            e, last = gram[-_SHORT:]
            short = e * _P1 + last
        else:
            return None
        entry = slots[((short + _SHORT_CONSTANT) * MIXER >> 20) & self._last_slot]
        piece, at = pieces.get(entry >> 32), entry & 0xFFFFFFFF
        if piece is None:
            return None
        known = piece.ids
        if at < len(known) and known[at - 1] == last and known[at - 2] == e:
            return known, at
        return None

    def _enter(self, piece: Piece, start: int) -> None:
        """Enter the n-grams that end after `start` and are followed by a token."""
        first = max(0, start - _LONG)
        ids = np.frombuffer(piece.ids[first : len(piece.ids) - 1], np.int32).astype(np.uint64) + np.uint64(1)
        for length, powers in _ARRAYS.items():
            begin = max(first, start - length)
            count = len(ids) - (begin - first) - length + 1
            if count <= 0:
                continue
            slots = np.correlate(ids[begin - first :], powers) * np.uint64(MIXER) >> np.uint64(20)
            slots &= np.uint64(self._last_slot)
            end = (piece.number << 32) + begin + length
            self._table[slots.view(np.int64)] = np.arange(end, end + count)

    def _drop(self, piece: Piece) -> None:
        del self._pieces[piece.number]
        self._num_tokens -= len(piece.ids)

    def _number(self) -> int:
        """Return a number for a piece, which no other one of this index has had."""
        self._next += 1
        return self._next

    def _make_table(self, slots: int) -> None:
        self._table = np.zeros(slots, np.int64)
        self._last_slot = slots - 1  # slots are a power of two
        self._slots: memoryview[int] = self._table.data  # reads single numbers several times as fast

    def _grow(self) -> None:
        slots = len(self._table)
        while slots < self._num_tokens:
            slots *= 2
        self._make_table(slots)
        for piece in self._pieces.values():
            self._enter(piece, 0)


def match_length(ids: array[int], source: array[int], at: int) -> int:
    """Count the tokens before `at` of a source that are the last of `ids`, up to `MAX_BACK`: a short n-gram at
    least."""
    length, end = _SHORT, len(ids)
    most = min(end, at, MAX_BACK)
    if ids[end - most :] == source[at - most : at]:
        return most
    while length < most and ids[end - 1 - length] == source[at - 1 - length]:
        length += 1
    return length


def common_length(a: array[int], b: array[int]) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    if high <= 8:  # the usual case
        while low < high and a[low] == b[low]:
            low += 1
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
