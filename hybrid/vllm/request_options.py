"""Options that a request may have, in vLLM's `SamplingParams.extra_args`, or `vllm_xargs` over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hybrid.checks import shown
from hybrid.errors import ArgumentError

MAX_PRIORITY = 16

MAX_PIN = 7 * 86400.0
"""Seconds of the longest pin."""

PREFIX = "hybrid_"

KNOWN = ("hybrid_pin", "hybrid_key", "hybrid_priority", "hybrid_hold")


class RequestOptions(NamedTuple):
    """Options of a request.

    Attributes:
        pin: seconds for which its last state is not evicted; 0: ends the pin of that key; None: nothing is pinned.
        key: name of the pin. A later one of the same name takes its place; "": the request's own.
        priority: each step makes its states worth twice as much, up to `MAX_PRIORITY`.
        hold: seconds for which what is cached of it when it comes is not evicted while it waits, at most; None: it is
            evicted as if it had not come.
    """

    pin: float | None = None
    key: str = ""
    priority: int = 0
    hold: float | None = None


PLAIN = RequestOptions()


def options_of(request: Any) -> RequestOptions:
    """The options of a request of vLLM.

    Raises:
        ArgumentError: one is not known, or has no such value.
    """
    params = request.sampling_params
    given = params.extra_args if params is not None else None
    if not isinstance(given, Mapping) or not any(str(name).startswith(PREFIX) for name in given):
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
    return RequestOptions(pin, key, priority, hold)
