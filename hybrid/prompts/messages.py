"""Chat messages: checked before a template sees them, which would print whatever it is given; and the control tokens in
them, kept from becoming control tokens.

A chat template writes control tokens around the texts of messages, and a user can write the same names. So before the
template is applied, each such name in the messages is replaced by a character that occurs nowhere else (a mark). The
control tokens that are in the rendered text then are the template's. The text between them is tokenized with the names
in their places, as a text in which control tokens mean nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid.checks import is_deeper, shown
from hybrid.errors import PromptError

Message = dict[str, Any]
"""A chat message, as `{"role": "user", "content": "..."}`."""

OPTIONS = ("tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
"""Keys beside `messages` that are passed to the chat template, as in `apply_chat_template` of transformers. The entries
of `chat_template_kwargs` are passed to it too, such as `enable_thinking`."""

LOAD = "load it first, and give the image itself: transformers.image_utils.load_image(...)"


def checked(messages: list[Any]) -> list[Message]:
    """Messages of which every template can be given: a content of text parts alone is their text.

    Raises:
        PromptError: one is not a message; the error says which, and why.
    """
    if not messages:
        raise PromptError("a chat is empty: messages must hold at least one {'role': ..., 'content': ...}")
    return [_checked(f"message {number}", message) for number, message in enumerate(messages)]


def _checked(name: str, given: Any) -> Message:
    if not isinstance(given, dict):
        raise PromptError(f"{name} must be a dict with a role and a content; got {shown(given)}")
    message: Message = given
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise PromptError(
            f"{name} must have a role, a text such as 'user', 'assistant' or 'system'; got "
            f"{shown(role) if 'role' in message else 'the keys ' + shown(list(message))}"
        )
    if isinstance(content, list):
        for number, part in enumerate(content):
            _check_part(f"{name}, part {number}", part)
        if all(part["type"] == "text" for part in content):
            message = {**message, "content": "".join(part["text"] for part in content)}
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise PromptError(
            f"{name} must have a content, a text or a list of parts as {{'type': 'text', 'text': ...}}; got "
            f"{shown(content)}"
        )
    if isinstance(calls := message.get("tool_calls"), list):
        message = {**message, "tool_calls": [_with_arguments(call) for call in calls]}
    return message


def _with_arguments(call: Any) -> Any:
    """A call of a tool with its arguments as a dict, which templates expect: in OpenAI's form they are JSON text."""
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_arguments(function)}
    if not isinstance(text := call.get("arguments"), str):
        return call
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):  # a model wrote it: it stays the text that it is
        return call
    return {**call, "arguments": found} if isinstance(found, dict) and not is_deeper(found) else call


def joined(messages: list[Message]) -> list[Message]:
    """Messages in whose contents no text part follows another: together, two could make a name that neither holds."""
    return [
        {**message, "content": _joined(message["content"])} if isinstance(message.get("content"), list) else message
        for message in messages
    ]


def _joined(parts: list[Any]) -> list[Any]:
    found: list[Any] = []
    for part in parts:
        if found and part["type"] == found[-1]["type"] == "text":
            found[-1] = {**found[-1], "text": found[-1]["text"] + part["text"]}
        else:
            found.append(part)
    return found


def _check_part(name: str, part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise PromptError(f"{name}: a part of type 'text' holds its text under 'text'; got {shown(part)}")
    elif kind == "image":
        if isinstance(part.get("image"), str | Path | None):
            raise PromptError(
                f"{name}: a part of type 'image' holds the image itself under 'image', not an address or a path "
                f"({', '.join(f'{key!r:.40}' for key in list(part)[:8])}); {LOAD}"
            )
    elif kind == "image_url":
        raise PromptError(f"{name}: an image_url is not opened, as prompts may come from anywhere; {LOAD}")
    else:
        raise PromptError(
            f"{name} must be a dict with the type 'text' or 'image'; got {shown(kind) if kind else shown(part)}"
        )


def template_options(prompt: Any) -> dict[str, Any]:
    """Read what is passed to the chat template beside the messages.

    Raises:
        PromptError: `chat_template_kwargs` is not a dict of names.
    """
    options = {"add_generation_prompt": True}
    if isinstance(prompt, dict):
        more = prompt.get("chat_template_kwargs") or {}
        if not isinstance(more, dict) or not all(isinstance(key, str) for key in more):
            raise PromptError(f"chat_template_kwargs must be a dict of the template's variables; got {more!r:.100}")
        reserved = [
            key for key in more if key in ("tokenize", "conversation", "messages", "return_tensors", "return_dict")
        ]
        if reserved:
            raise PromptError(f"chat_template_kwargs: {reserved[0]!r} is not a variable of a template; leave it out")
        if prompt.get("continue_final_message"):
            options["add_generation_prompt"] = False
        options |= {key: prompt[key] for key in OPTIONS if prompt.get(key) is not None} | more
    return options


def num_characters(value: Any, limit: int) -> int:
    """Characters of all texts in lists and dicts, or more than `limit`; each other value counts as one."""
    counted, values = 0, [value]
    while values and counted <= limit:
        item = values.pop()
        counted += len(item) if isinstance(item, str) else 1
        if isinstance(item, dict):
            counted += len(item)
            values += item.values() if counted <= limit else ()
        elif isinstance(item, list | tuple):
            counted += len(item)
            values += item if counted <= limit else ()
    return counted


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
