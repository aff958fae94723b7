"""From the tokens of an answer to its text, as they are generated, up to the first stop text.

Stop texts are searched for by an Aho-Corasick automaton: each character is read once, however many texts are searched
for and however long they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream


class StopMatch(NamedTuple):
    """A stop text in a piece of text.

    Attributes:
        start: its first character, counted from the beginning of the piece: negative if it began before the piece.
        end: the character after its last one.
        text: the stop text.
    """

    start: int
    end: int
    text: str


class StopTexts:
    """An automaton for a set of texts. It holds no state of a search, so that requests can share it.

    A state is the longest suffix of the text read so far that begins one of the texts; state 0 is the empty one.

    Args:
        texts: the texts to search for, none of them empty.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depths: list[int] = [0]
        self._matched: list[str] = [""]  # per state: the longest of the texts that ends there; empty: none does
        for text in texts:
            state = 0
            for character in text:
                state = self._next[state].get(character) or self._add(state, character)
            self._matched[state] = text
        self._fallbacks: list[int] = [0] * len(self._next)  # per state: its longest proper suffix that is a state
        self._link()

    def find(self, piece: str, state: int) -> tuple[int, StopMatch | None]:
        """Read the next piece of a text.

        Args:
            piece: it is read up to the end of a stop text.
            state: after the pieces before it; 0 at the beginning.

        Returns:
            The state after the piece, and the stop text whose last character comes first, or None if there is none. Of
            several that end together, it is the longest.
        """
        following, fallbacks, matched = self._next, self._fallbacks, self._matched
        for index, character in enumerate(piece):
            while (after := following[state].get(character)) is None and state:
                state = fallbacks[state]
            state = after or 0
            if found := matched[state]:
                return state, StopMatch(index + 1 - len(found), index + 1, found)
        return state, None

    def num_held(self, state: int) -> int:
        """Number of characters at the end of the text read so far that may be the beginning of a stop text."""
        return self._depths[state]

    def _add(self, state: int, character: str) -> int:
        added = len(self._next)
        self._next[state][character] = added
        self._next.append({})
        self._depths.append(self._depths[state] + 1)
        self._matched.append("")
        return added

    def _link(self) -> None:
        """Set the fallback of every state, those of shorter texts first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                queue.append(child)
                fallback = self._fallbacks[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallbacks[fallback]
                self._fallbacks[child] = self._next[fallback].get(character, 0)
                self._matched[child] = self._matched[child] or self._matched[self._fallbacks[child]]


MAX_PENDING = 32
"""Tokens without text of their own after which the first of them are decoded: a character has up to four."""


def control_tokens(tokenizer: Any) -> dict[int, str]:
    """The names of a tokenizer's control tokens, which its texts leave out, by their ids."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token: entry.content for token, entry in added.items() if entry.special}


class Detokenizer:
    """The text of an answer, updated token by token, and cut at the first stop text.

    Stop texts are searched for in the text with the names of control tokens, whether or not the text leaves them out.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: texts that end the answer. Of several, the one whose last character comes first counts.
        min_tokens: the text of this many tokens at the beginning of the answer is not searched for them.
        skip_special_tokens: leave the names of control tokens out of the text.
        control: these names by token; None: those of the tokenizer.

    Attributes:
        text: the part of the answer that no later token can change. It only grows.
        stop_text: the stop text that was found; None: none was.
        num_kept: number of tokens of the answer before the stop text; 0 until one was found.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        skip_special_tokens: bool = True,
        control: Mapping[int, str] | None = None,
    ) -> None:
        self.text: str = ""
        self.stop_text: str | None = None
        self.num_kept: int = 0
        self._backend = tokenizer.backend_tokenizer
        self._skips = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._stop = StopTexts(stop) if stop else None
        self._state = 0
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._pending: list[int] = []  # the last tokens, while they have no text
        self._decoded = ""
        self._left_out: Mapping[int, str] = {}  # names that are searched, and are not in the text
        if stop and skip_special_tokens:
            self._left_out = control_tokens(tokenizer) if control is None else control
        # places in what is searched: the text, and the names that it leaves out
        self._num_searched = 0
        self._ends: list[int] = []  # after each token
        self._names: list[tuple[int, int]] = []  # from where to where a name stands
        self._num_left_out = 0  # characters of all of these

    @property
    def stopped(self) -> bool:
        """Tell whether a stop text was found."""
        return self.stop_text is not None

    def append(self, token: int) -> bool:
        """Add a token.

        Returns:
            Whether it completed a stop text.
        """
        self._ids.append(token)
        piece = self._step(token)
        if len(self._pending) >= MAX_PENDING:
            piece = self._decode_pending()
        name = self._left_out.get(token, "")
        self._ends.append(self._num_searched + len(piece) + len(name))
        return self._extend(piece) or bool(name and self._extend(name, left_out=True))

    def finish(self) -> None:
        """End the answer: text that was held back, as the beginning of a stop text or of a character, is part of it."""
        if self.stopped:
            return
        whole = self._decode(self._ids)  # with an incomplete last character
        rest = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        if not self._extend(rest):
            self.text = self._decoded

    def _decode_pending(self) -> str:
        """Decode the first of the pending tokens. The stream decodes all of them with every token: bytes that never
        become a character would cost ever more."""
        pending = self._pending
        for cut in range(len(pending) - 4, len(pending) - 8, -1):
            first, rest = self._decode(pending[:cut]), pending[cut:]
            if first + self._decode(rest) == self._decode(pending):
                self._pending, self._stream = [], DecodeStream(skip_special_tokens=self._skips)
                return first + "".join(map(self._step, rest))
        return ""

    def _step(self, token: int) -> str:
        self._pending.append(token)
        piece: str = self._stream.step(self._backend, token) or ""
        if piece:
            self._pending.clear()
        return piece

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=self._skips)
        return text

    def _extend(self, piece: str, left_out: bool = False) -> bool:
        """Add decoded text, or a name that the text leaves out. Returns whether it completed a stop text; else `text`
        is extended as far as is certain."""
        before = self._num_searched
        self._num_searched += len(piece)
        if left_out:
            self._names.append((before, self._num_searched))
            self._num_left_out += len(piece)
        else:
            self._decoded += piece
        if self._stop is None or len(self._ids) <= self._min_tokens:
            self.text = self._decoded
            return False
        self._state, found = self._stop.find(piece, self._state)
        if found is None:
            self.text = self._text_up_to(self._num_searched - self._stop.num_held(self._state))
            return False
        cut = before + found.start
        self.text = self._text_up_to(cut)
        self.stop_text = found.text
        # a token without text of its own is the beginning of a character, and counts to the token that ends it
        ends = enumerate(pairwise([0, *self._ends]), start=1)
        self.num_kept = max((n for n, (start, end) in ends if start < end <= cut), default=0)
        return True

    def _text_up_to(self, at: int) -> str:
        """The text before a place in what is searched. Few names stand after it."""
        num_left_out = self._num_left_out
        for start, end in reversed(self._names):
            if end <= at:
                break
            num_left_out -= end - max(start, at)
        return self._decoded[: at - num_left_out]
