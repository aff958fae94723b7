"""LLVM: what makes machine code for the CPU at hand, and links object files into the process."""

import sys
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm

from hybrid.kernels.cpu.target import target


@lru_cache
def machine() -> Any:
    """LLVM's back end for this CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    own, found = llvm.Target.from_triple(llvm.get_process_triple()), target()
    if sys.platform == "linux" and own.name == "x86-64":  # code for any address (`hybrid.kernels.cpu.image`)
        relocation, model = "pic", "small"
    else:  # as Numba has it
        relocation, model = "static" if own.name.startswith("x86") else "default", "jitdefault"
    return own.create_target_machine(
        cpu=found.cpu, features=found.features, opt=3, reloc=relocation, codemodel=model, jit=True
    )


@lru_cache
def _linker() -> Any:
    """What links code into the process."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine())


def link(code: bytes, symbol: str) -> int:
    """Link an object file into the process; returns the address of one of its functions."""
    _linker().add_object_file(llvm.ObjectFileRef.from_data(code))
    _linker().finalize_object()
    found: int = _linker().get_function_address(symbol)
    return found
