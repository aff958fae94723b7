"""Machine code of functions: Numba compiles a function once, and its code is kept on disk.

A function that Numba compiles is named here by its module and its name (`hybrid.kernels.cpu.compiled`), so that a
process that finds its code on disk imports neither. A file holds the code of one function for arguments of some types:
an image, which is copied to memory (`hybrid.kernels.cpu.image`), or where there is none, not on Linux and x86-64, an
object file, which LLVM links. Numba compiles the function where there is no file, or one that does not belong to the
present sources, versions and CPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from array import array
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from hybrid.kernels.cpu import image, kept
from hybrid.kernels.cpu.kinds import INTEGER, Kind
from hybrid.kernels.cpu.target import target

COMPILED = f"{__package__}.compiled"
"""The package of what is compiled."""

_lock = threading.RLock()  # a signal handler may run compiled code, too

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
                self._addresses[arguments] = _load(self._module, self.__name__, arguments)
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


def _load(module: str, name: str, arguments: tuple[Kind, ...]) -> int:
    """Load the code of a function; returns its address."""
    symbol = ".".join((module, name, *(kind if isinstance(kind, str) else "+".join(kind) for kind in arguments)))
    file, origin = f"{symbol}.{kept.short(repr(target()[:2]))}.code", _origin(module)
    code = kept.read(file, origin)
    if code is None:
        code = import_module(f"{COMPILED}.build").compiled(module, name, arguments, symbol)
        kept.write(file, origin, code)
    found = image.unpacked(code)
    if found is not None:
        return image.load(found)
    linked: int = import_module(f"{__package__}.llvm").link(code, symbol)
    return linked


@lru_cache
def _origin(module: str) -> bytes:
    """What the code of a function of a module follows from: the sources, the module, what compiles them, and the
    CPU."""
    if module.startswith(f"{COMPILED}."):
        return _of_sources()
    return kept.digest(_of_sources(), Path(str(import_module(module).__file__)).read_bytes())


@lru_cache
def _of_sources() -> bytes:
    """The digest of what compiled functions are made of: constants of their modules come from the folders above."""
    folders = kept.SOURCES / "compiled", kept.SOURCES, kept.SOURCES.parent
    names = [folder / name for folder in folders for name in sorted(os.listdir(folder)) if name.endswith(".py")]
    return kept.digest(repr(target()).encode(), *(name.read_bytes() for name in names))
