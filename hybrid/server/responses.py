"""OpenAI's responses. Nothing is kept on the server: a conversation is sent as its items."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from hybrid.checks import shown
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.encode import Message
from hybrid.serve.async_engine import OutputStream
from hybrid.server.answers import Changes, whole
from hybrid.server.call import Call
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.openai_messages import ROLES, image_of
from hybrid.server.parts import AnswerPart, AnswerParts, PartChange, PartEvent, PartKind
from hybrid.server.records import Digests, RequestRecord
from hybrid.server.sampling import changed, openai_params, schema_of
from hybrid.server.service import Asked, Server, new_id
from hybrid.server.thinking import set_thinking
from hybrid.server.tools import Tools, openai_tools

TEXTS = {
    PartKind.TEXT: "output_text",
    PartKind.REASONING: "reasoning_text",
    PartKind.CALL: "function_call_arguments",
}
"""Names of the events of an item's text, by the kind of its part."""


async def responses(server: Server, call: Call) -> None:
    """Answer `POST /v1/responses`."""
    await server.answer(call, read_responses)


def read_responses(server: Server, call: Call, fields: Fields, model: str | None) -> Asked:
    """Read what a body asks.

    Raises:
        HttpError: something cannot be used.
    """
    template = server.template
    instructions = fields.text("instructions")
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    given = fields.take("input")
    messages += read_input(given, fields)
    tools = openai_tools(fields, template, are_flat=True)
    prompt: dict[str, Any] = {"messages": messages, "split_special_tokens": True} | tools.in_prompt
    own = tools.params(read_text_format(fields)) | {"parse_response": server.takes_apart}
    fields.only("n", 1)
    compared = fields.inner("prompt_cache_options", "comparison_response_id")
    params = openai_params(fields, server.defaults, server.max_tokens, "max_output_tokens")
    params = server.with_adapter(changed(params, own, fields), model)
    is_stream = fields.boolean("stream")
    if (options := fields.nested("stream_options")) is not None:
        options.ignore("include_obfuscation")
        options.close()
    if (reasoning := fields.nested("reasoning")) is not None:
        if reasoning.only("effort", "none"):
            params = set_thinking(prompt, params, server.thinking, "reasoning.effort", False)
        reasoning.ignore("summary")
        reasoning.close()
    salt = fields.text("cache_salt") or ""
    fields.only("background", False)
    fields.only("truncation", "disabled")
    fields.only("include", [])
    fields.only("top_logprobs", 0)
    fields.never(
        previous_response_id="nothing is kept here; send the conversation as its items",
        conversation="nothing is kept here; send the conversation as its items",
        prompt="prompts are not kept here; send input",
        max_tool_calls="this server calls no tools itself",
        context_management="send the items that are to be used",
        moderation="this server has none",
    )
    fields.close()
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    parts = Digests.of(params.adapter, instructions, tools.functions, items)
    writer = ResponseWriter(server, params, tools, instructions, parts)
    if compared is not None:
        writer.compare(server.records.find(compared, call.tenant))
    return Asked([prompt], params, writer, is_stream, salt)


