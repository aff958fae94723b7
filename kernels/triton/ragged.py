"""The cover of a packed batch by a grid of programs: which request, and which tile of it, is a program's.

The number of tiles of each request is known on the device only. A grid of `max_tiles` programs is large enough for any
batch of that number of tokens and requests; surplus programs find no request and end.
"""

import triton
import triton.language as tl

MIN_BATCH = 32
"""Up to this number of requests, and of captures, all batches run the same compiled code."""


def padded_batch(count: int) -> int:
    """The power of two for which a batch of this number of requests, or of captures, is compiled."""
    return max(triton.next_power_of_2(count), MIN_BATCH)


def max_tiles(num_rows: int, num_requests: int, tile: int) -> int:
    """Tiles that suffice for `num_rows` rows, however they are spread over the requests."""
    return num_rows // tile + num_requests


@triton.jit
def find_tile(cu_seqlens, num_requests, index, TILE: tl.constexpr, ROWS: tl.constexpr, REQUESTS: tl.constexpr):
    """The request and the tile of it that program `index` has.

    Args:
        cu_seqlens: `[num_requests + 1]` where each request's tokens begin.
        TILE: rows of a tile.
        ROWS: rows per token.
        REQUESTS: a power of two, at least `num_requests`.

    Returns:
        (request, tile); the request is `num_requests` or more when there is nothing to do.
    """
    at = tl.arange(0, REQUESTS)
    exists = at < num_requests
    start = tl.load(cu_seqlens + at, mask=exists, other=0)
    end = tl.load(cu_seqlens + at + 1, mask=exists, other=0)
    tiles = (((end - start) * ROWS + TILE - 1) // TILE).to(tl.int32)
    request = tl.sum((tl.cumsum(tiles, 0) <= index).to(tl.int32), 0)
    before = tl.sum(tl.where(at < request, tiles, 0), 0)
    return request, index - before
