"""What is compiled for: a level of CPUs, or the CPU at hand, as LLVM describes it.

On Linux and x86-64 CPUs are taken by levels, so that code can be made elsewhere, and be shared. LLVM describes others:
it has to be imported to be asked, and Numba to know that it works here. What a process found is kept on disk for the
next ones, under what it follows from: the CPU as the system describes it, and the versions of what compiles.
"""

import os
import platform
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
    """What code is compiled for.

    Attributes:
        cpu: as LLVM names it, or `NUMBA_CPU_NAME`.
        features: of the CPU, as LLVM lists them, `+fma,-avx512f` and so on, or `NUMBA_CPU_FEATURES`.
    """

    cpu: str
    features: str

    @property
    def short(self) -> str:
        """A part of names of files."""
        return kept.short(repr(tuple(self)))


V3 = {
    **{name: name for name in ("avx", "avx2", "bmi2", "cx16", "f16c", "fma", "movbe", "popcnt", "ssse3")},
    **{"abm": "lzcnt", "bmi1": "bmi", "lahf_lm": "sahf", "sse4_1": "sse4.1", "sse4_2": "sse4.2"},
}
"""Features of level 3 ("x86-64 psABI", 2020, table 3.1): as Linux names them, and LLVM."""

V4 = {**V3, **{name: name for name in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")}}

WIDE = ("-prefer-256-bit",)
"""LLVM leaves half of a register unused otherwise."""


def _level(cpu: str, features: dict[str, str], *more: str) -> tuple[frozenset[str], Target]:
    named = [f"+{name}" for name in sorted(features.values())]
    return frozenset(features), Target(cpu, ",".join((*named, *more)))


LEVELS: dict[str, tuple[frozenset[str], Target]] = {
    "v4-bf16": _level("x86-64-v4", {**V4, "avx512_bf16": "avx512bf16"}, *WIDE),
    "v4": _level("x86-64-v4", V4, *WIDE),
    "v3": _level("x86-64-v3", V3),
}
"""Levels of CPUs, the best first: what Linux lists, and what is compiled for. Code is no faster when it is compiled for
the CPU at hand, and has the same bits."""


@lru_cache
def target() -> Target:
    """What this process compiles for.

    Raises:
        ImportError: the CPU is of no level, and there is no Numba. Where it has not run before, whatever its import
            raises.
    """
    level = level_of_this_cpu()
    return compiler()[0] if level is None else LEVELS[level][1]


def level_of_this_cpu() -> str | None:
    """The name of the best level that the CPU has. None: it has none, or another CPU is asked for."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or any(_replaced()) or sys.maxsize < 1 << 32:
        return None
    listed = {name for line in _described() if line.startswith("flags") for name in line.split()}
    return next((name for name, (features, _) in LEVELS.items() if features <= listed), None)


@lru_cache
def compiler() -> tuple[Target, str]:
    """The CPU at hand, and what compiles for it: versions of Numba, of LLVM's package and of Python, and the system.

    Raises:
        ImportError: there is no Numba. Where it has not run before, whatever its import raises.
    """
    versions = repr((version("numba"), version("llvmlite"), sys.version_info[:2], sys.platform))
    described = repr((_replaced(), _described()))
    name = f"cpu.{kept.short(described)}" if _described() else None
    origin = kept.digest(repr((described, versions, np.__version__)).encode())  # Numba refuses some versions of NumPy
    content = None if name is None else kept.read(name, origin)
    if content is None:
        content = "\n".join(_asked()).encode()
        if name is not None:
            kept.write(name, origin, content)
    return Target(*content.decode().split("\n")), versions


def _asked() -> tuple[str, str]:
    """The CPU and its features, asked for."""
    import llvmlite.binding as llvm
    from numba import config

    return (
        llvm.get_host_cpu_name() if config.CPU_NAME is None else config.CPU_NAME,
        llvm.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES,
    )


def _replaced() -> list[str | None]:
    """What replaces the CPU at hand."""
    return [os.environ.get(name) for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]


def _described() -> list[str]:
    """What says which CPU this is; nothing: the system does not describe it."""
    try:
        with CPUINFO.open(encoding="utf-8") as lines:
            return [line for line in takewhile(str.strip, lines) if not line.startswith(CHANGING)]
    except OSError:
        return []


_features: frozenset[str] = frozenset(target().features.split(","))

HAS_FMA: bool = not _features.isdisjoint(("+fma", "+neon"))
"""Whether the CPU multiplies and adds with one rounding; otherwise `fma` would be a slow function."""

HAS_WIDE_REGISTERS: bool = "+avx512f" in _features
"""Whether a register holds `LANES` numbers, and there are 32 of them."""

HAS_PAIRS: bool = HAS_WIDE_REGISTERS and "+avx512bf16" in _features
"""Whether the CPU multiplies pairs of bfloat16 numbers and adds both products, as `vectors.add_product_of` does."""
