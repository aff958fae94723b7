"""Reading copies from the files of a store, and checking them."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid.errors import HybridError
from hybrid.tiers.index import Place
from hybrid.tiers.segment import checksum
from hybrid.tiers.store import Store
from hybrid.tiers.tier import Contents, Name


@dataclass(frozen=True, slots=True)
class Wanted:
    """A copy that is to be read: its name, and where it is."""

    name: Name
    file: str
    origin: str
    place: Place


class WrongCopyError(HybridError):
    """A copy on disk is not what was written."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__("a copy on disk is damaged")
        self.wanted: Wanted = wanted


def read_copies(store: Store, wanted: list[Wanted]) -> list[Contents]:
    """Read copies, and check them.

    Raises:
        WrongCopyError: one is not what was written.
        OSError, EOFError: one cannot be read.
    """
    found: list[Contents] = []
    for want in wanted:
        span = want.place.span
        contents = bytearray(span.num_bytes)
        store.get_into(want.file, span.start, memoryview(contents))
        if checksum(want.origin, want.name, want.place.text, contents) != span.checksum:
            raise WrongCopyError(want)
        found.append(contents)
    return found
