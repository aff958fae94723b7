"""Which pages the checkpoints of a tier need: a tree of prefixes by their names, a page each.

A page is kept for the checkpoints at its end and below it. Of a checkpoint it is known how many pages only it needs:
what is free when it goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator


class Prefix:
    """A prefix that ends with a page, and that some checkpoint needs.

    Attributes:
        name: its digest.
        above: the prefix that is a page shorter; None: there is none.
        below: those that are a page longer, in the order in which they came.
        has_checkpoint: the tier has a checkpoint at its end.
        num_alone: pages that only this checkpoint needs; None: to be counted.
    """

    __slots__ = ("above", "below", "has_checkpoint", "name", "num_alone")

    def __init__(self, name: bytes) -> None:
        self.name: bytes = name
        self.above: Prefix | None = None
        self.below: dict[Prefix, None] = {}
        self.has_checkpoint: bool = False
        self.num_alone: int | None = None


class Needs:
    """The prefixes that checkpoints need. Adding one takes as long as it has pages that are not needed yet, whatever
    the length of its prefix."""

    def __init__(self) -> None:
        self._prefixes: dict[bytes, Prefix] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._prefixes

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, path: Iterable[bytes]) -> bytes | None:
        """A checkpoint needs pages.

        Args:
            path: their names, the last first. Read as far as it is not known.

        Returns:
            The name of the last one that was needed before; None: there is none.
        """
        return self._join(None, path)

    def missing(self, path: Iterable[bytes]) -> list[bytes]:
        """The names of a path up to the first that is needed already, that one included."""
        names = []
        for name in path:
            names.append(name)
            if name in self._prefixes:
                break
        return names

    def extend(self, name: bytes, path: Iterable[bytes]) -> None:
        """The pages before a page that is needed are known now, if they were not.

        Args:
            path: their names, the last first.
        """
        prefix = self._prefixes.get(name)
        if prefix is not None and prefix.above is None:
            self._join(prefix, path)
            self._recount(prefix, None)

    def _join(self, lower: Prefix | None, path: Iterable[bytes]) -> bytes | None:
        """Add the pages of a path up to the first that is known, and return the name of that one.

        Args:
            lower: what is below the path; None: the path begins with the page at whose end a checkpoint is.
        """
        top, added = lower, set[bytes]()
        for name in path:
            prefix = self._prefixes.get(name)
            is_known = prefix is not None
            if prefix is None:
                prefix = self._prefixes[name] = Prefix(name)
                added.add(name)
            elif name in added or (top is not None and self._is_above(top, prefix)):
                return None  # the path of a damaged manifest leads back to itself
            if lower is None:
                prefix.has_checkpoint, prefix.num_alone = True, None
            else:
                lower.above = prefix
                prefix.below[lower] = None
            if is_known:
                self._recount(prefix, lower)
                return name
            lower = prefix
        return None

    @staticmethod
    def _is_above(upper: Prefix, prefix: Prefix | None) -> bool:
        while prefix is not None and prefix is not upper:
            prefix = prefix.above
        return prefix is upper

    def shorten(self, name: bytes) -> tuple[bytes, bytes | None] | None:
        """A checkpoint does not need its last page any more, and is one of the page before it from now on. Returns the
        names of that page and of the one before it, if nothing else needs it; otherwise, and where there is no page
        before it or that has a checkpoint, the checkpoint is gone."""
        prefix = self._prefixes[name]
        if prefix.below:
            self.remove(name)
            return None
        above = prefix.above
        del self._prefixes[name]
        if above is None:
            return name, None
        del above.below[prefix]
        has_checkpoint, above.has_checkpoint = above.has_checkpoint, True
        self._recount(above, None)
        return name, None if has_checkpoint else above.name

    def remove(self, name: bytes) -> list[tuple[bytes, bytes | None]]:
        """A checkpoint is gone. Returns the names of the pages that nothing needs any more, each with that of the page
        before it, the last first."""
        prefix: Prefix | None = self._prefixes[name]
        assert prefix is not None
        prefix.has_checkpoint, prefix.num_alone = False, None
        gone: list[tuple[bytes, bytes | None]] = []
        while prefix is not None and not prefix.below and not prefix.has_checkpoint:
            del self._prefixes[prefix.name]
            above = prefix.above
            gone.append((prefix.name, above.name if above is not None else None))
            if above is not None:
                del above.below[prefix]
            prefix = above
        if prefix is not None:
            self._recount(prefix, None)
        return gone

    def has_checkpoint(self, name: bytes) -> bool:
        """Whether there is a checkpoint at the end of a prefix."""
        return name in self._prefixes and self._prefixes[name].has_checkpoint

    def upward(self, name: bytes) -> Iterator[bytes]:
        """The names of a page that is needed and of those before it, as far as they are known."""
        prefix = self._prefixes.get(name)
        while prefix is not None:
            yield prefix.name
            prefix = prefix.above

    def best(self, name: bytes, value: Callable[[bytes], float], known: dict[bytes, float]) -> float:
        """The highest value of the checkpoints that need a page, of those where requests continued last; minus
        infinity: there is none.

        Args:
            value: of a checkpoint.
            known: what was found before, of other pages of the same moment. This page and those below it are added.
        """
        prefix, way = self._prefixes.get(name), list[Prefix]()
        while prefix is not None and prefix.name not in known:
            way.append(prefix)
            prefix = next(reversed(prefix.below), None)
        found = known[prefix.name] if prefix is not None else -math.inf
        for one in reversed(way):
            if one.has_checkpoint:
                found = max(found, value(one.name))
            known[one.name] = found
        return found

    def alone(self, name: bytes) -> Iterator[bytes]:
        """The pages that only a checkpoint needs, the last first."""
        prefix: Prefix | None = self._prefixes[name]
        if prefix is None or prefix.below:
            return
        yield prefix.name
        prefix = prefix.above
        while prefix is not None and not prefix.has_checkpoint and len(prefix.below) == 1:
            yield prefix.name
            prefix = prefix.above

    def num_alone(self, name: bytes) -> int:
        """How many pages only a checkpoint needs."""
        prefix = self._prefixes[name]
        if prefix.num_alone is None:
            prefix.num_alone = sum(1 for _ in self.alone(name))
        return prefix.num_alone

    def checkpoints(self, name: bytes) -> list[bytes]:
        """The checkpoints that need a page."""
        found, todo = [], [self._prefixes[name]]
        while todo:
            prefix = todo.pop()
            if prefix.has_checkpoint:
                found.append(prefix.name)
            todo.extend(prefix.below)
        return found

    def _recount(self, prefix: Prefix, other: Prefix | None) -> None:
        """What is below a prefix has changed, or that it has a checkpoint: others may need more or fewer pages alone.

        Args:
            other: what came below it, of which nothing is counted yet.
        """
        prefix.num_alone = None
        for lower in [*prefix.below] if len(prefix.below) <= 2 else ():
            below: Prefix | None = lower if lower is not other else None
            while below is not None and not below.has_checkpoint and len(below.below) == 1:
                (below,) = below.below
            if below is not None:
                below.num_alone = None

    def clear(self) -> None:
        """Nothing is needed."""
        self._prefixes.clear()

    def violations(self, checkpoints: Iterable[bytes]) -> list[str]:
        """What is wrong with it, for the audit.

        Args:
            checkpoints: those that there are.
        """
        wrong = []
        for name, prefix in self._prefixes.items():
            if not prefix.below and not prefix.has_checkpoint:
                wrong.append("a page is kept that nothing needs")
            if prefix.above is not None and prefix not in prefix.above.below:
                wrong.append("a page is not known to the page before it")
            if prefix.num_alone is not None and prefix.num_alone != sum(1 for _ in self.alone(name)):
                wrong.append(f"a checkpoint counts {prefix.num_alone} pages of its own, which is wrong")
        if {name for name, prefix in self._prefixes.items() if prefix.has_checkpoint} != set(checkpoints):
            wrong.append("the checkpoints are not those whose pages are needed")
        return wrong
