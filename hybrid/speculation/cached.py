"""Drafts from what was there before: the continuation of the whole history in the tree, and of its last tokens anywhere
in its namespace."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count, pairwise

from hybrid.speculation.acceptance import AcceptanceByDepth
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.grams import FIRST_SLOTS, GRAMS, MAX_BACK, GramIndex, Piece, common_length, match_length
from hybrid.tree.tree import Tree

AHEAD = 256
"""Tokens of a continuation that are copied from the tree at once."""

MAX_TOKENS = 1 << 20
"""Tokens that all indices of n-grams remember together."""

LEAST_TOKENS = FIRST_SLOTS // 2
"""An index counts as this many tokens at least: its table takes memory without any."""

BLOCK = 128
"""The tokens of an answer are indexed when there are this many."""

PROVEN = 4
"""After as many right tokens of a source one that differs is taken for a replacement."""

MAX_AHEAD = 16
"""A source that is this many tokens behind is not followed any more."""

WINDOW = 16
"""Tokens of a source, after the place where a history left it, among which it is looked for again."""

CYCLE = 64
"""Tokens for which an answer is expected to repeat itself, before that is looked at again."""

CONTINUED: tuple[float, ...] = (0.8, *[0.9] * 3, *[0.95] * 9)
"""Expected acceptance of what the tree has after the whole history, by `acceptance.BUCKETS`: sampled answers differ."""

REPEATED: tuple[float, ...] = (0.3, 0.3, 0.3, 0.4, 0.5, 0.5, 0.6, 0.6, 0.7, 0.8, 0.8, 0.9, 0.95)
"""Expected acceptance of what follows an n-gram elsewhere, by `acceptance.BUCKETS`."""

Chain = tuple[Sequence[int], Sequence[int], Sequence[float]]

NOTHING: Chain = ((), (), ())
"""No draft."""


class FollowedTokens:
    """Tokens that a history may follow from position `start` on, and are before `at` of them.

    Attributes:
        ids: the tokens.
        at: where in `ids` the token of position `start` is.
        start: a position of the history.
        matched: how many tokens before it were those of the source when it was found.
        learned: how often such sources are right. Each token of the history that the source had a token for is counted,
            drafted or not.
        followed: how many tokens in a row were right.
        is_left: the token at `start` is another one.
        is_proven: `PROVEN` tokens in a row were right at some time.
    """

    __slots__ = ("at", "followed", "ids", "is_left", "is_proven", "learned", "matched", "start")

    def __init__(self, ids: array[int], at: int, start: int, matched: int, learned: AcceptanceByDepth) -> None:
        self.ids: array[int] = ids
        self.at: int = at
        self.start: int = start
        self.matched: int = matched
        self.learned: AcceptanceByDepth = learned
        self.followed: int = 0
        self.is_left: bool = False
        self.is_proven: bool = False

    @property
    def right(self) -> int:
        """Number of tokens before `start` that are those of the source."""
        return self.matched + self.followed

    def follow(self, ids: array[int]) -> None:
        """Pass the tokens of a history, from `start` on, that are those of the source, which it has not left."""
        own = ids[self.start :]
        theirs = self.ids[self.at : self.at + len(own)]
        count = len(own) if own == theirs else common_length(own, theirs)
        self.is_left = count < len(theirs)
        self.learned.observe(self.matched + self.followed, count, self.is_left)
        if count:
            self.at += count
            self.start += count
            self.followed += count
            if self.followed >= PROVEN:
                self.is_proven = True

    def skip(self) -> None:
        """Record that the next token of the history replaces that of the source."""
        self.at += 1
        self.start += 1
        self.matched = self.followed = 0
        self.is_left = False

    def draft(self, limit: int) -> Chain:
        """Return what follows, up to `limit` tokens. Ids that stand for images end it."""
        tokens = self.ids[self.at : self.at + limit]
        if tokens and min(tokens) < 0:
            tokens = tokens[: next(at for at, token in enumerate(tokens) if token < 0)]
        count = len(tokens)
        return tokens, range(-1, count - 1), self.learned.ahead(self.matched + self.followed, count)


class ContinuationDrafter(Drafter):
    """Continues a history as the tree does: an answer that is generated again, a retry, the second of several answers.

    Args:
        tree: returns that of the cache, which may get another one.
    """

    def __init__(self, tree: Callable[[], Tree]) -> None:
        self._tree = tree
        self._learned = AcceptanceByDepth(CONTINUED)
        self._own: dict[History, AcceptanceByDepth] = {}
        self._sources: dict[History, FollowedTokens] = {}
        self._next_look: dict[History, int] = {}

    @property
    def name(self) -> str:
        """Name of the drafter."""
        return "continuation"

    @property
    def prior(self) -> float:
        """A greedy answer repeats itself; a sampled one does not."""
        return 0.9

    def propose(self, history: History, limit: int) -> Chain:
        """Return what followed the whole history in its namespace."""
        end = len(history.ids)
        if end < self._next_look.get(history, 0):  # the usual case
            return NOTHING
        source = self._sources.get(history)
        if source is not None:
            if not source.is_left:
                source.follow(history.ids)
            if source.start == end and source.at < len(source.ids):
                return source.draft(limit)
        return self._look(history, limit)

    def _look(self, history: History, limit: int) -> Chain:
        """Look the history up in the tree. When it is not there, it is looked up again with its next page."""
        ids = self._tree().following(history.key(), AHEAD)
        if not ids:
            self._sources.pop(history, None)
            page_size = self._tree().page_size
            self._next_look[history] = (len(history) // page_size + 1) * page_size
            return NOTHING
        before = self._sources.get(history)
        learned = self._own.setdefault(history, self._learned.of_request())
        right = before.right if before is not None and not before.is_left else 0
        source = self._sources[history] = FollowedTokens(ids, 0, len(history), right, learned)
        return source.draft(limit)

    def end(self, history: History) -> None:
        """Learn from the request, and forget it."""
        if history in self._own:
            self._learned.absorb(self._own.pop(history))
        self._sources.pop(history, None)
        self._next_look.pop(history, None)

    def clear(self) -> None:
        """Forget what was read from the tree. How often it was right stays."""
        self._sources.clear()


class _Reading:
    """Progress in a history.

    Attributes:
        piece: its tokens that are indexed.
        learned: how often sources are right.
        source: what it follows; None: nothing.
    """

    __slots__ = ("_latest", "_read", "learned", "piece", "source")

    def __init__(self, piece: Piece, learned: AcceptanceByDepth) -> None:
        self.piece: Piece = piece
        self.learned: AcceptanceByDepth = learned
        self.source: FollowedTokens | None = None
        self._latest: dict[tuple[int, int], int] = {}  # the place after each pair of tokens that is not indexed yet
        self._read = 1  # pairs up to here are known

    def indexed(self) -> None:
        """Record that more tokens were indexed: of pairs those among the last of them are known here, which few tokens
        follow."""
        self._latest.clear()
        self._read = max(1, self.piece.end - MAX_BACK)

    def repeated(self, ids: array[int]) -> int | None:
        """Return where the last two tokens of a history of at least three were before, among those that are not
        indexed yet and a few before them: the place after them."""
        (third, second, last), end, read = ids[-3:], len(ids) - 1, self._read
        if end == read + 1:  # the usual case
            self._latest[third, second] = end
        elif end > read:
            self._latest.update(zip(pairwise(ids[read - 1 : end]), count(read + 1), strict=False))
        self._read = end
        return self._latest.get((second, last))


class GramDrafter(Drafter):
    """Continues the last tokens of a history as they were continued where they last occurred: in the history itself, or
    in another one of its namespace. Quotations, edits, results of tools.

    It stays with a source as long as that is right, and looks for the place in it again after a few wrong tokens.
    """

    def __init__(self) -> None:
        self._learned = AcceptanceByDepth(REPEATED)
        self._indices: OrderedDict[str, GramIndex] = OrderedDict()
        self._readings: dict[History, _Reading] = {}
        self._size = 0  # tokens of all indices, as they count

    @property
    def name(self) -> str:
        """Name of the drafter."""
        return "ngrams"

    @property
    def num_tokens(self) -> int:
        """Tokens that are indexed."""
        return sum(index.num_tokens for index in self._indices.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the indices, with the tokens."""
        return sum(index.num_bytes for index in self._indices.values())

    def propose(self, history: History, limit: int) -> Chain:
        """Return what followed the last tokens of the history."""
        reading = self._readings.get(history) or self._open(history)
        if len(history.ids) - reading.piece.end >= BLOCK:
            self._learn(history, reading.piece)
            reading.indexed()
        ids, source, end = history.ids, reading.source, len(history.ids)
        if source is not None:
            if not source.is_left:
                source.follow(ids)
            if source.start == end - 1 and source.followed >= PROVEN:
                source.skip()
            if source.start == end and source.at < len(source.ids):
                return source.draft(limit)
            if end - source.start > MAX_AHEAD:
                reading.source = None
        found = self._look(ids, history.namespace, reading)
        if found is None:
            return NOTHING
        reading.source = FollowedTokens(found[0], found[1], end, found[2], reading.learned)
        return reading.source.draft(limit)

    def _look(self, ids: array[int], namespace: str, reading: _Reading) -> tuple[array[int], int, int] | None:
        """Look for the last tokens of a history: in the source that was left, in those that are not indexed yet, and in
        the index.

        Returns:
            Of the longest match its tokens, the place after it, and its length.
        """
        if len(ids) <= GRAMS[-1]:
            return None
        best, source = None, reading.source
        if source is not None and source.is_proven and (again := _again(source, ids[-2:])) is not None:
            best = (*again, match_length(ids, *again))
        place = reading.repeated(ids)
        if place is not None and place < len(ids):  # there were more of them, if a step has failed since
            length = match_length(ids, ids, place)
            if best is None or length > best[2]:
                best = _cycle(ids[place:]), 0, length
        index = self._indices.get(namespace)
        found = index.find(ids) if index is not None else None
        if found is not None:
            length = match_length(ids, found[0], found[1])
            if best is None or length > best[2]:
                best = found[0], found[1], length
        return best

    def end(self, history: History) -> None:
        """Keep what the request added, and forget the rest."""
        reading = self._readings.pop(history, None) or self._open(history)
        self._learn(history, reading.piece)
        index = self._indices.get(history.namespace)
        if index is not None:
            before = _size(index)
            index.close(reading.piece)
            self._size += _size(index) - before
        self._learned.absorb(reading.learned)
        self._readings.pop(history, None)

    def clear(self) -> None:
        """Forget all tokens but those of requests that run. How often n-grams were right stays."""
        self._indices.clear()
        self._size = 0
        for reading in self._readings.values():
            reading.source = None

    def _open(self, history: History) -> _Reading:
        """Begin with a history: what is known of it is not indexed again."""
        reading = self._readings[history] = _Reading(
            self._index(history.namespace).open(history[:]), self._learned.of_request()
        )
        self._learn(history, reading.piece)
        reading.indexed()
        return reading

    def _index(self, namespace: str) -> GramIndex:
        """Return the index of a namespace, which was used last of all."""
        if namespace not in self._indices:
            self._indices[namespace] = GramIndex(MAX_TOKENS)
            self._size += LEAST_TOKENS
        self._indices.move_to_end(namespace)
        return self._indices[namespace]

    def _learn(self, history: History, piece: Piece) -> None:
        """Index the tokens of a history that are not. When all indices are too large, the one that was not used for
        longest goes."""
        if len(history) > piece.end:
            index = self._index(history.namespace)
            before = _size(index)
            index.extend(piece, history[piece.end :])
            self._size += _size(index) - before
        while len(self._indices) > 1 and self._size > MAX_TOKENS:
            _, oldest = self._indices.popitem(last=False)
            self._size -= _size(oldest)


CachedDrafter = ContinuationDrafter | GramDrafter
"""Drafters that learn themselves how probable their drafts are."""


def _size(index: GramIndex) -> int:
    """Return the number of tokens that an index counts as."""
    return max(index.num_tokens, LEAST_TOKENS)


def _cycle(period: array[int]) -> array[int]:
    """Return what follows if a history continues to repeat its last tokens."""
    return (period * (CYCLE // len(period) + 1))[:CYCLE]


def _again(source: FollowedTokens, last: array[int]) -> tuple[array[int], int] | None:
    """Return where a source that was left continues: after the next place that has the last two tokens."""
    ids, end = source.ids, min(source.at + WINDOW, len(source.ids))
    at = max(source.at - 2, 1)
    while at < end - 1:
        try:
            at = ids.index(last[1], at, end - 1) + 1
        except ValueError:
            return None
        if ids[at - 2 : at] == last:
            return ids, at
    return None
