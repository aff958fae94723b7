"""Sizes: numbers of bytes as text, the bytes of a page and of a checkpoint, and rounding up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isqrt

from hybrid.checks import Rule, RuleError, Value, integers
from hybrid.errors import ArgumentError

UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}{more}": 1024**power for power, letter in enumerate("KMGT", 1) for more in ("", "I", "IB")},
}
"""Bytes of a unit, in capitals: 512MB is 512 * 1000**2, and 512M, 512Mi and 512MiB are 512 * 1024**2."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The costs of pages and checkpoints. Eviction policies weigh what they save against it.

    Attributes:
        page: bytes of a page.
        checkpoint: bytes of a checkpoint as it is stored.
        memory: bytes of the memory that holds them; 0: not known.
        are_apart: pages and checkpoints have memories of their own: what is evicted of one is ranked by what it frees
            of that one.
    """

    page: int = 1
    checkpoint: int = 24
    memory: int = 0
    are_apart: bool = False

    @property
    def anchor_spacing(self) -> int:
        """Pages between two anchors of a path: `sqrt(2 * n * s)` where `n` pages fill the memory and a checkpoint is as
        large as `s` pages; 0 where the memory is not known, and there are none.

        Anchors that are `g` pages apart take up to `n * s / g`, and a path that is trimmed to one of them loses `g / 2`
        too many on average: together that is least here.
        """
        return isqrt(2 * self.memory * self.checkpoint) // self.page if self.page else 0


def anchors(start: int, end: int, spacing: int) -> range:
    """Positions in `(start, end)` to which a long path may be trimmed: `spacing` tokens from one to the next, none
    within half of that of the end.

    Args:
        start: a multiple of the grid.
        spacing: likewise (`Tree.anchor_spacing`); 0: there are none.
    """
    return range(start + spacing, end - spacing // 2, spacing) if spacing else range(0)


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def parse_memory(text: str) -> int | float:
    """Parse an amount of memory.

    Returns:
        A number of bytes ("512MiB", "2 GB", "512M", "1000000"), or a fraction up to 1, a float ("50%", "0.5", "1.0").

    Raises:
        ArgumentError: the text is neither.
    """
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*(%|[A-Za-z]*)\s*", text)
    number, unit = (float(match[1]), match[2].upper()) if match is not None else (0.0, "")
    if match is not None and number > 0:
        is_fraction = unit == "%" or (unit == "" and "." in match[1])
        fraction = number / 100 if unit == "%" else number
        if is_fraction and fraction <= 1:
            return fraction
        if not is_fraction and unit in UNITS and number * UNITS[unit] >= 1:
            return int(match[1]) if unit == "" else int(number * UNITS[unit])
    raise ArgumentError(
        f"not an amount of memory: {text!r:.100}; write bytes as '512MiB', '4GiB' or '2GB', or a part of what is free "
        "as '50%'"
    )


def amounts(expected: str, rule: Rule[Value]) -> Rule[Value]:
    """Amounts of memory that a rule accepts, and texts of such.

    Args:
        expected: in words.
    """

    def parsed(value: object) -> object:
        try:
            return parse_memory(value) if isinstance(value, str) else value
        except ArgumentError as error:
            raise RuleError(f"is {error}") from None

    return Rule(expected, lambda value: rule.accepts(parsed(value)), lambda value: rule.read(parsed(value)))


BYTES: Rule[int] = amounts("a number of bytes, or a string such as '16GiB'", integers(1))
"""Numbers of bytes, and texts such as "16GiB"."""


def format_bytes(count: int) -> str:
    """A number of bytes for people: "49.5 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
