"""Machine code from functions, by Numba and LLVM."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types

from hybrid.kernels.cpu.compiled.link import link
from hybrid.kernels.cpu.functions import Function
from hybrid.kernels.cpu.kinds import Kind
from hybrid.kernels.cpu.llvm import machine

compiled_inline: Callable[..., Any] = njit(nogil=True, error_model="numpy")
"""Compile as a part of the functions that call it. Others are compiled by themselves, where their name is asked for."""


def type_of(kind: Kind) -> Any:
    """Numba's type of a name, or of the names of a pair."""
    if isinstance(kind, tuple):
        return types.BaseTuple.from_types(tuple(map(type_of, kind)))
    return vars(types)[kind]


def compiled(function: Function) -> bytes:
    """Machine code of a function: an image, or an object file, where what LLVM makes is not known here."""
    code = object_file(function)
    image = link(code, function.symbol)
    return code if image is None else image.packed()


def object_file(function: Function) -> bytes:
    """An object file with a function by its symbol, and nothing else that another file sees."""
    plain = vars(import_module(function.module))[function.name]
    dispatcher = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(plain)
    signature = tuple(map(type_of, function.arguments))
    dispatcher.compile(signature)
    code = llvm.parse_assembly(dispatcher.inspect_llvm(signature))
    own = dispatcher.overloads[signature].fndesc.llvm_func_name
    for value in (*code.functions, *code.global_variables):
        if not value.is_declaration:
            value.linkage = "external" if value.name == own else "internal"
    code.get_function(own).name = function.symbol
    found: bytes = machine().emit_object(code)
    return found
