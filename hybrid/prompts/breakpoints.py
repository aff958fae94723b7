"""Places in chat messages up to which a prompt is to be cached: found in its tokens.

A message, or a part of its content, may have `cache_control`, as in Anthropic's API, or `prompt_cache_breakpoint`, as
in OpenAI's. The place is the end of its text, in what the chat template makes of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.checks import shown
from hybrid.errors import PromptError
from hybrid.prompts.messages import Message

NAMES = ("cache_control", "prompt_cache_breakpoint")
"""Keys of a message, or of a part of one, at whose end there is a breakpoint."""

DEFAULT_TTL = 300.0
"""Seconds without a use after which a breakpoint ends, where it does not say."""

MAX_BREAKPOINTS = 16
"""Breakpoints of one prompt, at most."""

BREAK = "\ue002"
"""Stands at a breakpoint while its place is looked for: a character that Unicode leaves to private use."""

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """A position up to which a prompt is to be cached.

    Attributes:
        num_tokens: of the prompt before it.
        ttl: seconds without a use after which it is not protected from eviction any more.
    """

    num_tokens: int
    ttl: float


def taken_out(messages: Sequence[Message]) -> tuple[list[Message], list[Message], list[float]]:
    """Messages without breakpoints, messages with a mark at each of them, and the time to live of each.

    Raises:
        PromptError: there are too many, or one has no known form.
    """
    plain: list[Message] = []
    marked: list[Message] = []
    ttls: list[float] = []
    for message in messages:
        own = _ttl(message)
        message = _without(message)
        content = message.get("content")
        marks = content
        if isinstance(content, list):
            ends = [_ttl(part) for part in content]
            content = [_without(part) for part in content]
            marks = [_marked(part, end) for part, end in zip(content, ends, strict=True)]
            ttls += [end for end in ends if end is not None]
            if own is not None:
                marks = [*marks, {"type": "text", "text": BREAK}]
        elif own is not None:
            marks = f"{content or ''}{BREAK}"
        ttls += [own] if own is not None else []
        plain.append({**message, "content": content} if "content" in message else message)
        marked.append({**message, "content": marks} if "content" in message or own is not None else message)
    if len(ttls) > MAX_BREAKPOINTS:
        raise PromptError(f"a prompt has up to {MAX_BREAKPOINTS} breakpoints; got {len(ttls)}")
    return plain, marked, ttls


def are_in(messages: Any) -> bool:
    """Tell whether any of these messages has a breakpoint."""
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            return False
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(name in part for part in (message, *parts) if isinstance(part, dict) for name in NAMES):
            return True
    return False


def up_to(text: str, number: int) -> str:
    """A rendered text up to its mark of this number, from 0 on; without marks."""
    pieces = text.split(BREAK)
    return "".join(pieces[: number + 1])


def _without(part: Any) -> Any:
    if isinstance(part, dict) and any(name in part for name in NAMES):
        return {key: value for key, value in part.items() if key not in NAMES}
    return part


def _marked(part: Any, ttl: float | None) -> Any:
    if ttl is None:
        return part
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise PromptError(f"a breakpoint stands at the end of a text, or of a message; got {shown(part)}")
    return {**part, "text": part["text"] + BREAK}


def _ttl(part: Any) -> float | None:
    """The time to live of a breakpoint, or None if it has none."""
    if not isinstance(part, dict):
        return None
    found = next((part[name] for name in NAMES if part.get(name)), None)
    if found is None:
        return None
    ttl = found.get("ttl", DEFAULT_TTL) if isinstance(found, Mapping) else DEFAULT_TTL
    if isinstance(ttl, str) and (match := re.fullmatch(r"([1-9]\d{0,5})([smhd])", ttl)):
        return float(int(match[1]) * SECONDS[match[2]])
    if isinstance(ttl, int | float) and not isinstance(ttl, bool) and 0 < ttl < math.inf:
        return float(ttl)
    raise PromptError(
        f"the ttl of a breakpoint is a text such as '5m' or '1h', or a number of seconds; got {shown(ttl)}"
    )
