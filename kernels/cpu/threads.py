"""The number of threads that compute: in torch's own operations, and in compiled ones.

The number of threads of torch is that of OpenMP in the calling thread. `torch.set_num_threads` sets it there, and also
what every thread begins with that first uses torch afterwards. Here it is set for the calling thread alone, in the
library that torch has loaded, so that neither threads that start meanwhile nor other engines see it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import NamedTuple

import torch


class Setters(NamedTuple):
    """Functions of libraries that set a number of threads for the calling thread.

    Attributes:
        openmp: of OpenMP.
        mkl: of MKL, which has a number of its own; returns the one before. None: torch does not use MKL.
    """

    openmp: Callable[[int], object]
    mkl: Callable[[int], int] | None


class _OfThread(threading.local):
    """The threads of torch before `torch_on_one_thread` in this thread; None: it is not under way."""

    before: int | None = None


_own = _OfThread()


def num_threads() -> int:
    """The threads that compiled operations are shared among: as many as torch uses in this thread, or used before
    `torch_on_one_thread`."""
    return _own.before or torch.get_num_threads()


class torch_on_one_thread(AbstractContextManager[None]):  # noqa: N801  # is called as a function is
    """Torch's own operations are computed by this thread alone; compiled ones have their threads.

    For small operations between compiled ones: after one on several threads those of OpenMP look for the next one for
    about ten milliseconds, and take the cores on which compiled operations have theirs. Where the library that torch
    computes with is not found, torch keeps its threads: that takes such time, and changes nothing else.
    """

    def __init__(self) -> None:
        self._found: Setters | None = None
        self._count = self._of_mkl = 1

    def __enter__(self) -> None:
        count = torch.get_num_threads()
        found = setters() if count > 1 else None
        if found is None:
            return
        self._found, self._count, self._of_mkl = found, count, count
        try:
            _own.before = count
            if found.mkl is not None:
                self._of_mkl = found.mkl(1)
            found.openmp(1)
        except BaseException:  # a signal handler has raised
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        found, self._found = self._found, None
        if found is None:
            return
        if torch.get_num_threads() == 1:  # another number was set meanwhile, and stays
            found.openmp(self._count)
            if found.mkl is not None:
                found.mkl(self._of_mkl)
        _own.before = None


@lru_cache
def setters() -> Setters | None:
    """Return functions that set the numbers of threads of the libraries that torch computes with; None: they are not
    found.

    OpenMP is looked up in the order in which torch's own libraries find it: among what the whole process sees, as a
    library in LD_PRELOAD, then among what torch is linked with.
    """
    of_process, of_torch = _library(None), _library(torch._C.__file__)
    for library in (of_process, of_torch):
        openmp, own = _function(library, "omp_set_num_threads"), _function(library, "omp_get_max_threads")
        if openmp is not None and own is not None and _is_of_torch(openmp, own):
            return Setters(openmp, _function(of_torch, "MKL_Set_Num_Threads_Local"))
    return None


def _library(name: str | None) -> ctypes.PyDLL | None:
    """A library and those that it is linked with; None: what the whole process sees. Its functions are called without
    giving the interpreter's lock away: they return at once."""
    try:
        return ctypes.PyDLL(name)
    except (OSError, TypeError):  # Windows has no name for what a process sees
        return None


def _function(library: ctypes.PyDLL | None, name: str) -> Callable[..., int] | None:
    """A function of numbers that returns a number, or nothing; None: the library does not have it."""
    try:
        return library[name] if library is not None else None
    except AttributeError:
        return None


def _is_of_torch(openmp: Callable[[int], object], own: Callable[[], int]) -> bool:
    """Tell whether torch computes with a library of OpenMP, of which a process may have several: a number that is set
    there is torch's.

    Args:
        openmp: sets the number of this thread.
        own: returns it.
    """
    before, count = own(), torch.get_num_threads()
    try:
        openmp(count + 1)
        return torch.get_num_threads() == count + 1
    finally:
        openmp(before)
