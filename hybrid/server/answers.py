"""What is new in an output of the engine, answer by answer; log-probabilities with the texts of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hybrid.engine.output import Completion, RequestOutput

Logprobs = list[dict[int, float]]


@dataclass(frozen=True, slots=True)
class Change:
    """What is new of one answer.

    Attributes:
        index: of the answer.
        text: that was added.
        token_ids: that were added.
        logprobs: of these; None: not asked for.
        finish_reason: set once, with the end.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: str | None


class Changes:
    """Finds what is new in the outputs of one request. Outputs that a reader has missed are in the next one.

    Args:
        n: number of answers.
    """

    def __init__(self, n: int) -> None:
        self._seen = [(0, 0)] * n
        self._ended = [False] * n

    def of(self, output: RequestOutput) -> list[Change]:
        """Return the changes since the output before."""
        found = []
        for answer in output.outputs:
            index = answer.index
            if self._ended[index]:
                continue
            characters, tokens = self._seen[index]
            self._ended[index] = answer.finish_reason is not None
            if len(answer.token_ids) > tokens or len(answer.text) > characters or self._ended[index]:
                self._seen[index] = (len(answer.text), len(answer.token_ids))
                logprobs = answer.logprobs[tokens:] if answer.logprobs is not None else None
                new = answer.token_ids[tokens:]
                found.append(Change(index, answer.text[characters:], new, logprobs, answer.finish_reason))
        return found


def whole(answer: Completion) -> Change:
    """An answer from its beginning to its end."""
    return Change(answer.index, answer.text, answer.token_ids, answer.logprobs, answer.finish_reason)


class TokenTexts:
    """The texts and the bytes of single tokens.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_alphabet()
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text, and its bytes: those of a part of a character have no text of their own."""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if "\ufffd" in text and all(character in self._bytes for character in name):
            return text, [self._bytes[character] for character in name]
        return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """The bytes by the characters that vocabularies of byte-level tokenizers write them as."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def chat_logprobs(texts: TokenTexts, change: Change, top: int) -> list[dict[str, Any]]:
    """Log-probabilities in the form of OpenAI's chat completions.

    Args:
        top: alternatives of each token.
    """
    found = []
    for token, known in zip(change.token_ids, change.logprobs or (), strict=False):
        best = sorted(known.items(), key=lambda item: -item[1])[:top]
        found.append(_entry(texts, token, known[token]) | {"top_logprobs": [_entry(texts, *one) for one in best]})
    return found


def _entry(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    text, raw = texts.of(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": raw}


def completion_logprobs(texts: TokenTexts, change: Change, top: int, offset: int) -> dict[str, Any]:
    """Log-probabilities in the form of OpenAI's completions.

    Args:
        top: alternatives of each token.
        offset: characters before the first of these tokens.
    """
    tokens, chosen, best, offsets = [], [], [], []
    for token, known in zip(change.token_ids, change.logprobs or (), strict=False):
        text = texts.of(token)[0]
        tokens.append(text)
        chosen.append(max(known[token], -9999.0))
        ordered = sorted(known.items(), key=lambda item: -item[1])[:top]
        best.append({texts.of(one)[0]: max(value, -9999.0) for one, value in ordered})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": best, "text_offset": offsets}
