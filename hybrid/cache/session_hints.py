"""Hints about what requests leave in a cache: pins, and the order of eviction."""

from __future__ import annotations

from collections import OrderedDict

from hybrid.cache.pins import Pin, Pins
from hybrid.errors import MemoryBudgetError
from hybrid.hints import Hints
from hybrid.key import Key
from hybrid.tree.sessions import MAX_SESSIONS, Sessions
from hybrid.tree.tree import Tree

Name = tuple[str, str, str]
"""Of a session: its tenant, its namespace, and what the client calls it."""


class SessionHints:
    """What hints do in a cache. Of a session there is one pin: the latest.

    Args:
        tree: holds what requests have left.
        pins: those of the cache, with their limits.

    Attributes:
        num_refused: pins that hints asked for and that the limits did not let.
    """

    def __init__(self, tree: Tree, pins: Pins) -> None:
        self._tree = tree
        self._pins = pins
        self._sessions = Sessions(tree)
        self._pinned: OrderedDict[Name, Pin] = OrderedDict()
        self.num_refused: int = 0

    def ended(self, key: Key, hints: Hints, session: str | None, tenant: str | None) -> None:
        """Record what a request has left, and knows of it."""
        tenant = key.namespace if tenant is None else tenant
        name = (tenant, key.namespace, session) if session is not None else None
        if name is not None and (hints.release or hints.end_session):
            self._unpin(name)
        found = self._tree.peek(key, len(key))
        end = found.deepest
        if end is not None and end.end > found.num_page_tokens:
            end = None  # others continue in the middle of its edge
        self._sessions.end_request(name, end, hints, tenant)
        if hints.retain:
            try:
                pin = self._pins.add(key, hints.retain, hints.retain_tokens)
            except MemoryBudgetError:
                self.num_refused += 1
                return
            if name is not None and pin is not None:
                self._unpin(name)
                self._pinned[name] = pin
                if len(self._pinned) > MAX_SESSIONS:
                    self._pinned.popitem(last=False)

    def of_session(self, session: str, hints: Hints, namespace: str, tenant: str | None) -> bool:
        """Record when a session continues, or that it has ended. Returns whether it is known."""
        tenant = namespace if tenant is None else tenant
        name = tenant, namespace, session
        if hints.end_session or hints.release:
            self._unpin(name)
            return self._sessions.end_session(name, tenant)
        return hints.expect_resume is not None and self._sessions.expect(name, hints.expect_resume)

    def _unpin(self, name: Name) -> None:
        if (pin := self._pinned.pop(name, None)) is not None:
            self._pins.remove(pin)
