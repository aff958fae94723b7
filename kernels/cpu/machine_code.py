"""Machine code of functions: Numba compiles a function once, and keeps it in its cache for later processes.

A function that Numba compiles is named here by its module and its name (`hybrid.kernels.cpu.compiled`). It is compiled
for arguments of some types where it is first needed, or in advance, on all cores.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from hybrid.kernels.cpu.compiled.build import build_of, compile_and_keep, type_of
from hybrid.kernels.cpu.functions import COMPILED, Function, all_functions
from hybrid.kernels.cpu.kinds import INTEGER, Kind

_lock = threading.RLock()  # a signal handler may run compiled code, too

_UNUSED = array("q", (0, 0))
"""Memory to which compiled functions write results and exceptions, which are not read."""

PROGRAM = "import sys; sys.path[:] = {path!r}; from {module} import compile_share; compile_share({numbers!r})"
"""Program that a process that compiles runs."""


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
                function = Function(self._module, self.__name__, arguments)
                is_listed = function in _known() or not self._module.startswith(COMPILED)
                assert is_listed, f"{function} is not in the list"
                self._addresses[arguments] = _address(function)
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


loaded: dict[Function, Any] = {}
"""Machine code that Numba has made of functions: it keeps it in memory."""


def _address(function: Function) -> int:
    found = loaded.get(function) or _find(function)
    if found is None:
        signature = tuple(map(type_of, function.arguments))
        found = loaded[function] = build_of(function.module, function.name).compiled(signature)
    address: int = found.library.get_pointer_to_function(found.fndesc.llvm_func_name)
    return address


def _find(function: Function) -> Any | None:
    """Return the machine code of a function in Numba's cache, if it is there, and load it."""
    found = build_of(function.module, function.name).kept(tuple(map(type_of, function.arguments)))
    if found is not None:
        loaded[function] = found
    return found


@lru_cache
def _known() -> frozenset[Function]:
    return frozenset(all_functions())


def missing(wanted: Sequence[Function]) -> list[Function]:
    """Return those of functions that are to be compiled; the others are loaded from Numba's cache."""
    with _lock:
        return [each for each in wanted if each not in loaded and _find(each) is None]


def compile_in_advance(wanted: Sequence[Function]) -> Iterator[Function]:
    """Compile functions, in as many processes as there are cores, and yield each when it is compiled. What cannot be
    compiled is left out: it raises where it is needed. The processes import neither torch nor what the caller has
    imported."""
    functions = all_functions()
    numbers = [functions.index(each) for each in wanted]
    count = min(cores(), len(numbers))
    if count < 2 or not build_of(wanted[0].module, wanted[0].name).can_be_kept:
        yield from compile_and_keep(list(wanted))
        return
    compiled: SimpleQueue[Function | None] = SimpleQueue()
    processes = list[Popen[str]]()

    def follow(process: Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit():
                compiled.put(functions[int(line)])
        compiled.put(None)

    try:
        for first in range(count):
            processes.append(_process(numbers[first::count]))
        for process in processes:
            threading.Thread(target=follow, args=(process,), name="hybrid-compile", daemon=True).start()
        while count:
            function = compiled.get()
            if function is None:
                count -= 1
            else:
                yield function
    finally:  # the caller may be interrupted
        for process in processes:
            process.kill()
            process.wait()


def _process(numbers: Sequence[int]) -> Popen[str]:
    program = PROGRAM.format(path=sys.path, module=__name__, numbers=numbers)
    return Popen([sys.executable, "-I", "-W", "ignore", "-c", program], stdout=PIPE, stderr=DEVNULL, text=True)


def compile_share(numbers: Sequence[int]) -> None:
    """Compile those of all functions that have these numbers, and print each number."""
    functions = all_functions()
    for function in compile_and_keep([functions[number] for number in numbers]):
        print(functions.index(function), flush=True)


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
