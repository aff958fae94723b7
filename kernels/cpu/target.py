"""What is compiled for: the CPU at hand, as LLVM describes it.

LLVM has to be imported to be asked, and Numba to know that it works here. What a process found is kept on disk for the
next ones, under what it follows from: the CPU as the system describes it, and the versions of what compiles.
"""

import os
import sys
from functools import lru_cache
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hybrid.kernels.cpu import kept

CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the CPU."""

CHANGING = ("cpu MHz", "bogomips", "BogoMIPS")
"""Lines there that differ from time to time."""

LANES = 16
"""Partial sums of a sum along a row: element i is added to sum i % LANES."""


class Target(NamedTuple):
    """What code is compiled for, and by what.

    Attributes:
        cpu: as LLVM names it, or `NUMBA_CPU_NAME`.
        features: of the CPU, as LLVM lists them, `+fma,-avx512f` and so on, or `NUMBA_CPU_FEATURES`.
        versions: of Numba, of LLVM's package and of Python, and the system.
    """

    cpu: str
    features: str
    versions: str


@lru_cache
def target() -> Target:
    """What this process compiles for.

    Raises:
        ImportError: there is no Numba. Where it has not run before, whatever its import raises.
    """
    versions = repr((version("numba"), version("llvmlite"), sys.version_info[:2], sys.platform))
    described = _described()
    name = None if described is None else f"cpu.{kept.short(described)}"
    origin = kept.digest(repr((described, versions, np.__version__)).encode())  # Numba refuses some versions of NumPy
    content = None if name is None else kept.read(name, origin)
    if content is None:
        content = "\n".join(_asked()).encode()
        if name is not None:
            kept.write(name, origin, content)
    cpu, features = content.decode().split("\n")
    return Target(cpu, features, versions)


def _asked() -> tuple[str, str]:
    """The CPU and its features, asked for."""
    import llvmlite.binding as llvm
    from numba import config

    return (
        llvm.get_host_cpu_name() if config.CPU_NAME is None else config.CPU_NAME,
        llvm.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES,
    )


def _described() -> str | None:
    """What says which CPU this is, and what replaces it; None: the system does not describe it."""
    replaced = [os.environ.get(name) for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    try:
        with CPUINFO.open(encoding="utf-8") as lines:
            first = [line for line in takewhile(str.strip, lines) if not line.startswith(CHANGING)]
    except OSError:
        return None
    return repr((replaced, first))


_features: frozenset[str] = frozenset(target().features.split(","))

HAS_FMA: bool = not _features.isdisjoint(("+fma", "+neon"))
"""Whether the CPU multiplies and adds with one rounding; otherwise `fma` would be a slow function."""

HAS_WIDE_REGISTERS: bool = "+avx512f" in _features
"""Whether a register holds `LANES` numbers, and there are 32 of them."""

HAS_PAIRS: bool = HAS_WIDE_REGISTERS and "+avx512bf16" in _features
"""Whether the CPU multiplies pairs of bfloat16 numbers and adds both products, as `vectors.add_product_of` does."""
