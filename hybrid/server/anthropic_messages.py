"""Anthropic's messages: from its bodies to what a chat template is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hybrid.prompts.encode import Message
from hybrid.server.body import LongData
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields
from hybrid.server.openai_messages import image_from
from hybrid.server.records import Digests
from hybrid.server.tools import Tools, checked_tools, read_function


@dataclass
class AnthropicPrompt:
    """What of a body makes the prompt.

    Attributes:
        messages: for the chat template.
        tools: of the request.
        options: of the chat template.
        structured: the form of the answer; None: any.
        system, turns: as they were sent, to find what has changed since another request.
        tools_ttl: of a breakpoint among the tools, which stands at the end of the first message; None: there is none.
        thinks: whether the model is to think; None: as its chat template has it.
        shows_thinking: thinking blocks of the answer have their texts.
    """

    messages: list[Message] = field(default_factory=list)
    tools: Tools = field(default_factory=Tools)
    options: dict[str, Any] = field(default_factory=dict)
    structured: dict[str, Any] | None = None
    system: Any = None
    turns: list[Any] = field(default_factory=list)
    tools_ttl: str | None = None
    thinks: bool | None = None
    shows_thinking: bool = True

    def digests(self, model: str | None) -> Digests:
        """Digests of its parts.

        Args:
            model: that computes it: an adapter, or None.
        """
        return Digests.of(model, self.system, self.tools.functions, self.turns)


def read_prompt(fields: Fields, template: str) -> AnthropicPrompt:
    """Read what of a body makes the prompt.

    Args:
        template: the source of the model's chat template.

    Raises:
        HttpError: something cannot be used.
    """
    found = AnthropicPrompt(options={"split_special_tokens": True})
    found.system = fields.take("system")
    if found.system is not None:
        found.messages.append({"role": "system", "content": _system(found.system, fields.path("system"))})
    found.turns = fields.array("messages") or []
    if not found.turns:
        raise fields.refuse("messages", "a list of at least one message", None)
    for number, value in enumerate(found.turns):
        found.messages += _messages(Fields(value, f"{fields.path('messages')}[{number}]"))
    if found.messages[-1]["role"] == "assistant":
        found.options["continue_final_message"] = True
    found.tools, found.tools_ttl = _tools(fields, template)
    found.options |= found.tools.in_prompt
    _read_thinking(fields, found)
    config = fields.nested("output_config")
    if config is not None:
        form = config.nested("format")
        config.never(effort="this model has none")
        config.close()
        if form is not None:
            form.one_of("type", ("json_schema",), "json_schema")
            schema = form.dictionary("schema")
            if schema is None:
                raise form.refuse("schema", "a JSON schema", None)
            form.close()
            found.structured = {"json_schema": schema}
    for message, ttl in ((found.messages[0], found.tools_ttl), (found.messages[-1], cache_control(fields))):
        if ttl is not None:
            message["cache_control"] = {"ttl": ttl}
    return found


def cache_control(fields: Fields) -> str | None:
    """The time to live of a breakpoint; None: there is none.

    Raises:
        HttpError: it is not as described.
    """
    control = fields.nested("cache_control")
    if control is None:
        return None
    control.one_of("type", ("ephemeral",), "ephemeral")
    ttl = control.one_of("ttl", ("5m", "1h"), "5m")
    control.close()
    return ttl


def _read_thinking(fields: Fields, found: AnthropicPrompt) -> None:
    thinking = fields.nested("thinking")
    if thinking is None:
        return
    kind = thinking.one_of("type", ("enabled", "disabled", "adaptive"), "disabled")
    if thinking.integer("budget_tokens", 1) is not None and kind == "enabled":
        text = "thinking.budget_tokens is not supported: max_tokens counts thinking and answer; leave it out"
        raise HttpError(400, text, "thinking.budget_tokens", "unsupported_parameter")
    found.shows_thinking = thinking.one_of("display", ("summarized", "omitted"), "summarized") != "omitted"
    thinking.close()
    found.thinks = kind != "disabled"


def _system(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise HttpError(400, f"{where} must be a text or a list of text blocks", where, "invalid_type")
    parts = []
    for number, item in enumerate(value):
        block = Fields(item, f"{where}[{number}]")
        block.one_of("type", ("text",), "text")
        parts.append(_text(block))
        block.close()
    return parts


def _text(block: Fields) -> dict[str, Any]:
    text = block.text("text")
    if text is None:
        raise block.refuse("text", "a text", None)
    block.ignore("citations")
    ttl = cache_control(block)
    return {"type": "text", "text": text} | ({"cache_control": {"ttl": ttl}} if ttl is not None else {})


def _messages(fields: Fields) -> list[Message]:
    """The template's messages of one of Anthropic's: each result of a tool is one of its own."""
    role = fields.one_of("role", ("user", "assistant", "system"), "")
    if not role:
        raise fields.refuse("role", "'user' or 'assistant'", None)
    content, where = fields.take("content"), fields.path("content")
    fields.close()
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise HttpError(400, f"{where} must be a text or a list of blocks", where, "invalid_type")
    results: list[Message] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thought: list[str] = []
    ttl: str | None = None  # of a breakpoint that is not at a text: it stands at the end of the message
    for number, item in enumerate(content):
        block = Fields(item, f"{where}[{number}]")
        kind = block.text("type")
        if kind != "text" and (own := cache_control(block)) is not None:
            ttl = own
        if kind == "text":
            parts.append(_text(block))
        elif kind == "image" and role == "user":
            parts.append(_image(block))
        elif kind == "tool_result" and role == "user":
            results.append(_tool_result(block))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_tool_use(block))
        elif kind == "thinking" and role == "assistant":
            thought.append(block.text("thinking") or "")
            block.ignore("signature")  # of thinking that another server would check
        else:
            kinds = "'text', 'image' or 'tool_result'" if role == "user" else "'text', 'thinking' or 'tool_use'"
            raise block.refuse("type", kinds, kind)
        block.close()
    if role != "assistant":
        made = results + ([{"role": role, "content": parts}] if parts else [])
        if ttl is not None:
            made[-1]["cache_control"] = {"ttl": ttl}
        return made
    message: Message = {"role": role, "content": parts or None}
    if not parts and not calls:
        message["content"] = ""
    if calls:
        message["tool_calls"] = calls
    if thought:
        message["reasoning_content"] = "".join(thought)
    if ttl is not None:
        message["cache_control"] = {"ttl": ttl}
    return [message]


def _image(block: Fields) -> dict[str, Any]:
    source = block.nested("source")
    if source is None:
        raise block.refuse("source", "{'type': 'base64', 'media_type': ..., 'data': ...}", None)
    kind, data = source.text("type"), source.take("data")
    source.ignore("media_type")
    if kind != "base64" or not isinstance(data, str | LongData):
        raise source.refuse("type", "'base64': this server opens no addresses and keeps no files", kind)
    source.close()
    return {"type": "image", "image": image_from(data, source.path("data"))}


def _tool_use(block: Fields) -> dict[str, Any]:
    name, given = block.text("name"), block.dictionary("input")
    call: dict[str, Any] = {"type": "function", "function": {"name": name or "", "arguments": given or {}}}
    if not name:
        raise block.refuse("name", "a text", name)
    if (call_id := block.text("id")) is not None:
        call["id"] = call_id
    block.ignore("caller")
    return call


def _tool_result(block: Fields) -> Message:
    call = block.text("tool_use_id")
    content = block.take("content")
    failed = block.boolean("is_error")
    if isinstance(content, list):
        texts = []
        for number, item in enumerate(content):
            part = Fields(item, f"{block.path('content')}[{number}]")
            if part.text("type") != "text":
                raise part.refuse("type", "'text': a tool's result is text on this server", item)
            texts.append(_text(part)["text"])
            part.close()
        content = "".join(texts)
    elif content is not None and not isinstance(content, str):
        raise block.refuse("content", "a text or a list of text blocks", content)
    text = content or ""
    message: Message = {"role": "tool", "content": f"Error: {text}" if failed else text}
    return message | ({"tool_call_id": call} if call is not None else {})


def _tools(fields: Fields, template: str) -> tuple[Tools, str | None]:
    functions = []
    ttl: str | None = None
    for number, value in enumerate(fields.array("tools") or ()):
        tool = Fields(value, f"{fields.path('tools')}[{number}]")
        tool.one_of("type", ("custom",), "custom")
        functions.append(read_function(tool, "input_schema"))
        ttl = cache_control(tool) or ttl
        tool.close()
    wanted = fields.nested("tool_choice")
    kind, name, is_single = ("auto" if functions else "none"), None, False
    if wanted is not None:
        kind = wanted.one_of("type", ("auto", "any", "tool", "none"), "auto")
        name = wanted.text("name") if kind == "tool" else None
        is_single = wanted.boolean("disable_parallel_tool_use")
        wanted.close()
    choice = {"any": "required", "tool": "named"}.get(kind, kind)
    return checked_tools(functions, choice, name, template, is_single), ttl
