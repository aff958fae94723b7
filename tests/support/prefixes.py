"""Prefixes of made-up pages, and changes of who has them."""

from __future__ import annotations

from hybrid.events import Change

PAGE = 4


def names_of(*path: int) -> list[bytes]:
    """Digests of the pages of a path: each page is a number, and a digest stands for all before it."""
    return [bytes(f"{hash(path[: at + 1]) & 0xFFFFFFFFFFFFFFFF:016x}", "ascii") for at in range(len(path))]


def pages(names: list[bytes], born: bool = True) -> Change:
    return Change(born, "pages", b"".join(names), len(names) * PAGE)


def checkpoint(names: list[bytes], born: bool = True, tier: str = "device") -> Change:
    return Change(born, "checkpoint", names[-1], len(names) * PAGE, tier)
