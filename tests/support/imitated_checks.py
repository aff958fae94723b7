"""What must hold on every imitated CPU: products that do not depend on the batch, and hits of an engine."""

import numpy as np
import torch
from torch import Tensor

from hybrid import CacheConfig, Engine
from hybrid.commands.parity import Judge, branch, busy_batch, second_turn
from hybrid.kernels.batch_invariant import Products, RowBlocks, choose, choose_for_experts, linear, multiply_single_rows
from hybrid.kernels.triton.common.interpreter import fixed_order_matmul
from support.imitated import numbers, weights

CHUNK = 16

SCENARIOS = (second_turn, branch, busy_batch)


def broken_products() -> list[str]:
    """Kinds of weights for which a row's bits depend on the batch."""
    return [name for name, weight in weights() if not _is_invariant(weight)]


def _is_invariant(weight: Tensor) -> bool:
    lengths, decoded = (1, CHUNK, 2 * CHUNK + 5, 3, 9 * CHUNK), 13
    ends = np.cumsum(lengths).tolist()
    segments = list(zip([0, *ends], ends, strict=False))
    x = numbers(ends[-1] + decoded, weight.shape[1], seed=2).to(weight)
    alone = x[ends[-1] :]
    for products in (choose(weight, CHUNK), choose(weight, CHUNK, may_compile=False), Products()):
        together = linear(x, weight, RowBlocks(segments, ends[-1], len(x), CHUNK), products)
        for start, end in segments:
            for cut in range(start, end, CHUNK):
                part = x[cut:end].clone()
                blocks = RowBlocks([(0, end - cut)], end - cut, end - cut, CHUNK)
                if not torch.equal(linear(part, weight, blocks, products), together[cut:end]):
                    return False
        if not _rows_are_equal(alone, weight, products, together[ends[-1] :]):
            return False
    experts = choose_for_experts(weight.unsqueeze(0))
    return _rows_are_equal(alone, weight, experts, multiply_single_rows(alone, weight.t(), experts))


def _rows_are_equal(x: Tensor, weight: Tensor, products: Products, expected: Tensor) -> bool:
    """Whether rows get the expected bits in batches of all sizes, at other places and beside others."""
    for count in range(1, len(x) + 1):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(count))[:count]
        if not torch.equal(multiply_single_rows(x[order], weight.t(), products), expected[order]):
            return False
    return True


def is_dot_invariant() -> bool:
    """Whether the `dot` of interpreted kernels gives a row its bits at every place."""
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
