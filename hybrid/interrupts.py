"""Signal handlers wait until the bookkeeping is whole.

Python runs the handlers of signals in the main thread, between any two bytecodes. A handler that raises (Ctrl-C, a time
limit by SIGALRM, SystemExit on SIGTERM) would leave a list half changed. Within `deferred` handlers are not run but
remembered, and run at its end, or where `handlers_allowed` lets them: while the model computes.
"""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal.getsignal takes 1.5 us, and this 0.05
from _signal import signal as set_handler  # signal.signal makes enums of both handlers
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

_SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


class _Deferral(AbstractContextManager[None]):
    """A stand-in for every handler that is written in Python: remembers signals while it is closed, and otherwise calls
    the handlers, those that have waited first.

    Attributes:
        raised: what a handler raised last.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._is_open = True
        self._handlers: dict[int, Handler] = {}
        self._arrived: list[tuple[Handler, int, FrameType | None]] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((self._handlers[number], number, frame))
        if self._is_open:
            self.open()

    def close(self) -> None:
        """Have handlers wait from now on."""
        self._is_open = False

    def open(self) -> None:
        """Let handlers run from now on. While one runs the others wait, and if it raises, they wait on, so that the
        code that catches its exception is not interrupted."""
        self._is_open = False
        while self._arrived:
            handler, number, frame = self._arrived.pop(0)
            try:
                handler(number, frame)
            except BaseException as error:
                self.raised = error
                raise
        self._is_open = True

    def __enter__(self) -> None:
        """Take the place of the handlers, and have them wait."""
        global _current
        try:
            self._replace_handlers()
            self.close()
            _current = self
        except BaseException:  # a handler ran before it was replaced, and raised
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        """Put the handlers back, and call those that have waited: all of them, even if one raises."""
        global _current
        _current = None
        try:
            self._put_back([*self._handlers])
        finally:
            self._is_open = True
            with ExitStack() as calls:
                for handler, number, frame in reversed(self._arrived):
                    calls.callback(handler, number, frame)

    def _replace_handlers(self) -> None:
        found = [each for each in zip(_SIGNALS, map(getsignal, _SIGNALS), strict=True) if callable(each[1])]
        for number, handler in found:  # the others are not written in Python
            if isinstance(handler, _Deferral):  # one whose end was interrupted
                handler = handler._handlers[number]
            self._handlers[number] = handler
            set_handler(number, self)

    def _put_back(self, numbers: list[int]) -> None:
        try:
            while numbers:
                if getsignal(numbers[-1]) is self:  # otherwise a handler was installed meanwhile
                    set_handler(numbers[-1], self._handlers[numbers[-1]])
                numbers.pop()
        finally:  # one that was put back may have run, and raised
            if numbers:
                self._put_back(numbers)


_current: _Deferral | None = None
"""What the main thread is in; signal handlers belong to the process, and so does this."""


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_NOTHING: AbstractContextManager[None] = nullcontext()


def deferred() -> AbstractContextManager[None]:
    """Run a piece of bookkeeping whole: the handlers of signals that arrive meanwhile run after it, all of them.

    Within another one, and in other threads than the main one, where handlers never run, it does nothing.
    """
    return _Deferral() if _current is None and _is_main_thread() else _NOTHING


@contextmanager
def handlers_allowed() -> Iterator[None]:
    """Let handlers run within `deferred`, those that have waited first. One that raises ends this."""
    own = _current
    if own is None or not _is_main_thread():
        yield
        return
    own.open()
    try:
        yield
    finally:
        own.close()


def was_raised_by_handler(error: BaseException) -> bool:
    """Tell whether an exception came from a signal handler that ran within `handlers_allowed`."""
    return _current is not None and _current.raised is error


def is_for_the_process(error: BaseException) -> bool:
    """Tell whether an exception is meant for the process, and no failure of what was under way: Ctrl-C, or a function
    of the user's that calls `sys.exit`. Only the main thread can end the process: elsewhere it is a failure like any
    other."""
    return not isinstance(error, Exception) and _is_main_thread()
