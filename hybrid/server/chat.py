"""OpenAI's chat completions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import orjson

from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.messages import OPTIONS
from hybrid.prompts.thinking import SWITCHES
from hybrid.serve.async_engine import OutputStream
from hybrid.server.answers import AnswerChange, Changes, chat_logprobs, whole
from hybrid.server.call import Call
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.openai_messages import openai_messages
from hybrid.server.parts import AnswerPart, AnswerParts, PartChange, PartEvent, PartKind
from hybrid.server.records import Digests
from hybrid.server.sampling import changed, openai_params, structured_of
from hybrid.server.service import Asked, Server, new_id
from hybrid.server.thinking import set_thinking
from hybrid.server.tools import Tools, openai_tools

DONE = b"data: [DONE]\n\n"


async def chat_completions(server: Server, call: Call) -> None:
    """Answer `POST /v1/chat/completions`."""
    await server.answer(call, read_chat_completions)


def read_chat_completions(server: Server, call: Call, fields: Fields, model: str | None) -> Asked:
    """Read what a body asks.

    Raises:
        HttpError: something cannot be used.
    """
    template = server.template
    prompt: dict[str, Any] = {"messages": openai_messages(fields.array("messages"), "messages", template)}
    tools = openai_tools(fields, template)
    prompt |= tools.in_prompt | template_fields(fields, template)
    own = tools.params(structured_of(fields)) | {"parse_response": server.takes_apart}
    params = openai_params(fields, server.defaults, server.max_tokens, "max_completion_tokens", "max_tokens")
    params = changed(params, own | {"logprobs": read_logprobs(fields)}, fields)
    is_stream, options = fields.boolean("stream"), stream_options(fields)
    salt = fields.text("cache_salt") or ""
    fields.only("modalities", ["text"])
    if fields.only("reasoning_effort", "none"):
        params = set_thinking(prompt, params, server.thinking, "reasoning_effort", False)
    fields.only("verbosity", "medium")
    fields.never(
        audio="this server makes text",
        function_call="send tool_choice",
        functions="send tools",
        moderation="this server has none",
        prediction="start the server with --speculation cache, which drafts from what is cached",
        web_search_options="this server reaches no network",
    )
    fields.close()
    writer = ChatWriter(server, params, tools, *options)
    return Asked([prompt], server.with_adapter(params, model), writer, is_stream, salt)


def template_fields(fields: Fields, template: str) -> dict[str, Any]:
    """Options of the chat template. What a user writes is text, and never a control token.

    Args:
        template: of the model's chats: what it does not read is refused, but thinking that is to be off.

    Raises:
        HttpError: it does not read an option.
    """
    found: dict[str, Any] = {"split_special_tokens": True}
    for name in ("add_generation_prompt", "continue_final_message"):
        if name in fields:
            found[name] = fields.boolean(name)
    for name, value in (
        ("documents", fields.array("documents")),
        ("chat_template_kwargs", fields.dictionary("chat_template_kwargs")),
        ("chat_template", fields.text("chat_template")),
    ):
        if value is not None:
            found[name] = value
    variables: dict[str, Any] = found.get("chat_template_kwargs", {})
    if "chat_template" not in found and "chat_template" not in variables:
        given = [(f"chat_template_kwargs.{name}", name) for name in variables if name not in OPTIONS]
        given += [("documents", "documents")] if "documents" in found else []
        for path, name in given:
            if name not in template and not (name in SWITCHES and variables[name] is False):
                text = f"{path}: this model's chat template does not read it; leave it out"
                raise HttpError(400, text, path, "unsupported_parameter")
    return found


def read_logprobs(fields: Fields) -> int | None:
    """The number of alternatives with log-probabilities; None: none are asked for.

    Raises:
        HttpError: the fields contradict each other.
    """
    wanted, top = fields.boolean("logprobs"), fields.integer("top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise HttpError(400, "top_logprobs needs logprobs: true", fields.path("top_logprobs"), "invalid_value")
    return (top or 0) if wanted else None


def stream_options(fields: Fields) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether each piece has it."""
    options = fields.nested("stream_options")
    if options is None:
        return False, False
    found = options.boolean("include_usage"), options.boolean("continuous_usage_stats")
    options.ignore("include_obfuscation")
    options.close()
    return found


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The usage of a call's prompts together, in OpenAI's form."""
    usages = [output.usage for output in outputs]
    prompt = sum(usage.prompt_tokens for usage in usages)
    answer = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "cache_write_tokens": sum(usage.written_tokens for usage in usages),
        },
    }
    if any(usage.drafted_tokens for usage in usages):
        accepted = sum(usage.accepted_tokens for usage in usages)
        rejected = sum(usage.drafted_tokens for usage in usages) - accepted
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return found


class ChatWriter:
    """Writes chat completions.

    Args:
        server: that answers.
        params: of the request.
        tools: of the request.
        usage_at_end, usage_always: whether a stream ends with its usage, and whether each piece has it.
    """

    def __init__(
        self, server: Server, params: SamplingParams, tools: Tools, usage_at_end: bool, usage_always: bool
    ) -> None:
        self.id: str = new_id("chatcmpl-")
        self.parts: Digests | None = None
        self._server = server
        self._params = params
        self._tools = tools
        self._usage_at_end = usage_at_end
        self._usage_always = usage_always
        self._changes = Changes(params.n, tools.is_single)
        self._parts = [AnswerParts(tools) for _ in range(params.n)]
        head = {"id": self.id, "object": "chat.completion.chunk", "created": int(time.time()), "model": server.name}
        self._head = head
        self._start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'

    # A stream

    def begin(self, streams: Sequence[OutputStream]) -> bytes:
        """Each answer's role."""
        delta = {"role": "assistant", "content": None if self._tools.forced is not None else ""}
        return b"".join(self._chunk(index, delta, None, None, None) for index in range(self._params.n))

    def piece(self, at: int, output: RequestOutput) -> bytes:
        """What is new of each answer."""
        usage = usage_of([output]) if self._usage_always else None
        return b"".join(self._piece(change, usage) for change in self._changes.of(output))

    def _piece(self, change: AnswerChange, usage: dict[str, Any] | None) -> bytes:
        parts = self._parts[change.index]
        changes = parts.add(change)
        delta = _delta(chain(changes, parts.end()) if change.finish_reason is not None else changes, parts)
        logprobs = self._logprobs(change)
        reason = self._reason(change)
        if not delta and logprobs is None and reason is None and usage is None:
            return b""
        return self._chunk(change.index, delta, logprobs, reason, usage)

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None, usage: dict[str, Any] | None
    ) -> bytes:
        middle = b',"delta":' + orjson.dumps(delta)
        if logprobs is None and reason is None and usage is None:  # as most are, for every token
            return self._start + b"%d" % index + middle + b',"logprobs":null,"finish_reason":null}]}\n\n'
        middle += b',"logprobs":' + orjson.dumps(logprobs)
        end = b',"finish_reason":' + orjson.dumps(reason) + b"}]"
        if usage is not None:
            end += b',"usage":' + orjson.dumps(usage)
        return self._start + b"%d" % index + middle + end + b"}\n\n"

    def _logprobs(self, change: AnswerChange) -> dict[str, Any] | None:
        top = self._params.logprobs
        if top is None or change.logprobs is None:
            return None
        return {"content": chat_logprobs(change, top), "refusal": None}

    def _reason(self, change: AnswerChange) -> str | None:
        if change.finish_reason != "stop":  # as for nearly every token
            return change.finish_reason
        return "tool_calls" if self._tools.forced is not None or self._parts[change.index].calls else "stop"

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The usage, if it is asked for, and the end."""
        if not self._usage_at_end:
            return DONE
        return b"data: " + orjson.dumps(self._head | {"choices": [], "usage": usage_of(outputs)}) + b"\n\n" + DONE

    def failed(self, failure: HttpError) -> bytes:
        """The error, and the end."""
        return b"data: " + orjson.dumps(openai_error(failure)) + b"\n\n" + DONE

    # A whole response

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answers and the usage."""
        choices = [self._choice(change) for change in whole(outputs[0], self._tools.is_single)]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": usage_of(outputs)}

    def _choice(self, change: AnswerChange) -> dict[str, Any]:
        parts = self._parts[change.index]
        parts.whole(change)
        text, calls = parts.text_of(PartKind.TEXT), parts.calls
        is_call = calls or self._tools.forced is not None
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if is_call else ""), "refusal": None}
        if reasoning := parts.text_of(PartKind.REASONING):
            message["reasoning_content"] = reasoning
        if is_call:
            message["tool_calls"] = [_call(part) for part in calls]
        reason = self._reason(change)
        return {"index": change.index, "message": message, "logprobs": self._logprobs(change), "finish_reason": reason}


def _delta(changes: Iterable[PartChange], parts: AnswerParts) -> dict[str, Any]:
    """What is new of an answer, as a part of its message."""
    delta: dict[str, Any] = {}
    for event, part, text in changes:
        if event is PartEvent.CLOSED:
            continue
        if part.kind is not PartKind.CALL:
            if event is PartEvent.EXTENDED:
                name = "content" if part.kind is PartKind.TEXT else "reasoning_content"
                delta[name] = delta.get(name, "") + text
            continue
        number, calls = len(parts.calls) - 1, delta.setdefault("tool_calls", [])
        if event is PartEvent.OPENED:
            calls.append({"index": number} | _call(part))
        elif calls and calls[-1]["index"] == number:
            calls[-1]["function"]["arguments"] += text
        else:
            calls.append({"index": number, "function": {"arguments": text}})
    return delta


def _call(part: AnswerPart) -> dict[str, Any]:
    """A call of a tool as far as it was written."""
    return {"id": new_id("call_"), "type": "function", "function": {"name": part.name, "arguments": part.text}}


def openai_error(failure: HttpError) -> dict[str, Any]:
    """An error in OpenAI's form."""
    found = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return {"error": found}
