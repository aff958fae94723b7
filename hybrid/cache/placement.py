"""The placement of checkpoints along a prompt. All positions are multiples of the grid."""

from collections.abc import Collection, Iterator

from hybrid.key import Key
from hybrid.tree.node import Kind
from hybrid.units import anchors

SPACING = 2**0.5
"""Spare checkpoints are this factor apart: a first branch anywhere recomputes at most the last 30 % of its prefix."""

FIRST_SPARE = 4
"""The first spare checkpoint is after this many grid steps: before it there is little to save."""

MIN_PASS = 64
"""Tokens before the first spare checkpoint, at least, where each costs a pass of its own."""

DENSE_ABOVE = 0.5
"""While more than this part of the memory is free, there is a spare checkpoint at every multiple of the grid."""


def prompt_end(num_tokens: int, grid: int) -> int:
    """The last position that the same prompt can use when it is repeated: at least one token is left to compute."""
    return (num_tokens - 1) // grid * grid


def of_prompt(
    names: Collection[str],
    prefill_end: int,
    grid: int,
    *,
    branching_len: int | None,
    shared: Collection[int],
    declared: Collection[int],
    is_replay: bool,
    hit: int = 0,
    spacing: int = 0,
    key: Key | None = None,
) -> dict[int, Kind]:
    """Positions of a prompt at which a checkpoint is worth evicting another for, and why: in order, anchors last.

    Args:
        names: the placements to use (`CacheConfig.placement`).
        prefill_end: end of what is computed as prompt.
        branching_len: where the request leaves what is cached, beyond its hit; None: nowhere.
        shared: positions that waiting requests share with this one.
        declared: positions that the request itself names; negative ones count from the prompt's end.
        is_replay: the prompt is a finished turn that is computed again, to be shared.
        hit: tokens of the prompt that are not computed.
        spacing: tokens between two anchors (`Tree.anchor_spacing`); 0: there are none.
        key: a position inside one of its units moves to the grid before the unit; None: there are no units.
    """
    wanted: dict[int, Kind] = {}
    if "prompt_end" in names and not is_replay:
        wanted[prompt_end(prefill_end, grid)] = Kind.PROMPT_END
    if prefill_end % grid == 0 and ("turn_end" if is_replay else "prompt_end") in names:
        wanted[prefill_end] = Kind.TURN_END if is_replay else Kind.PROMPT_END  # where the next turn continues
    if branching_len is not None and "branch" in names:
        wanted[branching_len] = Kind.BRANCH
    wanted.update(dict.fromkeys(shared, Kind.BRANCH))
    for position in declared:
        wanted[(position if position >= 0 else prefill_end + position) // grid * grid] = Kind.USER
    if key is not None and key.units:
        wanted = {key.whole(position, grid): kind for position, kind in wanted.items()}
    ordered = {position: wanted[position] for position in sorted(wanted) if position > 0}
    if "anchor" in names and not is_replay:
        for position in anchors(hit, prefill_end, spacing):
            if (whole := position if key is None else key.whole(position, grid)) > hit:
                ordered.setdefault(whole, Kind.ANCHOR)
    return ordered


def spare(start: int, end: int, grid: int, free: float) -> Iterator[int]:
    """Positions in `(start, end]` for branches to come: at every multiple of the grid while most of the memory is free,
    then at growing distances.

    Args:
        free: the part of the memory that is free.
    """
    if free > DENSE_ABOVE:
        yield from range((start // grid + 1) * grid, end + 1, grid)
        return
    step = float(FIRST_SPARE)
    while (position := round(step) * grid) <= end:
        if position > start:
            yield position
        step *= SPACING


def sparse(start: int, end: int, grid: int) -> Iterator[int]:
    """Spare positions where each costs a pass of its own: at doubling distances, in the first half of the prompt. A
    branch recomputes at most half of its prefix, and a few more passes cost little."""
    position = max(FIRST_SPARE * grid, MIN_PASS // grid * grid)
    while position <= end // 2:
        if position > start:
            yield position
        position *= 2
