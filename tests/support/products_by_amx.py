"""The program that multiplies by AMX, on a CPU that has it: prints as JSON which products have another order of sums
than Intel's manual says, and which rows depend on others.

    HYBRID_CPU_LEVEL=amx python tests/support/products_by_amx.py

With the argument `compile` it multiplies nothing, and runs on other CPUs: it prints which instructions of AMX the
machine code has.

    HYBRID_CPU_LEVEL=amx NUMBA_CPU_NAME=... NUMBA_CPU_FEATURES=... python tests/support/products_by_amx.py compile
"""

import json
import random
import sys

import torch
from torch import Tensor

from hybrid.kernels.cpu import permission

INSTRUCTIONS = ("ldtilecfg", "tilezero", "tileloadd", "tdpbf16ps", "tilestored", "tilerelease")

SHAPES = [(64, 32), (34, 50), (150, 77), (96, 513), (6, 3)]
"""Numbers of a row, and rows of the weight."""

ROWS = (1, 2, 7, 16, 17, 32, 33, 64, 257)


def expected(x: Tensor, w: Tensor) -> Tensor:
    """The products in fp32, added up as Intel's manual describes it."""
    length = -(-x.shape[1] // 32) * 32
    x, w = (torch.nn.functional.pad(each.float(), (0, length - each.shape[1])) for each in (x, w))
    total = torch.zeros(len(x), len(w))
    for step in range(0, length, 32):
        of_places = [torch.zeros(len(x), len(w)), torch.zeros(len(x), len(w))]
        for place in range(step, step + 32):
            # the product is exact in fp64, and its sum with a number of fp32 is hardly ever rounded twice
            product = x[:, place, None].double() * w[None, :, place].double()
            of_places[place % 2] = (of_places[place % 2].double() + product).float()
        total += of_places[0] + of_places[1]
    return total


def instructions() -> list[str]:
    """The instructions of AMX in what is compiled to multiply bfloat16 numbers."""
    permission.ask_for_tiles = lambda: True  # before it is asked for: nothing is run
    from hybrid.kernels.cpu.compiled.build import build_of, type_of
    from hybrid.kernels.cpu.functions import COMPILED
    from hybrid.kernels.cpu.kinds import HALF, INTEGER

    build = build_of(f"{COMPILED}.amx", "multiply_tiles")
    signature = tuple(map(type_of, (INTEGER, (HALF, HALF), INTEGER, INTEGER)))
    code = (build.kept(signature) or build.compiled(signature)).library.get_asm_str()
    return [name for name in INSTRUCTIONS if name in code]


def wrong_products() -> list[str]:
    """What is wrong with products of this CPU."""
    torch.set_num_threads(1)
    from hybrid.kernels.cpu.matmul import multiply

    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    wrong = []
    for length, outputs in SHAPES:
        half = torch.randn(max(ROWS), length // 2, generator=generator)
        x = torch.cat((half, half), 1).bfloat16()  # products cancel out: their order is seen in what is left
        scale = torch.rand(outputs, generator=generator)
        narrow = torch.randn(outputs, length // 2, generator=generator)
        narrow = torch.cat((narrow, -narrow), 1).bfloat16()
        bytes_of_w = (narrow.float() * 40).round().clamp(-127, 127).to(torch.int8)
        for w, factors in ((narrow, None), (bytes_of_w, scale)):
            sums = expected(x[:16], w)
            alone = multiply(x[:16], w, factors)
            right = (sums if factors is None else sums * factors).bfloat16()
            if not torch.equal(alone, right):
                wrong.append(f"{length} x {outputs}, {w.dtype}: another order of sums")
            for rows in ROWS:
                block = x[torch.tensor(rng.choices(range(max(ROWS)), k=rows))]
                row, place = rng.randrange(16), rng.randrange(rows)
                block[place] = x[row]
                if not torch.equal(multiply(block, w, factors)[place], alone[row]):
                    wrong.append(f"{length} x {outputs}, {w.dtype}: row {place} of {rows}")
    return wrong


def main() -> None:
    """Print what was found."""
    found = {"instructions": instructions()} if sys.argv[1:] == ["compile"] else {"wrong": wrong_products()}
    from hybrid.kernels.cpu.target import LEVEL

    json.dump({"level": LEVEL, **found}, sys.stdout)


if __name__ == "__main__":
    main()
