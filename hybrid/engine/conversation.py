"""A chat that keeps the token ids that were computed, so that each turn hits all turns before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybrid.engine.engine import Engine
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import RequestError
from hybrid.prompts.encode import Message

Said = str | Message | Sequence[Message]
"""What is said next: the text of a user, or a message, or several, as those of tools."""


class Conversation:
    """A chat of which only what is new is tokenized.

    A text that is tokenized again may come out as other tokens, and a chat template may leave out the reasoning of
    earlier answers: then an earlier turn, as it was computed, is not the beginning of the next prompt, and does not
    hit. Here the prompt of a turn is the ids of the turns before it, as they were generated, and those of what is new,
    in the template's form.

        chat = hybrid.Conversation(engine)
        print(chat.ask("What is a tuple?").content)
        print(chat.ask("And a list?").usage.cached_tokens)

    With an `AsyncEngine` give its `engine`, and use `prompt` and `note` around its calls:

        output = (await engine.generate(chat.prompt(said), chat.params))[0]
        chat.note(said, output)

    Args:
        engine: answers; it needs a tokenizer with a chat template.
        messages: with which the chat begins, as the system's.
        params: of every answer; None: the engine's `default_params`. Answers are taken apart (`parse_response`).
        tools: that answers may call.
        chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`.
        namespace: of the cache.

    Attributes:
        messages: those that were said and answered, as texts.
        token_ids: prompt and answer of the latest turn; empty before the first.
        params: of every answer, with the tools.
    """

    def __init__(
        self,
        engine: Engine,
        messages: Sequence[Message] = (),
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "",
    ) -> None:
        self.messages: list[Message] = list(messages)
        self.token_ids: list[int] = []
        self.params: SamplingParams = replace(params or engine.default_params, parse_response=True, tools=tuple(tools))
        self._engine = engine
        self._namespace = namespace
        self._options: dict[str, Any] = {"split_special_tokens": True}
        if tools:
            self._options["tools"] = [dict(tool) for tool in tools]
        if chat_template_kwargs:
            self._options["chat_template_kwargs"] = dict(chat_template_kwargs)

    def prompt(self, said: Said) -> list[int]:
        """The token ids of the next turn's prompt. Changes nothing; in any thread.

        Raises:
            PromptError: there is no chat template, it refuses the messages, or they hold images, which ids cannot.
        """
        new = _messages(said)
        if not self.token_ids:
            return self._engine.encode({"messages": [*self.messages, *new], **self._options})
        more = self._engine.encode_turn({"messages": new, **self._options})
        return self.token_ids + (more[1:] if more[:1] == self.token_ids[-1:] else more)

    def note(self, said: Said, output: RequestOutput) -> None:
        """What was said was answered: both are part of the chat from now on.

        Raises:
            RequestError: the output is not the end of an answer, or the request failed. The chat is as it was.
        """
        if output.finish_reason in (None, "error"):
            why = output.error or "it has not ended"
            raise RequestError(f"{output.request_id} is no answer: {why}; ask again")
        self.messages += [*_messages(said), output.message()]
        self.token_ids = output.prompt_token_ids + output.token_ids

    def ask(self, said: Said) -> RequestOutput:
        """Answer what is said next. The chat is as it was where that fails.

        Raises:
            HybridError: all that `Engine.generate` raises.
            RequestError: the request failed.
        """
        output = self._engine.generate(self.prompt(said), self.params, namespace=self._namespace, progress=False)[0]
        self.note(said, output)
        return output

    def stream(self, said: Said) -> Iterator[str]:
        """Answer what is said next, piece by piece. It is part of the chat once the last piece was taken.

        Raises:
            HybridError: all that `Engine.stream` raises.
        """
        with self._engine.stream(self.prompt(said), self.params, namespace=self._namespace) as stream:
            yield from stream
            self.note(said, stream.output)


def _messages(said: Said) -> list[Message]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    return [dict(said)] if isinstance(said, Mapping) else list(said)
