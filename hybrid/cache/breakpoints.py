"""Prefixes that prompts name, each pinned from the step that computes it until it was not used for its time to live."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hybrid.cache.pins import Pin, Pins
from hybrid.errors import MemoryBudgetError
from hybrid.key import Key
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree

MAX_PER_TENANT = 64
"""Breakpoints of one tenant; the one that was not used for longest goes before another one."""


@dataclass(frozen=True)
class _Held:
    """A breakpoint: its pin, whose it is, and the seconds that a use adds."""

    pin: Pin
    tenant: str
    ttl: float


class Breakpoints:
    """The breakpoints of a cache, those that were not used for longest first.

    Where no more can be pinned, the tenant with the most pinned tokens gives way, with its oldest.

    Args:
        tree: what is pinned.
        pins: hold the locks.
    """

    def __init__(self, tree: Tree, pins: Pins) -> None:
        self._tree = tree
        self._pins = pins
        self._held: dict[bytes, _Held] = {}  # by the names of the prefixes

    def __len__(self) -> int:
        return sum(held.pin in self._pins for held in self._held.values())

    def num_tokens(self) -> dict[str, int]:
        """Count the tokens of all breakpoints of each tenant."""
        sizes: dict[str, int] = {}
        for held in self._held.values():
            sizes[held.tenant] = sizes.get(held.tenant, 0) + held.pin.num_tokens * (held.pin in self._pins)
        return sizes

    def keep(self, key: Key, num_tokens: int, ttl: float, tenant: str) -> bool:
        """Pin the first `num_tokens` tokens of a key, or use them again. Returns whether they are pinned: there is a
        checkpoint, and room among the pins."""
        node = self._node(key, num_tokens)
        if node is None:
            return False
        if self._use(node, ttl):
            return True
        self._held = {name: held for name, held in self._held.items() if held.pin in self._pins}
        while sum(held.tenant == tenant for held in self._held.values()) >= MAX_PER_TENANT:
            self._end_oldest(tenant)
        while True:
            try:
                pin = self._pins.add(key, ttl, num_tokens)
            except MemoryBudgetError:
                if not self._held:
                    return False
                sizes = self.num_tokens()
                self._end_oldest(max(sizes, key=sizes.__getitem__))
                continue
            assert pin is not None
            self._held[self._tree.names.at(node, node.end)] = _Held(pin, tenant, ttl)
            return True

    def use(self, key: Key, num_tokens: int) -> None:
        """Record that a request resumes after the first `num_tokens` tokens of a key: if they are pinned, they stay for
        longer."""
        if self._held and (node := self._node(key, num_tokens)) is not None:
            self._use(node, 0.0)

    def _node(self, key: Key, num_tokens: int) -> Node | None:
        node = self._tree.peek(key, num_tokens).checkpoint
        return node if node is not None and node.end == num_tokens else None

    def _use(self, node: Node, ttl: float) -> bool:
        name = self._tree.names.at(node, node.end)
        held = self._held.get(name)
        if held is None or held.pin not in self._pins:
            return False
        del self._held[name]
        self._held[name] = held
        self._pins.renew(held.pin, time.monotonic() + max(ttl, held.ttl))
        return True

    def _end_oldest(self, tenant: str) -> None:
        name = next(name for name, held in self._held.items() if held.tenant == tenant)
        self._pins.remove(self._held.pop(name).pin)
