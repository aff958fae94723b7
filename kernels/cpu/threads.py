"""Work of one operation, shared among as many threads as torch uses."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import torch


def share(work: Callable[[int, int], None], count: int, multiple: int, most: int) -> None:
    """Call `work(first, last)` for ranges that make up `[0, count)`.

    Args:
        work: releases the interpreter's lock. What it does with an element does not depend on the range.
        multiple: ranges begin at multiples of it.
        most: ranges that the work is worth.
    """
    blocks = -(-count // multiple)
    threads = min(torch.get_num_threads(), blocks, most)
    if threads <= 1:
        work(0, count)
        return
    bounds = [min(count, blocks * at // threads * multiple) for at in range(threads + 1)]
    pool = _pool(torch.get_num_threads() - 1)
    waiting = [pool.submit(work, first, last) for first, last in pairwise(bounds[1:])]
    work(bounds[0], bounds[1])
    for future in waiting:
        future.result()


@lru_cache(maxsize=1)
def _pool(size: int) -> ThreadPoolExecutor:
    """The threads besides the caller's."""
    return ThreadPoolExecutor(size, thread_name_prefix="hybrid-cpu")
