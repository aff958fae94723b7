"""Contents on their way from a GPU to the host.

What leaves the memory of a GPU is copied in a stream of its own:

* a copy waits for all that the GPU was given before, which may have written what is copied;
* what the GPU is given afterwards, which may write there, waits for the copy;
* the host waits for neither. It waits for contents before it reads them (`Outgoing.wait`); a restore does not, since
  it is given to the GPU after the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from hybrid.memory.arrivals import Copier, Copy, Mark
from hybrid.memory.digests import Contents


class Outgoing:
    """What is on its way from the memory of a device to the host.

    Args:
        copier: copies; None: nothing is ever on its way.
    """

    def __init__(self, copier: Copier | None = None) -> None:
        self._copier = copier
        self._under_way: deque[tuple[Contents, Mark]] = deque()

    def begin(self, parts: Sequence[Tensor]) -> Contents:
        """The bytes of parts of the memory, one after the other, on their way. The device may write there afterwards.
        When this raises, nothing is on its way.

        Args:
            parts: `[N]` uint8 each.
        """
        assert self._copier is not None
        self._drop_ended()
        sizes = [part.numel() for part in parts]
        target = self._copier.allocate(sum(sizes))
        self._copier.begin()
        try:
            copies = zip(target.split(sizes), parts, strict=True)
            mark = self._copier.copy([Copy(own, part) for own, part in copies])
        finally:
            self._copier.wait()
        contents = memoryview(target.numpy())  # type: ignore[arg-type]
        self._under_way.append((contents, mark))
        return contents

    def wait(self, contents: Contents) -> Contents:
        """The host waits for contents that `begin` has returned; others are there. Returns them."""
        self._drop_ended()
        for own, mark in self._under_way:
            if own is contents:
                mark.wait_on_host()
        return contents

    def _drop_ended(self) -> None:
        while self._under_way and self._under_way[0][1].has_ended:
            self._under_way.popleft()
