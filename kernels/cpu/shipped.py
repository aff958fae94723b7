"""Code that comes with the package: a file for each level of CPUs, with all functions for all kinds of numbers.

With it a process needs no Numba. A file belongs to the sources that it was compiled from, and is used whole or not at
all, so that sources that were changed never run with it.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from hybrid.kernels.cpu import kept
from hybrid.kernels.cpu.target import level_of_this_cpu

FOLDER: Path = kept.SOURCES / "levels"


@lru_cache
def code() -> Mapping[str, bytes]:
    """The code for this CPU, by the symbols of functions; empty: there is none, or it is of other sources."""
    level = level_of_this_cpu()
    if level is None:
        return {}
    content = kept.read(file_of(level), kept.sources(), FOLDER)
    if content is None:
        return {}
    head, _, rest = content.partition(b"\n")
    return {symbol: rest[first:last] for symbol, (first, last) in json.loads(head).items()}


def write(level: str, codes: Mapping[str, bytes], folder: Path) -> None:
    """Write the file of a level."""
    places, rest = {}, b""
    for symbol, own in sorted(codes.items()):
        places[symbol] = len(rest), len(rest) + len(own)
        rest += own
    kept.write(file_of(level), kept.sources(), json.dumps(places).encode() + b"\n" + rest, folder)


def file_of(level: str) -> str:
    """The name of its file."""
    return f"x86-64-{level}.code"
