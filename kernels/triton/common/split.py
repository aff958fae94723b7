"""Products of fp32 tiles on tensor cores for bfloat16: an fp32 number goes as the sum of two bfloat16 numbers.

Two of them hold 16 bits of a number, and the tensor cores add up their products in fp32, so that about 2**-16 of a
product is lost, where rounding an operand to bfloat16 loses 2**-9. Without `SPLIT` the products are fp32 as they are.
"""

import triton
import triton.language as tl


@triton.jit
def halves(x):
    """An fp32 tile as the sum of two of bfloat16: what its upper 16 bits say, and the rest, rounded."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _side_by_side(x):
    """`[M, N]` fp32 as `[M, 2 * N]` bfloat16, the halves of a number next to each other: one product takes both, and
    no number leaves its thread."""
    high, low = halves(x)
    return tl.reshape(tl.join(high, low), [x.shape[0], 2 * x.shape[1]])


@triton.jit
def _summed(y):
    """`[M, 2 * N]` to `[M, N]`: neighbours added."""
    high, low = tl.split(tl.reshape(y, [y.shape[0], y.shape[1] // 2, 2]))
    return high + low


@triton.jit
def dot_narrow(x, y, SPLIT: tl.constexpr):
    """The product of a tile of the type of the inputs, bfloat16 where they are SPLIT, and an fp32 tile."""
    if SPLIT:
        return _summed(tl.dot(x, _side_by_side(y)))
    else:
        return tl.dot(x.to(tl.float32), y, input_precision="ieee")


@triton.jit
def dot_halves(high, low, y):
    """The product of `high + low`, both bfloat16, and an fp32 tile."""
    both = _side_by_side(y)
    return _summed(tl.dot(high, both, tl.dot(low, both)))


@triton.jit
def dot_wide(x, y, SPLIT: tl.constexpr):
    """The product of two fp32 tiles."""
    if SPLIT:
        x_high, x_low = halves(x)
        y_high, y_low = halves(y)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    else:
        return tl.dot(x, y, input_precision="ieee")
