"""The decoded tokens of a step whose drafts form trees: as the linear layers compute them, and what attention sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid.engine.step import Part


def unroll(parts: Sequence[Part]) -> tuple[list[int], list[int], tuple[list[int], list[int]]]:
    """The steps of the linear layers, as `hybrid.batch.Unrolled` and `Batch.copies` have them.

    Args:
        parts: all that decode.

    Returns:
        The decoded token that each step computes, for each decoded token its first step, and slots from which keys and
        values are copied with those where they go.
    """
    steps: list[int] = []
    places: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    for part in parts:
        row = len(places)
        own = [row, *(row + 1 + at for path in part.paths for at in path)]
        places += [len(steps) + own.index(each) for each in range(row, row + part.num_rows)]
        steps += own
        if part.branches is not None:
            for source, target in part.branches.copies(part.lease.block_table):
                sources.append(source)
                targets.append(target)
    return steps, places, (sources, targets)


def tables_of_drafts(parts: Sequence[Part]) -> Iterator[tuple[int, Sequence[int]]]:
    """(row among the decoded tokens, page ids) of the drafts that form trees."""
    row = 0
    for part in parts:
        if part.branches is not None:
            yield from ((row + 1 + at, part.table(at)) for at in range(part.num_drafts))
        row += part.num_rows
