"""Compile the operations of a CPU before they are needed: all functions, for all types, on all cores.

    python tools/cpu_code.py

does so for the CPU at hand, and keeps the code beside the sources, where processes find it. `write_levels` does so for
the wheel. Neither imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


def compile_here() -> None:
    """Compile for the CPU at hand what is not on disk yet."""
    _import_folders()
    from tqdm import tqdm

    try:
        from hybrid.kernels.cpu import machine_code
        from hybrid.kernels.cpu.functions import all_functions
    except Exception as error:  # no Numba, or one that does not run here
        print(f"nothing is compiled for this CPU: {error}")
        return
    missing = machine_code.missing(all_functions())
    for _ in tqdm(machine_code.compile_in_advance(missing), total=len(missing), desc="compile", unit="operation"):
        pass


def write_levels(folder: Path) -> None:
    """Write a file for each level of CPUs.

    Raises:
        ImportError: there is no Numba.
        RuntimeError: a function could not be compiled.
    """
    _import_folders()
    from hybrid.kernels.cpu import image, shipped
    from hybrid.kernels.cpu.functions import all_functions
    from hybrid.kernels.cpu.processes import compile_all
    from hybrid.kernels.cpu.target import LEVELS, compiler

    compiler()
    for level, (_, target) in LEVELS.items():
        codes = {each.symbol: code for each, code in compile_all(all_functions(), target)}
        if any(image.unpacked(codes.get(each.symbol, b"")) is None for each in all_functions()):
            raise RuntimeError(f"not every function could be compiled for {target}")
        shipped.write(level, codes, folder)


def _import_folders() -> None:
    """Make `hybrid` a package of folders: what is imported of it needs no torch."""
    package = sys.modules["hybrid"] = ModuleType("hybrid")
    package.__path__ = [str(ROOT)]


if __name__ == "__main__":
    compile_here()
