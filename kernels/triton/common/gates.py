"""The gates of the gated delta rule."""

import triton
import triton.language as tl


@triton.jit
def log_decay(x, rate):
    """`rate * softplus(x)`: the log of what remains of the state. x: fp32, with its bias."""
    grown = tl.exp(x)
    total = 1 + grown
    # log(1 + grown) to the last bits: the rounding of the sum cancels in the quotient, which is 1 next to 1
    softplus = tl.where(total == 1, grown, tl.log(total) * (grown / (total - 1)))
    return rate * tl.where(x > 20, x, softplus)


@triton.jit
def replaced(y):
    """`sigmoid(y)` in the type of `y`: how much of the old value is replaced."""
    return (1 / (1 + tl.exp(-y.to(tl.float32)))).to(y.dtype)
