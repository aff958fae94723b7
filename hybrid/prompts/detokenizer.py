"""From the tokens of an answer to its text, as they are generated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tokenizers.decoders import DecodeStream

from hybrid.prompts.stop_texts import stop_texts

MAX_PENDING = 32
"""Tokens without text of their own after which the first of them are decoded: a character has up to four."""


class TextStream:
    """The text of an answer, updated token by token, and cut at the first stop text.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: texts that end the answer. Of several, the one whose last character comes first counts.
        min_tokens: the text of this many tokens at the beginning of the answer is not searched for them.

    Attributes:
        text: the part of the answer that no later token can change. It only grows.
        stopped: whether a stop text was found.
        num_kept: number of tokens of the answer before the stop text; 0 until one was found.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.text: str = ""
        self.stopped: bool = False
        self.num_kept: int = 0
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop_texts(stop) if stop else None
        self._state = 0
        self._min_tokens = min_tokens
        self._ids: list[int] = []
        self._pending: list[int] = []  # the last tokens, while they have no text
        self._ends: list[int] = []  # length of the decoded text after each token
        self._decoded = ""

    def append(self, token: int) -> bool:
        """Add a token.

        Returns:
            Whether it completed a stop text.
        """
        self._ids.append(token)
        piece = self._step(token)
        if len(self._pending) >= MAX_PENDING:
            piece = self._decode_pending()
        self._ends.append(len(self._decoded) + len(piece))
        return self._extend(piece)

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
                self._pending, self._stream = [], DecodeStream(skip_special_tokens=True)
                return first + "".join(map(self._step, rest))
        return ""

    def _step(self, token: int) -> str:
        self._pending.append(token)
        piece: str = self._stream.step(self._backend, token) or ""
        if piece:
            self._pending.clear()
        return piece

    def _decode(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def _extend(self, piece: str) -> bool:
        """Add decoded text. Returns whether it completed a stop text; else `text` is extended as far as is certain."""
        before = len(self._decoded)
        self._decoded += piece
        if self._stop is None or len(self._ids) <= self._min_tokens:
            self.text = self._decoded
            return False
        self._state, found = self._stop.find(piece, self._state)
        if found is None:
            self.text = self._decoded[: len(self._decoded) - self._stop.num_held(self._state)]
            return False
        self.text = self._decoded[: before + found.start]
        self.stopped = True
        # a token without text of its own is the beginning of a character, and counts to the token that ends it
        ends = enumerate(pairwise([0, *self._ends]), start=1)
        self.num_kept = max((n for n, (start, end) in ends if start < end <= len(self.text)), default=0)
        return True
