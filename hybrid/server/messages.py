"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.serve.async_engine import OutputStream
from hybrid.server.answers import Change, Changes, whole
from hybrid.server.anthropic_messages import AnthropicPrompt, read_prompt
from hybrid.server.call import Call
from hybrid.server.chat import called
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.sampling import changed
from hybrid.server.service import Server, new_id

STOPS = {"stop": "end_turn", "length": "max_tokens"}


async def messages(server: Server, call: Call) -> None:
    """Answer `POST /v1/messages`."""
    fields = Fields(await server.body(call))
    model = fields.text("model")
    server.check_model(model)
    prompt = read_prompt(fields, server.template)
    params = read_params(fields, server.defaults)
    if prompt.structured is not None:
        params = changed(params, {"structured": prompt.structured}, fields)
    is_stream = fields.boolean("stream")
    asks_why = "diagnostics" in fields
    previous = None
    if (diagnostics := fields.nested("diagnostics")) is not None:
        previous = diagnostics.text("previous_message_id")
        diagnostics.close()
    fields.ignore("metadata", "service_tier")
    fields.only("speed", "standard")
    fields.close()
    writer = MessageWriter(server, params, prompt)
    if asks_why:
        writer.diagnose(call, previous)
    body = {"messages": prompt.messages} | prompt.options
    await server.run(call, [body], server.with_adapter(params, model), writer, is_stream=is_stream)


async def count_tokens(server: Server, call: Call) -> None:
    """Answer `POST /v1/messages/count_tokens`."""
    fields = Fields(await server.body(call))
    server.check_model(fields.text("model"))
    prompt = read_prompt(fields, server.template)
    fields.only("speed", "standard")
    fields.close()
    ids = await server.encode({"messages": prompt.messages} | prompt.options, call.tenant.namespace)
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
        self.id = new_id("msg_")
        self._server = server
        self._params = params
        self._tools = prompt.tools
        self.parts = (prompt.system, prompt.tools, prompt.turns)
        self._changes = Changes(1)
        self._diagnostics: dict[str, Any] | None = None
        self._is_open = False
        self._text = ""  # of a call that is read when it ends

    def diagnose(self, call: Call, previous: str | None) -> None:
        """Say in the response why the cache did not have what another message had."""
        self._diagnostics = {"cache_miss_reason": None}
        if previous is not None and self._server.records.find(previous, call.tenant) is None:
            self._diagnostics = {"cache_miss_reason": {"type": "previous_message_not_found"}}

    def _message(
        self, content: list[Any], usage: dict[str, Any], stop: str | None, sequence: str | None = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._server.name,
            "content": content,
        }
        found |= {"stop_reason": stop, "stop_sequence": sequence, "usage": usage}
        return found | ({"diagnostics": self._diagnostics} if self._diagnostics is not None else {})

    # A stream

    def begin(self, streams: Sequence[OutputStream]) -> bytes:
        """The message, without content; its usage is what is expected before it is computed."""
        accepted = streams[0].accepted
        assert accepted is not None
        cached = accepted.predicted.usable_hit
        usage = _usage(accepted.prompt_tokens, cached, 0)
        return _event("message_start", message=self._message([], usage, None))

    def piece(self, at: int, output: RequestOutput) -> bytes:
        """What is new."""
        return b"".join(self._piece(change) for change in self._changes.of(output))

    def _piece(self, change: Change) -> bytes:
        forced, only = self._tools.forced is not None, self._tools.only
        if forced and only is None:
            self._text += change.text
            return b""
        events = b""
        if not self._is_open:
            self._is_open = True
            events += _event("content_block_start", index=0, content_block=self._block(only if forced else None))
        if change.text:
            events += _event("content_block_delta", index=0, delta=_delta(change.text, forced))
        return events

    def _block(self, tool: dict[str, Any] | None) -> dict[str, Any]:
        if tool is None:
            return {"type": "text", "text": ""}
        return {"type": "tool_use", "id": new_id("toolu_"), "name": tool["function"]["name"], "input": {}}

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The end of the content, why it ended, and the usage as it was."""
        output = outputs[0]
        events = b""
        if self._text and (call := called(self._text, None)) is not None:
            block = _tool_use(call)
            given = orjson.dumps(block["input"]).decode()
            events += _event("content_block_start", index=0, content_block=block | {"input": {}})
            events += _event("content_block_delta", index=0, delta=_delta(given, True))
            self._is_open = True
        if self._is_open:
            events += _event("content_block_stop", index=0)
        stop, sequence = self._stop(output)
        delta = {"stop_reason": stop, "stop_sequence": sequence}
        usage = output.usage
        counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return events + _event("message_delta", delta=delta, usage=counts) + _event("message_stop")

    def failed(self, failure: HttpError) -> bytes:
        """The error."""
        return b"event: error\ndata: " + orjson.dumps(anthropic_error(failure)) + b"\n\n"

    # A whole response

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The message."""
        output = outputs[0]
        (change,) = whole(output)
        content: list[Any] = [{"type": "text", "text": change.text}]
        if self._tools.forced is not None:
            only = self._tools.only
            call = called(change.text, only["function"]["name"] if only is not None else None)
            content = [_tool_use(call)] if call is not None else []
        usage = output.usage
        counts = _usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return self._message(content, counts, *self._stop(output))

    def _stop(self, output: RequestOutput) -> tuple[str, str | None]:
        """Return why it ended, and the stop text that ended it."""
        reason = output.finish_reason or ""
        if self._tools.forced is not None and reason == "stop":
            return "tool_use", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return STOPS.get(reason, reason), None


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        given = orjson.loads(function["arguments"])
    except ValueError:  # the answer ended at max_tokens
        given = {}
    return {"type": "tool_use", "id": new_id("toolu_"), "name": function["name"], "input": given}


def _delta(text: str, is_json: bool) -> dict[str, str]:
    return {"type": "input_json_delta", "partial_json": text} if is_json else {"type": "text_delta", "text": text}


def _usage(prompt: int, cached: int, answer: int) -> dict[str, Any]:
    """The usage in Anthropic's form, in which tokens that were read from the cache are not input."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }
