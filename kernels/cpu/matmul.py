"""Matrix products of single rows, batch invariant by construction and as fast as the weight can be read.

Every output element is one chain of additions in the order of the inner dimension, whatever other rows and columns are
computed beside it: neither the number of rows, nor a row's place, nor its address matters. Several rows share one pass
over the weight: `SWEEP` rows of it at a time, `COLUMNS` wide, are read for all of them and stay in the first cache.

Numba compiles the loops when this module is first imported and keeps the code on disk; importing it without Numba
raises ImportError.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from numba import float32, int64, void
from torch import Tensor

SWEEP = 8
"""Steps of the inner dimension that are added up while an output is in a register. The loop is written out."""

COLUMNS = 512
"""Outputs of a row that are computed before the next ones."""

MIN_SHARED_PRODUCTS = 1 << 20
"""Multiplications below which a product is not worth a second thread."""


def can_multiply(weight: Tensor) -> bool:
    """Whether single rows can be multiplied with a weight `[out, in]`: fp32, on the CPU, stored by columns."""
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.t().is_contiguous()


def multiply_single_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """`x @ matrix` for rows of which each may be in any batch, with torch's number of threads.

    Args:
        x: `[rows, in]` fp32.
        matrix: `[in, out]` fp32, contiguous.

    Returns:
        `[rows, out]`.
    """
    output = x.new_empty(x.shape[0], matrix.shape[1])
    arrays = x.contiguous().numpy(), matrix.numpy(), output.numpy()

    def part(start: int, stop: int) -> None:
        _multiply(*arrays, start, stop)

    columns, threads = matrix.shape[1], torch.get_num_threads()
    blocks = -(-columns // COLUMNS)
    if threads == 1 or blocks == 1 or matrix.numel() * x.shape[0] < MIN_SHARED_PRODUCTS:
        part(0, columns)
        return output
    threads = min(threads, blocks)
    bounds = [min(columns, blocks * share // threads * COLUMNS) for share in range(threads + 1)]
    pool = _pool(torch.get_num_threads() - 1)
    waiting = [pool.submit(part, start, stop) for start, stop in pairwise(bounds[1:])]
    part(bounds[0], bounds[1])
    for future in waiting:
        future.result()
    return output


@lru_cache(maxsize=1)
def _pool(size: int) -> ThreadPoolExecutor:
    """The threads besides the caller's."""
    return ThreadPoolExecutor(size, thread_name_prefix="hybrid-matmul")


_matrix: Any = float32[:, ::1]

_compile: Any = numba.njit(
    void(_matrix, _matrix, _matrix, int64, int64),
    fastmath={"contract"},  # a product and its addition are rounded once: nothing else is rearranged
    error_model="numpy",
    nogil=True,
    cache=True,
)


@_compile
def _multiply(x, matrix, output, start, stop):  # type: ignore[no-untyped-def]
    """Write columns `[start, stop)` of `x @ matrix`; `start` is a multiple of COLUMNS."""
    rows, inner = x.shape
    whole = inner - inner % SWEEP
    for first in range(start, stop, COLUMNS):
        last = min(first + COLUMNS, stop)
        width = last - first  # slices, and indices from 0 on: only then are the loops compiled to vector code
        for row in range(rows):
            output[row, first:last] = np.float32(0)
        for k in range(0, whole, SWEEP):
            w0 = matrix[k, first:last]
            w1 = matrix[k + 1, first:last]
            w2 = matrix[k + 2, first:last]
            w3 = matrix[k + 3, first:last]
            w4 = matrix[k + 4, first:last]
            w5 = matrix[k + 5, first:last]
            w6 = matrix[k + 6, first:last]
            w7 = matrix[k + 7, first:last]
            for row in range(rows):
                y = output[row, first:last]
                x0, x1, x2, x3 = x[row, k], x[row, k + 1], x[row, k + 2], x[row, k + 3]
                x4, x5, x6, x7 = x[row, k + 4], x[row, k + 5], x[row, k + 6], x[row, k + 7]
                for j in range(width):
                    total = y[j] + x0 * w0[j]
                    total += x1 * w1[j]
                    total += x2 * w2[j]
                    total += x3 * w3[j]
                    total += x4 * w4[j]
                    total += x5 * w5[j]
                    total += x6 * w6[j]
                    total += x7 * w7[j]
                    y[j] = total
        for k in range(whole, inner):
            w0 = matrix[k, first:last]
            for row in range(rows):
                y = output[row, first:last]
                x0 = x[row, k]
                for j in range(width):
                    y[j] += x0 * w0[j]
