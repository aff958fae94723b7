"""The values of arguments, checked as they are read: a wrong one ends the command with exit status 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from hybrid.checks import DTYPE_NAMES
from hybrid.errors import ArgumentError

OWN_DTYPE = (
    "the checkpoint's on a GPU, and on a CPU where it is bfloat16 and the CPU multiplies that faster, else float32"
)
"""The type that an engine runs a model in, unless it is given."""


def add_dtype(parser: argparse.ArgumentParser, default: str | None = None, *, otherwise: str = OWN_DTYPE) -> None:
    """The argument `--dtype`: the type that a model runs in.

    Args:
        default: None: no type, which is what `otherwise` says.
        otherwise: for the help.
    """
    text = f"type that the model runs in (default: {default or otherwise})"
    parser.add_argument("--dtype", default=default, choices=DTYPE_NAMES, help=text)


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an argument that is an integer in `[low, high]`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if low <= value <= high:
            return value
        raise argparse.ArgumentTypeError(f"it must be an integer from {low} to {high}; got {text!r:.100}")

    return parse


def seconds(text: str) -> float:
    """The type of an argument that is a duration."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 < value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"it must be a positive number of seconds, such as 20 or 0.5; got {text!r:.100}")


def check_encoding(arguments: Sequence[str]) -> None:
    """Check that arguments are texts: bytes of the command line that are not UTF-8 arrive as lone surrogates.

    Raises:
        ArgumentError: one is not.
    """
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = argument.encode("utf-8", "surrogateescape")
            raise ArgumentError(
                f"argument {number} is not UTF-8 at character {error.start}: {shown!r:.100}; give texts in UTF-8"
            ) from None
