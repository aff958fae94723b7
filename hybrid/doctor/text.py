"""The texts of logged requests as tokens: with the model's tokenizer and template, or without one by words."""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from jinja2 import TemplateError

from hybrid.errors import PromptError
from hybrid.prompts.messages import checked

WORD = re.compile(r" ?\w{1,8}|\s+|[^\w\s]")
"""About a token of common tokenizers, where there is none at hand."""

VOLATILE = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d)?|\d{4}-\d\d-\d\d|\d{1,2}:\d\d(?::\d\d)?"
    r"|[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F-]{13,}|\b(?=\w*\d)[0-9a-fA-F]{8,}\b|\d{5,}"
)
"""Dates, times and ids: what changes from request to request in a prompt that is else the same."""

MAX_ANSWERS = 1 << 16
"""Answers that are remembered, to put back what a client leaves out of them."""

THINK = "<think>"


def by_words(text: str) -> array[int]:
    """Ids of a text's words: equal words have equal ids."""
    return array("i", [crc32(word.encode(errors="replace")) >> 1 for word in WORD.findall(text)])


def content_of(message: dict[str, Any]) -> str:
    """The text of a message: its content, parts of it that are texts, and calls of tools."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", f"<{part.get('type')}>")) for part in content if isinstance(part, dict))
    calls = message.get("tool_calls") or []
    return (content if isinstance(content, str) else "") + "".join(
        f"\n<tool_call>{json.dumps(call.get('function', call), ensure_ascii=False)}" for call in calls if call
    )


def thoughts_of(message: dict[str, Any]) -> str:
    """The thinking that comes before a message's content, as a template writes it."""
    thoughts = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    return f"{THINK}\n{thoughts}\n</think>\n\n" if isinstance(thoughts, str) else ""


@dataclass
class Template:
    """The way from messages to a text and to tokens.

    Attributes:
        tokenizer: of transformers; None: by words, in a template of our own.
        sort_tools: tools are written in one order.
        keep_thinking: an answer in the history is written with the thinking that it came with.
        move_dates: dates, times and ids of system messages are written at the prompt's end.
    """

    tokenizer: Any = None
    sort_tools: bool = False
    keep_thinking: bool = False
    move_dates: bool = False
    _answers: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False)

    @property
    def ids(self) -> Callable[[str], array[int]]:
        """The function from a text to its token ids."""
        if self.tokenizer is None:
            return by_words
        return lambda text: array("i", self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any]) -> str:
        """The text of a prompt."""
        moved: list[str] = []
        if self.sort_tools:
            tools = sorted(tools, key=lambda tool: json.dumps(tool, sort_keys=True))
        if self.move_dates:
            messages = [self._without_dates(message, moved) for message in messages]
        if self.keep_thinking:
            messages = [self._with_thinking(message) for message in messages]
        if self._has_template:
            return self._applied(messages, tools, begins_answer=True) + " ".join(moved)
        lines = [json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools]
        text = "<|tools|>\n" + "".join(lines) if tools else ""
        for message in messages:
            text += f"<|{message.get('role')}|>\n{thoughts_of(message)}{content_of(message)}<|end|>\n"
        return f"{text}{' '.join(moved)}<|assistant|>\n"

    def answer(
        self, message: dict[str, Any], prompt: str = "", messages: list[dict[str, Any]] | None = None, tools: Any = ()
    ) -> str:
        """The text of an answer, as the model wrote it: where the template writes it behind the prompt of these
        messages, with what the template ends it with."""
        text = thoughts_of(message) + content_of(message)
        if self.keep_thinking and (thoughts := thoughts_of(message)):
            self._answers[content_of(message)] = thoughts
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        if not self._has_template:
            return f"{text}<|end|>\n"
        if messages is not None and not thoughts_of(message):
            whole = self._applied([*messages, message], tools, begins_answer=False)
            if whole.startswith(prompt):
                return whole[len(prompt) :]
        return text + str(self.tokenizer.eos_token or "")

    @property
    def _has_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def _applied(self, messages: list[dict[str, Any]], tools: Sequence[Any], *, begins_answer: bool) -> str:
        """The text that the model's own template makes of messages.

        Raises:
            ValueError: it refuses them.
        """
        made = [
            {**message, "content": content_of({**message, "tool_calls": None})}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                checked(made), tools=list(tools) or None, tokenize=False, add_generation_prompt=begins_answer
            )
        except (TemplateError, TypeError, PromptError) as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error
        return str(text)

    def _without_dates(self, message: dict[str, Any], moved: list[str]) -> dict[str, Any]:
        if message.get("role") not in ("system", "developer"):
            return message
        text = content_of(message)
        moved += VOLATILE.findall(text)
        return {**message, "content": VOLATILE.sub("", text)}

    def _with_thinking(self, message: dict[str, Any]) -> dict[str, Any]:
        if message.get("role") != "assistant" or thoughts_of(message):
            return message
        content = content_of(message)
        thoughts = self._answers.get(content) or self._answers.get(content.strip())
        return {**message, "content": thoughts + content, "tool_calls": None} if thoughts else message
