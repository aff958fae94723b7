"""Chat messages of OpenAI's API, as chat templates are given them."""

from __future__ import annotations

import binascii
import re
from typing import Any

from hybrid.checks import shown
from hybrid.prompts.encode import Message
from hybrid.server.body import LongData, decoded, has_long_data
from hybrid.server.errors import HttpError
from hybrid.server.fields import Fields

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of OpenAI's messages; templates know a developer as a system."""


def openai_messages(values: list[Any] | None, where: str, template: str) -> list[Message]:
    """Messages as a template takes them.

    Args:
        values: as they were sent.
        where: they are in the body.
        template: of the model's chats: a name that it does not read is refused. Reasoning and calls were sent by a
            server, and are taken back in any case.

    Raises:
        HttpError: one cannot be used.
    """
    if not values:
        raise HttpError(400, f"{where} must be a list of at least one message", where, "invalid_type")
    return [_message(Fields(value, f"{where}[{number}]"), template) for number, value in enumerate(values)]


def _message(fields: Fields, template: str) -> Message:
    role = fields.one_of("role", ROLES, "")
    if not role:
        raise fields.refuse("role", " or ".join(map(repr, ROLES)), None)
    found: Message = {"role": "system" if role == "developer" else role}
    found["content"] = _content(fields.take("content"), fields.path("content"))
    if role == "assistant":
        fields.ignore("annotations")
        if calls := fields.array("tool_calls"):
            found["tool_calls"] = [_call(call, f"{fields.path('tool_calls')}[{at}]") for at, call in enumerate(calls)]
        if (refusal := fields.text("refusal")) and not found["content"]:
            found["content"] = refusal
        thought = [text for name in ("reasoning_content", "reasoning") if (text := fields.text(name))]
        if thought:
            found["reasoning_content"] = thought[0]
        if found["content"] is None and not calls and (thought or calls is not None):  # an answer that was cut early
            found["content"] = ""
        fields.never(audio="send text", function_call="send tool_calls")
    if role == "tool":
        if (call := fields.text("tool_call_id")) is not None:
            found["tool_call_id"] = call
        if (name := fields.text("name")) is not None:
            found["name"] = name
    elif (name := fields.text("name")) is not None:
        _check_read(template, "name", fields)
        found["name"] = name
    if found["content"] is None and not found.get("tool_calls"):
        raise fields.refuse("content", "a text or a list of parts", None)
    fields.close()
    return found


def _call(value: Any, where: str) -> Any:
    """A call of a tool that the assistant has made, as it was sent."""
    call = Fields(value, where)
    call.one_of("type", ("function",), "function")
    call.text("id")
    function = call.nested("function")
    if function is None:
        raise call.refuse("function", "an object with name and arguments", None)
    if not function.text("name"):
        raise function.refuse("name", "a text", None)
    arguments = function.take("arguments")
    if not isinstance(arguments, str | dict | None) or has_long_data(arguments):
        raise function.refuse("arguments", "the text of a JSON object", arguments)
    function.check_json("arguments", arguments)
    return value


def _check_read(template: str, name: str, fields: Fields) -> None:
    if not re.search(rf"\b(messages?|msg|m)(\[[^\]]*\])?(\.{name}\b|\[['\"]{name}['\"]\])", template):
        text = f"{fields.path(name)}: this model's chat template does not read it; leave it out, or use the content"
        raise HttpError(400, text, fields.path(name), "unsupported_parameter")


def _content(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise HttpError(400, f"{where} must be a text or a list of parts; got {shown(value)}", where, "invalid_type")
    return [_part(Fields(part, f"{where}[{number}]")) for number, part in enumerate(value)]


def _part(fields: Fields) -> dict[str, Any]:
    kind = fields.one_of("type", ("text", "refusal", "image_url", "input_audio", "file"), "")
    if kind in ("text", "refusal"):
        text = fields.text(kind)
        if text is None:
            raise fields.refuse(kind, "a text", None)
        found: dict[str, Any] = {"type": "text", "text": text}
    elif kind == "image_url":
        image = fields.nested("image_url")
        if image is None:
            raise fields.refuse("image_url", "{'url': 'data:image/...;base64,...'}", None)
        image.ignore("detail")  # a hint about cost: images here have the size that they have
        found = {"type": "image", "image": image_of(image.take("url"), image.path("url"))}
        image.close()
    else:
        raise fields.refuse("type", "'text' or 'image_url': this server takes texts and images", kind or None)
    if (point := fields.nested("prompt_cache_breakpoint")) is not None:
        found["prompt_cache_breakpoint"] = {"ttl": point.one_of("ttl", ("5m", "30m", "1h", "12h", "24h"), "30m")}
        point.ignore("mode", "type")
        point.close()
    fields.close()
    return found


def image_of(url: Any, where: str) -> Any:
    """The image in a data URL. It is opened, and decoded where its prompt is encoded.

    Raises:
        HttpError: it is another kind of URL, or no image.
    """
    head, comma, data = url.partition(",") if isinstance(url, str | LongData) else ("", "", "")
    if not head.startswith("data:"):
        text = f"{where} must be a data URL, 'data:image/png;base64,...': this server opens no addresses"
        raise HttpError(400, text, where, "invalid_image_url")
    if not comma or not head.endswith(";base64"):
        raise HttpError(400, f"{where} must be base64: 'data:image/png;base64,...'", where, "invalid_image_url")
    return image_from(data, where)


def image_from(data: str | LongData, where: str) -> Any:
    """Open an image in base64; its pixels are not decoded.

    Raises:
        HttpError: it is no image of a known kind, or the extra `images` is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise HttpError(400, f"{where}: images need the extra 'images' on this server", where) from None
    try:
        return Image.open(decoded(data), formats=("PNG", "JPEG", "WEBP", "GIF"))
    except binascii.Error as error:
        raise HttpError(400, f"{where} is not base64: {error}", where, "invalid_image_url") from None
    except Exception as error:  # Pillow raises many kinds for what is no image
        reason = "" if isinstance(error, UnidentifiedImageError) else f": {error!s:.100}"
        text = f"{where} is not an image of PNG, JPEG, WebP or GIF{reason}"
        raise HttpError(400, text, where, "invalid_image") from None