def read_input(given: Any, fields: Fields) -> list[Message]:
    """The messages of a body's items. Reasoning goes to the next message or call of the assistant, for a template that
    reads it: clients send all items back that they got.

    Raises:
        HttpError: one cannot be used.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise fields.refuse("input", "a text or a list of at least one item", given)
    found: list[Message] = []
    thought = ""
    for number, value in enumerate(given):
        item = Fields(value, f"{fields.path('input')}[{number}]")
        kind = item.text("type") or "message"
        item.ignore("id", "status", "phase")
        if kind == "reasoning":
            thought += _reasoning(item)
            item.close()
            continue
        if kind == "message":
            found.append(_message(item))
        elif kind == "function_call":
            call = _function_call(item)
            if found and found[-1]["role"] == "assistant" and found[-1].get("tool_calls"):
                found[-1]["tool_calls"].append(call)
            else:
                found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.take("output")
            if not isinstance(output, str):
                raise item.refuse("output", "a text", output)
            found.append({"role": "tool", "content": output, "tool_call_id": item.text("call_id") or ""})
        else:
            kinds = "'message', 'reasoning', 'function_call' or 'function_call_output'"
            raise item.refuse("type", kinds, kind)
        item.close()
        if thought and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = thought
        thought = ""
    if not found:
        raise fields.refuse("input", "a list with a message besides reasoning", given)
    return found


def _reasoning(item: Fields) -> str:
    """The text of an item of reasoning."""
    texts = []
    for number, value in enumerate(item.array("content") or ()):
        part = Fields(value, f"{item.path('content')}[{number}]")
        part.one_of("type", ("reasoning_text",), "reasoning_text")
        texts.append(part.text("text") or "")
        part.close()
    item.ignore("summary")
    item.never(encrypted_content="this server encrypts none; send the item as it came")
    return "".join(texts)


def _message(item: Fields) -> Message:
    role = item.one_of("role", ROLES[:-1], "")
    if not role:
        raise item.refuse("role", " or ".join(map(repr, ROLES[:-1])), None)
    content, where = item.take("content"), item.path("content")
    role = "system" if role == "developer" else role
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not content:
        raise HttpError(400, f"{where} must be a text or a list of parts; got {shown(content)}", where, "invalid_type")
    parts = []
    for number, value in enumerate(content):
        part = Fields(value, f"{where}[{number}]")
        kind = part.text("type")
        if kind in ("input_text", "output_text"):
            text = part.text("text")
            if text is None:
                raise part.refuse("text", "a text", None)
            part.ignore("annotations", "logprobs")
            parts.append({"type": "text", "text": text})
        elif kind == "input_image":
            part.ignore("detail")
            parts.append({"type": "image", "image": image_of(part.take("image_url"), part.path("image_url"))})
        else:
            raise part.refuse("type", "'input_text', 'output_text' or 'input_image'", kind)
        part.close()
    return {"role": role, "content": parts}


def _function_call(item: Fields) -> dict[str, Any]:
    name, arguments = item.text("name"), item.text("arguments")
    if not name or arguments is None:
        raise item.refuse("name", "a text, with arguments", name)
    item.check_json("arguments", arguments)
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call["id"] = item.text("call_id") or ""
    return call


def read_text_format(fields: Fields) -> dict[str, Any] | None:
    """The form that an answer must have; None: any.

    Raises:
        HttpError: it cannot be used.
    """
    text = fields.nested("text")
    if text is None:
        return None
    text.only("verbosity", "medium")
    form = text.nested("format")
    text.close()
    if form is None:
        return None
    kind = form.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "json_schema":
        return schema_of(form)
    form.close()
    return {"json_object": True} if kind == "json_object" else None


class ResponseWriter:
    """Writes responses.

    Args:
        server: that answers.
        params: of the request.
        tools: of the request.
        instructions: of the request.
        parts: digests of its prompt.
    """

    def __init__(
        self, server: Server, params: SamplingParams, tools: Tools, instructions: str | None, parts: Digests
    ) -> None:
        self.id: str = new_id("resp_")
        self.parts: Digests | None = parts
        self._own = parts
        self._is_compared = False
        self._before: Digests | None = None  # of the response that it is compared with, if that is known
        self._tools = tools
        self._changes = Changes(1, tools.is_single)
        self._number = 0
        self._items: list[dict[str, Any]] = []  # of the parts that were opened
        self._parts = AnswerParts(tools)
        choice = tools.choice if tools.choice != "named" else {"type": "function", "name": tools.name}
        self._head = {
            "id": self.id,
            "object": "response",
            "created_at": time.time(),
            "model": server.name,
            "instructions": instructions,
            "max_output_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "tools": [{"type": "function", "strict": True} | one["function"] for one in tools.functions],
            "tool_choice": choice,
            "parallel_tool_calls": not tools.is_single,
            "error": None,
            "incomplete_details": None,
            "metadata": {},
        }

    def compare(self, record: RequestRecord | None) -> None:
        """Say at the end why the cache did not have what another response's prompt had.

        Args:
            record: of that response; None: it is not known.
        """
        self._is_compared, self._before = True, record.parts if record is not None else None

    def _diagnostics(self, output: RequestOutput) -> dict[str, Any]:
        if self._before is None:
            return {"type": "comparison_response_not_found"}
        usage, changed = output.usage, self._before.changed(self._own)
        if changed is None:
            return {"type": "cache_hit" if usage.cached_tokens else "unavailable"}
        reason = changed if changed in ("model", "tools") else "input"
        missed = usage.prompt_tokens - usage.cached_tokens
        return {"type": "cache_miss", "reason": f"{reason}_changed", "cache_missed_tokens": missed}

    def _event(self, kind: str, **more: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._number} | more
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"

    def _response(self, status: str, items: list[Any], output: RequestOutput | None = None) -> dict[str, Any]:
        found = self._head | {"status": status, "output": items}
        if output is not None:
            found["usage"] = _usage(output)
            if self._is_compared:
                found["prompt_cache_diagnostics"] = self._diagnostics(output)
            if status == "incomplete":
                found["incomplete_details"] = {"reason": "max_output_tokens"}
        return found

    # A stream

    def begin(self, streams: Sequence[OutputStream]) -> bytes:
        """The response, without output."""
        created = self._event("response.created", response=self._response("in_progress", []))
        return created + self._event("response.in_progress", response=self._response("in_progress", []))

    def piece(self, at: int, output: RequestOutput) -> bytes:
        """What is new."""
        return b"".join(self._events(self._parts.add(change)) for change in self._changes.of(output))

    def _events(self, changes: Iterable[PartChange], status: str = "completed") -> bytes:
        """The events of parts.

        Args:
            status: of those that are closed.
        """
        events = b""
        for event, part, text in changes:
            is_text = part.kind is PartKind.TEXT
            if event is PartEvent.OPENED:
                self._items.append(_item(part, "in_progress"))
                events += self._event("response.output_item.added", output_index=part.index, item=self._items[-1])
                if is_text:
                    events += self._item_event("response.content_part.added", content_index=0, part=_part(""))
                continue
            of_text: dict[str, Any] = {} if part.kind is PartKind.CALL else {"content_index": 0}
            of_text |= {"logprobs": []} if is_text else {}
            if event is PartEvent.EXTENDED:
                events += self._item_event(f"response.{TEXTS[part.kind]}.delta", delta=text, **of_text)
                continue
            of_text["arguments" if part.kind is PartKind.CALL else "text"] = part.text
            of_text |= {"name": part.name} if part.kind is PartKind.CALL else {}
            events += self._item_event(f"response.{TEXTS[part.kind]}.done", **of_text)
            if is_text:
                events += self._item_event("response.content_part.done", content_index=0, part=_part(part.text))
            self._items[-1] = _item(part, status, self._items[-1])
            events += self._event("response.output_item.done", output_index=part.index, item=self._items[-1])
        return events

    def _item_event(self, kind: str, **more: Any) -> bytes:
        """An event of the last item."""
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The end of the output, and the response."""
        output = outputs[0]
        status = "incomplete" if output.finish_reason == "length" else "completed"
        events = self._events(self._parts.end(len(output.token_ids)), status)
        return events + self._event(f"response.{status}", response=self._response(status, self._items, output))

    def failed(self, failure: HttpError) -> bytes:
        """The error."""
        return self._event("error", code=failure.code, message=failure.message, param=failure.param)

    # A whole response

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response."""
        output = outputs[0]
        (change,) = whole(output, self._tools.is_single)
        status = "incomplete" if output.finish_reason == "length" else "completed"
        self._parts.whole(change)
        parts = self._parts.parts
        items = [_item(part, status if part is parts[-1] else "completed") for part in parts]
        return self._response(status, items, output)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item(part: AnswerPart, status: str, begun: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An item of the output.

    Args:
        status: of the item; "in_progress": it has no text yet.
        begun: the item as it was begun, whose ids it keeps; None: it has new ones.
    """
    is_begun, begun = status == "in_progress", begun or {}
    if part.kind is PartKind.CALL:
        ids = {"id": begun.get("id") or new_id("fc_"), "call_id": begun.get("call_id") or new_id("call_")}
        return ids | {"type": "function_call", "name": part.name, "arguments": part.text, "status": status}
    if part.kind is PartKind.REASONING:
        content = [] if is_begun else [{"type": "reasoning_text", "text": part.text}]
        own = {"id": begun.get("id") or new_id("rs_"), "type": "reasoning", "content": content}
        return own | {"summary": [], "status": status}
    content = [] if is_begun else [_part(part.text)]
    ids = {"id": begun.get("id") or new_id("msg_")}
    return ids | {"type": "message", "role": "assistant", "status": status, "content": content}


def _usage(output: RequestOutput) -> dict[str, Any]:
    usage = output.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.written_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
