"""Machine code of functions: Numba compiles a function once, its code is kept on disk, and LLVM alone loads it.

A file holds the code of one function for arguments of some types. To load it is to link it into the process, which
takes less than a millisecond. Numba's own files hold more, for functions that are compiled later and call this one,
and take ten to twenty times as long. Numba compiles the function where there is no file, or one that does not belong to
the present sources, versions and CPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import llvmlite
import llvmlite.binding as llvm
import numba
from numba import njit, types

SOURCES = Path(__file__).parent
"""What compiled functions are made of, and the folder above."""

DIGEST_BYTES = 32

_lock = threading.RLock()  # a signal handler may run compiled code, too

_UNUSED = array("q", (0, 0))
"""Where compiled functions write results and exceptions, which are not read."""


class Compiled:
    """A function of numbers that is compiled for the types of its arguments when it is first needed.

    Its machine code is called as Numba does: `int32 code(void *result, void *exception, arguments...)`, which returns 0
    unless the function raised. It may raise `MemoryError`, and returns nothing.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.__name__ = function.__name__
        self._function = function
        self._addresses: dict[tuple[Any, ...], int] = {}
        self._entry: Any = None

    def address(self, *arguments: Any) -> int:
        """The address of the machine code for arguments of Numba's types."""
        with _lock:
            if arguments not in self._addresses:
                self._addresses[arguments] = _load(self._function, arguments)
            return self._addresses[arguments]

    def __call__(self, *arguments: int) -> bool:
        """Run the function, all of whose arguments are int64, without the interpreter; returns whether it failed."""
        if self._entry is None:
            count = len(arguments)
            native = ctypes.CFUNCTYPE(ctypes.c_int32, *(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * count)
            unused = _UNUSED.buffer_info()[0]
            self._entry = partial(native(self.address(*(types.int64,) * count)), unused, unused + 8)
        failed: bool = self._entry(*arguments) != 0
        return failed


def compiled(function: Callable[..., None]) -> Compiled:
    """Compile a function when it is first needed, and keep the code on disk."""
    return Compiled(function)


compiled_inline: Callable[..., Any] = njit(nogil=True, error_model="numpy")
"""Compile as a part of the functions that call it."""


def _load(function: Callable[..., None], arguments: tuple[Any, ...]) -> int:
    """Link the code of a function into the process; returns its address."""
    types_of_arguments = ",".join(map(str, arguments))
    name = re.sub(r"\W+", "-", f"{function.__module__}.{function.__qualname__}-{types_of_arguments}").strip("-")
    origin = _origin(Path(function.__code__.co_filename))
    kept = folder()
    path = kept / f"{name}.{blake2b(repr(_cpu()).encode(), digest_size=4).hexdigest()}.o" if kept is not None else None
    code = _read(path, origin) if path is not None else None
    if code is None:
        code = _compile(function, arguments, name)
        with suppress(OSError):  # the next process compiles it again
            if path is not None:
                _write(path, origin, code)
    linker = _linker()
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    found: int = linker.get_function_address(name)
    return found


def folder() -> Path | None:
    """Where code is kept: `NUMBA_CACHE_DIR`, if it is set; else beside the sources, or in the user's cache where that
    cannot be written. None, and every process compiles, where the user has no home either."""
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    beside = SOURCES / "__pycache__"
    if os.access(beside if beside.exists() else SOURCES, os.W_OK):
        return beside
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybrid" / "code"
    except RuntimeError:
        return None


def _read(path: Path, origin: bytes) -> bytes | None:
    """The code in a file; None: there is none, it is torn, or it has another origin."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return code if digest == _digest(origin, code) else None


def _write(path: Path, origin: bytes, code: bytes) -> None:
    """Write a file that other processes find whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        own.write_bytes(_digest(origin, code) + code)
        own.replace(path)
    except BaseException:
        own.unlink(missing_ok=True)
        raise


def _digest(*parts: bytes) -> bytes:
    found = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(part)
    return found.digest()


@lru_cache
def _origin(path: Path) -> bytes:
    """What the code of a function in a file follows from: the sources, the file, what compiles them, and the CPU."""
    return _of_sources() if path.parent == SOURCES else _digest(_of_sources(), path.read_bytes())


@lru_cache
def _of_sources() -> bytes:
    sources = sorted([*SOURCES.glob("*.py"), *SOURCES.parent.glob("*.py")])
    versions = repr((numba.__version__, llvmlite.__version__, sys.version_info[:2], _cpu()))
    return _digest(versions.encode(), *(source.read_bytes() for source in sources))


@lru_cache
def _cpu() -> tuple[str, str]:
    """The CPU that code is compiled for, and its features, as LLVM names them; `NUMBA_CPU_NAME` and
    `NUMBA_CPU_FEATURES` replace them."""
    name, features = numba.config.CPU_NAME, numba.config.CPU_FEATURES
    return (
        llvm.get_host_cpu_name() if name is None else name,
        llvm.get_host_cpu_features().flatten() if features is None else features,
    )


@lru_cache
def _machine() -> Any:
    """LLVM's back end for this CPU, with the settings of Numba's."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    relocation = "static" if target.name.startswith("x86") else "default"
    name, features = _cpu()
    return target.create_target_machine(
        cpu=name, features=features, opt=3, reloc=relocation, codemodel="jitdefault", jit=True
    )


@lru_cache
def _linker() -> Any:
    """What links code into the process."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())


def _compile(function: Callable[..., None], arguments: tuple[Any, ...], name: str) -> bytes:
    """An object file with the function under a name, and nothing else that another file sees."""
    dispatcher = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    dispatcher.compile(arguments)
    module = llvm.parse_assembly(dispatcher.inspect_llvm(arguments))
    own = dispatcher.overloads[arguments].fndesc.llvm_func_name
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration:
            value.linkage = "external" if value.name == own else "internal"
    module.get_function(own).name = name
    code: bytes = _machine().emit_object(module)
    return code
