"""Calls in an event loop, from other threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from hybrid.interrupts import deferred_interrupts


class LoopCall:
    """One call of a function in an event loop, from any thread.

    A signal handler that raises in the lines of the event loop makes it drop the callback that it is about to run. So
    the loop gets each call twice, and the second does nothing if the first was made. While the function runs handlers
    wait. If it raises it is called again.

    Args:
        loop: if it is closed, the call is not made.
        function: without arguments.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        self._loop = loop
        self._function = function
        self._is_due = True
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(self)
            loop.call_soon_threadsafe(self)

    def __call__(self) -> None:
        """In the event loop."""
        if not self._is_due:
            return
        try:
            with deferred_interrupts():  # an event loop drops what a handler raises in a callback
                self._function()
                self._is_due = False
        finally:
            if self._is_due:
                self._loop.call_soon(self)
