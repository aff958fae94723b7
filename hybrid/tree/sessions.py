"""Sessions of requests: the states that they leave in a tree, so that hints can name them together."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

from hybrid.hints import Hints
from hybrid.tree.node import Node
from hybrid.tree.tree import Tree

MAX_SESSIONS = 4096
"""Sessions that are remembered; of more, the one that was heard of longest ago is forgotten."""

MAX_STATES = 64
"""States of a session that are remembered, the latest."""

MAX_SAMPLES = 64
"""Moments from which the rate of requests is taken."""


class Sessions:
    """The sessions of a tree, by their names.

    Args:
        tree: the states are in it.
        clock: seconds.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree = tree
        self._clock = clock
        self._states: OrderedDict[Hashable, dict[Node, None]] = OrderedDict()
        self._moments: deque[tuple[float, int]] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._states)

    def end_request(self, session: Hashable | None, end: Node | None, hints: Hints, tenant: str | None = None) -> None:
        """Record that a request has ended, of a session or of none, and its pages end with a node: do what its hints
        say.

        Args:
            tenant: whose states these are.
        """
        self._moments.append((self._clock(), self._tree.candidates.now))
        if session is not None and end is not None:
            self._note(session, end)
        if hints.end_session and session is not None:
            self.end_session(session, tenant)
        elif end is None or end.parent is None:
            return
        elif hints.release or hints.end_session:
            self._tree.release(end, tenant)
        elif hints.expect_resume is not None:
            self._expect(end, hints.expect_resume)

    def expect(self, session: Hashable, seconds: float) -> bool:
        """Record that a session continues after a number of seconds. Returns whether it is known."""
        for node in reversed(self._states.get(session, {})):
            if node.parent is not None and node.slot is not None:
                self._expect(node, seconds)
                return True
        return False

    def end_session(self, session: Hashable, tenant: str | None = None) -> bool:
        """Record that a session has ended: what only it has is evicted first. Returns whether it was known."""
        states = self._states.pop(session, None)
        for node in reversed(states or {}):
            if node.parent is not None:
                self._tree.release(node, tenant)
        return states is not None

    def _note(self, session: Hashable, end: Node) -> None:
        """Remember where a request ended, and the states above, which are left when its end has gone."""
        states = self._states.setdefault(session, {})
        self._states.move_to_end(session)
        above: list[Node] = [end]
        while (node := above[-1].checkpoint_above()) is not None and node not in states and len(above) < MAX_STATES:
            above.append(node)
        for node in reversed(above):
            states.pop(node, None)
            states[node] = None
        for node in [node for node in states if node.parent is None]:
            del states[node]
        while len(states) > MAX_STATES:
            del states[next(iter(states))]
        if len(self._states) > MAX_SESSIONS:
            self._states.popitem(last=False)

    def _expect(self, end: Node, seconds: float) -> None:
        node = end if end.slot is not None else end.checkpoint_above()
        if node is None:
            return
        (first, before), (last, now) = self._moments[0], self._moments[-1]
        rate = (now - before) / (last - first) if last > first else 1.0  # requests per second
        self._tree.expect(node, int(min(seconds * rate, 1e9)))
