"""Sizes: numbers of bytes as text, the bytes of a page and of a checkpoint, and rounding up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybrid.errors import ArgumentError

UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True, slots=True)
class Prices:
    """What pages and checkpoints cost. Eviction policies weigh what they save against it.

    Attributes:
        page: bytes of a page.
        checkpoint: bytes of a checkpoint as it is stored.
    """

    page: int = 1
    checkpoint: int = 24


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: "512MiB", "2 GB" or "1000000".

    Raises:
        ArgumentError: the text is not a number of bytes.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise ArgumentError(f"not an amount of memory: {text!r}; write it as '512MiB', '4GiB' or '2GB'")
    return int(float(match[1]) * UNITS[match[2].upper()])


def format_bytes(count: int) -> str:
    """A number of bytes for people: "49.5 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
