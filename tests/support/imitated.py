"""The program that runs on every imitated CPU: the bits of some plain products, and where they are not those of the CPU
at hand, the checks of `support.imitated_checks`. Prints what it found as JSON.

    python tests/support/imitated.py CHECKPOINT [PLAIN]

Without a CHECKPOINT ("") no engine runs. PLAIN are the bits of plain products on the CPU at hand.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
from torch import Tensor

SHAPES = [(6, 160), (777, 160), (160, 288), (50, 33), (1, 45), (99, 150)]
"""(out, in) of weights: narrow ones, and ones whose rows are at every alignment."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights() -> Iterator[tuple[str, Tensor]]:
    """Weights of every type, by rows and by columns."""
    for (outputs, inner), dtype in product(SHAPES, (torch.float32, torch.bfloat16)):
        weight = numbers(outputs, inner).to(dtype)
        yield f"{dtype} {outputs} x {inner} by rows", weight
        yield f"{dtype} {outputs} x {inner} by columns", weight.t().contiguous().t()


def plain_products() -> str:
    """A hash of the bits of products as torch and NumPy compute them."""
    bits = hashlib.sha256()
    for _, weight in weights():
        x = numbers(64, weight.shape[1], seed=1).to(weight)
        for rows in (1, 2, 3, 8, 64):
            bits.update(torch.mm(x[:rows], weight.t()).view(torch.uint8).numpy().tobytes())
            bits.update(np.matmul(x[:rows].float().numpy(), weight.t().float().numpy()).tobytes())
    return bits.hexdigest()


def main(checkpoint: str, plain: str = "") -> None:
    """Run everything, and print it."""
    found: dict[str, object] = {"plain": plain_products()}
    if found["plain"] != plain:
        from support import imitated_checks as checks  # seconds to import

        found |= {
            "broken": checks.broken_products(),
            "compiled": checks.compiled_products(),
            "is_dot_invariant": checks.is_dot_invariant(),
            "wrong": checks.wrong_hits(checkpoint) if checkpoint else [],
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
