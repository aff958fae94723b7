"""How much of an attention one program does, and into how many pieces keys are cut: plain arithmetic on sizes.

A tile's shape decides the last bits of what its rows get, so it follows from sizes that a caller can hold fixed, and
never from a measurement.
"""

from typing import NamedTuple

import torch
import triton

MIN_PIECE = 256
"""Keys below which another piece costs more than it gives; a multiple of every tile's keys."""
MAX_SPLITS = 128
MAX_DRAFTS = 8
"""New tokens per request up to which a batch counts as decoding."""
HOPPER_SHARED_MEMORY = 232448
"""Bytes of shared memory that a program may have on an H100 or H200."""

_LONG_PIECE = 2048
"""Keys above which a piece is worth cutting even where the device is busy: the batch may hold one long request."""
_LONG_SPLITS = 16


class Tile(NamedTuple):
    """The shape of one program's work.

    Attributes:
        rows: (token, head) pairs.
        keys: keys of a block.
        warps, stages: Triton's `num_warps` and `num_stages`.
        resident: how many such programs a multiprocessor holds at once.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


def choose_tile(
    num_tokens: int,
    num_requests: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    num_splits: int | None,
    shared_memory: int,
) -> Tile:
    """The tile for a batch, from its sizes alone.

    Args:
        group: query heads per KV head.
        shared_memory: bytes that a program may have.
    """
    decoding = num_splits != 1 and num_tokens <= MAX_DRAFTS * num_requests
    rows = triton.cdiv(num_tokens, num_requests) * group
    if decoding and (rows <= 16 or num_splits is not None or num_tokens == num_requests):
        return _decode_tile(group, head_dim, dtype.itemsize)
    few = rows <= 64 and num_splits is None
    return _extend_tile(few, head_dim, dtype.itemsize, shared_memory)


def packed_tile(tile: Tile, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile where keys and values are packed rows: they are unpacked in registers, which hold fewer of them."""
    if dtype.itemsize == 4:
        return tile
    if tile.rows <= 32:
        return tile._replace(keys=max(16, tile.keys // 2))
    return tile if head_dim <= 128 else Tile(64, 16, 8, 2, 1)


def _decode_tile(group: int, head_dim: int, size: int) -> Tile:
    """Few rows: the time goes into reading keys and values, so enough bytes must be on their way at any time."""
    rows = max(16, triton.next_power_of_2(group))
    width = head_dim * size
    if width <= 256:
        return Tile(rows, 64, 4, 3 if width > 128 else 4, 3)
    return Tile(rows, 32 if width <= 512 else 16, 4, 3, 3)


def _extend_tile(few: bool, head_dim: int, size: int, shared_memory: int) -> Tile:
    """Many rows: the time goes into the products, so the tile is as large as registers and shared memory allow."""
    if size == 4:
        return Tile(32, 32 if head_dim <= 128 else 16, 4, 2, 1)
    if shared_memory < HOPPER_SHARED_MEMORY:
        return Tile(128, 32, 8, 3, 1) if head_dim <= 128 else Tile(64, 32, 8, 3 if shared_memory > 102400 else 2, 1)
    if few:
        return Tile(64, 32, 4, 2, 2)
    return Tile(128, 64, 8, 3 if head_dim <= 128 else 2, 1)


def choose_splits(programs: int, slots: int, width: int, decoding: bool) -> int:
    """Pieces that keep a device busy for about two rounds.

    Args:
        programs: programs without a split.
        slots: programs that the device holds at once.
        width: keys that the longest request may have.
        decoding: whether tokens are few. Then a piece of the longest request is not left very long either: the others
            may be short. Where they are many, pieces are more to write, and only an idle device is worth it.
    """
    if decoding:
        wanted = max(2 * slots // programs, min(_LONG_SPLITS, width // _LONG_PIECE))
    else:
        wanted = 2 * slots // programs if programs < slots else 1
    return max(1, min(wanted, width // MIN_PIECE, MAX_SPLITS))
