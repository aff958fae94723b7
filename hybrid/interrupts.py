"""Signal handlers wait until the bookkeeping is whole.

Python runs the handlers of signals in the main thread, between any two bytecodes. A handler that raises (Ctrl-C, a time
limit by SIGALRM, SystemExit on SIGTERM) would leave a list half changed. Within `deferred` handlers are not run but
remembered, and run at its end, or in a pause of it: while the model computes.
"""

from __future__ import annotations

import signal
import threading
import warnings
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal takes 1.5 us, and this 0.05
from _signal import signal as set_handler  # signal.signal makes enums of both handlers
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


class _Waiting:
    """In place of a handler: remembers its signal while the section is closed, and calls the handler otherwise."""

    def __init__(self, handler: Handler, section: Section) -> None:
        self.handler = handler
        self._section = section

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._section.arrived(self.handler, number, frame)


class Section:
    """A section of code in which signal handlers wait; see `deferred`.

    Attributes:
        was_interrupted: a handler raised in a pause.
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

    def paused(self) -> AbstractContextManager[None]:
        """Let handlers run, those that have waited first. A handler that raises closes the section again, so that
        the code that catches its exception is not interrupted."""
        return _Pause(self)

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


class _Pause(AbstractContextManager[None]):
    """Within it handlers run."""

    def __init__(self, section: Section) -> None:
        self._section = section

    def __enter__(self) -> None:
        self._section.open()

    def __exit__(self, *raised: object) -> None:
        self._section.close()


_current: list[Section] = []
"""The section that the main thread is in; signal handlers belong to the process, and so does this."""


@contextmanager
def deferred() -> Iterator[Section]:
    """Run a piece of bookkeeping whole: the handlers of signals that arrive meanwhile run after it, all of them.

    Every handler written in Python waits. Within another one, and in other threads than the main one, where handlers
    never run, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Section()
        return
    if _current:
        yield _current[0]
        return
    section = Section()
    try:
        section.replace_handlers()
        section.close()
        _current.append(section)
        yield section
    finally:
        _current.clear()
        section.restore_handlers()


class DeferredInterrupts:
    """A section of the former kind, which does nothing."""

    was_interrupted: bool = False

    def opened(self) -> AbstractContextManager[None]:
        """Do nothing."""
        warn_once()
        return nullcontext()


@contextmanager
def deferred_interrupts() -> Iterator[DeferredInterrupts]:
    """Do nothing: `HybridCache.bookkeeping()` has handlers wait where that is needed."""
    warn_once()
    yield DeferredInterrupts()


@cache
def warn_once() -> None:
    """Warn, in the first call, that these contexts do nothing any more."""
    warnings.warn("deferred_interrupts() does nothing: use HybridCache.bookkeeping()", DeprecationWarning, stacklevel=4)


def is_for_the_process(error: BaseException) -> bool:
    """Tell whether an exception is meant for the process, and no failure of what was under way: Ctrl-C, or a function
    of the user's that calls `sys.exit`. Only the main thread can end the process: elsewhere it is a failure like any
    other."""
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
