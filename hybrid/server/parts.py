"""An answer as the parts that every API writes: runs of reasoning and of text, and calls of tools.

Each part is opened, extended and closed; an API writes its events for these, and the parts themselves at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import Any

from hybrid.prompts.cut_calls import name_and_arguments
from hybrid.server.answers import AnswerChange
from hybrid.server.tools import Tools


class PartKind(Enum):
    """What a part is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer.

    Attributes:
        kind: what it is.
        index: among the parts of the answer.
        name: of the tool that is called.
        arguments: of a call that the model wrote: those that are whole; None: they are to be read from `text`.
        text: all of it up to now; of a call, its arguments as JSON.
    """

    kind: PartKind
    index: int
    name: str = ""
    arguments: dict[str, Any] | None = None
    text: str = ""


class PartEvent(Enum):
    """What happens to a part."""

    OPENED = "opened"
    EXTENDED = "extended"
    CLOSED = "closed"


PartChange = tuple[PartEvent, AnswerPart, str]
"""What happened to a part, and the text that it was extended by."""


class AnswerParts:
    """Finds the parts of one answer in its changes. One part is open at a time.

    Args:
        tools: of the request. A call that must be made by a model that cannot write one is the whole answer: its
            arguments, or its name and its arguments, which are read when the answer ends.
    """

    def __init__(self, tools: Tools) -> None:
        self.parts: list[AnswerPart] = []
        self._tools = tools
        self._is_open = False
        self._unread = ""

    @property
    def calls(self) -> list[AnswerPart]:
        """The calls of tools up to now."""
        return [part for part in self.parts if part.kind is PartKind.CALL]

    def whole(self, change: AnswerChange) -> None:
        """Take an answer from its beginning to its end."""
        for _ in chain(self.add(change), self.end(len(change.token_ids))):
            pass

    def text_of(self, kind: PartKind) -> str:
        """The texts of all parts of a kind, up to now."""
        return "".join(part.text for part in self.parts if part.kind is kind)

    def add(self, change: AnswerChange) -> Iterator[PartChange]:
        """Yield what a change of the answer opens, extends and closes."""
        if self._tools.forced is not None:
            if self._tools.only is None:
                self._unread += change.text
            else:
                yield from self._write(PartKind.CALL, change.text, self._tools.only["function"]["name"])
            return
        if change.reasoning:
            yield from self._write(PartKind.REASONING, change.reasoning)
        if change.text:
            yield from self._write(PartKind.TEXT, change.text)
        for call in change.calls:
            yield from self._close()
            yield from self._write(PartKind.CALL, call.json_arguments, call.name, call.arguments)

    def end(self, num_tokens: int = 0) -> Iterator[PartChange]:
        """Yield what the end of the answer opens, extends and closes, the last part with it.

        Args:
            num_tokens: of the answer. One with tokens and without parts has one empty text.
        """
        if self._unread and (found := name_and_arguments(self._unread)) is not None:
            name, arguments = found
            yield from self._write(PartKind.CALL, arguments, name)
        elif not self.parts and self._tools.forced is None and num_tokens:
            yield from self._write(PartKind.TEXT, "")
        self._unread = ""
        yield from self._close()

    def _write(
        self, kind: PartKind, text: str, name: str = "", arguments: dict[str, Any] | None = None
    ) -> Iterator[PartChange]:
        """Extend the open part, after opening one if it is of another kind."""
        if not self._is_open or self.parts[-1].kind is not kind:
            yield from self._close()
            self._is_open = True
            self.parts.append(AnswerPart(kind, len(self.parts), name, arguments))
            yield PartEvent.OPENED, self.parts[-1], ""
        part = self.parts[-1]
        part.text += text
        if text:
            yield PartEvent.EXTENDED, part, text

    def _close(self) -> Iterator[PartChange]:
        if self._is_open:
            self._is_open = False
            yield PartEvent.CLOSED, self.parts[-1], ""
