"""The checks that must hold on every imitated CPU: products that do not depend on the batch, and hits of an engine."""

import hashlib

import numpy as np
import torch
from torch import Tensor

from hybrid import CacheConfig, Engine
from hybrid.commands.parity import Judge, branch, busy_batch, second_turn
from hybrid.kernels.ops import linear
from hybrid.kernels.packed_weights import quantize
from hybrid.kernels.triton.interpreter import fixed_order_matmul
from support.imitated import numbers, weights

CHUNK = 16

SCENARIOS = (second_turn, branch, busy_batch)


def broken_products() -> list[str]:
    """Kinds of weights for which a row's bits depend on the batch."""
    return [name for name, weight in weights() if not _is_invariant(weight)]


def compiled_products() -> str:
    """A hash of the bits of products of float32."""
    bits = hashlib.sha256()
    for _, weight in weights():
        x = numbers(13, weight.shape[1], seed=3)
        bits.update(linear(x, weight).numpy().tobytes())
        whole, factors = (weight.float() * 40).clamp(-127, 127).to(torch.int8), numbers(len(weight), seed=4)
        bits.update(linear(x.bfloat16(), whole, None, factors).view(torch.int16).numpy().tobytes())
        packed, scales = quantize(weight, 32)
        bits.update(linear(x, packed, None, scales).numpy().tobytes())
    return bits.hexdigest()


def _is_invariant(weight: Tensor) -> bool:
    """Tell whether rows get the same bits in batches of all sizes, at other places and beside others."""
    x = numbers(45, weight.shape[1], seed=2).to(weight)
    together = linear(x, weight)
    for count in range(1, len(x) + 1):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(count))[:count]
        if not torch.equal(linear(x[order], weight), together[order]):
            return False
    return True


def is_dot_invariant() -> bool:
    """Tell whether the `dot` of interpreted kernels gives a row its bits at every place."""
    a, b = numbers(64, 64).numpy(), numbers(64, 32, seed=1).numpy()
    start = np.zeros((64, 32), np.float32)
    together = fixed_order_matmul(a, b, start)
    order = np.random.default_rng(0).permutation(64)
    return bool(
        np.array_equal(fixed_order_matmul(a[order], b, start), together[order])
        and np.array_equal(fixed_order_matmul(a[:16], b, start[:16]), together[:16])
    )


def wrong_hits(checkpoint: str) -> list[str]:
    """The scenarios of `hybrid parity` in which a hit differs from a cold run."""
    config = CacheConfig(memory="64MiB", deterministic=True, page_size=CHUNK, chunk_size=CHUNK)
    judge = Judge(Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=config))
    checks = [scenario(judge) for scenario in SCENARIOS]
    return [f"{check.name}: {check.detail}" for check in checks if not check.passed]
