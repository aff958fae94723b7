"""From the tokens of an answer to its text, as they are generated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of an answer, updated token by token, and cut at the first stop text.

    Args:
        tokenizer: a fast tokenizer of transformers.
        stop: texts that end the answer. Of several, the one whose last character comes first counts.

    Attributes:
        text: the part of the answer that no later token can change. It only grows.
        stopped: whether a stop text was found.
        num_kept: number of tokens of the answer before the stop text; 0 until one was found.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.text: str = ""
        self.stopped: bool = False
        self.num_kept: int = 0
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._ids: list[int] = []
        self._ends: list[int] = []  # length of the decoded text after each token
        self._decoded = ""

    def append(self, token: int) -> bool:
        """Add a token.

        Returns:
            Whether it completed a stop text.
        """
        self._ids.append(token)
        before = len(self._decoded)
        self._decoded += self._stream.step(self._backend, token) or ""
        self._ends.append(len(self._decoded))
        return self._update(before)

    def finish(self) -> None:
        """End the answer: text that was held back, as the beginning of a stop text or of a character, is part of it."""
        if self.stopped:
            return
        whole = self._backend.decode(self._ids, skip_special_tokens=True)  # with an incomplete last character
        before = len(self._decoded)
        self._decoded = whole if whole.startswith(self._decoded) else self._decoded
        if not self._update(before):
            self.text = self._decoded

    def _update(self, before: int) -> bool:
        """Look for a stop text that ends after the first `before` characters; else extend `text` as far as is
        certain."""
        longest = max((len(stop) for stop in self._stop), default=0)
        first = max(0, before - longest)
        found = [(at + len(stop), at) for stop in self._stop if (at := self._decoded.find(stop, first)) >= 0]
        if found:  # the one that is complete first, character by character: a token may complete several at once
            self.text = self._decoded[: min(found)[1]]
            self.stopped = True
            # a token without text of its own is the beginning of a character, and counts to the token that ends it
            ends = enumerate(pairwise([0, *self._ends]), start=1)
            self.num_kept = max((n for n, (start, end) in ends if start < end <= len(self.text)), default=0)
            return True
        held = max(
            (n for stop in self._stop for n in range(1, len(stop)) if self._decoded.endswith(stop[:n])), default=0
        )
        self.text = self._decoded[: len(self._decoded) - held]
        return False
