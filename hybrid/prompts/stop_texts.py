"""Search for several texts at once, in a text that grows: an Aho-Corasick automaton.

Each character of the text is read once, however many texts are searched for and however long they are.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class Found(NamedTuple):
    """A stop text in a piece of text.

    Attributes:
        start: its first character, counted from the beginning of the piece: negative if it began before the piece.
        end: the character after its last one.
    """

    start: int
    end: int


class StopTexts:
    """An automaton for a set of texts. It holds no state of a search, so that requests can share it.

    A state is the longest suffix of the text read so far that begins one of the texts; state 0 is the empty one.

    Args:
        texts: the texts to search for, none of them empty.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depths: list[int] = [0]
        self._matched: list[int] = [0]  # per state: length of the longest of the texts that ends there; 0: none does
        for text in texts:
            state = 0
            for character in text:
                state = self._next[state].get(character) or self._add(state, character)
            self._matched[state] = len(text)
        self._fallbacks: list[int] = [0] * len(self._next)  # per state: its longest proper suffix that is a state
        self._link()

    def find(self, piece: str, state: int) -> tuple[int, Found | None]:
        """Read the next piece of a text.

        Args:
            piece: it is read up to the end of a stop text.
            state: after the pieces before it; 0 at the beginning.

        Returns:
            The state after the piece; the stop text whose last character comes first, None: there is none. Of several
            that end together, it is the longest.
        """
        following, fallbacks, matched = self._next, self._fallbacks, self._matched
        for index, character in enumerate(piece):
            while (after := following[state].get(character)) is None and state:
                state = fallbacks[state]
            state = after or 0
            if matched[state]:
                return state, Found(index + 1 - matched[state], index + 1)
        return state, None

    def num_held(self, state: int) -> int:
        """Number of characters at the end of the text read so far that may be the beginning of a stop text."""
        return self._depths[state]

    def _add(self, state: int, character: str) -> int:
        added = len(self._next)
        self._next[state][character] = added
        self._next.append({})
        self._depths.append(self._depths[state] + 1)
        self._matched.append(0)
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


@lru_cache(maxsize=32)
def stop_texts(texts: tuple[str, ...]) -> StopTexts:
    """The automaton for these texts; those of recent requests are kept."""
    return StopTexts(texts)
