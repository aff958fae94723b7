"""Machine code of functions, by Numba, in Numba's own cache: it is compiled once for a CPU, these sources and a version
of Numba.

Numba's index of a function knows when its file has changed. These functions consist of others, and of constants of the
host side, so that a digest of all sources is a part of their key. What the cache cannot give or take, for whatever
reason (a torn file, a full disk, a folder that cannot be written), is compiled in the process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.core.caching import FunctionCache

from hybrid.kernels.cpu.functions import Function
from hybrid.kernels.cpu.kinds import Kind
from hybrid.kernels.cpu.target import LEVEL

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

log: logging.Logger = logging.getLogger(__name__)

compiled_inline: Callable[..., Any] = njit(nogil=True, error_model="numpy")
"""Compile as a part of the functions that call it. Others are compiled by themselves, where their name is asked for."""

FOLDER = Path(__file__).parent

SOURCES = (*sorted(FOLDER.glob("*.py")), *(FOLDER.parent / f"{name}.py" for name in ("kinds", "target", "team")))
"""What compiled functions are made of: these modules, and constants of the host side."""


def type_of(kind: Kind) -> Any:
    """Numba's type of a name, or of the names of a pair."""
    if isinstance(kind, tuple):
        return types.BaseTuple.from_types(tuple(map(type_of, kind)))
    return vars(types)[kind]


class Build:
    """A function as Numba compiles it, for one signature or several.

    Args:
        module, name: where the function is.
    """

    def __init__(self, module: str, name: str) -> None:
        plain = vars(import_module(module))[name]
        self._dispatcher = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(plain)
        self._cache: FunctionsCache | None = None
        with suppress(RuntimeError):  # no folder can be written: not beside the sources, nor in the user's cache
            self._cache = FunctionsCache(plain)

    @property
    def can_be_kept(self) -> bool:
        """Whether another process finds what this one compiles."""
        return self._cache is not None

    def kept(self, signature: tuple[Any, ...]) -> Any | None:
        """What Numba's cache has of a signature."""
        return None if self._cache is None else self._cache.load_overload(signature, self._dispatcher.targetctx)

    def compiled(self, signature: tuple[Any, ...]) -> Any:
        """What Numba makes of a signature, which its cache then has."""
        self._dispatcher.compile(signature)
        found = self._dispatcher.overloads[signature]
        if self._cache is not None:
            self._cache.save_overload(signature, found)
        return found


class FunctionsCache(FunctionCache):  # type: ignore[misc]  # Numba has no types
    """Numba's cache of a function, which knows all of its sources, and never fails."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return *super()._index_key(sig, codegen), LEVEL, sources()

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever unpickling a torn file raises
            log.info("%s cannot be read from Numba's cache (%s: %s)", self, type(error).__name__, error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            with _alone(Path(self.cache_path)):  # an index is read, and written again
                try:
                    super().save_overload(sig, data)
                except Exception:  # a torn index: a new one takes its place
                    self.flush()
                    super().save_overload(sig, data)
        except Exception as error:  # a full disk, a folder that was closed meanwhile
            log.info("%s cannot be kept in Numba's cache (%s: %s)", self, type(error).__name__, error)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time write to a folder, where its file system has locks."""
    handle = None
    with suppress(OSError):
        if fcntl is not None:
            handle = os.open(folder / "hybrid.lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


@lru_cache
def sources() -> str:
    """A digest of what compiled functions are made of."""
    found = blake2b(digest_size=16)
    for path in SOURCES:
        found.update(path.read_bytes())
    return found.hexdigest()


@cache
def build_of(module: str, name: str) -> Build:
    """The function of this name, once in a process."""
    return Build(module, name)


def compile_and_keep(functions: list[Function]) -> Iterator[Function]:
    """Compile functions into Numba's cache, and yield each. What cannot be compiled is left out: it raises where it is
    needed."""
    for function in functions:
        with suppress(Exception):
            build_of(function.module, function.name).compiled(tuple(map(type_of, function.arguments)))
            yield function
