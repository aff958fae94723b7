"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.cut_calls import whole_part
from hybrid.serve.async_engine import OutputStream
from hybrid.server.answers import Changes, whole
from hybrid.server.anthropic_messages import AnthropicPrompt, read_prompt
from hybrid.server.call import Call
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.parts import AnswerPart, AnswerParts, PartChange, PartEvent, PartKind
from hybrid.server.records import Digests
from hybrid.server.sampling import changed, hint_options
from hybrid.server.service import Asked, Server, new_id
from hybrid.server.thinking import set_thinking

STOPS = {"stop": "end_turn", "length": "max_tokens"}

DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}
"""The kind of a delta, and its field, by the kind of its part."""


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
        self._parts = AnswerParts(prompt.tools)
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
        return b"".join(self._events(self._parts.add(change)) for change in self._changes.of(output))

    def _events(self, changes: Iterable[PartChange]) -> bytes:
        events = b""
        for event, part, text in changes:
            if event is PartEvent.OPENED:
                begun = self._block(part) | ({"input": {}} if part.kind is PartKind.CALL else {})
                events += _event("content_block_start", index=part.index, content_block=begun)
            elif event is PartEvent.CLOSED:
                events += _event("content_block_stop", index=part.index)
            elif part.kind is not PartKind.REASONING or self._shows_thinking:
                kind, field = DELTAS[part.kind]
                events += _event("content_block_delta", index=part.index, delta={"type": kind, field: text})
        return events

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The end of the content, why it ended, and the usage as it was."""
        output = outputs[0]
        events = self._events(self._parts.end(len(output.token_ids)))
        stop, sequence = self._stop(output)
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        return events + _event("message_delta", delta=delta, usage=_usage_of(output)) + _event("message_stop")

    def failed(self, failure: HttpError) -> bytes:
        """The error."""
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(failure)) + b"\n\n"

    # A whole response

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The message."""
        output = outputs[0]
        (change,) = whole(output, self._tools.is_single)
        self._parts.whole(change)
        content = [self._block(part) for part in self._parts.parts]
        return self._message(content, _usage_of(output), *self._stop(output))

    def _stop(self, output: RequestOutput) -> tuple[str, str | None]:
        """Return why it ended, and the stop text that ended it."""
        reason = output.finish_reason or ""
        if reason == "stop" and (self._parts.calls or self._tools.forced is not None):
            return "tool_use", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return STOPS.get(reason, reason), None

    def _block(self, part: AnswerPart) -> dict[str, Any]:
        """A part as a block. Of arguments that max_tokens has cut it has what is whole."""
        if part.kind is PartKind.CALL:
            arguments = whole_part(part.text) if part.arguments is None else part.arguments
            return {"type": "tool_use", "id": new_id("toolu_"), "name": part.name, "input": arguments}
        if part.kind is PartKind.REASONING:
            return {"type": "thinking", "thinking": part.text if self._shows_thinking else "", "signature": ""}
        return {"type": "text", "text": part.text}


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
