"""The cost of something in calls: it is the same on every machine."""

import sys
from collections.abc import Callable
from typing import Any


def calls_of(function: Callable[[], Any]) -> int:
    """Calls of functions, Python's and others', that a function makes."""
    count = 0

    def tell(_frame: Any, event: str, _arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tell)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
