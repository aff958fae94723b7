"""Machine code from functions, by Numba and LLVM."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from numba import njit, types

from hybrid.kernels.cpu.compiled.link import link
from hybrid.kernels.cpu.kinds import Kind
from hybrid.kernels.cpu.llvm import machine

compiled_inline: Callable[..., Any] = njit(nogil=True, error_model="numpy")
"""Compile as a part of the functions that call it. Others are compiled by themselves, where their name is asked for."""


def type_of(kind: Kind) -> Any:
    """Numba's type of a name, or of the names of a pair."""
    if isinstance(kind, tuple):
        return types.BaseTuple.from_types(tuple(map(type_of, kind)))
    return vars(types)[kind]


def compiled(module: str, name: str, arguments: tuple[Kind, ...], symbol: str) -> bytes:
    """Machine code of a function of a module: an image, or an object file, where what LLVM makes is not known here."""
    code = object_file(module, name, arguments, symbol)
    image = link(code, symbol)
    return code if image is None else image.packed()


def object_file(module: str, name: str, arguments: tuple[Kind, ...], symbol: str) -> bytes:
    """An object file with a function of a module as `symbol`, and nothing else that another file sees."""
    function = vars(import_module(module))[name]
    dispatcher = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    signature = tuple(map(type_of, arguments))
    dispatcher.compile(signature)
    code = llvm.parse_assembly(dispatcher.inspect_llvm(signature))
    own = dispatcher.overloads[signature].fndesc.llvm_func_name
    for value in (*code.functions, *code.global_variables):
        if not value.is_declaration:
            value.linkage = "external" if value.name == own else "internal"
    code.get_function(own).name = symbol
    found: bytes = machine().emit_object(code)
    return found
