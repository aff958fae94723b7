"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.cut_calls import whole_part
from hybrid.serve.async_engine import OutputStream
from hybrid.server.answers import AnswerChange, Changes, whole
from hybrid.server.anthropic_messages import AnthropicPrompt, read_prompt
from hybrid.server.call import Call
from hybrid.server.chat import called
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.records import Digests
from hybrid.server.sampling import changed, hint_options
from hybrid.server.service import Asked, Server, new_id
from hybrid.server.thinking import set_thinking

STOPS = {"stop": "end_turn", "length": "max_tokens"}

TEXT: dict[str, Any] = {"type": "text", "text": ""}
THINKING: dict[str, Any] = {"type": "thinking", "thinking": "", "signature": ""}

DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The kind of a delta, and its field, by the kind of its block."""


async def messages(server: Server, call: Call) -> None:
    """Answer `POST /v1/messages`."""
    await server.answer(call, read_messages)


def read_messages(server: Server, call: Call, fields: Fields, model: str | None) -> Asked:
    """Read what a body asks.

    Raises:
        HttpError: something cannot be used.
    """
    prompt = read_prompt(fields, server.template)
    params = read_params(fields, server.defaults)
    own = prompt.tools.params(prompt.structured) | {"parse_response": server.takes_apart}
    params = changed(params, own, fields)
    body: dict[str, Any] = {"messages": prompt.messages} | prompt.options
    if prompt.thinks is not None:
        params = set_thinking(body, params, server.thinking, "thinking", prompt.thinks)
    is_stream = fields.boolean("stream")
    asks_why = "diagnostics" in fields
    previous = None
    if (diagnostics := fields.nested("diagnostics")) is not None:
        previous = diagnostics.text("previous_message_id")
        diagnostics.close()
    fields.ignore("metadata", "service_tier")
    fields.only("speed", "standard")
    fields.close()
    params = server.with_adapter(params, model)
    writer = MessageWriter(server, params, prompt)
    if asks_why:
        writer.diagnose(call, previous)
    return Asked([body], params, writer, is_stream)


async def count_tokens(server: Server, call: Call) -> None:
    """Answer `POST /v1/messages/count_tokens`."""

    def read(fields: Fields, model: str | None) -> dict[str, Any]:
        prompt = read_prompt(fields, server.template)
        fields.only("speed", "standard")
        fields.close()
        body: dict[str, Any] = {"messages": prompt.messages} | prompt.options
        if prompt.thinks is not None:
            set_thinking(body, server.defaults, server.thinking, "thinking", prompt.thinks)
        return body

    ids = await server.encode(call, await server.read(call, read))
    await call.respond({"input_tokens": len(ids)})


def read_params(fields: Fields, own: SamplingParams) -> SamplingParams:
    """The parameters of a body.

    Raises:
        HttpError: one cannot be used.
    """
    given = {name: value for name in ("temperature", "top_p", "top_k") if (value := fields.take(name)) is not None}
    if (stop := fields.take("stop_sequences")) is not None:
        given["stop"] = stop
    length = fields.take("max_tokens")
    if length is None:
        raise fields.refuse("max_tokens", "a number of tokens", None)
    given |= hint_options(fields)
    return changed(own, given | {"max_new_tokens": length}, fields, stop="stop_sequences")


def anthropic_error(failure: HttpError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    return {"type": "error", "error": {"type": failure.kind, "message": failure.message}, "request_id": None}


def _event(kind: str, **more: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind} | more) + b"\n\n"


class MessageWriter:
    """Writes messages.

    Args:
        server: that answers.
        params: of the request.
        prompt: of the request.
    """

    def __init__(self, server: Server, params: SamplingParams, prompt: AnthropicPrompt) -> None:
        self.id: str = new_id("msg_")
        self._server = server
        self._tools = prompt.tools
        self._shows_thinking = prompt.shows_thinking
        self._changes = Changes(params.n, prompt.tools.is_single)
        self._diagnostics: dict[str, Any] | None = None
        self._open: str | None = None  # kind of the block that is written
        self._num_blocks = 0
        self._num_calls = 0
        self._text = ""  # of a call that is read when it ends
        self._digests = prompt.digests(params.adapter)
        self.parts: Digests | None = self._digests

    def diagnose(self, call: Call, previous: str | None) -> None:
        """Say in the response why the cache did not have what another message had."""
        self._diagnostics = {"cache_miss_reason": None}
        if previous is None:
            return
        record = self._server.records.find(previous, call.tenant)
        if record is None or record.parts is None:
            self._diagnostics = {"cache_miss_reason": {"type": "previous_message_not_found"}}
        elif (changed := record.parts.changed(self._digests)) is not None:
            missed = {"cache_missed_input_tokens": record.as_json().get("prompt_tokens", 0)}
            self._diagnostics = {"cache_miss_reason": {"type": f"{changed}_changed"} | missed}

    def _message(
        self, content: list[Any], usage: dict[str, Any], stop: str | None, sequence: str | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self.id, "type": "message", "role": "assistant", "model": self._server.name}
        found |= {"content": content, "stop_reason": stop, "stop_sequence": sequence, "usage": usage}
        return found | ({"diagnostics": self._diagnostics} if self._diagnostics is not None else {})

    # A stream

    def begin(self, streams: Sequence[OutputStream]) -> bytes:
        """The message, without content; its usage is what is expected before it is computed."""
        accepted = streams[0].accepted
        assert accepted is not None
        usage = _usage(accepted.prompt_tokens, accepted.predicted.usable_hit, 0, 0)
        return _event("message_start", message=self._message([], usage, None))

    def piece(self, at: int, output: RequestOutput) -> bytes:
        """What is new."""
        return b"".join(self._piece(change) for change in self._changes.of(output))

    def _piece(self, change: AnswerChange) -> bytes:
        if self._tools.forced is not None:
            only = self._tools.only
            if only is None:
                self._text += change.text
                return b""
            block = {"type": "tool_use", "id": "", "name": only["function"]["name"], "input": {}}
            return self._write(block, change.text)
        thought = change.reasoning if self._shows_thinking else ""
        events = self._write(THINKING, thought) if change.reasoning else b""
        if change.text:
            events += self._write(TEXT, change.text)
        for call in change.calls:
            events += self._close() + self._write(_tool_use(call.name, call.arguments), call.json_arguments)
        self._num_calls += len(change.calls)
        return events

    def _write(self, block: dict[str, Any], text: str) -> bytes:
        """Write a text into a block of a kind, which is begun if another one is open."""
        events, kind = b"", block["type"]
        if self._open != kind:
            events = self._close()
            self._open = kind
            begun = block | ({"id": new_id("toolu_"), "input": {}} if kind == "tool_use" else {})
            events += _event("content_block_start", index=self._num_blocks, content_block=begun)
        if text:
            name, field = DELTAS[kind]
            events += _event("content_block_delta", index=self._num_blocks, delta={"type": name, field: text})
        return events

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open, index = None, self._num_blocks
        self._num_blocks += 1
        return _event("content_block_stop", index=index)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The end of the content, why it ended, and the usage as it was."""
        output, events = outputs[0], b""
        if self._text and (call := called(self._text, None)) is not None:
            events = self._write(_made(call), call["function"]["arguments"])
        elif self._open is None and not self._num_blocks and self._tools.forced is None and output.token_ids:
            events = self._write(TEXT, "")
        events += self._close()
        stop, sequence = self._stop(output, self._num_calls)
        usage = _usage_of(output)
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        return events + _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failed(self, failure: HttpError) -> bytes:
        """The error."""
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(failure)) + b"\n\n"

    # A whole response

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The message."""
        output = outputs[0]
        (change,) = whole(output, self._tools.is_single)
        thought = change.reasoning if self._shows_thinking else ""
        content: list[Any] = [THINKING | {"thinking": thought}] if change.reasoning else []
        if self._tools.forced is not None:
            only = self._tools.only
            call = called(change.text, only["function"]["name"] if only is not None else None)
            content += [_made(call)] if call is not None else []
        else:
            is_empty = not content and not change.calls and change.token_ids
            content += [TEXT | {"text": change.text}] if change.text or is_empty else []
            content += [_tool_use(call.name, call.arguments) for call in change.calls]
        return self._message(content, _usage_of(output), *self._stop(output, len(change.calls)))

    def _stop(self, output: RequestOutput, num_calls: int) -> tuple[str, str | None]:
        """Return why it ended, and the stop text that ended it."""
        reason = output.finish_reason or ""
        if reason == "stop" and (num_calls or self._tools.forced is not None):
            return "tool_use", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return STOPS.get(reason, reason), None


def _tool_use(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A block; of arguments that max_tokens has cut it has what is whole."""
    return {"type": "tool_use", "id": new_id("toolu_"), "name": name, "input": arguments}


def _made(call: dict[str, Any]) -> dict[str, Any]:
    """The block of a call that had to be made."""
    function = call["function"]
    return _tool_use(function["name"], whole_part(function["arguments"]))


def _usage_of(output: RequestOutput) -> dict[str, Any]:
    usage = output.usage
    return _usage(usage.prompt_tokens, usage.cached_tokens, usage.written_tokens, usage.completion_tokens)


def _usage(prompt: int, cached: int, written: int, answer: int) -> dict[str, Any]:
    """The usage in Anthropic's form, in which tokens that were read from the cache, or written to it, are not input."""
    return {
        "input_tokens": prompt - cached - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }
