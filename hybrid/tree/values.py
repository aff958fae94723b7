"""The values that stand for pages and checkpoints of a tree: ours, or those of pools of the caller's own; and who sees
what a tree is about to let go of.

A tree never looks at what identifies a page or a checkpoint. An engine with its own allocators can therefore hand over
values of any kind, such as index tensors on a device: they are kept, cut and returned as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

PageValues = Any
"""Values of consecutive pages: an `array` of page ids, or a container of the caller's own with a length and slices,
which grows with `extend`, loses pages from its end with `del values[n:]`, and moves them with `move_end(n, into)`."""

SlotValue = Any
"""The identity of a checkpoint: a slot id, or any object but None."""


page_ids: Callable[..., array[int]] = partial(array, "i")
"""Makes a container of page ids. One is made for each node: no function of Python's own runs for it."""


def move_end(values: PageValues, start: int, into: PageValues) -> None:
    """Move the values of the pages from `start` on, which are some, to the end of others."""
    if isinstance(values, array):
        into.extend(values[start:])
        del values[start:]
    else:
        values.move_end(start, into)


class Leaving(Protocol):
    """Sees what is about to be evicted, while the tree still has it. Must not raise, and must not change the tree. Its
    argument is a `hybrid.tree.node.Node`."""

    def checkpoint(self, node: Any) -> None:
        """The checkpoint of a node is about to be evicted."""
        ...

    def pages(self, node: Any, num_kept: int) -> None:
        """The pages of a node after the first `num_kept` are about to be evicted."""
        ...


class Watcher(Leaving, Protocol):
    """Sees what is inserted, too, once the tree has it. Must not raise, and must not change the tree."""

    def inserted(self, node: Any, num_existing: int, adopted: bool) -> None:
        """A node, which ends where the insert did, has got the pages after the first `num_existing` tokens, where it is
        longer, and a checkpoint, if it was `adopted`."""
        ...
