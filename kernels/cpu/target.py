"""What is compiled for: the CPU at hand, as Numba describes it, and sizes that compiled code and who calls it have in
common. Imports no torch."""

import logging
import os
import platform
import sys
from collections.abc import Callable

from numba.core.registry import cpu_target

from hybrid.kernels.cpu.permission import ask_for_tiles

log: logging.Logger = logging.getLogger(__name__)

LANES = 16
"""Partial sums of a sum along a row: element i is added to sum i % LANES."""

_, CPU, _described = cpu_target.target_context.codegen().magic_tuple()

FEATURES: frozenset[str] = frozenset(_described.split(","))
"""Of the CPU as LLVM lists them, `+fma` and so on, or those in `NUMBA_CPU_FEATURES`."""

LEVELS: dict[str, frozenset[str]] = {
    "amx": frozenset(("+avx512f", "+avx512bw", "+amx-tile", "+amx-bf16")),
    "avx512_bf16": frozenset(("+avx512f", "+avx512bf16")),
    "avx512": frozenset(("+avx512f",)),
    "avx2": frozenset(("+avx", "+fma")),
    "neon": frozenset(("+neon",)),
    "generic": frozenset(),
}
"""What operations are compiled for, the best first, and what a CPU needs for it. All but amx add products up in the
same order, and have the same bits."""

VARIABLE = "HYBRID_CPU_LEVEL"
"""Names a level. Otherwise it is chosen by what the CPU has, whichever it is: two of the same abilities agree."""

NOT_CHOSEN = {"amx": frozenset[str](), "avx512_bf16": frozenset(("+avx512fp16",))}
"""Levels that are taken only where they are named, on CPUs that have these: amx was not measured with this code; where
there is avx512_fp16, two instructions that multiply and add fp32 are up to twice as fast as the one that multiplies
pairs of bfloat16 (docs/performance.md#levels)."""


def level_of(features: frozenset[str], asked: str, tiles_are_allowed: Callable[[], bool]) -> str:
    """Choose the level to compile for.

    Args:
        features: of the CPU.
        asked: a level, or "".
        tiles_are_allowed: asks the system for the registers of amx; a level below is taken where it refuses.

    Raises:
        ValueError: there is no level of this name, or the CPU lacks it.
    """
    there = [name for name, needed in LEVELS.items() if needed <= features]
    if asked and asked not in there:
        raise ValueError(f"{VARIABLE} must be one of {', '.join(there)} on this CPU, or left out; got {asked!r:.100}")
    usual = next(name for name in there if name not in NOT_CHOSEN or not NOT_CHOSEN[name] <= features)
    if asked == "amx" and not tiles_are_allowed():
        log.warning("the system refuses the registers of amx: operations are compiled for %s", usual)
        return usual
    return asked or usual


LEVEL: str = level_of(FEATURES, os.environ.get(VARIABLE, ""), ask_for_tiles)
"""The one in use. Part of the name of compiled code."""

HAS_TILES: bool = LEVEL == "amx"
"""Whether products of bfloat16 rows are those of AMX."""

HAS_FMA: bool = not FEATURES.isdisjoint(("+fma", "+neon"))
"""Whether the CPU multiplies and adds with one rounding; otherwise a function of the C library does, slowly."""

HAS_WIDE_REGISTERS: bool = LEVEL in ("amx", "avx512_bf16", "avx512")
"""Whether a register holds `LANES` numbers, and there are 32 of them."""

HAS_PAIRS: bool = LEVEL == "avx512_bf16"
"""Whether one instruction multiplies pairs of bfloat16 numbers and adds both products, as `vectors.add_product_of`
does."""

PREFERS_BFLOAT16: bool = HAS_WIDE_REGISTERS
"""Whether models whose checkpoints are in bfloat16 are computed in it if no type is asked for: where it was measured to
be faster (docs/performance.md#levels). Nothing is measured at a start: replicas are to agree."""

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
