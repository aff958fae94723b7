"""Options that a request may have, in vLLM's `SamplingParams.extra_args`, or `vllm_xargs` over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid.checks import shown
from hybrid.errors import ArgumentError
from hybrid.hints import NO_HINTS, Hints, hints_of, merged, note_ignored, session_of

MAX_PRIORITY = 16

MAX_PIN = 7 * 86400.0
"""Seconds of the longest pin."""

PREFIX = "hybrid_"

HINTS = ("release", "expect_resume", "end_session")
"""Hints that have an option of their own; a pin is `hybrid_pin`."""

KNOWN = (
    "hybrid_pin",
    "hybrid_key",
    "hybrid_priority",
    "hybrid_hold",
    "hybrid_release",
    "hybrid_expect_resume",
    "hybrid_end_session",
)


class RequestOptions(NamedTuple):
    """Options of a request.

    Attributes:
        pin: seconds for which its last state is not evicted; 0: ends the pin of that key; None: nothing is pinned.
        key: name of the pin. A later one of the same name takes its place; "": the request's own.
        priority: each step makes its states worth twice as much, up to `MAX_PRIORITY`.
        hold: seconds for which what is cached of it when it comes is not evicted while it waits, at most; None: it is
            evicted as if it had not come.
        pin_tokens: how many of its tokens are pinned; None: all.
        hints: what is known of what it will have left.
        session: the session that it belongs to; None: none.
    """

    pin: float | None = None
    key: str = ""
    priority: int = 0
    hold: float | None = None
    pin_tokens: int | None = None
    hints: Hints = NO_HINTS
    session: tuple[str, str] | None = None


PLAIN = RequestOptions()


def options_of(request: Any) -> RequestOptions:
    """The options of a request of vLLM.

    Raises:
        ArgumentError: one is not known, or has no such value.
    """
    params = request.sampling_params
    given = params.extra_args if params is not None else None
    options = own_options(given) if isinstance(given, Mapping) else PLAIN
    return with_hints(options, request)


def with_hints(options: RequestOptions, request: Any) -> RequestOptions:
    """Options with what the request's envelope of hints and its session say: `Request.kv_hints` and `session_id`, which
    vLLM has from 0.32 on. A pin of its own counts more than one of the envelope; its name is the session's."""
    session = session_of(getattr(request, "session_id", None))
    if session is not None:
        options = options._replace(session=(str(getattr(request, "cache_salt", None) or ""), session))
    envelope = getattr(request, "kv_hints", None)
    if envelope is not None:
        found, ignored = hints_of(envelope)
        note_ignored(ignored)
        options = options._replace(hints=merged(found, options.hints))
        if options.pin is None and found.retain is not None:
            options = options._replace(pin=min(found.retain, MAX_PIN), pin_tokens=found.retain_tokens)
    if options.pin is not None and not options.key and options.session is not None:
        options = options._replace(key="/".join(options.session))
    return options


def own_options(given: Mapping[Any, Any]) -> RequestOptions:
    """The options among the extra arguments of a request.

    Raises:
        ArgumentError: one is not known, or has no such value.
    """
    if not any(str(name).startswith(PREFIX) for name in given):
        return PLAIN
    unknown = [name for name in given if str(name).startswith(PREFIX) and name not in KNOWN]
    if unknown:
        raise ArgumentError(f"extra_args has {shown(unknown[0])}, which is not known; known are {', '.join(KNOWN)}")
    pin, key, priority = given.get("hybrid_pin"), given.get("hybrid_key", ""), given.get("hybrid_priority", 0)
    hold = given.get("hybrid_hold")
    for name, seconds in (("hybrid_pin", pin), ("hybrid_hold", hold)):
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and 0 <= seconds <= MAX_PIN):
            raise ArgumentError(f"extra_args: {name} must be seconds from 0 to {MAX_PIN:.0f}, got {shown(seconds)}")
    if not isinstance(key, str):
        raise ArgumentError(f"extra_args: hybrid_key must be a text, got {shown(key)}")
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= MAX_PRIORITY:
        raise ArgumentError(f"extra_args: hybrid_priority must be 0 to {MAX_PRIORITY}, got {shown(priority)}")
    named = {name: given[f"{PREFIX}{name}"] for name in HINTS if f"{PREFIX}{name}" in given}
    named |= {name: bool(value) for name, value in named.items() if name != "expect_resume" and value in (0, 1)}
    return RequestOptions(pin, key, priority, hold, hints=Hints(**named) if named else NO_HINTS)
