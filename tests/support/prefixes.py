"""Prefixes of made-up pages, changes of who has them, and names that are counted."""

from __future__ import annotations

from collections.abc import Iterator

from hybrid.events import Change
from hybrid.key import names_after
from hybrid.tree.names import Chain

PAGE = 4


def names_of(*path: int) -> list[bytes]:
    """Digests of the pages of a path: each page is a number, and a digest stands for all before it."""
    return [bytes(f"{hash(path[: at + 1]) & 0xFFFFFFFFFFFFFFFF:016x}", "ascii") for at in range(len(path))]


def pages(names: list[bytes], born: bool = True) -> Change:
    return Change(born, "pages", b"".join(names), len(names) * PAGE)


def checkpoint(names: list[bytes], born: bool = True, tier: str = "device") -> Change:
    return Change(born, "checkpoint", names[-1], len(names) * PAGE, tier)


def noted_in(named: list[bytes]) -> Chain:
    """What names prefixes of a tree, and notes each name that it computes."""

    def chain(last: bytes, ids: bytes | bytearray, page_bytes: int, start: int) -> Iterator[bytes]:
        for name in names_after(last, ids, page_bytes, start):
            named.append(name)
            yield name

    return chain
