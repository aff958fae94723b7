"""What is known of requests while they run and for a while after: numbers and reasons, no text of any."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from hybrid.engine.output import RequestOutput
from hybrid.server.body import LongData
from hybrid.server.tenants import Caller


class Digests(NamedTuple):
    """Digests of what makes a prompt.

    Attributes:
        model, system, tools: of the adapter, the system prompt and the tools.
        messages: of each message.
    """

    model: bytes
    system: bytes
    tools: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def of(cls, model: str | None, system: Any, tools: Any, messages: Iterable[Any]) -> Digests:
        """The digests of these, as JSON has them."""
        return cls(_digest(model), _digest(system), _digest(tools), tuple(map(_digest, messages)))

    def changed(self, now: Digests) -> str | None:
        """Name the first field in which a later prompt differs; None: it continues this one."""
        for name in ("model", "tools", "system"):
            if getattr(self, name) != getattr(now, name):
                return name
        return None if now.messages[: len(self.messages)] == self.messages else "messages"


def _digest(value: Any) -> bytes:
    content = orjson.dumps(value, default=LongData.digest, option=orjson.OPT_PASSTHROUGH_DATACLASS)
    return blake2b(content, digest_size=16).digest()


MAX_ENDED = 1000
"""Ended requests that are remembered."""


@dataclass(eq=False)
class RequestRecord:
    """One request.

    Attributes:
        id: as its response has it.
        tenant: who sent it.
        path: that it was sent to.
        began: seconds since the epoch.
        output: its latest; None: it has none, or it ended.
        shown: its numbers when it ended.
        parts: digests of the parts of its prompt, to say what another one changed; None: its API does not ask.
    """

    id: str
    tenant: Caller
    path: str
    began: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    output: RequestOutput | None = None
    shown: dict[str, Any] | None = None
    parts: Digests | None = None

    def as_json(self) -> dict[str, Any]:
        """Its numbers, and why its hit was what it was."""
        if self.shown is not None:
            return self.shown
        output = self.output
        found: dict[str, Any] = {
            "id": self.id,
            "tenant": self.tenant.name,
            "path": self.path,
            "began": round(self.began, 3),
            "seconds": round(time.perf_counter() - self.clock, 4),
            "state": "waits" if output is None else "runs",
        }
        if output is None:
            return found
        usage = output.usage
        return found | {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "page_tokens": usage.page_tokens,
            "written_tokens": usage.written_tokens,
            "completion_tokens": usage.completion_tokens,
            "explain": str(output.explain),
            "time_to_first_token": output.time_to_first_token,
            "tokens_per_second": output.tokens_per_second,
        }


class Records:
    """The requests of a server.

    Attributes:
        counts: tokens and requests by (name of a tenant, what is counted).
    """

    def __init__(self) -> None:
        self._live: dict[str, RequestRecord] = {}
        self._ended: OrderedDict[str, RequestRecord] = OrderedDict()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, record: RequestRecord) -> None:
        """A request begins."""
        self._live[record.id] = record

    def end(self, record: RequestRecord, state: str, reason: str = "") -> None:
        """A request ends.

        Args:
            state: "stop", "length", "abort" or "error".
            reason: for one of the last two.
        """
        if self._live.pop(record.id, None) is None:
            return
        name = record.tenant.name
        shown = record.as_json()
        record.shown, record.output = {**shown, "state": state} | ({"reason": reason} if reason else {}), None
        self.counts[name, f"requests_{state}"] += 1
        for kind in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            self.counts[name, kind] += shown.get(kind, 0)
        self._ended[record.id] = record
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def find(self, request_id: str, tenant: Caller) -> RequestRecord | None:
        """A request of a tenant, by its id; None: there is none, or it is another tenant's."""
        record = self._live.get(request_id) or self._ended.get(request_id)
        return record if record is not None and is_visible(record, tenant) else None

    def live(self, tenant: Caller) -> Iterator[RequestRecord]:
        """Those under way that a tenant may see, oldest first."""
        return (record for record in self._live.values() if is_visible(record, tenant))

    def ended(self, tenant: Caller) -> Iterator[RequestRecord]:
        """Those that ended and that a tenant may see, latest first."""
        return (record for record in reversed(self._ended.values()) if is_visible(record, tenant))


def is_visible(record: RequestRecord, tenant: Caller) -> bool:
    """Tell whether a tenant may see a request."""
    return tenant.sees_all or record.tenant.name == tenant.name
