"""Work in a thread that does not own what it touches."""

import threading
from collections.abc import Callable
from typing import Any


def in_a_thread(work: Callable[[], Any]) -> BaseException | None:
    """Return what a function raises in another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None
