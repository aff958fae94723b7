"""Where to put checkpoints along a prompt. All positions are multiples of the grid."""

from collections.abc import Iterator

SPACING = 2**0.5
"""Spare checkpoints lie this factor apart: a first branch anywhere computes at most the last 30 % of its way again."""

FIRST_SPARE = 4
"""The first spare checkpoint lies after so many grid steps: before it there is little to spare."""


def prompt_end(num_tokens: int, grid: int) -> int:
    """The last position that the same prompt, asked again, can use: at least one token is left to compute."""
    return (num_tokens - 1) // grid * grid


def geometric(start: int, end: int, grid: int) -> Iterator[int]:
    """Positions in `(start, end]`, ever further apart: for branches that nobody has seen yet, while memory is free."""
    step = float(FIRST_SPARE)
    while (position := round(step) * grid) <= end:
        if position > start:
            yield position
        step *= SPACING
