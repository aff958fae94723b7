"""Control tokens in the texts of users: kept from becoming control tokens.

A chat template writes control tokens around the texts of messages, and a user can write the same names. So before the
template is applied, each such name in the messages is replaced by a character that occurs nowhere else (a mark). The
control tokens that are in the rendered text then are the template's. The text between them is tokenized with the names
in their places, as a text in which control tokens mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hybrid.errors import PromptError

FIRST_MARK = 0xF0000
"""The first character of those that Unicode leaves to private use, in its plane 15."""


class ControlTokens:
    """The control tokens of a tokenizer: those that `split_special_tokens` of transformers splits. Other added tokens,
    such as `<think>` of Qwen's models, are words of the vocabulary like any other.

    Args:
        tokenizer: of transformers, a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        tokens = [token for token in tokenizer.added_tokens_decoder.values() if token.special and token.content]
        tokens.sort(key=lambda token: -len(token.content))
        self._tokenizer = tokenizer
        self._names = [token.content for token in tokens]
        # an added token may include the spaces around it
        around = [r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip for token in tokens]
        self._pattern = re.compile(f"({'|'.join(around)})") if tokens else re.compile("(?!)()")

    def marks(self, value: Any) -> dict[str, str]:
        """A mark for each name of a control token in the texts of lists and dicts, by the name, longest name first."""
        texts = list(_texts(value))
        found = [name for name in self._names if any(name in text for text in texts)]
        used = {character for text in texts for character in text if ord(character) >= FIRST_MARK} if found else set()
        free = (chr(number) for number in range(FIRST_MARK, 0x110000) if chr(number) not in used)
        return dict(zip(found, free, strict=False))

    def tokenize(self, text: str, marks: dict[str, str]) -> list[int]:
        """Token ids of a rendered text, in which the names that marks stand for are not control tokens.

        Raises:
            PromptError: this tokenizer's result for a text is not that of its parts between control tokens.
        """
        parts = self._pattern.split(text)  # control tokens at the odd places
        whole = self._ids(text)
        if [token for part in parts for token in self._ids(part)] != whole:
            raise PromptError(
                "split_special_tokens cannot be used with chat messages and this tokenizer, which tokenizes a text in "
                "another way than its parts; remove the names of control tokens from the messages, and leave it out"
            )
        ids: list[int] = []
        for at, part in enumerate(parts):
            ids += self._ids(part) if at % 2 else self._ids(unmarked(part, marks), split_special_tokens=True)
        return ids

    def _ids(self, text: str, **options: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, **options).input_ids) if text else []


def marked(value: Any, marks: dict[str, str]) -> Any:
    """Lists and dicts with marks instead of names, in all their texts."""
    if isinstance(value, str):
        for name, mark in marks.items():
            value = value.replace(name, mark)
    elif isinstance(value, dict):
        return {marked(key, marks): marked(item, marks) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        return [marked(item, marks) for item in value]
    return value


def unmarked(text: str, marks: dict[str, str]) -> str:
    """A text with the names that the marks in it stand for."""
    for name, mark in marks.items():
        text = text.replace(mark, name)
    return text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
