"""Hints: what a client knows of the future of what its request leaves in a cache.

One vocabulary for the engine, its server, vLLM and SGLang. The envelope of these two (`kv_hints`) carries actions by
name. Those that have a meaning elsewhere keep it: `kv.retain` as vLLM has it (`directives`) or as Dynamo has it
(`priority`, `ttl_seconds`), and Dynamo's `kv.evict`. Two are ours: `hybrid.expect_resume` and `hybrid.end_session`. A
hint is advice: it changes the order of eviction, and pins within the limits of all pins; what is wrong or unknown is
ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybrid import checks
from hybrid.checks import BOOLEANS, Rule, integers, numbers, optional
from hybrid.errors import ArgumentError

MAX_SECONDS = 30 * 86400.0
"""The longest time that a hint may name, but for `math.inf`."""

MAX_ACTIONS = 16
"""Actions of an envelope that are read."""

MAX_SESSION_CHARACTERS = 256

MAX_NOTED = 64
"""Names of actions that are logged as ignored."""

SECONDS = f"seconds from 0 to {MAX_SECONDS:.0f}"

RULES: dict[str, Rule[Any]] = {
    "retain": optional(numbers(SECONDS, lambda seconds: 0 <= seconds <= MAX_SECONDS or seconds == math.inf)),
    "retain_tokens": optional(integers(1)),
    "release": BOOLEANS,
    "expect_resume": optional(numbers(SECONDS, lambda seconds: 0 <= seconds <= MAX_SECONDS)),
    "end_session": BOOLEANS,
}
"""What the fields of hints may be."""

logger = logging.getLogger(__name__)


@checks.known_names
@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a client knows of what its request leaves in the cache, when it ends.

    Args:
        retain: seconds for which it is not evicted (`math.inf`: as long as the limits of pins let it); None: it is
            not pinned.
        retain_tokens: how many of its first tokens; None: all, the answer included.
        release: it is not needed any more: what no other request continues from is evicted first.
        expect_resume: seconds until a request continues from it; None: not known. Policies that learn rank by it.
        end_session: its session has ended: all that the requests of this session left is released.

    Raises:
        ArgumentError: a number is out of range.
    """

    retain: float | None = None
    retain_tokens: int | None = None
    release: bool = False
    expect_resume: float | None = None
    end_session: bool = False

    def __post_init__(self) -> None:
        checks.settings(self, **RULES)


NO_HINTS = Hints()


def check_hints(call: str, hints: object) -> None:
    """Check that hints are hints. Raises ArgumentError: they are not."""
    if not isinstance(hints, Hints):
        raise ArgumentError(f"{call}: hints must be hybrid.Hints(...); got {checks.shown(hints)}")


class Understood(NamedTuple):
    """The hints of an envelope.

    Attributes:
        hints: those that are known.
        ignored: the names of actions that are not, or whose payload is not as it must be.
    """

    hints: Hints
    ignored: tuple[str, ...] = ()


def merged(hints: Hints, own: Hints) -> Hints:
    """Hints, and others that count more where both say something."""
    return Hints(
        retain=own.retain if own.retain is not None else hints.retain,
        retain_tokens=own.retain_tokens if own.retain is not None else hints.retain_tokens,
        release=own.release or hints.release,
        expect_resume=own.expect_resume if own.expect_resume is not None else hints.expect_resume,
        end_session=own.end_session or hints.end_session,
    )


def session_of(name: object) -> str | None:
    """The name of a session, as a client has given it; None: there is none, or it is not one."""
    return name if isinstance(name, str) and 0 < len(name) <= MAX_SESSION_CHARACTERS else None


def hints_of(envelope: Any) -> Understood:
    """The hints of an envelope: vLLM's or SGLang's `KvHintsEnvelope`, or the same as JSON.

    Never raises: what cannot be used is named among `ignored`.
    """
    actions = _field(envelope, "actions")
    given: dict[str, Any] = {}
    ignored = []
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list | tuple) else ():
        name = str(_field(action, "action_type"))[:64]
        try:
            found = _hints_of_action(name, _field(action, "payload") or {})
            Hints(**found)  # each by itself, so that one that is wrong spoils no other
        except (ArgumentError, TypeError, ValueError, AttributeError, KeyError, OverflowError):
            ignored.append(name)
            continue
        given |= found
    return Understood(Hints(**given) if given else NO_HINTS, tuple(ignored))


_noted: set[str] = set()


def note_ignored(names: Iterable[str]) -> None:
    """Log the names of actions that were ignored, each once."""
    for name in names:
        if name not in _noted and len(_noted) < MAX_NOTED:
            _noted.add(name)
            logger.warning("hybrid: the hint %r is not known, or its payload is wrong: it is ignored", name)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _hints_of_action(name: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """What an action says, as arguments of `Hints`.

    Raises:
        ValueError: it is not known. Others: its payload is not as it must be.
    """
    if name == "kv.retain":
        return _retained(payload)
    if name == "kv.evict":
        return {"release": True, "end_session": True}
    if name == "hybrid.expect_resume":
        return {"expect_resume": payload["seconds"]}
    if name == "hybrid.end_session":
        return {"end_session": True}
    raise ValueError(name)


def _retained(payload: Mapping[str, Any]) -> dict[str, Any]:
    """`kv.retain`: of its directives the one that reaches furthest, since only a prefix can be kept; or one priority
    and `ttl_seconds` for all. Priority 0 releases."""
    directives = payload.get("directives")
    if directives is None:
        seconds = payload.get("ttl_seconds", payload.get("duration"))
        directives = [{"priority": payload.get("priority", 1), "duration": seconds}]
    found: dict[str, Any] = {}
    furthest = -1.0
    for one in directives:
        priority, seconds = checks.integer("kv.retain: priority", one["priority"], 0, 100), one.get("duration")
        end = math.inf if one.get("covers_output") or one.get("end") is None else float(one["end"])
        if priority == 0:
            found["release"] = True
        elif end > furthest:
            furthest = end
            found["retain"] = math.inf if seconds is None else seconds
            found["retain_tokens"] = None if end == math.inf else int(end)
    return found
