"""What is compiled for: the CPU at hand, as Numba describes it, and sizes that compiled code and who calls it have in
common. Imports no torch."""

import logging
import platform
import sys

from numba.core.registry import cpu_target

log: logging.Logger = logging.getLogger(__name__)

LANES = 16
"""Partial sums of a sum along a row: element i is added to sum i % LANES."""

_, CPU, _described = cpu_target.target_context.codegen().magic_tuple()

FEATURES: frozenset[str] = frozenset(_described.split(","))
"""Of the CPU as LLVM lists them, `+fma` and so on, or those in `NUMBA_CPU_FEATURES`."""

HAS_FMA: bool = not FEATURES.isdisjoint(("+fma", "+neon"))
"""Whether the CPU multiplies and adds with one rounding; otherwise a function of the C library does, slowly."""

HAS_WIDE_REGISTERS: bool = "+avx512f" in FEATURES
"""Whether a register holds `LANES` numbers, and there are 32 of them."""

HAS_PAIRS: bool = HAS_WIDE_REGISTERS and "+avx512bf16" in FEATURES
"""Whether the CPU multiplies pairs of bfloat16 numbers and adds both products, as `vectors.add_product_of` does."""

if not (HAS_FMA and sys.platform == "linux" and platform.machine() == "x86_64"):
    log.warning(
        "operations are compiled for %s on %s: they are tested on Linux and x86-64 CPUs with AVX2 alone, and without "
        "instructions that multiply and add at once they are slow",
        CPU,
        sys.platform,
    )

TOKENS = 16
"""Tokens whose queries attention takes together."""

BLOCK = 64
"""Keys that attention takes at once, a multiple of LANES."""

COLUMNS = 12
"""Rows of a weight that few rows of x are multiplied with before the next ones; tiles divide it."""

PANEL_ROWS, PANEL_VECTORS = (12, 2) if HAS_WIDE_REGISTERS else (6, 1)
"""Rows of x, and vectors of rows of the weight, that are multiplied at once where there are many: their sums fill the
registers."""

PANEL_COLUMNS = PANEL_VECTORS * LANES
"""Rows of the weight in a panel."""
