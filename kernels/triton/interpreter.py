"""`tl.dot` for Triton's interpreter with sums in a fixed order.

The interpreter computes `tl.dot` with NumPy, whose BLAS adds up the products of an output element in an order that
depends on the CPU, on the shape of the tile and on the element's place in it. On a GPU the order depends on neither
place nor neighbours, and kernels rely on that where results must not depend on the batch. So must what is tested.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_PRODUCTS = 1 << 20
"""Products that are held at once."""


def fixed_order_matmul(a: NDArray[Any], b: NDArray[Any], start: NDArray[Any]) -> NDArray[Any]:
    """`a @ b + start` in the type of `start`, one addition per step of the inner dimension, first to last.

    NumPy adds whole arrays, element by element: no element is treated in another way than its neighbours.

    Args:
        a: `[..., M, K]`.
        b: `[..., K, N]`.
        start: `[..., M, N]`.
    """
    left = np.moveaxis(a, -1, 0)[..., :, None]  # [K, ..., M, 1]
    right = np.moveaxis(b, -2, 0)[..., None, :]  # [K, ..., 1, N]
    total: NDArray[Any] = np.zeros(start.shape, start.dtype)
    step = max(1, MAX_PRODUCTS // max(1, start.size))
    for first in range(0, len(left), step):
        products = np.multiply(left[first : first + step], right[first : first + step], dtype=start.dtype)
        products[0] += total
        total = np.add.reduce(products, axis=0) if start.size > 1 else np.add.accumulate(products, axis=0)[-1]
    return total + start


def install_fixed_order_dot() -> None:
    """Let the interpreter compute `tl.dot` with `fixed_order_matmul`."""
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return interpreter.TensorHandle(fixed_order_matmul(a.data, b.data, d.data), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
