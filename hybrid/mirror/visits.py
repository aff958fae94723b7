"""Requests of another engine: what is known of those that have come, and the order of those that wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from hybrid.key import Key
from hybrid.tree.node import Kind, Match, Node, NodeUsage, PrefixHistory
from hybrid.tree.paths import Path
from hybrid.tree.tree import Tree
from hybrid.units import anchors

MAX_VISITS = 8192
"""Requests that are remembered; of more the one that came first is forgotten, as if it came again."""

MAX_KEYS = 32
"""Requests whose keys are kept, so that they are not made again: about as many as one batch of prefills."""


class StateOrigin(NamedTuple):
    """A state that is about to be inserted.

    Attributes:
        kind: why it was put there.
        turn: number of turn ends before it on its path.
        past: usage of a state that was there before, or of this one if it is not kept; None: there is none.
        path: what the policy knows its request by; None: times are not known.
    """

    kind: Kind
    turn: int
    past: NodeUsage | None
    path: Path | None = None


class Expected(NamedTuple):
    """An insert that was announced.

    Attributes:
        params: its parameters.
        arrival: what the state is.
        below: a node on its path that its request keeps locked; None: it has none, or none is known.
        key: of its request, as far as it was kept: what is inserted is its beginning, or longer.
    """

    params: Any
    arrival: StateOrigin
    below: Node | None = None
    key: Key | None = None


PLAIN = StateOrigin(Kind.TURN_END, 0, None)


class Visits:
    """The requests of a tree, by their ids.

    Args:
        tree: is matched, once per request so that it counts.
        learns: the policy learns from why states are there and what has become of them. Where it does not, all states
            are of one kind.

    Attributes:
        seconds: when the latest request came, as far as times are known.
    """

    def __init__(self, tree: Tree, learns: bool) -> None:
        self._tree = tree
        self._learns = learns
        self._histories: dict[str, tuple[PrefixHistory, Path | None]] = {}
        self._keys: dict[str, tuple[Sequence[int], Key]] = {}
        self._anchors: dict[str, list[int]] = {}
        self._expected: Expected | None = None
        self.seconds: float = 0.0

    def match(self, rid: str, key: Key, limit: int, seconds: float | None = None) -> tuple[Match, int]:
        """Find the longest cached prefix of a request, and how much of it the tree has had. Counts when it is the
        request's first.

        Args:
            seconds: when the request came; None: times are not known.
        """
        known = self._histories.get(rid)
        if known is not None:
            return self._tree.peek(key, limit), known[0].num_tokens
        self._tree.use_clock(None if seconds is None else lambda: seconds)
        self.seconds = self.seconds if seconds is None else seconds
        found = self._tree.match(key, limit)
        history = self._tree.recall(key, found, limit)
        self._histories[rid] = history, self._tree.report_misses(found, history, limit)
        if len(self._histories) > MAX_VISITS:
            del self._histories[next(iter(self._histories))]
        return found, history.num_tokens

    def place_anchors(self, rid: str, hit: int, end: int) -> None:
        """Place the anchors of a request between its hit and its prompt's end."""
        self._anchors[rid] = [*anchors(hit, end, self._tree.anchor_spacing(end))]
        if len(self._anchors) > MAX_VISITS:
            del self._anchors[next(iter(self._anchors))]

    def passes_anchor(self, rid: str, num_tokens: int) -> bool:
        """Tell, once, whether the pass of a request that ends here is the first that comes as far as an anchor: its
        state is that anchor, for which no pass has to end."""
        places = self._anchors.get(rid)
        if not places or places[0] > num_tokens:
            return False
        self._anchors[rid] = [place for place in places if place > num_tokens]
        return True

    def keep_key(self, rid: str, ids: Sequence[int], key: Key) -> None:
        """Keep the key that was made of a request's ids."""
        self._keys.pop(rid, None)
        self._keys[rid] = ids, key
        if len(self._keys) > MAX_KEYS:
            del self._keys[next(iter(self._keys))]

    def key(self, rid: str, ids: Sequence[int]) -> Key | None:
        """Return the key that was kept of a request's ids, if these are the same object: SGLang only adds to it, so
        that the key is their beginning. None if it is another."""
        kept = self._keys.get(rid)
        return kept[1] if kept is not None and kept[0] is ids else None

    def __contains__(self, rid: str) -> bool:
        """Tell whether a request has been matched."""
        return rid in self._histories

    def end_request(self, rid: str, num_answered: int) -> None:
        """Record that a request has ended, with an answer of `num_answered` tokens; 0: it has none."""
        known = self._histories.pop(rid, None)
        if known is not None and num_answered:
            self._tree.ended(known[1], num_answered)
        self._keys.pop(rid, None)
        self._anchors.pop(rid, None)

    def describe(self, rid: str, num_tokens: int, kind: Kind) -> StateOrigin:
        """Describe a state of a request at a position."""
        if not self._learns:
            return PLAIN
        known = self._histories.get(rid)
        if known is None:
            return StateOrigin(kind, 0, None)
        history, path = known
        return StateOrigin(kind, history.turn, history.gone.get(num_tokens), path)

    def admit(
        self, key: Key, num_tokens: int, origin: StateOrigin, tails_help: bool, priority: int = 0
    ) -> tuple[StateOrigin, bool]:
        """Tell whether a state is worth more than what would be evicted for it.

        Args:
            key: of its request, at least as far as the state.
            num_tokens: position of the state.
            tails_help: pages without a state can be evicted instead.
            priority: of its request.

        Returns:
            The state, with a usage if it is not to be kept; and whether it is.
        """
        tree = self._tree
        found = tree.peek(key, num_tokens)
        usage = origin.past or tree.new_usage(origin.kind, origin.turn, origin.path)
        tree.stored_for(usage, key.namespace, priority)
        only_its_own = found.num_page_tokens < num_tokens
        if found.num_tokens < num_tokens and tree.admits(usage, num_tokens, found.num_tokens, only_its_own, tails_help):
            return origin, True
        return origin._replace(past=usage), False

    def expect_insert(self, coming: Expected) -> None:
        """Record what the next insert is."""
        self._expected = coming

    def take_expected(self, params: Any) -> Expected | None:
        """Return the insert that was announced with these parameters, once. None if there was none."""
        expected, self._expected = self._expected, None
        return expected if expected is not None and expected.params is params else None

    def arrival(self, key: Key) -> StateOrigin:
        """Describe the state of an insert that was not announced, as far as the tree itself can tell."""
        if not self._learns:
            return PLAIN
        found = self._tree.peek(key, len(key))
        history = self._tree.recall(key, found, len(key))
        self._tree.report_misses(found, history, len(key))
        kind = Kind.BRANCH if found.num_page_tokens == len(key) else Kind.TURN_END
        return StateOrigin(kind, history.turn, history.gone.get(len(key)))


def dfs_weight_order(nodes: Sequence[Node | None]) -> list[int]:
    """Order a walk through the tree, at every node first to where most requests are; None is the empty prefix.

    Returns:
        Places in `nodes`: requests of one node come one after the other, those of a node after all below it.
    """
    paths = []
    weights: Counter[int] = Counter()
    for node in nodes:
        path = []
        while node is not None and node.parent is not None:
            path.append(node)
            weights[id(node)] += 1
            node = node.parent
        paths.append(path[::-1])
    first = {id(node): place for place, path in reversed([*enumerate(paths)]) for node in path}

    def rank(place: int) -> list[tuple[float, int]]:
        steps: list[tuple[float, int]] = [(-weights[id(node)], first[id(node)]) for node in paths[place]]
        return [*steps, (1.0, 0)]  # after all below

    return sorted(range(len(nodes)), key=rank)
