"""Signal handlers wait until the bookkeeping is whole, and it begins where there is stack for it.

Python runs the handlers of signals in the main thread, between any two bytecodes. A handler that raises (Ctrl-C, a time
limit by SIGALRM, SystemExit on SIGTERM) would leave a list half changed. Within `deferred_interrupts` handlers are not
run but remembered, and run at its end. A `RecursionError` would do the same, and come again where the failure is
undone: so there must be room on the stack before a piece of bookkeeping begins (`check_stack`).
"""

from __future__ import annotations

import signal
import sys
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal takes 1.5 us, and this 0.05
from _signal import signal as set_handler  # signal.signal makes enums of both handlers
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

from hybrid.errors import RequestError

STACK = 150
"""Calls within calls that a step may need, or another piece of bookkeeping: over twice what was seen."""

Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


class _Waiting:
    """In place of a handler: remembers its signal while the section is closed, and calls the handler otherwise."""

    def __init__(self, handler: Handler, section: DeferredInterrupts) -> None:
        self.handler = handler
        self._section = section

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._section.arrived(self.handler, number, frame)


class DeferredInterrupts:
    """A section of code in which signal handlers wait; see `deferred_interrupts`.

    Attributes:
        was_interrupted: a handler raised while the section was opened.
    """

    def __init__(self) -> None:
        self.was_interrupted: bool = False
        self._is_open = True
        self._arrived: list[tuple[Handler, int, FrameType | None]] = []
        self._replaced: list[tuple[int, Handler]] = []

    def arrived(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """A signal arrived: its handler runs now, if the section is open, or later."""
        self._arrived.append((handler, number, frame))
        if self._is_open:
            self.open()

    def close(self) -> None:
        """From now on handlers wait."""
        self._is_open = False

    def opened(self) -> AbstractContextManager[None]:
        """Let handlers run, those that have waited first. A handler that raises closes the section again, so that
        the code that catches its exception is not interrupted."""
        return _Opened(self)

    def open(self) -> None:
        """From now on handlers run, those that have waited first. While one of them runs the others wait, and if it
        raises, the section stays closed."""
        self._is_open = False
        while self._arrived:
            handler, number, frame = self._arrived.pop(0)
            self.was_interrupted = True
            handler(number, frame)
            self.was_interrupted = False
        self._is_open = True

    def replace_handlers(self) -> None:
        """Put this section in the place of every handler that is written in Python."""
        handlers = [own for own in zip(_SIGNALS, map(getsignal, _SIGNALS), strict=True) if callable(own[1])]
        for number, handler in handlers:  # the others are not written in Python
            if isinstance(handler, _Waiting):  # of a section whose end was interrupted
                handler = handler.handler
            self._replaced.append((number, handler))
            set_handler(number, _Waiting(handler, self))

    def restore_handlers(self) -> None:
        """Put the handlers back, and run those that have waited. All of them run, even if one raises."""
        try:
            self._put_back()
        finally:
            self._is_open = True
            self._finish_handlers()

    def _put_back(self) -> None:
        try:
            while self._replaced:
                number, handler = self._replaced[-1]
                if isinstance(getsignal(number), _Waiting):  # otherwise a handler was installed meanwhile
                    set_handler(number, handler)
                self._replaced.pop()
        finally:  # one that was put back may have run, and raised
            if self._replaced:
                self._put_back()

    def _finish_handlers(self) -> None:
        while self._arrived:
            handler, number, frame = self._arrived.pop(0)
            try:
                handler(number, frame)
            finally:
                self._finish_handlers()


class _Opened(AbstractContextManager[None]):
    """Within it handlers run."""

    def __init__(self, section: DeferredInterrupts) -> None:
        self._section = section

    def __enter__(self) -> None:
        self._section.open()

    def __exit__(self, *raised: object) -> None:
        self._section.close()


_current: list[DeferredInterrupts] = []
"""The section that the main thread is in; signal handlers belong to the process, and so does this."""


@contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupts]:
    """Run a piece of bookkeeping whole: the handlers of signals that arrive meanwhile run after it.

    Every handler written in Python waits. In other threads than the main one there is nothing to defer: handlers never
    run there. A section within another one changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield DeferredInterrupts()
        return
    if _current:
        yield _current[0]
        return
    section = DeferredInterrupts()
    try:
        section.replace_handlers()
        section.close()
        _current.append(section)
        yield section
    finally:
        _current.clear()
        section.restore_handlers()


@contextmanager
def deferred() -> Iterator[None]:
    """Run a piece of bookkeeping whole: handlers of signals that arrive meanwhile run after it, all of them.

    Within another one, and in other threads than the main one, where handlers never run, it does nothing.
    """
    with deferred_interrupts():
        yield


def is_for_the_process(error: BaseException) -> bool:
    """Tell whether an exception is meant for the process, and no failure of what was under way: Ctrl-C, or a function
    of the user's that calls `sys.exit`. Only the main thread can end the process: elsewhere it is a failure like any
    other."""
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def has_stack() -> bool:
    """Tell whether there is room on Python's stack for a piece of bookkeeping."""
    try:
        sys._getframe(max(0, sys.getrecursionlimit() - STACK))
    except ValueError:  # the stack is not as deep
        return True
    return False


def check_stack() -> None:
    """Check that there is room on Python's stack for a piece of bookkeeping that is about to begin.

    Raises:
        RequestError: there is not. Nothing was changed.
    """
    if not has_stack():
        raise RequestError(
            f"this call is too deep in a recursion: up to {STACK} calls more must be possible. Call it from less "
            f"deep, or raise sys.setrecursionlimit, which is {sys.getrecursionlimit()}"
        )
