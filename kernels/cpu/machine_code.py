"""Machine code of functions: it comes with the package, or Numba compiles a function once and it is kept on disk.

A function that Numba compiles is named here by its module and its name (`hybrid.kernels.cpu.compiled`), so that a
process that finds its code imports neither. Code of one function for arguments of some types is an image, which is
copied to memory (`hybrid.kernels.cpu.image`), or where there is none, not on Linux and x86-64, an object file, which
LLVM links. Numba compiles the function where there is no code, or one that does not belong to the present sources,
versions and CPU. This module cannot be imported where there is neither code that was shipped nor Numba.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hybrid.kernels.cpu import image, kept, shipped
from hybrid.kernels.cpu.functions import COMPILED, Function, all_functions
from hybrid.kernels.cpu.kinds import INTEGER, Kind
from hybrid.kernels.cpu.processes import compile_all
from hybrid.kernels.cpu.target import compiler, target

if not shipped.code():
    compiler()  # raises ImportError where there is none

_lock = threading.RLock()  # a signal handler may run compiled code, too

_compiled: dict[Function, bytes] = {}
"""Code that this process has compiled in advance."""

_UNUSED = array("q", (0, 0))
"""Where compiled functions write results and exceptions, which are not read."""


class Compiled:
    """A function of numbers that is compiled for the types of its arguments when it is first needed.

    Its machine code is called as Numba does: `int32 code(void *result, void *exception, arguments...)`, which returns 0
    unless the function raised. It may raise `MemoryError`, and returns nothing.

    Args:
        module: of the function, a name that can be imported.
        name: of the function there.
    """

    def __init__(self, module: str, name: str) -> None:
        self.__name__ = name
        self._module = module
        self._addresses: dict[tuple[Kind, ...], int] = {}
        self._entry: Any = None

    def address(self, *arguments: Kind) -> int:
        """The address of the machine code for arguments of these types."""
        with _lock:
            if arguments not in self._addresses:
                self._addresses[arguments] = _load(Function(self._module, self.__name__, arguments))
            return self._addresses[arguments]

    def __call__(self, *arguments: int) -> bool:
        """Run the function, all of whose arguments are int64, without the interpreter; returns whether it failed."""
        if self._entry is None:
            count = len(arguments)
            native = ctypes.CFUNCTYPE(ctypes.c_int32, *(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * count)
            unused = _UNUSED.buffer_info()[0]
            self._entry = partial(native(self.address(*(INTEGER,) * count)), unused, unused + 8)
        failed: bool = self._entry(*arguments) != 0
        return failed


def missing(wanted: Sequence[Function]) -> list[Function]:
    """Those of functions that are to be compiled: no code of them comes with the package or is on disk."""
    if shipped.code():
        return []
    nothing = f"{kept.short(repr(wanted))}.{target().short}.none"
    if kept.read(nothing, _origin(COMPILED)) is not None:
        return []
    found = [each for each in wanted if each not in _compiled and _find(each) is None]
    if not found:
        kept.write(nothing, _origin(COMPILED), b"")  # one file to read instead of all
    return found


def compile_in_advance(wanted: Sequence[Function]) -> Iterator[Function]:
    """Compile functions, on all cores, and yield each when there is code of it. What cannot be compiled is left out: it
    raises where it is needed."""
    with kept.alone():  # another process may have compiled some meanwhile
        left = [each for each in wanted if _find(each) is None]
        yield from (each for each in wanted if each not in left)
        for function, code in compile_all(left, target()):
            _compiled[function] = code  # it may be that nothing can be kept on disk
            _keep(function, code)
            yield function


def _load(function: Function) -> int:
    """Load the code of a function; returns its address."""
    assert function in _known() or not function.module.startswith(COMPILED), f"{function} is not in the list"
    code = _compiled.get(function) or _find(function)
    if code is None:
        code = import_module(f"{COMPILED}.build").compiled(function)
        _keep(function, code)
    found = image.unpacked(code)
    if found is not None:
        return image.load(found)
    linked: int = import_module(f"{__package__}.llvm").link(code, function.symbol)
    return linked


@lru_cache
def _known() -> frozenset[Function]:
    return frozenset(all_functions())


def _find(function: Function) -> bytes | None:
    """The code of a function, if it comes with the package or is on disk."""
    return shipped.code().get(function.symbol) or kept.read(_file(function), _origin(function.module))


def _keep(function: Function, code: bytes) -> None:
    """Keep the code of a function on disk."""
    kept.write(_file(function), _origin(function.module), code)


def _file(function: Function) -> str:
    return f"{function.symbol}.{target().short}.code"


@lru_cache
def _origin(module: str) -> bytes:
    """What the code of a function of a module follows from: what it is compiled for and by what, the sources, and the
    module."""
    own = b"" if module.startswith(COMPILED) else Path(str(import_module(module).__file__)).read_bytes()
    return kept.digest(repr((target(), compiler()[1])).encode(), kept.sources(), own)
